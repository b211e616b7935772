"""Tests connections that send nothing, send slowly, or do not read."""

import asyncio
import json
import statistics
import time

from background import Background, raise_file_limit
from client import Prompts, abort, ask, connect, percentile, read_body, read_head, request
from process import Server

# The number of file descriptors to keep free for files other than the test connections.
OTHER_FILES = 200

# The number of runs with idle connections, and also the number of runs without them.
IDLE_TURNS = 3


async def first_token_times(port, prompts, seconds):
    """Sends short requests one after another for `seconds`. Returns their times to the first token in seconds."""
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        answer = await ask(port, "/v1/completions", prompts.completion(32, 2, stream=True))
        assert answer.status == 200 and answer.is_complete, answer
        times.append(answer.first)
    return times


async def send_header_slowly(port, lifetimes):
    """Sends one byte of a header per second until the server closes the connection.

    Appends the time for which the connection was open to `lifetimes`, in seconds.
    """
    reader, writer = await connect(port)
    started = time.perf_counter()
    writer.write(b"GET /v1/models HTTP/1.1\r\nX-Slow: ")
    closed = asyncio.ensure_future(reader.read())
    while not (await asyncio.wait([closed], timeout=1))[0]:
        writer.write(b"x")
    lifetimes.append(time.perf_counter() - started)
    closed.exception()
    writer.close()


async def send_headers_slowly(session, port, count):
    """Runs `send_header_slowly` on `count` connections. Returns how long each connection was open, in seconds."""
    lifetimes = []
    clients = [asyncio.ensure_future(send_header_slowly(port, lifetimes)) for _ in range(count)]
    await asyncio.sleep(0.5)
    session.ready()
    await session.stopped()
    await asyncio.gather(*clients)
    return lifetimes


def slow_loris(options, report):
    count, timeout_s = (200, 2.0) if options.short else (1000, 10.0)
    with Server(options, "--header-timeout", str(timeout_s)) as server:
        prompts = Prompts(server.port)
        asyncio.run(first_token_times(server.port, prompts, 1))
        seconds = timeout_s - 1
        # Measure without slow connections both before and after the measurement with them, because the speed of the
        # machine can drift.
        without_slow = asyncio.run(first_token_times(server.port, prompts, seconds / 2))
        with Background(send_headers_slowly, server.port, count) as slow:
            with_slow = asyncio.run(first_token_times(server.port, prompts, seconds))
        without_slow += asyncio.run(first_token_times(server.port, prompts, seconds / 2))
        lifetimes = slow.result
        faults = server.faults()
    deviation = max(abs(lifetime - timeout_s) for lifetime in lifetimes)
    target = f"all closed after {timeout_s:g} s ± 0.5 s"
    figure = f"{len(lifetimes)} closed after {min(lifetimes):.2f} to {max(lifetimes):.2f} s"
    report.add(f"{count} slow-loris sockets: closed", target, figure, deviation <= 0.5 and not faults, faults=faults)
    p50, p99 = (percentile(with_slow, share) / percentile(without_slow, share) - 1 for share in (0.5, 0.99))
    p99_ms = [percentile(times, 0.99) * 1e3 for times in (without_slow, with_slow)]
    figure = f"p99 {p99:+.1%} ({p99_ms[0]:.1f} → {p99_ms[1]:.1f} ms), p50 {p50:+.1%}"
    report.add("time to first token of other requests", "p99 ≤ +5%", figure, p99 <= 0.05, is_speed=True, p50=p50)


async def hold_connections(session, port, count):
    """Opens connections, sends one request on each, and keeps them open. Returns how many the server closed."""
    connections = []
    for _ in range(count):
        reader, writer = await connect(port)
        writer.write(request("GET", "/live"))
        _, headers = await read_head(reader)
        async for _ in read_body(reader, headers):
            pass
        connections.append((reader, writer))
    session.ready()
    await session.stopped()
    closed = sum(reader.at_eof() for reader, _ in connections)
    for _, writer in connections:
        writer.transport.abort()
    return closed


async def run_streams(port, prompts, count, max_tokens):
    """Runs `count` streams at once. Returns their answers."""
    bodies = [prompts.completion(32, max_tokens, stream=True) for _ in range(count)]
    return await asyncio.gather(*(ask(port, "/v1/completions", body) for body in bodies))


