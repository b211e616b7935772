"""Tests clients that disconnect, and servers that shut down or are killed."""

import asyncio
import json
import random
import signal
import time

from client import Prompts, abort, ask, connect, get, percentile, poll, read_head, request
from process import Server

PATH = "/v1/completions"


async def kill(port, prompts, chooser, longest, counts):
    """Opens a connection and closes it in a random phase of a request, from connecting to decoding."""
    phase = chooser.choice(["connect", "body", "queue", "prefill", "decode", "whole"])
    counts[phase] = counts.get(phase, 0) + 1
    close = abort if chooser.random() < 0.5 else lambda writer: writer.close()
    is_long = phase == "prefill"
    fields = prompts.completion(longest if is_long else 32, 400, stream=phase != "whole")
    if phase == "decode":
        most = chooser.randint(1, 60)
        await ask(port, PATH, fields, cancel=lambda answer: answer.events >= most)
        return
    _, writer = await connect(port)
    body = request("POST", PATH, json.dumps(fields).encode())
    if phase == "body":
        writer.write(body[: len(body) // 2])
    elif phase != "connect":
        writer.write(body)
    longest_wait = {"connect": 0.02, "body": 0.05, "queue": 0.01, "prefill": 0.3, "whole": 1.0}[phase]
    await asyncio.sleep(chooser.random() * longest_wait)
    close(writer)


def killed_clients(options, report):
    count, at_once = (150, 32) if options.short else (1000, 96)
    with Server(options, "--max-sequences", "16", "--queue", "512") as server:
        prompts, chooser, counts = Prompts(server.port), random.Random(3), {}
        longest = min(2000, server.context() - 500)
        asyncio.run(ask(server.port, PATH, prompts.completion(32, 4)))
        before = server.metrics()

        async def kill_all():
            free = asyncio.Semaphore(at_once)

            async def one():
                async with free:
                    await kill(server.port, prompts, chooser, longest, counts)

            await asyncio.gather(*(one() for _ in range(count)))

        asyncio.run(kill_all())
        idle_s = server.wait_until_idle()
        after = server.metrics()
        usage = after["kv_cache_usage_perc"] - before["kv_cache_usage_perc"]
        faults = server.faults()
        late = after["tokens_after_cancel_total"]
        ended = asyncio.run(ask(server.port, PATH, prompts.completion(32, 4)))
    idle = "never idle" if idle_s is None else f"idle after {idle_s * 1e3:.0f} ms"
    passed = idle_s is not None and late == 0 and usage == 0 and ended.status == 200 and not faults
    report.add(
        f"{count} clients killed at random phases",
        "0 tokens from steps that began after the cancellation; unchanged KV cache usage; no running or queued requests",
        f"{late:.0f} tokens; {usage:+.6f} of the KV cache; {idle}",
        passed,
        phases=counts,
        canceled_sequences=after["canceled_sequences_total"],
        faults=faults,
    )


async def cancel_time(port, fields, events):
    """Starts a stream and closes it. Returns the seconds until the server is idle, and the seconds between events.

    Closes the stream after `events` events, or during the prefill if `events` is 0.
    """
    reader, writer = await connect(port)

    async def is_running():
        writer.write(request("GET", "/v1/loads"))
        _, headers = await read_head(reader)
        load = json.loads(await reader.readexactly(int(headers["content-length"])))["loads"][0]
        return load["num_running_reqs"] + load["num_waiting_reqs"] > 0

    async def is_idle():
        return not await is_running()

    if events:
        answer = await ask(port, PATH, fields, cancel=lambda answer: answer.events >= events)
    else:
        _, client = await connect(port)
        client.write(request("POST", PATH, json.dumps(fields).encode()))
        await client.drain()
        await poll(is_running, "the start of the prefill")
        answer = None
        abort(client)
    started = time.perf_counter()
    await poll(is_idle, "the end of a canceled request")
    writer.close()
    return time.perf_counter() - started, answer.gaps if answer else []


def cancel_latency(options, report):
    count = 10 if options.short else 50
    with Server(options) as server:
        prompts = Prompts(server.port)
        longest = min(4000, server.context() - 100)
        # For comparison, measure the time to the first token without cancellation. A canceled prefill ends after the
        # current step, which computes at most one chunk of the prompt.
        prefill = asyncio.run(ask(server.port, PATH, prompts.completion(longest, 1, stream=True))).first
        decode, gaps, early = [], [], []
        for _ in range(count):
            time_s, more = asyncio.run(cancel_time(server.port, prompts.completion(32, 400, stream=True), 8))
            decode.append(time_s)
            gaps += more
            early.append(asyncio.run(cancel_time(server.port, prompts.completion(longest, 400, stream=True), 0))[0])
        late, faults = server.metrics()["tokens_after_cancel_total"], server.faults()
    step = percentile(gaps, 0.99)
    passed = late == 0 and not faults and max(decode) <= 2 * step + 0.01
    report.add(
        f"{count} streams canceled while they decode",
        "0 tokens from steps that began after the cancellation; the server is idle within 2 steps + 10 ms",
        f"p50 {percentile(decode, 0.5) * 1e3:.1f} ms, longest {max(decode) * 1e3:.1f} ms; step p99 {step * 1e3:.1f} ms",
        passed,
        is_speed=late == 0 and not faults,
    )
    report.add(
        f"{count} prompts of {longest} tokens canceled during prefill",
        "ended in less time than the whole prefill takes",
        f"p50 {percentile(early, 0.5) * 1e3:.1f} ms, longest {max(early) * 1e3:.1f} ms; "
        f"whole prefill {prefill * 1e3:.1f} ms",
        max(early) < prefill,
        is_speed=True,
    )


def is_answered(answer):
    """Returns whether a request got status 503 or a complete response, which can be a stream with an error event."""
    if answer.status != 200:
        return answer.status == 503
    return answer.is_complete


def shutdown_under_load(options, report):
    limit_s = 3 if options.short else 30
    tolerance_s = 0.5  # the time for the signal, the last step and the last events
    with Server(options, "--drain-timeout", str(limit_s)) as server:
        prompts, longest = Prompts(server.port), server.context() - 100
        bodies = [prompts.completion(32, 64, stream=True) for _ in range(24)]
        bodies += [prompts.completion(32, 64) for _ in range(4)]
        bodies += [prompts.completion(32, longest, stream=True) for _ in range(8)]
        bodies += [prompts.completion(32, longest) for _ in range(2)]

        async def is_unhealthy():
            return (await get(server.port, "/health"))[0] == 503

        async def shut_down():
            answers = (asyncio.wait_for(ask(server.port, PATH, body), limit_s + 30) for body in bodies)
            answers = asyncio.gather(*answers, return_exceptions=True)
            await asyncio.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            signaled = time.perf_counter()
            await poll(is_unhealthy, "status 503 of /health after SIGTERM")
            unhealthy_s = time.perf_counter() - signaled
            refused = await ask(server.port, PATH, prompts.completion(8, 2))
            answers = await answers
            return unhealthy_s, refused.status, answers, time.perf_counter() - signaled

        unhealthy_s, refused, answers, drain_s = asyncio.run(shut_down())
        ended = time.perf_counter()
        code = server.process.wait(limit_s + 10)
        exit_s = time.perf_counter() - ended
        panics = server.read_log().count("panicked at")
    lost = [answer for answer in answers if isinstance(answer, BaseException) or not is_answered(answer)]
    passed = not lost and code == 0 and refused == 503 and not panics
    passed = passed and unhealthy_s < 0.1 and drain_s <= limit_s + tolerance_s and exit_s < 3
    report.add(
        f"SIGTERM with {len(bodies)} requests",
        f"/health 503 at once; all answers end within {limit_s} s + {tolerance_s} s, completely or with an error; "
        "exit code 0",
        f"503 after {unhealthy_s * 1e3:.1f} ms; all answers after {drain_s:.2f} s, {len(lost)} lost; "
        f"exit code {code} {exit_s:.2f} s after the last answer",
        passed,
        ended_with_error=sum(not isinstance(answer, BaseException) and answer.has_error_event for answer in answers),
        lost=[repr(answer)[:200] for answer in lost],
    )
    with Server(options) as server:

        async def signal_twice():
            stream = asyncio.ensure_future(ask(server.port, PATH, prompts.completion(32, longest, stream=True)))
            await asyncio.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            await poll(is_unhealthy, "status 503 of /health after SIGTERM")
            server.process.send_signal(signal.SIGTERM)
            started = time.perf_counter()
            server.process.wait(10)
            stream.cancel()
            return time.perf_counter() - started

        exit_s = asyncio.run(signal_twice())
        code = server.process.returncode
    figure = f"exit code {code} after {exit_s * 1e3:.0f} ms"
    report.add("second signal", "ends at once", figure, exit_s < 0.25 and code == 130)


async def kill_under_load(server, prompts):
    """Kills a server that answers 8 requests. Returns the time at which the server was killed."""
    bodies = [prompts.completion(32, 400, stream=True) for _ in range(8)]
    requests = [asyncio.ensure_future(ask(server.port, PATH, body)) for body in bodies]
    await asyncio.sleep(0.5)
    server.process.kill()
    killed = time.perf_counter()
    await asyncio.gather(*requests, return_exceptions=True)
    return killed


def restart(options, report):
    """Kills a server while it answers, and starts a new server. Measures the time until the new server is ready."""
    turns, times, answered = (1 if options.short else 3), [], []
    server = Server(options)
    for _ in range(turns):
        with server:
            killed = asyncio.run(kill_under_load(server, Prompts(server.port)))
            server.process.wait(30)
        server = Server(options)
        times.append(time.perf_counter() - killed)
        answered.append(asyncio.run(ask(server.port, PATH, Prompts(server.port).completion(8, 2))).status)
    with server:
        faults = server.faults()
    figure = f"ready {min(times):.2f} to {max(times):.2f} s after the signal"
    passed = max(times) <= 2 and set(answered) == {200} and not faults
    name = f"a server killed under load and started again, {turns} times"
    report.add(name, "ready within 2 s", figure, passed, is_speed=set(answered) == {200}, faults=faults)
