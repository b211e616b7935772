"""Tests a long overload: more requests than a server can answer, some of them from faulty clients."""

import asyncio
import contextlib
import json
import os
import random
import time

from background import Background
from client import Prompts, abort, ask, connect, request
from process import Server

PATH = "/v1/completions"

# A request counts as hung after the server's queue timeout plus 100 s.
QUEUE_SECONDS = 20
HANG_SECONDS = QUEUE_SECONDS + 100

# The share of requests that each kind of fault affects.
FAULTS = {"killed": 0.05, "malformed": 0.02, "oversized": 0.005, "grammar": 0.005, "slow reader": 0.005}

# The outcomes that do not fail the test. A fault's name is the expected outcome of a request with this fault.
EXPECTED = {"answered", "queue timeout", "status 429", *FAULTS}


def outcome(answer):
    """Returns the outcome of a request as text, such as "answered" or "status 429"."""
    if answer.status != 200:
        return f"status {answer.status}"
    if answer.has_error_event:
        return "queue timeout" if b"rate_limit_exceeded" in answer.body else "error event"
    return "answered" if answer.is_complete else "cut off"


class Load:
    """Sends requests, some of them faulty, and counts their outcomes."""

    def __init__(self, port, prompts, sizes, seed):
        self.port, self.prompts, self.sizes = port, prompts, sizes
        self.random = random.Random(seed)
        self.counts = {}
        self.tokens = 0
        self.slowest = 0.0

    def count(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1

    def fields(self, **more):
        prompt_tokens, max_tokens = self.sizes
        return self.prompts.completion(
            self.random.randint(prompt_tokens // 2, prompt_tokens),
            self.random.randint(max_tokens // 2, max_tokens),
            **more,
        )

    async def good(self):
        """Sends a request without a fault and waits for its answer. Returns the outcome."""
        is_stream = self.random.random() < 0.7
        fields = self.fields(stream=is_stream)
        answer = await ask(self.port, PATH, fields)
        self.slowest = max(self.slowest, answer.end)
        result = outcome(answer)
        if result == "answered":
            self.tokens += fields["max_tokens"]
        return result

    # Each method from `killed` to `slow_reader` sends a request with the fault that the method is named after.
    # It returns the name of the fault if the request ends as intended, and otherwise the outcome of the request.

    async def killed(self):
        most, delay_s = self.random.randint(0, 20), self.random.random()
        if most:
            fields = self.fields(stream=True)
            answer = await ask(self.port, PATH, fields, cancel=lambda answer: answer.events >= most)
            return "killed" if answer.is_canceled else outcome(answer)
        _, writer = await connect(self.port)
        writer.write(request("POST", PATH, json.dumps(self.fields()).encode()))
        await asyncio.sleep(delay_s)
        abort(writer)
        return "killed"

    async def malformed(self):
        answer = await ask(self.port, PATH, None, raw=b'{"prompt": "\\ud800"')
        return "malformed" if answer.status == 400 else f"malformed: {outcome(answer)}"

    async def oversized(self):
        try:
            answer = await ask(self.port, PATH, None, raw=b" " * ((8 << 20) + 1))
        except (OSError, asyncio.IncompleteReadError):
            return "oversized"  # the server may reset the connection
        return "oversized" if answer.status == 413 else f"oversized: {outcome(answer)}"

    async def grammar(self):
        regex = "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"
        messages = [{"role": "user", "content": "x"}]
        fields = {"messages": messages, "max_tokens": 8, "structured_outputs": {"regex": regex}}
        answer = await ask(self.port, "/v1/chat/completions", fields)
        return "grammar" if answer.status in (200, 400, 429) else f"grammar: {outcome(answer)}"

    async def slow_reader(self):
        _, writer = await connect(self.port, receive_bytes=4096)
        writer.transport.pause_reading()
        writer.write(request("POST", PATH, json.dumps(self.fields(stream=True, logprobs=5)).encode()))
        await asyncio.sleep(10)
        abort(writer)
        return "slow reader"

    async def one(self):
        draw, fault = self.random.random(), None
        for name, share in FAULTS.items():
            if fault is None and draw < share:
                fault = name
            draw -= share
        send = getattr(self, fault.replace(" ", "_")) if fault else self.good
        # Count every exception as an outcome, because `run` drops finished tasks without reading their exceptions.
        try:
            self.count(await asyncio.wait_for(send(), HANG_SECONDS))
        except TimeoutError:
            self.count("hung")
        except (OSError, asyncio.IncompleteReadError) as error:
            self.count(f"lost: {type(error).__name__}")
        except Exception as error:  # noqa: BLE001 - the report lists all failures
            self.count(f"failed: {type(error).__name__}: {str(error)[:100]}")

    async def run(self, rate, seconds):
        """Sends `rate` requests per second for `seconds`, at random times, and waits until all have ended.

        Returns the value that `self.tokens` has after `seconds`.
        """
        tasks, end = set(), time.perf_counter() + seconds
        while time.perf_counter() < end:
            task = asyncio.ensure_future(self.one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(self.random.expovariate(rate))
        measured = self.tokens
        await asyncio.gather(*tasks)
        return measured


async def saturate(load, clients, seconds):
    """Keeps `clients` requests in progress for `seconds`.

    Returns two rates: requests per second and generated tokens per second.
    """
    end, requests = time.perf_counter() + seconds, [0]

    async def one():
        while time.perf_counter() < end:
            result = await asyncio.wait_for(load.good(), HANG_SECONDS)
            assert result == "answered", f"a request without overload ended with: {result}"
            requests[0] += 1

    started, before = time.perf_counter(), load.tokens
    await asyncio.gather(*(one() for _ in range(clients)))
    elapsed = time.perf_counter() - started
    return requests[0] / elapsed, (load.tokens - before) / elapsed


async def send(session, port, sizes, seed, clients, peak_s, seconds):
    """Measures how many requests per second the server can answer, then sends 1.5 times as many.

    If several processes overload a server at the same time, each process measures its share of the capacity.
    """
    load = Load(port, await asyncio.to_thread(Prompts, port, seed=seed), sizes, seed)
    await saturate(load, clients, peak_s / 4)
    peak = await saturate(load, clients, peak_s)
    session.ready()
    measured = load.tokens
    measured = await load.run(1.5 * peak[0], seconds) - measured
    await session.stopped()
    return {"peak": peak, "tokens": measured, "counts": load.counts, "slowest_s": load.slowest}


def added(results):
    """Combines the results of several processes."""
    counts = {}
    for result in results:
        for what, count in result["counts"].items():
            counts[what] = counts.get(what, 0) + count
    peak = [sum(result["peak"][index] for result in results) for index in (0, 1)]
    tokens, slowest = sum(result["tokens"] for result in results), max(result["slowest_s"] for result in results)
    return {"peak": peak, "tokens": tokens, "counts": counts, "slowest_s": slowest}


def slope(samples):
    """Returns the slope of the regression line through (time in seconds, value) samples."""
    count = len(samples)
    mean_x, mean_y = (sum(sample[index] for sample in samples) / count for index in (0, 1))
    square = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / square if square else 0.0


def soak(options, report):
    seconds = 15 if options.short else options.minutes * 60
    peak_s = 6 if options.short else 20
    running = options.soak_sequences
    # Use several client processes: one process sent at most 346 requests/s (2026-11-27, docs/history/reliability.md).
    processes = max(1, min(8, (os.cpu_count() or 1) // 4))
    flags = ["--max-sequences", str(running), "--queue", str(8 * running), "--queue-timeout", str(QUEUE_SECONDS)]
    with Server(options, *flags, "--write-timeout", "5") as server:
        before = server.metrics()
        samples = []
        share = -(-2 * running // processes)  # clients per process
        clients = [Background(send, server.port, (64, 64), seed, share, peak_s, seconds) for seed in range(processes)]
        for client in clients:
            client.start()
        with contextlib.ExitStack() as stack:
            for client in clients:
                stack.enter_context(client)
            started = time.monotonic()
            while (elapsed := time.monotonic() - started) < seconds:
                samples.append((elapsed, server.rss()))
                time.sleep(0.5)
        idle_s = server.wait_until_idle(HANG_SECONDS)
        after, faults = server.metrics(), server.faults()
    result = added([client.result for client in clients])
    counts = result["counts"]
    goodput = result["tokens"] / seconds / result["peak"][1]
    unexpected = {name: count for name, count in counts.items() if name not in EXPECTED}
    name = f"{seconds / 60:g} min at 1.5× capacity with faults"
    passed = not unexpected and idle_s is not None and not faults
    details = {"peak_requests_per_s": result["peak"][0], "peak_tok_per_s": result["peak"][1], "faults": faults}
    details |= {"slowest_s": result["slowest_s"], "sequences": running, "unexpected": unexpected}
    details |= {"client_processes": processes, "sent_per_s": sum(counts.values()) / seconds}
    target = "0 hung, 0 lost, 0 unexpected outcomes"
    report.add(f"{name}: answers", target, str(dict(sorted(counts.items()))), passed, **details)
    figure = f"{goodput:.1%} ({result['tokens'] / seconds:.0f} of {result['peak'][1]:.0f} tokens/s)"
    report.add(f"{name}: goodput", "≥ 95% of the peak", figure, goodput >= 0.95, is_speed=True)
    if not options.short:
        # In the first half, memory also grows because caches and buffers fill, which is not a leak.
        settled = [sample for sample in samples if sample[0] > seconds / 2]
        growth = slope(settled) * 3600 / 1e6
        evenly = [samples[index * (len(samples) - 1) // 24] for index in range(25)]
        details = {"minutes_and_mb": [[round(at / 60, 2), round(rss / 1e6, 1)] for at, rss in evenly]}
        figure = f"{growth:+.1f} MB/h"
        report.add(f"{name}: growth of memory in the second half", "≤ 1 MB/h", figure, growth <= 1, **details)
    leak = after["kv_cache_usage_perc"] - before["kv_cache_usage_perc"]
    late = after["tokens_after_cancel_total"]
    figure = f"{leak:+.6f} of the KV cache, {late:.0f} tokens after a cancellation"
    report.add(f"{name}: leaks", "0", figure, leak == 0 and late == 0)