def idle_connections(options, report):
    count, stream_count = (1000, 32) if options.short else (10_000, 256)
    max_count = raise_file_limit() - stream_count - OTHER_FILES
    if max_count < count:
        reason = f"the limit on open files allows only {max_count} connections, so the test uses {max_count}"
        report.skip(f"{count} idle connections", "0 errors", reason)
        count = max_count
    name = f"{count} idle connections and {stream_count} streams"
    # Alternate runs with and without idle connections, because the speed of the machine can drift.
    # Repeat the runs, because the p99 of one run varies by more than the target allows.
    without_idle, with_idle, errors = [], [], 0
    with Server(options, "--header-timeout", "3600") as server:
        prompts = Prompts(server.port)
        asyncio.run(run_streams(server.port, prompts, stream_count, 16))
        before = server.rss()
        for turn in range(IDLE_TURNS):
            # Start a client process in both cases, so that the cases differ only in the number of connections.
            with Background(hold_connections, server.port, 0):
                without_idle.append(asyncio.run(run_streams(server.port, prompts, stream_count, 64)))
            with Background(hold_connections, server.port, count) as idle:
                if turn == 0:
                    kilobytes = (server.rss() - before) / count / 1000
                with_idle.append(asyncio.run(run_streams(server.port, prompts, stream_count, 64)))
            errors += idle.result
        faults = server.faults()
    errors += sum(answer.status != 200 or not answer.is_complete for answers in with_idle for answer in answers)
    report.add(name, "0 errors", f"{errors} errors", errors == 0 and not faults, faults=faults)
    report.add(f"memory of {count} idle connections", "≤ 30 kB each", f"{kilobytes:.1f} kB each", kilobytes <= 30)
    gaps_without, gaps_with = ([p99_gap(answers) for answers in runs] for runs in (without_idle, with_idle))
    ratio = statistics.median(gaps_with) / statistics.median(gaps_without)
    ms = [[round(1e3 * gap, 1) for gap in gaps] for gaps in (gaps_without, gaps_with)]
    figure = f"{ratio:.2f}× (medians of {ms[0]} → {ms[1]} ms)"
    target = "≤ 1.1× the p99 without idle connections"
    report.add("streams' p99 time between tokens", target, figure, ratio <= 1.1, is_speed=True)


def p99_gap(answers):
    """Returns the p99 of the times between tokens, in seconds."""
    return percentile([gap for answer in answers for gap in answer.gaps], 0.99)


def unsent_bytes(port, client_ports):
    """Maps client ports to the bytes in the server's send queue, or to None if the connection is not established."""
    unsent = dict.fromkeys(client_ports)
    with open("/proc/net/tcp") as file:
        for line in file.readlines()[1:]:
            fields = line.split()
            local, remote = (int(address.split(":")[1], 16) for address in fields[1:3])
            if local == port and remote in unsent and fields[3] == "01":  # established
                unsent[remote] = int(fields[4].split(":")[0], 16)
    return unsent


async def watch_slow_readers(server, count, body):
    """Starts streams and reads nothing. Returns a list of times in seconds and the server's peak memory in bytes.

    Each time is from the last change of a connection's send queue until the server closed the connection.
    The list has no time for a connection that the server did not close.
    """
    clients = [await connect(server.port, receive_bytes=4096) for _ in range(count)]
    for _, writer in clients:
        writer.transport.pause_reading()
        writer.write(request("POST", "/v1/chat/completions", body))
    ports = [writer.get_extra_info("sockname")[1] for _, writer in clients]
    last_unsent, changed_at, closed_after, peak = unsent_bytes(server.port, ports), {}, {}, 0
    end = time.perf_counter() + 300
    while len(closed_after) < count and time.perf_counter() < end:
        await asyncio.sleep(0.02)
        now, unsent, peak = time.perf_counter(), unsent_bytes(server.port, ports), max(peak, server.rss())
        for port in ports:
            if unsent[port] is None and port in changed_at:
                closed_after.setdefault(port, now - changed_at[port])
            elif unsent[port] != last_unsent[port]:
                changed_at[port] = now
        last_unsent = unsent
    for _, writer in clients:
        abort(writer)
    return list(closed_after.values()), peak


