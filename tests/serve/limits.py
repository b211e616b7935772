"""Tests bursts, an API key with far more requests than others, hostile grammars, and constrained streams."""

import asyncio
import contextlib
import json
import random
import statistics
import time

from background import Background
from client import Prompts, ask, connect, percentile, read_body, read_head, request
from connections import run_streams
from process import Server

PATH = "/v1/completions"


async def reject(reader, writer, body):
    """Sends a request on an open connection.

    Returns the status, the response time in seconds, and the wait in seconds that the server suggests.
    """
    started = time.perf_counter()
    writer.write(request("POST", PATH, body))
    status, headers = await read_head(reader)
    async for _ in read_body(reader, headers):
        pass
    return status, time.perf_counter() - started, int(headers.get("retry-after-ms", 0)) / 1000


async def burst_statuses(port, bodies):
    """Sends all requests at once. Returns the number of responses per status."""
    statuses = {}

    async def one(body):
        answer = await ask(port, PATH, body)
        statuses[answer.status] = statuses.get(answer.status, 0) + 1

    await asyncio.gather(*(one(body) for body in bodies))
    return statuses


async def suggested_waits(port, prompts, clients, lengths, seconds):
    """Measures suggested and actual waits while other clients keep the server full.

    Returns the times to status 429, and pairs of suggested and actual wait, all in seconds.
    The actual wait is the time from a status 429 to the end of the next answer.
    """
    chooser, ends, end = random.Random(4), [], time.perf_counter() + seconds

    async def one():
        while time.perf_counter() < end:
            answer = await ask(port, PATH, prompts.completion(16, chooser.randint(*lengths)))
            if answer.status == 200:
                ends.append(time.perf_counter())

    tasks = [asyncio.ensure_future(one()) for _ in range(clients)]
    await asyncio.sleep(seconds / 3)  # let the server measure how long answers take
    times, waits, body = [], [], json.dumps(prompts.completion(16, 1)).encode()
    reader, writer = await connect(port)
    while time.perf_counter() < end:
        status, time_s, wait_s = await reject(reader, writer, body)
        if status == 429:
            times.append(time_s)
            waits.append((time.perf_counter(), wait_s))
        await asyncio.sleep(0.02)
    writer.close()
    await asyncio.gather(*tasks)
    ends.sort()
    real = [next((end - at for end in ends if end > at), None) for at, _ in waits]
    return times, [(wait, time_s) for (_, wait), time_s in zip(waits, real) if time_s is not None]


def burst(options, report):
    running, queue = (4, 8) if options.short else (options.burst, 2 * options.burst)
    total = 2 * (running + queue)
    with Server(options, "--max-sequences", str(running), "--queue", str(queue), "--queue-timeout", "600") as server:
        prompts, lengths = Prompts(server.port), (20, 120)
        # The answers are long, so that none ends before the last request of the burst arrives.
        bodies = [prompts.completion(16, 200) for _ in range(total)]
        counts = asyncio.run(burst_statuses(server.port, bodies))
        seconds = 6 if options.short else 30
        times, waits = asyncio.run(suggested_waits(server.port, prompts, running + queue, lengths, seconds))
        faults = server.faults()
    expected = {200: running + queue, 429: total - running - queue}
    report.add(
        f"burst of {total} requests to a server that allows {running} running and {queue} waiting requests",
        f"exactly {expected[429]} responses with status 429",
        str(dict(sorted(counts.items()))),
        counts == expected and not faults,
        faults=faults,
    )
    p99 = percentile(times, 0.99)
    figure = f"p50 {percentile(times, 0.5) * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms of {len(times)} responses"
    report.add("time to status 429 while the server is full", "≤ 5 ms", figure, times and p99 <= 0.005, is_speed=True)
    suggested, real = (sum(pair[index] for pair in waits) / max(1, len(waits)) for index in (0, 1))
    ratio = suggested / real if real else 0.0
    figure = f"mean suggestion {suggested * 1e3:.0f} ms, mean actual wait {real * 1e3:.0f} ms: {ratio:.2f}×"
    target = "mean suggestion within 2× of the mean actual wait"
    report.add("retry-after-ms", target, figure, 0.5 <= ratio <= 2, is_speed=True)


