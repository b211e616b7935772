"""Tests request bodies that are too large, never end, are compressed, or are not valid requests."""

import asyncio
import json
import random
import time

from client import ask, connect, read_body, read_head, request
from process import Server

# The context length of the server that gets malformed bodies. It is short, because a mutation can destroy the field
# `max_tokens`, and then only the context length limits the answer on most routes.
SHORT_CONTEXT = 512
# The maximum number of malformed or mutated bodies to send at once.
AT_ONCE = 64

ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"]
ROUTES += ["/v1/responses/input_tokens", "/v1/messages/count_tokens", "/v1/admission", "/tokenize", "/detokenize"]
MAX_BODY = 8 << 20


async def read_status(reader):
    """Reads a response and returns its status. Raises ValueError if the body is not JSON."""
    status, headers = await read_head(reader)
    json.loads(b"".join([part async for part in read_body(reader, headers)]))
    return status


async def declared(port, size):
    """Sends a body of `size` bytes with a Content-Length header. Returns the status."""
    reader, writer = await connect(port)
    writer.write(request("POST", ROUTES[0], b" " * size))
    status = await read_status(reader)
    writer.close()
    return status


async def endless(port):
    """Sends chunks of a body that never ends, until the server responds or stops reading. Returns the status."""
    reader, writer = await connect(port)
    head = f"POST {ROUTES[0]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += "Transfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    answer = asyncio.ensure_future(read_status(reader))
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    while not answer.done():
        try:
            writer.write(chunk)
            await asyncio.wait_for(writer.drain(), 1)
        except (ConnectionError, TimeoutError):
            break  # the server has stopped reading the body
    status = await answer
    writer.close()
    return status


async def compressed(port, encoding):
    """Sends a body with a Content-Encoding header. Returns the status."""
    reader, writer = await connect(port)
    writer.write(request("POST", ROUTES[0], b"\x1f\x8b" + bytes(1000), Content_Encoding=encoding))
    status = await read_status(reader)
    writer.close()
    return status


async def hold_bodies(server, count):
    """Sends 8 MiB bodies without their last byte. Returns the peak growth of the server's memory per body, in bytes."""
    before = server.rss()
    body = b'{"messages": "' + b"x" * (MAX_BODY - 20)
    clients = [await connect(server.port) for _ in range(count)]
    for _, writer in clients:
        writer.write(request("POST", ROUTES[0], body + b" " * 6)[:-1])
        await writer.drain()
    peak, end = 0, time.perf_counter() + 2
    while time.perf_counter() < end:
        peak = max(peak, server.rss())
        await asyncio.sleep(0.05)
    for _, writer in clients:
        writer.close()
    return (peak - before) / count


def large_bodies(options, report):
    count = 8 if options.short else 32
    with Server(options) as server:
        asyncio.run(declared(server.port, 100))

        async def send_all():
            kinds = [declared(server.port, MAX_BODY + 1), endless(server.port)]
            kinds += [compressed(server.port, encoding) for encoding in ("gzip", "br", "zstd")]
            return await asyncio.gather(*(kind for kind in kinds))

        statuses = asyncio.run(send_all())
        mebibytes = asyncio.run(hold_bodies(server, count)) / (1 << 20)
        faults = server.faults()
    expected = [413, 413, 415, 415, 415]
    figure = ", ".join(map(str, statuses))
    passed = statuses == expected and not faults
    report.add("bodies: 8 MiB + 1, endless, gzip, br, zstd", "413, 413, 415, 415, 415", figure, passed, faults=faults)
    report.add(f"memory of {count} unfinished bodies", "≤ 16 MiB each", f"{mebibytes:.1f} MiB each", mebibytes <= 16)


def malformed():
    """Returns bodies that the server must reject with status 400.

    They are not valid JSON, are not objects, are nested too deeply, or contain invalid values or too many values.
    """
    deep = [begin * 1_000_000 + end * 1_000_000 for begin, end in ((b"[", b"]"), (b'{"a":', b"}"))]
    return [
        b"", b"null", b"[]", b"1", b'"text"', b"{", b"{]", b"{} {}", b"\xef\xbb\xbf{}", b"\x00", b"\xff\xfe",
        b'{"messages": NaN}', b'{"temperature": Infinity}', b'{"temperature": 1e999}', b'{"a": "\\ud800"}',
        b'{"a": "\\udc00\\ud800"}', b'{"a": "\xff"}', b'{"a": "\xed\xa0\x80"}', b'{"a": "\x01"}', b"{'a': 1}",
        b'{"x": [' + b"0," * 1_000_000 + b"0]}", b"[" * 1_000_000, *deep,
        *(b'{"messages": ' + text + b"}" for text in deep),
    ]  # fmt: skip


def mutated(count, seed):
    """Yields `count` pairs of a route and a JSON body in which 1 to 4 random bytes are added, replaced or removed."""
    chooser = random.Random(seed)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat = {"messages": [{"role": "user", "content": "Grüße"}], "max_tokens": 2, "tools": [tool], "n": 1, "stop": ["a"]}
    valid = {
        ("/v1/chat/completions", "/v1/admission", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"): chat,
        ("/v1/completions", "/tokenize"): {"prompt": "x", "max_tokens": 2},
        ("/v1/responses", "/v1/responses/input_tokens"): {"input": "x", "max_output_tokens": 2},
        ("/detokenize",): {"tokens": [1, 2]},
        ("/api/chat", "/api/generate"): {"model": "x", "messages": chat["messages"], "prompt": "x", "stream": False}
        | {"options": {"num_predict": 2}},
    }
    for _ in range(count):
        routes, fields = chooser.choice(list(valid.items()))
        body = bytearray(json.dumps(fields, ensure_ascii=False).encode())
        for _ in range(chooser.randint(1, 4)):
            at = chooser.randrange(len(body))
            choice = chooser.randrange(3)
            body[at : at + (choice > 0)] = b"" if choice == 2 else bytes([chooser.randrange(256)])
        yield chooser.choice(routes), bytes(body)


def malformed_bodies(options, report):
    count = 300 if options.short else 10_000
    started = time.perf_counter()
    with Server(options, "--context", str(SHORT_CONTEXT)) as server:

        async def statuses(bodies):
            free, found = asyncio.Semaphore(AT_ONCE), {}

            async def send(route, body):
                async with free:
                    answer = await ask(server.port, route, None, raw=body)
                if "stream" not in answer.headers.get("content-type", ""):
                    json.loads(answer.body.splitlines()[0] if route.startswith("/api") else answer.body)
                found[answer.status] = found.get(answer.status, 0) + 1

            await asyncio.gather(*(send(route, body) for route, body in bodies))
            return found

        refused = asyncio.run(statuses([(route, body) for route in ROUTES for body in malformed()]))
        fuzzed = asyncio.run(statuses(mutated(count, seed=1)))
        idle, faults = server.wait_until_idle(), server.faults()
    total = sum(refused.values())
    report.add(f"{total} malformed bodies", "all 400", str(refused), set(refused) == {400} and not faults)
    only = set(fuzzed) <= {200, 400, 404}
    passed = only and idle is not None and not faults
    report.add(f"{count} mutated requests", "200, 400 or 404, no fault", str(fuzzed), passed, faults=faults)
    seconds = time.perf_counter() - started
    report.add("time for all bodies in this test", "≤ 180 s", f"{seconds:.0f} s", seconds <= 180, is_speed=True)
