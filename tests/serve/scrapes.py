"""Tests the cost of reading `/metrics` often."""

import asyncio
import time

from client import Prompts, ask, connect, percentile, read_body, read_head, request
from process import Server

RATE = 20


async def scrape_times(port, count, interval_s):
    """Reads the metrics `count` times on one connection.

    Returns the time of each read in seconds, and the size of the last response in bytes.
    """
    times, size = [], 0
    reader, writer = await connect(port)
    due = time.perf_counter()
    for _ in range(count):
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        due += interval_s
        started = time.perf_counter()
        writer.write(request("GET", "/metrics"))
        status, headers = await read_head(reader)
        size = sum([len(part) async for part in read_body(reader, headers)])
        times.append(time.perf_counter() - started)
        assert status == 200, status
    writer.close()
    return times, size


def scrapes(options, report):
    seconds, count = (5, 500) if options.short else (30, 2000)
    with Server(options, "--metrics-compat", "vllm") as server:
        prompts = Prompts(server.port)
        for _ in range(8):
            asyncio.run(ask(server.port, "/v1/completions", prompts.completion(16, 16)))

        def cpu_during(work):
            before = sum(server.cpu_seconds().values())
            result = work()
            return sum(server.cpu_seconds().values()) - before, result

        idle_s, _ = cpu_during(lambda: time.sleep(seconds))
        paced_s, (times, size) = cpu_during(lambda: asyncio.run(scrape_times(server.port, RATE * seconds, 1 / RATE)))
        busy_s, _ = cpu_during(lambda: asyncio.run(scrape_times(server.port, count, 0.0)))
        faults = server.faults()
    p50, p99 = (percentile(times, share) for share in (0.5, 0.99))
    figure = f"p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms, {size / 1000:.0f} kB"
    report.add("time to read /metrics", "p50 ≤ 2 ms", figure, p50 <= 0.002 and not faults, is_speed=True, faults=faults)
    share = (paced_s - idle_s) / seconds
    figure = f"{share:.2%} of one core ({busy_s / count * 1e6:.0f} µs of CPU time per read without pauses)"
    name = f"CPU time of {RATE} reads of /metrics per second"
    report.add(name, "≤ 1% of one core", figure, share <= 0.01, is_speed=True)
