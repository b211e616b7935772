"""Replicas of `inferno serve demo` behind the router SMG, all on this machine."""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

SMG_SCRIPT = Path(__file__).resolve().parents[2] / "deploy/smg/smg.sh"
KEY = "key-of-the-routing-tests"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
START_SECONDS = 60
REQUEST_SECONDS = 120
LOG_SECONDS = 5  # how long to wait for lines of a log


class Failure(Exception):
    """A test failed."""


def free_port():
    """Returns a free port that the kernel does not take for outgoing connections, which would make a later bind fail."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def wait_for(what, condition, seconds=START_SECONDS, pause=0.05):
    """Waits until a condition holds. Returns how many seconds that took."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            raise Failure(f"{what}: not within {seconds} s")
        time.sleep(pause)
    return time.monotonic() - started


class Replica:
    """One `inferno serve demo`. It keeps its port and its log when it restarts."""

    def __init__(self, program, folder, number, flags):
        self.program, self.number, self.flags = program, number, flags
        self.port = free_port()
        self.address = ("127.0.0.1", self.port)
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"replica-{number}.log"
        self.log.touch()
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("INFERNO_")}
        self.environment |= {"INFERNO_CACHE": str(folder / "cache"), "INFERNO_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
        self.process = None

    def start(self):
        command = [self.program, "serve", "demo", "--device", "cpu", "--port", str(self.port), "--log-format", "json"]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*command, *self.flags], stdout=subprocess.DEVNULL, stderr=log, env=self.environment
            )
        wait_for(f"replica {self.number} is ready", lambda: self.health() == 200)

    def health(self):
        """Returns the status of /health, or None if the replica does not answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def loads(self):
        """Returns the report of /v1/loads."""
        request = urllib.request.Request(f"{self.url}/v1/loads", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=5) as response:
            return json.load(response)["loads"][0]

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def wait(self):
        """Waits until the process ends, and returns its exit code."""
        return self.process.wait(timeout=REQUEST_SECONDS)

    def requests(self):
        """Returns the lines of the log about chat requests."""
        lines = []
        for line in self.log.read_text().splitlines():
            try:
                line = json.loads(line)
            except ValueError:
                continue  # cut off when the process was killed
            if line.get("path") == "/v1/chat/completions":
                lines.append(line)
        return lines

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Cluster:
    """Three replicas and SMG with the flags of deploy/smg/smg.sh. All processes end with the `with` block.

    With `has_file`, SMG reads the addresses of the replicas from a file.
    """

    def __init__(self, program, smg, folder, flags, has_file=False):
        self.folder, self.file = folder, folder / "workers.json" if has_file else None
        folder.mkdir(parents=True)
        self.replicas = [Replica(program, folder, number, flags) for number in range(3)]
        self.smg, self.port = smg, free_port()
        self.address = ("127.0.0.1", self.port)
        self.router = None

    def __enter__(self):
        try:
            for replica in self.replicas:
                replica.start()
            environment = self.replicas[0].environment | {
                "SMG_PORT": str(self.port),
                "SMG_METRICS_PORT": str(free_port()),
                "PATH": f"{self.smg.parent}{os.pathsep}{os.environ['PATH']}",
            }
            command = [SMG_SCRIPT, *(replica.url for replica in self.replicas)]
            if self.file:
                self.list_replicas(self.replicas)
                command, environment["SMG_WORKERS"] = [SMG_SCRIPT], str(self.file)
            with (self.folder / "smg.log").open("w") as log:
                self.router = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            wait_for("SMG knows three healthy replicas", lambda: self.healthy() == 3)
            time.sleep(2)  # until SMG has read the loads of all replicas
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for replica in self.replicas:
            replica.stop()
        if self.router:
            self.router.kill()
            self.router.wait()

    def list_replicas(self, replicas):
        """Replaces the file with the addresses of the replicas."""
        listed = {"version": 1, "workers": [{"url": replica.url} for replica in replicas]}
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(listed))
        new.rename(self.file)  # SMG must never read half a file

    def healthy(self):
        """Returns how many replicas SMG considers healthy."""
        if self.router.poll() is not None:
            raise Failure(f"SMG ended: {(self.folder / 'smg.log').read_text()[-2000:]}")
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/workers", headers={"Authorization": f"Bearer {KEY}"})
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                return sum(bool(worker.get("is_healthy")) for worker in json.load(response)["workers"])
        except OSError:
            return 0

    def shares(self, answers):
        """Returns how many of these answers each replica gave, according to its log.

        A replica may write a line shortly after it has sent the answer, so this waits for the lines of all whole answers.
        A killed replica may never write them.
        """
        ids = {answer.id for answer in answers}
        whole = sum(answer.status == 200 and answer.is_whole for answer in answers)
        end = time.monotonic() + LOG_SECONDS
        while True:
            shares = [sum(r["id"] in ids and r["status"] == 200 for r in replica.requests()) for replica in self.replicas]
            if sum(shares) >= whole or time.monotonic() > end:
                return shares
            time.sleep(0.05)


class Answer:
    """The outcome of one request."""

    def __init__(self, name):
        self.id = name
        self.status = None
        self.headers = {}
        self.text = ""
        self.cached_tokens = 0
        self.seconds = 0.0
        self.is_whole = False
        self.error = None
        self.has_begun = threading.Event()

    def __repr__(self):
        return f"{self.id}: status {self.status}, whole {self.is_whole}, {self.seconds:.2f} s, {self.error}"


class Request(threading.Thread):
    """A chat request on a thread of its own."""

    def __init__(self, address, name, messages, max_tokens, stream=False, to_the_end=False):
        super().__init__(daemon=True)
        self.answer = Answer(name)
        body = {"model": "demo", "messages": messages, "max_tokens": max_tokens, "stream": stream, "ignore_eos": to_the_end}
        self.body, self.is_stream = json.dumps(body), stream
        self.connection = http.client.HTTPConnection(*address, timeout=REQUEST_SECONDS)

    def run(self):
        started = time.monotonic()
        try:
            self.exchange()
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # AttributeError: `leave` closed the connection while http.client used it.
            self.answer.error = f"{type(error).__name__}: {error}"
        finally:
            self.answer.seconds = time.monotonic() - started
            self.answer.has_begun.set()
            self.connection.close()

    def exchange(self):
        answer = self.answer
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", "x-request-id": answer.id}
        headers["traceparent"] = TRACEPARENT
        self.connection.request("POST", "/v1/chat/completions", self.body, headers)
        response = self.connection.getresponse()
        answer.status = response.status
        answer.headers = {name.lower(): value for name, value in response.getheaders()}
        if response.status != 200:
            answer.error = response.read().decode(errors="replace")[:300]
        elif self.is_stream:
            self.read_stream(response)
        else:
            body = json.loads(response.read())
            answer.text = body["choices"][0]["message"]["content"] or ""
            answer.cached_tokens = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            answer.is_whole = True

    def read_stream(self, response):
        """Reads the events. If a replica dies, SMG sends an error and `[DONE]`, so `[DONE]` alone proves nothing."""
        is_finished = False
        for line in response:
            if line.startswith(b"data: [DONE]"):
                self.answer.is_whole = is_finished and self.answer.error is None
            elif line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    self.answer.error = str(event["error"])
                is_finished |= any(choice.get("finish_reason") for choice in event.get("choices", []))
                self.answer.has_begun.set()
        if not self.answer.is_whole:
            self.answer.error = self.answer.error or "the stream has no end"

    def leave(self):
        """Closes the connection, as a client that goes away."""
        if self.connection.sock:
            self.connection.sock.shutdown(socket.SHUT_RDWR)


def send_all(requests):
    """Sends requests at once and returns their answers."""
    for request in requests:
        request.start()
    for request in requests:
        request.join()
    return [request.answer for request in requests]
