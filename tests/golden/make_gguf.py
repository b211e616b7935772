#!/usr/bin/env python3
"""Writes tests/golden/gguf with the `gguf` package: blocks with their dequantized values, and small GGUF files.

    python tests/golden/make_gguf.py tests/golden/gguf fuzz/corpus     # requires gguf, numpy, safetensors

blocks.safetensors  for each type T: `T.blocks` u8 [blocks, bytes], and `T.values` f32 [blocks, elements] from
                    gguf.quants.dequantize. If T has f16 scales, half of the blocks have typical scales. The others
                    have random scales, some of them NaN; in K types, three of them have extreme finite scales.
                    In one block, all bits are 0; in another, all bits are 1.
                    The MXFP4 blocks are random, except that they cover all values of the scale byte.
tiny.gguf           every type of metadata value and array, and a tensor of each type T
tiny-0000N-of-…     the same in three parts, with the default alignment
big-endian.gguf     a file that inferno must refuse
tiny.json           the contents of tiny.gguf as gguf.GGUFReader reads them
provenance.json     versions, seed, checksums

The script writes the seed inputs for fuzzing to the second folder: small vocabularies, a few tensors, one-layer models,
safetensors files and indexes.
"""

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from safetensors.numpy import save_file

SEED = 20261121

# The byte offsets of the f16 fields in a block. An infinite field makes values infinite.
HALVES = {
    T.F32: [],
    T.F16: [],
    T.BF16: [],
    T.Q4_0: [0],
    T.Q4_1: [0, 2],
    T.Q5_0: [0],
    T.Q5_1: [0, 2],
    T.Q8_0: [0],
    T.Q2_K: [80, 82],
    T.Q3_K: [108],
    T.Q4_K: [0, 2],
    T.Q5_K: [0, 2],
    T.Q6_K: [208],
    T.MXFP4: [],
}