async def closed_loop(session, port, key, clients, seconds):
    """Runs `clients` clients that send requests one after another for `seconds`. After status 429, a client waits.

    Returns the number of tokens in the answers that ended in this time, and the number of responses per status.
    """
    chooser, tokens, statuses = random.Random(key), [0], {}
    session.ready()
    end = time.perf_counter() + seconds

    async def one():
        while time.perf_counter() < end:
            ids = [chooser.randint(100, 1000) for _ in range(16)]
            fields = {"prompt": ids, "max_tokens": 32, "ignore_eos": True}
            answer = await ask(port, PATH, fields, key=key)
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            if answer.status == 200 and time.perf_counter() < end:
                tokens[0] += json.loads(answer.body)["usage"]["completion_tokens"]
            elif answer.status == 429:
                await asyncio.sleep(min(1.0, int(answer.headers["retry-after-ms"]) / 1000))

    await asyncio.gather(*(one() for _ in range(clients)))
    await session.stopped()
    return tokens[0], statuses


def fairness(options, report):
    seconds, own, flood = (5, 2, 100) if options.short else (30, 4, 400)
    keys = ["key-a", "key-b", "key-c"]
    flags = ["--max-sequences", str(3 * own // 2), "--queue", "512"]
    with Server(options, *flags, keys=keys) as server:

        def run(greedy):
            counts = [greedy, own, own]
            with contextlib.ExitStack() as stack:
                sessions = [
                    stack.enter_context(Background(closed_loop, server.port, key, count, seconds))
                    for key, count in zip(keys, counts)
                ]
            return [session.result for session in sessions]

        run(own)
        equal, unequal = run(own), run(flood)
        faults = server.faults()
    shares = [after[0] / max(1, before[0]) for before, after in zip(equal[1:], unequal[1:])]
    refused = [statuses for _, statuses in unequal]
    baseline = "the tokens that they get when all keys send the same number of requests"
    figure = f"{min(shares):.0%} and {max(shares):.0%} of {baseline}"
    name = f"one key with {flood // own}× the requests of each of two other keys"
    details = {"faults": faults, "statuses": refused}
    details |= {"tokens_equal": [run[0] for run in equal], "tokens_unequal": [run[0] for run in unequal]}
    passed = min(shares) >= 0.9 and not faults
    report.add(name, "the other keys keep ≥ 90% of their tokens", figure, passed, is_speed=not faults, **details)


def nested(depth, inner, wrap):
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def hostile_grammars():
    """Returns values of the field `structured_outputs` that are hard to compile."""
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    strings = {"type": "array", "items": {"type": "string"}}
    options = nested(50, {"type": "null"}, lambda inner: {"anyOf": [inner, strings]})
    objects = nested(
        25, {"type": "null"}, lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    )
    rules = "\n".join(f"r{index}: r{index + 1} r{index + 1}" for index in range(40)) + '\nr40: "a"\nstart: r0'
    schemas = [
        {"enum": [f"value-{index}" for index in range(50_000)]},
        {"type": "object", "properties": {f"field{index}": {"type": "string"} for index in range(3000)}},
        options,
        objects,
        {"$ref": "#"},
        loop,
        {"type": "array", "items": {"type": "string", "minLength": 100_000}, "minItems": 100_000},
        {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
    ]
    regexes = [
        "((((a{1,100}){1,100}){1,100}){1,100}){1,100}",
        "(a+)+b",
        "(a|a|aa)*(a|aa)*(b|bb)*c{0,5000}",
        "(a|b)*a(a|b){200}",
        r"(\p{L}|\p{N}){500}[^\p{L}]{500}",
        "(" * 60_000 + "a" + ")" * 60_000,
    ]
    larks = ["start: /(.*a){30}/ & /(.*b){30}/ & /(.*c){30}/", 'start: start start | "a" | ""', rules]
    fields = [{"json": schema} for schema in schemas] + [{"regex": regex} for regex in regexes]
    return fields + [{"grammar": lark} for lark in larks]


async def send_grammars(session, port, at_once):
    """Sends hostile grammars until the measurement ends.

    Returns the number of responses per status, the times to a rejection in seconds, and the time and the first
    characters of the slowest grammar.
    """
    fields, free = hostile_grammars(), asyncio.Semaphore(at_once)
    statuses, slowest, times = {}, [0.0, ""], []

    async def one(index):
        async with free:
            messages = [{"role": "user", "content": "Hello"}]
            body = {"messages": messages, "max_tokens": 8, "structured_outputs": fields[index]}
            answer = await ask(port, "/v1/chat/completions", body)
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            if answer.status != 200:
                times.append(answer.end)
            if answer.end > slowest[0]:
                slowest[:] = answer.end, json.dumps(fields[index])[:60]

    session.ready()
    stopped = asyncio.ensure_future(session.stopped())
    while not stopped.done():
        await asyncio.gather(*(one(index) for index in range(len(fields))))
    return statuses, times, slowest


def grammars(options, report):
    # Alternate runs with and without hostile grammars, because the speed of the machine can drift.
    # Without --short, repeat the runs, because the p99 of one run varies by more than the target allows.
    seconds, turns = (5, 1) if options.short else (8, 5)
    with Server(options) as server:
        prompts = Prompts(server.port)
        # Send a harmless grammar first, because the server builds its grammar compiler for the first constraint.
        body = {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 4,
            "structured_outputs": {"regex": "a"},
        }
        asyncio.run(ask(server.port, "/v1/chat/completions", body))

        def gaps():
            end, found = time.perf_counter() + seconds, []
            while time.perf_counter() < end:
                answers = asyncio.run(run_streams(server.port, prompts, 8, 100))
                found += [gap for answer in answers for gap in answer.gaps]
            return found

        alone, during, statuses, times, slowest = [], [], {}, [], [0.0, ""]
        for _ in range(turns):
            alone.append(percentile(gaps(), 0.99))
            with Background(send_grammars, server.port, 8) as hostile:
                during.append(percentile(gaps(), 0.99))
            counts, more, slow = hostile.result
            for status, count in counts.items():
                statuses[status] = statuses.get(status, 0) + count
            times += more
            slowest = max(slowest, slow)
        idle, faults = server.wait_until_idle(), server.faults()
    name = f"{len(hostile_grammars())} hostile grammars, 8 at once"
    passed = set(statuses) <= {200, 400} and idle is not None and not faults
    details = {"slowest_s": slowest[0], "slowest": slowest[1], "faults": faults}
    report.add(f"{name}: statuses", "200 or 400", str(statuses), passed, **details)
    figure = f"p50 {percentile(times, 0.5) * 1e3:.0f} ms, longest {max(times, default=0) * 1e3:.0f} ms"
    report.add(f"{name}: time to a rejection", "≤ 400 ms", figure, max(times, default=0) <= 0.4, is_speed=True)
    slow, fast = statistics.median(during), statistics.median(alone)
    ms = [[round(1e3 * time_s, 1) for time_s in times] for times in (alone, during)]
    figure = f"{slow / fast:.2f}× (medians of {ms[0]} → {ms[1]} ms)"
    report.add(f"{name}: p99 time between tokens of other requests", "≤ 1.2×", figure, slow <= 1.2 * fast, is_speed=True)


def constrained(options, report):
    """Measures how much constrained streams slow down the unconstrained streams that run beside them."""
    item = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "ids": {"type": "array"}},
        "required": ["name"],
    }
    schema = {"type": "array", "items": item, "minItems": 100}
    turns, count = (3, 8) if options.short else (6, 16)
    with Server(options) as server:
        prompts = Prompts(server.port)

        async def gap(**fields):
            """Returns the median time between tokens of streams beside other streams with `fields`, in seconds."""
            others = [prompts.completion(32, 120, stream=True, **fields) for _ in range(count)]
            other_streams = asyncio.gather(*(ask(server.port, "/v1/completions", body) for body in others))
            answers = await run_streams(server.port, prompts, count, 100)
            assert all(answer.status == 200 and answer.is_complete for answer in await other_streams)
            return percentile([gap for answer in answers for gap in answer.gaps], 0.5)

        beside_free, beside_constrained = [], []
        constraint = {"structured_outputs": {"json": schema}, "ignore_eos": False}
        asyncio.run(gap(**constraint))
        for _ in range(turns):
            beside_free.append(asyncio.run(gap()))
            beside_constrained.append(asyncio.run(gap(**constraint)))
        faults = server.faults()
    slow, fast = statistics.median(beside_constrained), statistics.median(beside_free)
    figure = f"{slow / fast:.2f}× ({fast * 1e3:.2f} → {slow * 1e3:.2f} ms)"
    name = f"p50 between tokens of {count} streams beside {count} streams with a JSON schema"
    target = f"≤ 1.2× the p50 beside {count} streams without a JSON schema"
    report.add(name, target, figure, slow <= 1.2 * fast and not faults, is_speed=True, faults=faults)
