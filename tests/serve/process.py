"""Runs `inferno serve`, and reads its metrics, its log, its memory and its CPU time."""

import http.client
import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time

START_SECONDS = 300
END_SECONDS = 60


class Server:
    """An `inferno serve` that stops at the end of a `with` statement.

    `options` has the attributes `program`, `model`, `device` and `flags`.
    """

    def __init__(self, options, *flags, keys=()):
        self.keys = keys
        # With delete=True, a client process that is forked from this one could delete the log of the running server.
        self.log = tempfile.NamedTemporaryFile(prefix="inferno-serve-", suffix=".log", delete=False)  # noqa: SIM115
        command = [options.program, "serve", options.model, "--port", "0", *options.flags, *flags]
        if options.device:
            command += ["--device", options.device]
        for key in keys:
            command += ["--api-key", key]
        started = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        readable, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        line = self.process.stdout.readline() if readable else ""
        match = re.search(r"ready at http://[^ ]*:(\d+)/v1", line)
        if not match:
            self.process.kill()
            raise SystemExit(f"the server did not start; output: {line!r}; log:\n{self.read_log()[-2000:]}")
        self.port = int(match[1])
        self.start_s = time.monotonic() - started

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(1)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(END_SECONDS)
        self.process.stdout.close()
        self.log.close()
        os.unlink(self.log.name)

    def read_log(self):
        with open(self.log.name, errors="replace") as log:
            return log.read()

    def get(self, path, timeout=30):
        """Sends a GET request. Returns the status and the text of the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        headers = {"Authorization": f"Bearer {self.keys[0]}"} if self.keys else {}
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    def context(self):
        """Returns the server's context length in tokens."""
        return json.loads(self.get("/v1/models")[1])["data"][0]["max_model_len"]

    def metrics(self):
        """Returns the metrics named `inferno_*` without this prefix. Adds up the values of a metric over its labels."""
        values = {}
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith("inferno_"):
                name = re.match(r"inferno_(\w+)", line)[1]
                values[name] = values.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return values

    def faults(self):
        """Returns the number of responses with status 500 plus the number of panics in the log."""
        text = self.get("/metrics")[1]
        count = sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if 'code="500"' in line)
        return int(count) + self.read_log().count("panicked at")

    def wait_until_idle(self, limit=60):
        """Waits until no request is running or queued. Returns the seconds waited, or `None` after `limit` seconds."""
        started = time.monotonic()
        while time.monotonic() - started < limit:
            values = self.metrics()
            if values["num_requests_running"] + values["num_requests_waiting"] == 0:
                return time.monotonic() - started
            time.sleep(0.002)
        return None

    def rss(self):
        """Returns the resident memory in bytes."""
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

    def cpu_seconds(self):
        """Returns the CPU seconds of the running threads by name. Adds up threads with the same name."""
        times = {}
        for thread in os.listdir(f"/proc/{self.process.pid}/task"):
            try:
                with open(f"/proc/{self.process.pid}/task/{thread}/stat") as stat:
                    text = stat.read()
            except OSError:
                continue  # the thread has ended
            name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
            times[name] = times.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return times
