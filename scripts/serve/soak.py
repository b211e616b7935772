"""Tests a long overload: more requests than a server can answer, some of them from faulty clients."""

import asyncio
import json
import random
import time

from background import Background
from client import Prompts, abort, ask, connect, request
from process import Server

PATH = "/v1/completions"

# A request counts as hung if it takes longer than the server's queue timeout plus 100 s for the answer.
QUEUE_SECONDS = 20
HANG_SECONDS = QUEUE_SECONDS + 100

# The share of requests with each kind of fault.
FAULTS = {"killed": 0.05, "malformed": 0.02, "oversized": 0.005, "grammar": 0.005, "slow reader": 0.005}


class Load:
    """Sends requests at a given rate, some of them faulty, and counts the results."""

    def __init__(self, port, prompts, prompt_tokens, max_tokens):
        self.port, self.prompts, self.sizes = port, prompts, (prompt_tokens, max_tokens)
        self.random = random.Random(5)
        self.counts = {}
        self.tokens = 0
        self.slowest = 0.0

    def count(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1

    def fields(self, **more):
        prompt_tokens, max_tokens = self.sizes
        return self.prompts.completion(
            self.random.randint(prompt_tokens // 2, prompt_tokens), self.random.randint(max_tokens // 2, max_tokens), **more
        )

    async def good(self):
        """Sends a request and waits for its answer. Returns the outcome as text, such as "answered" or "status 429"."""
        is_stream = self.random.random() < 0.7
        fields = self.fields(stream=is_stream)
        answer = await asyncio.wait_for(ask(self.port, PATH, fields), HANG_SECONDS)
        self.slowest = max(self.slowest, answer.end)
        is_answer = answer.status == 200 and answer.is_complete and not answer.has_error_event
        if is_answer:
            self.tokens += fields["max_tokens"]
        waited = answer.status == 200 and answer.has_error_event and b"rate_limit_exceeded" in answer.body
        return "answered" if is_answer else "queue timeout" if waited else f"status {answer.status}"

    async def killed(self):
        most, delay_s = self.random.randint(0, 20), self.random.random()
        if most:
            await ask(self.port, PATH, self.fields(stream=True), cancel=lambda answer: answer.events >= most)
        else:
            _, writer = await connect(self.port)
            writer.write(request("POST", PATH, json.dumps(self.fields()).encode()))
            await asyncio.sleep(delay_s)
            abort(writer)

    async def malformed(self):
        answer = await ask(self.port, PATH, None, raw=b'{"prompt": "\\ud800"')
        assert answer.status == 400, answer

    async def oversized(self):
        answer = await ask(self.port, PATH, None, raw=b" " * ((8 << 20) + 1))
        assert answer.status == 413, answer

    async def grammar(self):
        regex = "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"
        fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "structured_outputs": {"regex": regex}}
        answer = await ask(self.port, "/v1/chat/completions", fields)
        assert answer.status in (200, 400, 429), answer

    async def slow_reader(self):
        _, writer = await connect(self.port, receive_bytes=4096)
        writer.transport.pause_reading()
        writer.write(request("POST", PATH, json.dumps(self.fields(stream=True, logprobs=5)).encode()))
        await asyncio.sleep(10)
        abort(writer)

    async def one(self):
        draw, fault = self.random.random(), None
        for name, share in FAULTS.items():
            if fault is None and draw < share:
                fault = name
            draw -= share
        try:
            if fault is None:
                self.count(await self.good())
            else:
                await asyncio.wait_for(getattr(self, fault.replace(" ", "_"))(), HANG_SECONDS)
                self.count(fault)
        except TimeoutError:
            self.count("hung")
        except (OSError, asyncio.IncompleteReadError) as error:
            # If a body is too large, the server may reset the connection.
            self.count("oversized" if fault == "oversized" else f"lost: {type(error).__name__}")

    async def run(self, rate, seconds):
        """Sends `rate` requests per second for `seconds`, at random times. Returns `self.tokens` after `seconds`."""
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
    """Keeps `clients` requests in progress for `seconds`. Returns the requests and the generated tokens per second."""
    end, requests = time.perf_counter() + seconds, [0]

    async def one():
        while time.perf_counter() < end:
            await load.good()
            requests[0] += 1

    started, before = time.perf_counter(), load.tokens
    await asyncio.gather(*(one() for _ in range(clients)))
    elapsed = time.perf_counter() - started
    return requests[0] / elapsed, (load.tokens - before) / elapsed


async def send(session, port, sizes, clients, peak_s, seconds):
    """Measures the server's capacity, then sends 1.5 times as many requests per second."""
    load = Load(port, await asyncio.to_thread(Prompts, port), *sizes)
    await saturate(load, clients, peak_s / 4)
    peak = await saturate(load, clients, peak_s)
    session.ready()
    measured = load.tokens
    measured = await load.run(1.5 * peak[0], seconds) - measured
    await session.stopped()
    return {"peak": peak, "tokens": measured, "counts": load.counts, "slowest_s": load.slowest}


def slope(samples):
    """Returns the growth per second of (time, value) samples, by linear regression."""
    count = len(samples)
    mean_x, mean_y = (sum(sample[index] for sample in samples) / count for index in (0, 1))
    square = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / square if square else 0.0


def soak(options, report):
    seconds = 15 if options.short else options.minutes * 60
    peak_s = 6 if options.short else 20
    running = options.soak_sequences
    flags = ["--max-sequences", str(running), "--queue", str(8 * running), "--queue-timeout", str(QUEUE_SECONDS)]
    with Server(options, *flags, "--write-timeout", "5") as server:
        before = server.metrics()
        samples = []
        with Background(send, server.port, (64, 64), 2 * running, peak_s, seconds) as clients:
            started = time.monotonic()
            while (elapsed := time.monotonic() - started) < seconds:
                samples.append((elapsed, server.rss()))
                time.sleep(0.5)
        idle_s = server.wait_until_idle(HANG_SECONDS)
        after, faults = server.metrics(), server.faults()
    result, counts = clients.result, clients.result["counts"]
    goodput = result["tokens"] / seconds / result["peak"][1]
    unexpected = {name: count for name, count in counts.items() if name.startswith(("lost", "status 5", "status 4"))}
    unexpected.pop("status 429", None)
    name = f"{seconds / 60:g} min at 1.5× capacity with faults"
    passed = not counts.get("hung") and not unexpected and idle_s is not None and not faults
    details = {"peak_requests_per_s": result["peak"][0], "peak_tok_per_s": result["peak"][1], "faults": faults}
    details |= {"slowest_s": result["slowest_s"], "sequences": running}
    report.add(f"{name}: answers", "0 hung, 0 lost, 0 status 500", str(dict(sorted(counts.items()))), passed, **details)
    figure = f"{goodput:.1%} ({result['tokens'] / seconds:.0f} of {result['peak'][1]:.0f} tokens/s)"
    report.add(f"{name}: goodput", "≥ 95 % of the peak", figure, goodput >= 0.95, is_speed=True)
    if not options.short:
        # Growth in the first half comes from caches and buffers, so it is not a leak.
        settled = [sample for sample in samples if sample[0] > seconds / 2]
        growth = slope(settled) * 3600 / 1e6
        details = {"start_mb": samples[0][1] / 1e6, "middle_mb": settled[0][1] / 1e6, "end_mb": settled[-1][1] / 1e6}
        figure = f"{growth:+.1f} MB/h"
        report.add(f"{name}: growth of memory in the second half", "≤ 1 MB/h", figure, growth <= 1, **details)
    leak = after["kv_cache_usage_perc"] - before["kv_cache_usage_perc"]
    late = after["tokens_after_cancel_total"]
    figure = f"{leak:+.6f} of the KV cache, {late:.0f} tokens after a cancellation"
    report.add(f"{name}: leaks", "0", figure, leak == 0 and late == 0)