def blocks(rng, kind):
    """Returns random blocks as u8 [blocks, bytes]."""
    length, size = gguf.GGML_QUANT_SIZES[kind]
    count = 512 if length == 1 else 16 if length == 256 else 32
    random = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for row in random[: count // 2]:
        for at in HALVES[kind]:
            row[at : at + 2] = np.frombuffer(np.float16(rng.normal() * 0.01).tobytes(), dtype=np.uint8)
    random[-2] = 0
    random[-1] = 255
    if kind == T.MXFP4:
        random = rng.integers(0, 256, (256, size), dtype=np.uint8)
        random[:, 0] = np.arange(256)
    if kind in (T.Q5_K, T.Q4_K, T.Q2_K, T.Q6_K, T.Q3_K):
        # The largest, the smallest positive and the most negative finite scales.
        for row, half in ((-3, np.float16(65504)), (-4, np.float16(6e-8)), (-5, np.float16(-65504))):
            for at in HALVES[kind]:
                random[row, at : at + 2] = np.frombuffer(half.tobytes(), dtype=np.uint8)
    return random


def write(path, arrays, endianess=GGUFEndian.LITTLE, split=0):
    writer = GGUFWriter(path, "llama", endianess=endianess, split_max_tensors=split)
    writer.add_name("tiny")
    writer.add_block_count(2)
    if not split:
        # The later parts of a split file have no metadata, so they cannot set an alignment.
        writer.add_custom_alignment(64)
    writer.add_uint8("all.u8", 200)
    writer.add_int8("all.i8", -100)
    writer.add_uint16("all.u16", 60000)
    writer.add_int16("all.i16", -30000)
    writer.add_uint32("all.u32", 4_000_000_000)
    writer.add_int32("all.i32", -2_000_000_000)
    writer.add_uint64("all.u64", 2**63 + 5)
    writer.add_int64("all.i64", -(2**62) - 5)
    writer.add_float32("all.f32", 0.1)
    writer.add_float64("all.f64", 0.1)
    writer.add_bool("all.bool", True)
    writer.add_string("all.string", "naïve 日本語 🦀\n")
    for name, kind, values in [
        ("u8", GGUFValueType.UINT8, [0, 255]),
        ("i8", GGUFValueType.INT8, [-128, 127]),
        ("u16", GGUFValueType.UINT16, [0, 65535]),
        ("i16", GGUFValueType.INT16, [-32768, 32767]),
        ("u32", GGUFValueType.UINT32, [0, 2**32 - 1]),
        ("i32", GGUFValueType.INT32, [-(2**31), 2**31 - 1]),
        ("u64", GGUFValueType.UINT64, [0, 2**64 - 1]),
        ("i64", GGUFValueType.INT64, [-(2**63), 2**63 - 1]),
        ("f32", GGUFValueType.FLOAT32, [-1.5, 3.25]),
        ("f64", GGUFValueType.FLOAT64, [-1e300, 1e-300]),
        ("bool", GGUFValueType.BOOL, [True, False, True]),
        ("string", GGUFValueType.STRING, ["", "a", "ü b"]),
    ]:
        writer.add_key_value(f"array.{name}", values, GGUFValueType.ARRAY, sub_type=kind)
    for kind, array in arrays.items():
        writer.add_tensor(f"{kind.name.lower()}.weight", array, raw_dtype=kind)
    writer.add_tensor("rank4.weight", np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def described(path):
    reader = GGUFReader(path)
    metadata = {
        name: {"types": [kind.name for kind in field.types], "value": field.contents()}
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    tensors = {
        tensor.name: {
            "type": tensor.tensor_type.name,
            "shape": [int(length) for length in reversed(tensor.shape)],
            "start": int(tensor.data_offset),
            "bytes": int(tensor.n_bytes),
            "sha256": hashlib.sha256(tensor.data.tobytes()).hexdigest(),
        }
        for tensor in reader.tensors
    }
    return {"metadata": metadata, "tensors": tensors}


def write_vocabulary(path, model):
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if model == "gpt2":
        # Printable bytes represent themselves. Ġ is a space, and Ċ is a newline.
        tokens = [chr(byte) for byte in range(33, 127)] + ["Ġ", "Ċ", "Ã", "¶"]
        tokens += ["lo", "He", "llo", "<s>", "</s>", "<think>"]
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_merges(["l o", "H e", "l lo"])
        specials = {"<s>": 3, "</s>": 3, "<think>": 4}
        types = [specials.get(token, 1) for token in tokens]
        writer.add_bos_token_id(tokens.index("<s>"))
        writer.add_eos_token_id(tokens.index("</s>"))
    else:
        tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
        types = [2, 3, 3] + [6] * 256
        pieces = ["▁", "H", "e", "l", "o", "He", "ll", "llo", "▁He", "Hello", "▁Hello"]
        tokens, types = tokens + pieces, types + [1] * len(pieces)
        writer.add_token_scores([float(-max(0, id - 259)) for id in range(len(tokens))])
        writer.add_add_space_prefix(True)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path, architecture):
    """Writes a one-layer model with random weights, as small as the block sizes allow."""
    writer = GGUFWriter(path, architecture)
    hidden, feed, heads, kv_heads, vocab, experts = 32, 32, 2, 1, 4, 2
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(feed)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_rope_freq_base(10000.0)
    rng = np.random.default_rng(SEED)

    def tensor(name, *shape, kind=None):
        if kind is None:
            return writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
        length, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*shape[:-1], shape[-1] // length * size)
        writer.add_tensor(name, rng.integers(0, 60, shape, dtype=np.uint8), raw_dtype=kind)

    tensor("token_embd.weight", vocab, hidden, kind=T.Q8_0)
    tensor("output_norm.weight", hidden)
    head = hidden // heads
    for name, rows in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * head)):
        tensor(f"blk.0.attn_{name}.weight", rows, hidden, kind=T.Q4_0)
    tensor("blk.0.attn_output.weight", hidden, heads * head, kind=T.Q8_0)
    tensor("blk.0.attn_norm.weight", hidden)
    if architecture == "llama":
        tensor("blk.0.ffn_norm.weight", hidden)
        tensor("blk.0.ffn_gate.weight", feed, hidden, kind=T.Q4_0)
        tensor("blk.0.ffn_up.weight", feed, hidden, kind=T.Q4_0)
        tensor("blk.0.ffn_down.weight", hidden, feed, kind=T.Q4_0)
        tensor("rope_freqs.weight", head // 2)
    else:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(1)
        writer.add_expert_feed_forward_length(feed)
        writer.add_sliding_window(16)
        tensor("blk.0.post_attention_norm.weight", hidden)
        tensor("blk.0.attn_sinks.weight", heads)
        for name, rows in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * head), ("output", hidden)):
            tensor(f"blk.0.attn_{name}.bias", rows)
        tensor("blk.0.ffn_gate_inp.weight", experts, hidden)
        tensor("blk.0.ffn_gate_inp.bias", experts)
        for name in ("gate", "up", "down"):
            tensor(f"blk.0.ffn_{name}_exps.weight", experts, feed, hidden, kind=T.MXFP4)
            tensor(f"blk.0.ffn_{name}_exps.bias", experts, feed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_corpora(out, tiny):
    for name in ("gguf", "safetensors"):
        (out / name).mkdir(parents=True, exist_ok=True)
    (out / "gguf/tiny.gguf").write_bytes(tiny.read_bytes())
    write(out / "gguf/one.gguf", {})
    write_vocabulary(out / "gguf/gpt2.gguf", "gpt2")
    write_vocabulary(out / "gguf/llama.gguf", "llama")
    write_model(out / "gguf/model.gguf", "llama")
    write_model(out / "gguf/experts.gguf", "gpt-oss")
    folder = out / "safetensors"
    save_file({"a": np.arange(2, dtype=np.uint8)}, folder / "one.safetensors")
    several = {
        "model.layers.10.w": np.zeros((2, 3), np.float32),
        "model.layers.2.w": np.zeros((3, 2), np.float16),
        "x_blocks": np.zeros((1, 2, 16), np.uint8),
        "x_scales": np.zeros((1, 2), np.uint8),
        "empty": np.zeros((0, 4), np.int64),
    }
    save_file(several, folder / "several.safetensors", {"format": "pt"})
    indices = {"good": "shard.safetensors", "absent": "other.safetensors", "escape": "../shard.safetensors"}
    for name, index in indices.items():
        text = json.dumps({"metadata": {"total_size": 2}, "weight_map": {"a": index}})
        (folder / f"{name}.index.json").write_text(text)
    for path in folder.iterdir():
        path.chmod(0o644)


def main():
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.gguf"):
        old.unlink()
    rng = np.random.default_rng(SEED)
    golden, arrays = {}, {}
    for kind in HALVES:
        raw = blocks(rng, kind)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(raw.reshape(-1), kind)
        golden[f"{kind.name}.blocks"] = raw
        golden[f"{kind.name}.values"] = values.reshape(len(raw), -1)
        arrays[kind] = raw[:4].reshape(2, -1)
    # GGUFWriter expects raw bytes for every type except F32 and F16.
    arrays[T.F32], arrays[T.F16] = arrays[T.F32].view(np.float32), arrays[T.F16].view(np.float16)
    save_file(golden, out / "blocks.safetensors")
    (out / "blocks.safetensors").chmod(0o644)
    write(out / "tiny.gguf", arrays)
    write(out / "tiny.gguf", arrays, split=6)
    write(out / "big-endian.gguf", {}, GGUFEndian.BIG)
    (out / "tiny.json").write_text(json.dumps(described(out / "tiny.gguf"), indent=1, ensure_ascii=False) + "\n")
    files = sorted(path for path in out.iterdir() if path.name != "provenance.json")
    provenance = {
        "gguf": version("gguf"),
        "numpy": np.__version__,
        "seed": SEED,
        "sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    }
    (out / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")
    write_corpora(Path(sys.argv[2]), out / "tiny.gguf")


main()
