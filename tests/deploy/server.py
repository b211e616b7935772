"""A demo server, and the metrics that it exports."""

import concurrent.futures
import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

START_SECONDS = 60


class Demo:
    """`inferno serve demo` on the CPU. Stops when the `with` block ends."""

    def __init__(self, program):
        self.folder = tempfile.TemporaryDirectory()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("INFERNO_")}
        environment |= {"INFERNO_CACHE": self.folder.name, "HF_HUB_OFFLINE": "1"}
        # One running and one waiting answer, so that a few requests at once fill the queue.
        command = [program, "serve", "demo", "--device", "cpu", "--port", "0", "--max-sequences", "1", "--queue", "1"]
        self.log = open(os.path.join(self.folder.name, "log"), "w+")  # noqa: SIM115 - `__exit__` closes it
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment)

    def __enter__(self):
        # The first line of standard output contains the URL. It comes when the model is ready.
        readable, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        line = self.process.stdout.readline() if readable else ""
        url = re.search(r"http://[0-9.:]+", line)
        if url is None:
            self.process.kill()
            self.log.seek(0)
            raise RuntimeError(f"cannot start the demo server: {line}{self.log.read()}")
        self.url = url.group()
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=START_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()
        self.folder.cleanup()

    def ask(self, _=None):
        """Sends a request and returns its status."""
        body = {"messages": [{"role": "user", "content": "What is the KV cache?"}], "max_tokens": 40}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    def metrics_after_requests(self):
        """Returns /metrics after a complete answer and a rejected request. Both create metrics."""
        statuses = {self.ask()}
        until = time.monotonic() + START_SECONDS
        while statuses != {200, 429} and time.monotonic() < until:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                statuses |= set(pool.map(self.ask, range(8)))
        if statuses != {200, 429}:
            raise RuntimeError(f"the demo server answered with the statuses {statuses} instead of 200 and 429")
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=START_SECONDS) as response:
            return response.read().decode()


def names_and_labels(text):
    """Returns the names of the samples in a metrics page, and the labels of each."""
    names, labels = set(), {}
    for line in text.splitlines():
        sample = re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", line)
        if sample:
            name = sample.group(1)
            names.add(name)
            labels.setdefault(name, set()).update(re.findall(r'(\w+)="', sample.group(2) or ""))
    return names, labels