def slow_readers(options, report):
    count, timeout_s = (4, 2.0) if options.short else (16, 30.0)
    with Server(options, "--write-timeout", str(timeout_s)) as server:
        fields = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True, "stream": True}
        # Large events fill the buffers of the connection quickly.
        body = json.dumps(fields | {"logprobs": True, "top_logprobs": 20, "n": 4}).encode()
        before = server.rss()
        times, peak = asyncio.run(watch_slow_readers(server, count, body))
        is_idle = server.wait_until_idle() is not None
        faults = server.faults()
    is_exact = len(times) == count and all(abs(time_s - timeout_s) <= 0.5 for time_s in times)
    range_s = f"after {min(times):.2f} to {max(times):.2f} s" if times else "no times"
    report.add(
        f"{count} clients that do not read",
        f"all disconnected and canceled {timeout_s:g} s ± 0.5 s after the last accepted byte",
        f"{len(times)} disconnected, {range_s}",
        is_exact and is_idle and not faults,
        peak_bytes_per_client=(peak - before) // count,
        faults=faults,
    )


async def measure_header_timeout(port):
    """Returns the time in seconds until the server closes a connection whose headers stay incomplete."""
    reader, writer = await connect(port)
    started = time.perf_counter()
    writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n")
    await reader.read()
    writer.close()
    return time.perf_counter() - started


async def measure_keep_alive_timeout(port):
    """Returns the time in seconds until the server closes a connection that is idle after a response."""
    reader, writer = await connect(port)
    writer.write(request("GET", "/live"))
    _, headers = await read_head(reader)
    async for _ in read_body(reader, headers):
        pass
    started = time.perf_counter()
    await reader.read()
    writer.close()
    return time.perf_counter() - started


async def measure_body_timeout(port):
    """Returns the time in seconds until the server returns status 408 for an incomplete body."""
    reader, writer = await connect(port)
    started = time.perf_counter()
    writer.write(request("POST", "/v1/completions", b" " * 100)[:-50])
    status, _ = await read_head(reader)
    writer.close()
    assert status == 408, status
    return time.perf_counter() - started


async def measure_queue_timeout(port, prompts, limit_s, context):
    """Returns the time in seconds until the server rejects a request that waits too long behind others (status 429)."""
    # With this priority, the blocking requests start before the measured request even if they arrive later.
    blockers = [prompts.completion(8, context - 16, priority=-100_000) for _ in range(32)]
    blockers = [asyncio.ensure_future(ask(port, "/v1/completions", body)) for body in blockers]
    await asyncio.sleep(0.5)
    started = time.perf_counter()
    answer = await ask(port, "/v1/completions", prompts.completion(8, 4))
    elapsed = time.perf_counter() - started
    for blocker in blockers:
        blocker.cancel()
    assert answer.status == 429 or elapsed < limit_s, answer
    return elapsed


def timeouts(options, report):
    seconds = (2.0, 2.5, 3.0) if options.short else (10.0, 30.0, 60.0)
    limits = dict(zip(("header", "body", "queue"), seconds))
    flags = [part for name, limit_s in limits.items() for part in (f"--{name}-timeout", str(limit_s))]
    with Server(options, "--max-sequences", "1", *flags) as server:
        prompts = Prompts(server.port)

        async def measure_all():
            return await asyncio.gather(
                measure_header_timeout(server.port),
                measure_keep_alive_timeout(server.port),
                measure_body_timeout(server.port),
                measure_queue_timeout(server.port, prompts, limits["queue"], server.context()),
            )

        times = asyncio.run(measure_all())
        faults = server.faults()
    # The flag --header-timeout also limits how long a connection may be idle after a response.
    names = ["headers", "idle after a response", "body (408)", "queue (429)"]
    flags = ["header", "header", "body", "queue"]
    for name, flag, time_s in zip(names, flags, times):
        is_exact = abs(time_s - limits[flag]) <= 0.5
        target, passed = f"{limits[flag]:g} s ± 0.5 s", is_exact and not faults
        report.add(f"timeout: {name}", target, f"{time_s:.2f} s", passed, faults=faults)
