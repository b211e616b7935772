"""Tests that deterministic answers depend neither on other requests nor on cached prefixes."""

import asyncio
import json
import random

from client import Prompts, ask
from process import Server

PATH = "/v1/completions"

# The maximum number of prompts in a group. The test sends a group both one by one and all at once.
# A group fits in the KV cache, so its prompts are still cached when the group is sent again.
AT_ONCE = 64

# With --deterministic, a prompt reuses only whole parts of earlier prompts from the prefix cache.
# With `--chunk 64`, a part has 64 tokens, so each prompt of this test has one whole part.
CHUNK = 64
PROMPT_TOKENS = (66, 96)
MAX_TOKENS = 8


def bodies(prompts, count):
    """Returns requests for completions with log probabilities. The temperature alternates between 0 and 1."""
    chooser, found = random.Random(7), []
    for index in range(count):
        fields = prompts.completion(chooser.randint(*PROMPT_TOKENS), MAX_TOKENS, logprobs=1, seed=index)
        found.append(fields | {"temperature": index % 2})
    return found


async def answer(port, body):
    """Returns the choices of an answer (text and log probabilities) as JSON, and the number of cached prompt tokens."""
    reply = await ask(port, PATH, body)
    assert reply.status == 200, (reply.status, reply.body[:300])
    fields = json.loads(reply.body)
    return json.dumps(fields["choices"]), (fields["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def compare(port, group, first):
    """Sends a group of requests in four ways. Returns the answers by way.

    In the first way, each request has its own `cache_salt`, so the later ways cannot reuse prompts that the first way
    caches.
    """

    async def alone(requests):
        return [await answer(port, body) for body in requests]

    async def at_once(requests):
        return await asyncio.gather(*(answer(port, body) for body in requests))

    salted = [body | {"cache_salt": f"alone-{first + index}"} for index, body in enumerate(group)]
    return {
        "alone, cold": await alone(salted),
        f"{AT_ONCE} at once, cold": await at_once(group),
        f"{AT_ONCE} at once, warm": await at_once(group),
        "alone, warm": await alone(group),
    }


def answers(options, report):
    count = 128 if options.short else 1000
    differences, reused = {}, {}
    with Server(options, "--deterministic", "--chunk", str(CHUNK)) as server:
        requests = bodies(Prompts(server.port), count)
        for first in range(0, count, AT_ONCE):
            ways = asyncio.run(compare(server.port, requests[first : first + AT_ONCE], first))
            expected = ways["alone, cold"]
            for name, found in ways.items():
                differs = sum(one[0] != other[0] for one, other in zip(expected, found))
                differences[name] = differences.get(name, 0) + differs
                reused[name] = reused.get(name, 0) + sum(cached > 0 for _, cached in found)
        faults = server.faults()
    figure = ", ".join(f"{name}: {differs}" for name, differs in list(differences.items())[1:])
    name = f"{count} prompts: answers that differ from the answers to single requests without cached tokens "
    name += "(text or log probabilities)"
    report.add(name, "0", figure, not any(differences.values()) and not faults, faults=faults)
    cold = sum(reused[name] for name in reused if name.endswith("cold"))
    warm = min(reused[name] for name in reused if name.endswith("warm"))
    figure = f"{cold} in cold runs, at least {warm} of {count} in each warm run"
    target = f"0 in cold runs, at least {count * 9 // 10} in each warm run"
    report.add("answers that reused cached prompt tokens", target, figure, cold == 0 and warm >= count * 9 // 10)
