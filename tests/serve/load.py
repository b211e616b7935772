#!/usr/bin/env python3
"""Measures `inferno serve` under load: tokens per second, times to the first token and between tokens, CPU time.

    tests/serve/load.py --program target/release/inferno --model MODEL [--device cpu] [--out FILE]

Starts the server. For each number of clients, all clients send random prompts at the same time in three rounds:
a warm-up, measured streams, and measured answers without streaming. At the end, a single client measures the time
to the first token. Requires only Python 3.11 or later.
"""

import argparse
import asyncio
import datetime
import json
import time

from background import raise_file_limit
from client import Prompts, ask, percentile
from process import Server
from report import command, describe, machine

PATH = "/v1/completions"


async def send_all(port, bodies):
    """Sends all requests at once. Returns the answers, and the seconds until the last answer ended."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(ask(port, PATH, body) for body in bodies))
    seconds = time.perf_counter() - started
    failed = [answer for answer in answers if answer.status != 200 or not answer.is_complete]
    if failed:
        cause = "an incomplete stream" if failed[0].status == 200 else f"status {failed[0].status}"
        raise SystemExit(
            f"cannot measure the load: {len(failed)} of {len(answers)} requests failed; the first failure was {cause}"
        )
    return answers, seconds


def measure(server, prompts, clients, prompt_tokens, max_tokens):
    """Measures the server with `clients` requests at once. Returns an entry of the report's `runs`."""

    def bodies(is_stream):
        return [prompts.completion(prompt_tokens, max_tokens, stream=is_stream) for _ in range(clients)]

    def run(bodies):
        return asyncio.run(send_all(server.port, bodies))

    run(bodies(True))
    streams = bodies(True)
    before, started = server.cpu_seconds(), time.perf_counter()
    answers, seconds = run(streams)
    elapsed, after = time.perf_counter() - started, server.cpu_seconds()
    tokens = clients * max_tokens
    used = {name: cpu_s - before.get(name, 0.0) for name, cpu_s in after.items()}
    gaps = [gap for answer in answers for gap in answer.gaps]
    first = [answer.first for answer in answers]
    return {
        "clients": clients,
        "stream_tok_per_s": tokens / seconds,
        "whole_tok_per_s": tokens / run(bodies(False))[1],
        "ttft_ms": {"p50": percentile(first, 0.5) * 1e3, "p99": percentile(first, 0.99) * 1e3},
        "between_tokens_ms": {"p50": percentile(gaps, 0.5) * 1e3, "p99": percentile(gaps, 0.99) * 1e3},
        "cpu_us_per_token": {name: cpu_s / tokens * 1e6 for name, cpu_s in sorted(used.items()) if cpu_s > 0.005},
        "busy_threads": sum(used.values()) / elapsed,
    }


def rounded(value):
    """Rounds a float, or the floats in nested dicts, to four significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main():
    parser = argparse.ArgumentParser(description="Measures `inferno serve` under load.")
    parser.add_argument("--program", default="target/release/inferno", help="the program to measure")
    parser.add_argument("--model", default="demo", help="the model to serve")
    parser.add_argument("--device", default="", help="the device; the default is the first GPU")
    parser.add_argument("--flags", default="", help="further flags for `inferno serve`, separated by spaces")
    parser.add_argument("--clients", default="1,8,32,64,128", help="numbers of clients, separated by commas")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="prompt tokens")
    parser.add_argument("--generate", type=int, default=128, metavar="N", help="tokens to generate")
    parser.add_argument("--out", help="the file for the report, in JSON")
    options = parser.parse_args()
    options.flags = options.flags.split()
    raise_file_limit()
    with Server(options) as server:
        prompts, runs = Prompts(server.port), []
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        result = {"command": command(), "date": date, "inferno": describe(server), "machine": machine()}
        result |= {"start_s": server.start_s, "prompt_tokens": options.prompt, "generated_tokens": options.generate}
        for clients in map(int, options.clients.split(",")):
            run = measure(server, prompts, clients, options.prompt, options.generate)
            runs.append(rounded(run))
            print(
                f"{clients} clients: {run['stream_tok_per_s']:.0f} tokens/s with streaming, "
                f"{run['whole_tok_per_s']:.0f} tokens/s without streaming; "
                f"time to first token p50 {run['ttft_ms']['p50']:.1f} ms; time between tokens p50 "
                f"{run['between_tokens_ms']['p50']:.2f} ms, p99 {run['between_tokens_ms']['p99']:.2f} ms; "
                f"{sum(run['cpu_us_per_token'].values()):.0f} µs of CPU time per token",
                flush=True,
            )
        first = []
        for _ in range(12):
            answers, _ = asyncio.run(send_all(server.port, [prompts.completion(options.prompt, 4, stream=True)]))
            first.append(answers[0].first * 1e3)
        result["one_client_ttft_ms"] = rounded({"p50": percentile(first, 0.5), "longest": max(first)})
        print(f"one client: time to first token p50 {percentile(first, 0.5):.1f} ms, longest {max(first):.1f} ms")
    result["runs"] = runs
    if options.out:
        with open(options.out, "w") as file:
            json.dump(rounded(result), file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
