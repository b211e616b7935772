"""An HTTP client on asyncio that measures streams, and that can reset connections or limit the receive buffer."""

import asyncio
import json
import random
import socket
import struct
import time
from dataclasses import dataclass, field

HOST = "127.0.0.1"
EVENT = b"\n\n"
DONE = b"data: [DONE]"


@dataclass
class Answer:
    """A response. `body` has only the last 4,096 bytes of a stream. `first` and `end` are seconds since the request."""

    status: int = 0
    headers: dict = field(default_factory=dict)
    body: bytes = b""
    first: float = 0.0  # the time of the first event of a stream
    end: float = 0.0
    gaps: list = field(default_factory=list)  # the times between events of a stream
    events: int = 0
    is_complete: bool = False
    is_canceled: bool = False

    @property
    def has_error_event(self):
        return b'data: {"error"' in self.body


def request(method, path, body=b"", **headers):
    """Returns the bytes of a request. An underscore in a header name becomes a hyphen."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def key_header(key):
    return {"Authorization": f"Bearer {key}"} if key else {}


async def connect(port, receive_bytes=None):
    """Opens a connection. `receive_bytes` limits the receive buffers of the socket (SO_RCVBUF) and of the reader."""
    if receive_bytes is None:
        return await asyncio.open_connection(HOST, port, limit=1 << 20)
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, (HOST, port))
    return await asyncio.open_connection(sock=plain, limit=receive_bytes)


def abort(writer):
    """Closes a connection with a TCP reset."""
    plain = writer.get_extra_info("socket")
    if plain is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def read_head(reader):
    """Returns the status and the headers of a response. Header names and values become lower case."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
    return int(head[0].split()[1]), headers


async def read_body(reader, headers):
    """Yields the body of a response in parts."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).strip() or b"0", 16):
            part = await reader.readexactly(size + 2)
            yield part[:-2]
        await reader.readline()
    else:
        yield await reader.readexactly(int(headers.get("content-length", 0)))


async def ask(port, path, fields, key=None, cancel=None, raw=None):
    """Sends a request and reads its response.

    After each part of a stream, calls `cancel` with the answer so far. If `cancel` returns True, resets the connection.
    `raw` is the body to send instead of `fields`.
    """
    body = json.dumps(fields).encode() if raw is None else raw
    answer = Answer()
    reader, writer = await connect(port)
    started = time.perf_counter()
    try:
        writer.write(request("POST", path, body, **key_header(key)))
        await writer.drain()
        answer.status, answer.headers = await read_head(reader)
        is_stream = "event-stream" in answer.headers.get("content-type", "")
        last = None
        async for part in read_body(reader, answer.headers):
            answer.body = (answer.body + part)[-4096:] if is_stream else answer.body + part
            if is_stream:
                count = part.count(EVENT) - part.count(b": ping")
                now = time.perf_counter()
                if count > 0 and last is None:
                    answer.first = now - started
                elif count > 0:
                    answer.gaps += [(now - last) / count] * count
                last = now if count > 0 else last
                answer.events += count
                if cancel and cancel(answer):
                    answer.is_canceled = True
                    abort(writer)
                    break
        answer.is_complete = not is_stream or DONE in answer.body[-64:]
    finally:
        answer.end = time.perf_counter() - started
        writer.close()
    return answer


async def get(port, path, key=None):
    """Sends a GET request on a new connection. Returns the status and the body."""
    reader, writer = await connect(port)
    writer.write(request("GET", path, **key_header(key)))
    status, headers = await read_head(reader)
    body = b"".join([part async for part in read_body(reader, headers)])
    writer.close()
    return status, body


async def poll(condition, what, limit_s=30):
    """Awaits `condition()` repeatedly until the result is True. Raises TimeoutError after `limit_s` seconds."""
    try:
        async with asyncio.timeout(limit_s):
            while not await condition():
                await asyncio.sleep(0)
    except TimeoutError:
        raise TimeoutError(f"{what} did not happen within {limit_s} s") from None


class Prompts:
    """Creates random prompts. They have no long common prefix, so no prompt reuses the cached prefix of another."""

    TEXT = "A server answers many clients at once. Each client waits for its first token and then reads a stream."

    def __init__(self, port, key=None, seed=1):
        answer = asyncio.run(ask(port, "/tokenize", {"prompt": self.TEXT}, key=key))
        self.ids = sorted(set(json.loads(answer.body)["tokens"]))
        self.random = random.Random(seed)

    def completion(self, prompt_tokens, max_tokens, **fields):
        """Returns the body of a completion request. By default, the answer has exactly `max_tokens` tokens."""
        prompt = [self.random.choice(self.ids) for _ in range(prompt_tokens)]
        return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0} | fields


def percentile(values, share):
    """Returns a percentile, or 0 if there are no values. `share` is the fraction of the values below the percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
