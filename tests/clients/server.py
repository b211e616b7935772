"""A server process, and a relay that counts the connections of its clients."""

import os
import re
import socket
import subprocess
import tempfile
import threading
from pathlib import Path

import scripted_model

START_SECONDS = 60


class Server:
    """A running `inferno serve` of the scripted model in a folder. Use it in a `with` statement.

    `url` is the base URL for clients. Their connections go through a relay. `connections` is their number so far.
    """

    def __init__(self, program, folder, *flags):
        self.home = tempfile.TemporaryDirectory()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("INFERNO_", "HF_"))}
        command = [program, "serve", scripted_model.NAME, "--device", "cpu", "--port", "0", *flags]
        self.log = Path(self.home.name, "log")
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | {"HOME": self.home.name},
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )
        # The port is open before the model is loaded. The first line appears when it is.
        timer = threading.Timer(START_SECONDS, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        match = re.search(r"ready at http://127\.0\.0\.1:(\d+)/v1", line)
        assert match, f"the server did not start: {line!r} {self.log.read_text()}"
        self.relay = Relay(int(match[1]))
        self.url = f"http://127.0.0.1:{self.relay.port}/v1"

    @property
    def connections(self):
        return self.relay.connections

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.relay.close()
        self.process.terminate()
        try:
            code = self.process.wait(30)
            assert code == 0, f"the server exited with code {code}: {self.log.read_text()[-2000:]}"
        finally:
            self.process.kill()
            self.home.cleanup()

    def requests(self):
        """Returns the log lines of the requests so far."""
        return [line for line in self.log.read_text().splitlines() if " request id=" in line]


class Relay:
    """Forwards connections to a port of this machine and counts them."""

    def __init__(self, port):
        self.target = port
        self.connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return  # closed
            self.connections += 1
            server = socket.create_connection(("127.0.0.1", self.target))
            for source, sink in ((client, server), (server, client)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=forward, args=(source, sink), daemon=True).start()

    def close(self):
        self.listener.close()


def forward(source, sink):
    """Copies bytes until one side closes its connection, then closes the other side."""
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
