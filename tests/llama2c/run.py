#!/usr/bin/env python3
"""Compares inferno with llama2.c on a published checkpoint of llama2.c, such as stories260K.

    tests/llama2c/run.py --checkpoint stories260K.bin --tokenizer tok512.bin --reference ./run \\
        --program target/release/inferno --flags "--device cpu --dtype f32"

https://huggingface.co/karpathy/tinyllamas has the checkpoints and tokenizers (MIT license).
https://github.com/karpathy/llama2.c has run.c, the reference: `cc -O2 -o run run.c -lm`.

Converts the checkpoint to safetensors in the folder of --out, and lets both programs continue some prompts greedily.
Prints how many texts are the same, byte for byte, and fails if fewer than --same of them are.
llama2.c computes in f32. In bf16, many texts differ from some token on, because two tokens are almost equally likely.
Needs the Python packages numpy and safetensors.
"""

import argparse
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

PROMPTS = [
    "Once upon a time",
    "Lily and Tom",
    "The dog",
    "One day, a boy",
    "There was a big tree",
    "Sara likes to",
    "In the park",
    "The sun was",
    "Mom said",
    "A little cat",
    "Ben and Mia were",
    "It was a rainy day",
    "The bird could not",
    "Max had a red car",
    "She was very sad",
    "They went to the",
]

SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]
# After the special tokens, the vocabulary has a token for each byte.
FIRST_PIECE = len(SPECIAL_TOKENS) + 256


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", required=True, help="the checkpoint, in llama2.c's first format")
    parser.add_argument("--tokenizer", required=True, help="the tokenizer, in llama2.c's format")
    parser.add_argument("--reference", required=True, help="the program that run.c compiles to")
    parser.add_argument("--program", default="target/release/inferno", help="the inferno program")
    parser.add_argument("--flags", default="", help="further flags for `inferno play`, separated by spaces")
    parser.add_argument("--out", default="llama2c-model", help="the folder for the converted model")
    parser.add_argument("--same", type=int, default=len(PROMPTS), help="how many texts must be the same")
    options = parser.parse_args()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    config = convert_weights(Path(options.checkpoint).read_bytes(), out)
    convert_tokenizer(Path(options.tokenizer).read_bytes(), config["vocab_size"], out)
    same = sum(is_same(prompt, options, config["max_position_embeddings"]) for prompt in PROMPTS)
    print(f"{same} of {len(PROMPTS)} texts are the same")
    sys.exit(same < options.same)


def is_same(prompt, options, context):
    """Returns whether inferno and the reference continue a prompt with the same text."""
    reference = [options.reference, options.checkpoint, "-z", options.tokenizer]
    # run.c generates one more token than it has positions.
    reference += ["-t", "0", "-n", str(context - 1), "-i", prompt]
    expected = subprocess.check_output(reference, stderr=subprocess.DEVNULL)
    inferno = [options.program, "play", options.out, "--raw", "--temperature", "0", *options.flags.split()]
    # The limit is larger than the context, so a text ends at the end of the story or of the context.
    text = subprocess.check_output([*inferno, "--max-tokens", str(2 * context), "--prompt", prompt])
    expected, text = expected.decode().strip(), (prompt + text.decode()).strip()
    if text == expected:
        return True
    at = next((i for i, (a, b) in enumerate(zip(text, expected)) if a != b), min(len(text), len(expected)))
    print(f"{prompt!r}: differs from character {at}: {text[at : at + 40]!r}, reference {expected[at : at + 40]!r}")
    return False


def convert_weights(data, out):
    """Writes model.safetensors and config.json. Returns the config. llama2.c's export script describes the format."""
    header = struct.Struct("7i")
    hidden, intermediate, layers, heads, kv_heads, vocab, context = header.unpack_from(data)
    # A positive vocabulary size means that the embedding is also the output head.
    is_tied, vocab = vocab > 0, abs(vocab)
    head_dim = hidden // heads
    at = header.size

    def take(*shape):
        nonlocal at
        values = np.frombuffer(data, np.float32, int(np.prod(shape)), at).reshape(shape)
        at += values.nbytes
        return values

    tensors = {"model.embed_tokens.weight": take(vocab, hidden)}
    for name, *shape in [
        ("input_layernorm", hidden),
        ("self_attn.q_proj", hidden, hidden),
        ("self_attn.k_proj", kv_heads * head_dim, hidden),
        ("self_attn.v_proj", kv_heads * head_dim, hidden),
        ("self_attn.o_proj", hidden, hidden),
        ("post_attention_layernorm", hidden),
        ("mlp.gate_proj", intermediate, hidden),
        ("mlp.down_proj", hidden, intermediate),
        ("mlp.up_proj", intermediate, hidden),
    ]:
        for layer, values in enumerate(take(layers, *shape)):
            if name in ("self_attn.q_proj", "self_attn.k_proj"):
                # llama2.c rotates adjacent elements of a head, transformers rotates elements of its two halves.
                values = values.reshape(-1, head_dim // 2, 2, hidden).swapaxes(1, 2).reshape(shape)
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ascontiguousarray(values)
    tensors["model.norm.weight"] = take(hidden)
    take(context, head_dim)  # the tables of the rotary embedding, which inferno computes itself
    if not is_tied:
        tensors["lm_head.weight"] = take(vocab, hidden)
    if at != len(data):
        sys.exit(f"cannot convert the checkpoint: it has {len(data)} bytes instead of {at}")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied,
        "bos_token_id": 1,
        # In the training data, <s> follows each story, and run.c stops there.
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return config


def convert_tokenizer(data, vocab, out):
    """Writes tokenizer.json for a SentencePiece BPE tokenizer with byte fallback, as transformers converts it."""
    at = 4  # after the length of the longest piece
    pieces, scores = [], []
    for _ in range(vocab):
        score, length = struct.unpack_from("fi", data, at)
        at += 8
        pieces.append(data[at : at + length].decode().replace(" ", "▁"))
        scores.append(score)
        at += length
    pieces[: len(SPECIAL_TOKENS)] = SPECIAL_TOKENS
    ids = {piece: id for id, piece in enumerate(pieces)}
    # A piece with a higher score is merged first.
    merges = [
        (-scores[id], piece[:length], piece[length:])
        for id, piece in enumerate(pieces)
        for length in range(1, len(piece))
        if id >= FIRST_PIECE and piece[:length] in ids and piece[length:] in ids
    ]
    merges = [[left, right] for _, left, right in sorted(merges, key=lambda merge: merge[0])]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bos = {"id": "<s>", "ids": [1], "tokens": ["<s>"]}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": id, "content": token, **special} for id, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": bos},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": merges,
        },
    }
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))


if __name__ == "__main__":
    main()
