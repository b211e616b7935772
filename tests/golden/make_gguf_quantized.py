#!/usr/bin/env python3
"""Writes tests/golden/gguf_quantized: a tiny quantized GGUF model of each family, and its logits in transformers.

    python tests/golden/make_gguf_quantized.py [--out tests/golden/gguf_quantized]     # takes a minute on a CPU

Requires torch, transformers, accelerate, safetensors, numpy and gguf; provenance.json lists the versions. For each family:

    FAMILY.gguf          a model with random weights. The gguf package quantizes its matrices to Q8_0, Q4_0, Q4_1, Q5_0
                         and Q5_1 in turn, so matrices that inferno stacks (q, k and v; gate and up) differ in type.
                         In the first layer, the gate and up matrices of experts have the same type.
                         gpt-oss's experts are MXFP4. Routers, norms, biases, sinks and position embeddings are F32, as
                         in llama.cpp's files.
    FAMILY.safetensors   `ids` I64 [T] and `logits` F32 [T, V]. transformers computes the logits from the dequantized
                         blocks (gguf.quants.dequantize), in float32, with eager attention and without a KV cache.

Tensors are converted as in llama.cpp's convert_hf_to_gguf.py: the rows of Llama's q and k are reordered for rotated pairs,
1 is added to Gemma's norms, GPT-2's matrices are transposed, and experts are stacked. Names come from
gguf.TensorNameMap, except those of experts and sinks.
If transformers can read GGUF files of this architecture, the logits that it computes from the file must agree.

Mistral has no file of its own, because its files are Llama files. Except in gpt-oss, RoPE is not scaled and sliding windows
cover all T tokens. tests/it/support/gguf writes files with other settings.
"""

import argparse
import hashlib
import itertools
import json
import logging
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN = Path(__file__).parent
import families
import make

SEED = 20261123
TYPES = [T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1]
# Rows have C, F, M or H·D elements, which are multiples of 32. All sizes except L and K differ.
SIZES = {"C": 32, "F": 64, "L": 2, "H": 8, "K": 2, "D": 12, "V": 57, "T": 31}
# GPT-2 derives its head size from C.
GPT2 = {"C": 96, "F": 64, "L": 2, "H": 6, "K": 6, "D": 16, "V": 57, "T": 31, "P": 41}
# The architectures that transformers 5.17 can read from GGUF files.
READ_BY_TRANSFORMERS = {"llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "gpt2"}


def cases():
    """Yields (family, sizes, config.json, GGUF architecture)."""
    standard = {"hidden_act": "silu", "max_position_embeddings": 240, "rms_norm_eps": 1e-5, "rope_theta": 500.0}
    gemma = {**standard, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 200, "query_pre_attn_scalar": 10}
    moe = {"E": 5, "N": 2}
    routed = {"num_experts_per_tok": moe["N"], "output_router_logits": False}

    def case(family, architecture, model_type, arch, sizes=SIZES, base=standard, **rest):
        s = SimpleNamespace(**sizes)
        config = families.config_of(architecture, s, **{**base, "head_dim": s.D, "model_type": model_type, "tie_word_embeddings": False, **rest})
        return family, s, config, arch

    A = gguf.MODEL_ARCH
    yield case("llama", "LlamaForCausalLM", "llama", A.LLAMA, attention_bias=False, mlp_bias=False)
    yield case("mixtral", "MixtralForCausalLM", "mixtral", A.LLAMA, {**SIZES, **moe}, num_local_experts=moe["E"], **routed)
    yield case("qwen2", "Qwen2ForCausalLM", "qwen2", A.QWEN2, {**SIZES, "H": 4, "D": 8}, tie_word_embeddings=True, use_sliding_window=False)
    yield case("qwen3", "Qwen3ForCausalLM", "qwen3", A.QWEN3, attention_bias=False, use_sliding_window=False)
    sparse = {"num_experts": moe["E"], "moe_intermediate_size": 96, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    yield case("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe", A.QWEN3MOE, {**SIZES, **moe, "M": 96}, **sparse, **routed, attention_bias=False)
    yield case("phi3", "Phi3ForCausalLM", "phi3", A.PHI3, {**SIZES, "H": 4, "D": 8}, pad_token_id=None, original_max_position_embeddings=240)
    yield case("gemma2", "Gemma2ForCausalLM", "gemma2", A.GEMMA2, base=gemma, tie_word_embeddings=True, attn_logit_softcapping=3.0, final_logit_softcapping=2.0)
    yield case("gemma3", "Gemma3ForCausalLM", "gemma3_text", A.GEMMA3, base=gemma, tie_word_embeddings=True, rope_local_base_freq=500.0)
    s = SimpleNamespace(**GPT2)
    yield "gpt2", s, {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": s.V, "n_embd": s.C, "n_layer": s.L, "n_head": s.H,
        "n_inner": s.F, "n_positions": s.P, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    }, A.GPT2  # fmt: skip
    s = SimpleNamespace(**SIZES, **moe, W=9)
    yield "gpt_oss", s, make.gpt_oss_config(
        s, rms_norm_eps=1e-5, max_position_embeddings=240, layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=False,
        eos_token_id=2, swiglu_limit=7.0, rope_theta=500.0,
        rope_scaling={"beta_fast": 3.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 60, "rope_type": "yarn", "truncate": False},
    ), A.GPT_OSS  # fmt: skip


class Quantizer:
    """A quantizer that cycles through `TYPES` and records the type that it chose for each matrix."""

    def __init__(self):
        self.types = itertools.cycle(TYPES)
        self.used = {}

    def __call__(self, name, weight, kind=None):
        kind = kind or next(self.types)
        blocks = gguf.quants.quantize(weight.numpy(), kind)
        self.used[name] = kind
        return blocks, torch.from_numpy(gguf.quants.dequantize(blocks, kind))


def is_float(name, weight):
    router = name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight"))
    return weight.dim() == 1 or router or "wpe" in name or name.endswith("_bias")


def permuted(weight, heads):
    """Reorders the rows of each head from [half, i] to [i, half]."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def in_file(family, s, config, arch, weights, quantizer):
    """Returns the tensors of the GGUF file as {name: (data, type)}, and the dequantized weights of the checkpoint."""
    names, values = gguf.get_tensor_name_map(arch, s.L), {}
    tensors, stacks = {}, {}
    gemma, permutes = family.startswith("gemma"), family in ("llama", "mixtral")
    for name, weight in weights.items():
        if ".experts." in name:
            stacks[name] = weight
            continue
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.endswith(".sinks"):
            ours = f"blk.{name.split('.')[2]}.attn_sinks.weight"
        assert ours, name
        transposed = family == "gpt2" and ours.startswith("blk.") and weight.dim() == 2
        stored = weight.T.contiguous() if transposed else weight
        heads = {"attn_q": s.H, "attn_k": s.K}.get(ours.split(".")[2] if ours.startswith("blk.") else "") if permutes else None
        if heads:
            stored = permuted(stored, heads)
        if gemma and ours.endswith("norm.weight"):
            stored = stored + 1
        if is_float(name, weight):
            tensors[ours], values[name] = (stored.numpy(), None), weight
            continue
        blocks, made = quantizer(ours, stored)
        tensors[ours] = (blocks, quantizer.used[ours])
        if heads:
            made = made.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        values[name] = made.T.contiguous() if transposed else made
    for layer in range(s.L):
        of_layer = {name: weight for name, weight in stacks.items() if f"layers.{layer}." in name}
        if family == "gpt_oss":
            gpt_oss_experts(layer, of_layer, tensors, values, quantizer)
        else:
            routed_experts(s, layer, of_layer, tensors, values, quantizer)
    return tensors, values


def routed_experts(s, layer, weights, tensors, values, quantizer):
    for part, spellings in (("gate", ("w1", "gate_proj")), ("up", ("w3", "up_proj")), ("down", ("w2", "down_proj"))):
        names = sorted((name for name in weights if name.split(".")[-2] in spellings), key=lambda name: int(name.split(".")[-3]))
        if not names:
            continue
        ours = f"blk.{layer}.ffn_{part}_exps.weight"
        # In the first layer, gate and up have the same type and can be stacked. In the second layer, their types differ.
        kind = quantizer.used[f"blk.{layer}.ffn_gate_exps.weight"] if (part, layer) == ("up", 0) else None
        blocks, made = quantizer(ours, torch.stack([weights[name] for name in names]), kind)
        tensors[ours] = (blocks, quantizer.used[ours])
        values |= {name: made[expert].contiguous() for expert, name in enumerate(names)}


def gpt_oss_experts(layer, weights, tensors, values, quantizer):
    """Adds gpt-oss's experts to `tensors` and `values`.

    transformers stores gate and up as [E, C, 2F], with their columns interleaved, and down as [E, F, C].
    GGUF files store the transposed matrices, with gate and up in separate tensors.
    """
    for name, weight in weights.items():
        place = name.split(".")[-1]
        is_bias = place.endswith("_bias")
        rows = weight if is_bias else weight.transpose(1, 2)
        parts = {"down": slice(None)} if place.startswith("down") else {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        made = torch.empty_like(rows)
        for part, here in parts.items():
            ours = f"blk.{layer}.ffn_{part}_exps.{'bias' if is_bias else 'weight'}"
            if is_bias:
                tensors[ours], made[:, here] = (rows[:, here].contiguous().numpy(), None), rows[:, here]
                continue
            blocks, made[:, here] = quantizer(ours, rows[:, here].contiguous(), T.MXFP4)
            tensors[ours] = (blocks, T.MXFP4)
        values[name] = made if is_bias else made.transpose(1, 2).contiguous()


def write(path, family, s, config, arch, tensors):
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.get("max_position_embeddings", getattr(s, "P", None)))
    writer.add_embedding_length(s.C)
    writer.add_block_count(s.L)
    writer.add_feed_forward_length(s.F)
    writer.add_head_count(s.H)
    writer.add_vocab_size(s.V)
    if family == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        writer.add_head_count_kv(s.K)
        writer.add_key_length(s.D)
        writer.add_value_length(s.D)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_rope_dimension_count(s.D)
    if hasattr(s, "E"):
        writer.add_expert_count(s.E)
        writer.add_expert_used_count(s.N)
    if family in ("qwen3_moe", "gpt_oss"):
        writer.add_expert_feed_forward_length(getattr(s, "M", s.F))
    if family == "qwen3_moe":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if family.startswith("gemma") or family == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
    if family.startswith("gemma"):
        writer.add_float32(f"{writer.arch}.attention.scale", config["query_pre_attn_scalar"] ** -0.5)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family == "gemma3":
        writer.add_float32("gemma3.rope.freq_base_swa", config["rope_local_base_freq"])
    if family == "phi3":
        writer.add_uint32("phi3.rope.scaling.original_context_length", config["original_max_position_embeddings"])
    if family == "gpt_oss":
        scaling = config["rope_scaling"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_float32("gpt-oss.rope.scaling.yarn_beta_fast", scaling["beta_fast"])
        writer.add_float32("gpt-oss.rope.scaling.yarn_beta_slow", scaling["beta_slow"])
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array("gpt-oss.attention.sliding_window_pattern", slides)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def logits_of(model, ids):
    return model.eval()(input_ids=ids[None], use_cache=False).logits[0]


def make_case(out, number, family, s, config, arch):
    g = torch.Generator().manual_seed(SEED + number)
    weights = make.make_weights(s, config, torch.float32, g)
    quantizer = Quantizer()
    tensors, values = in_file(family, s, config, arch, weights, quantizer)
    path = out / f"{family}.gguf"
    write(path, family, s, config, arch, tensors)
    ids = torch.randint(0, s.V, (s.T,), generator=g)
    with tempfile.TemporaryDirectory() as folder:
        logits = []
        for tensors_of in (values, weights):
            make.write_checkpoint(Path(folder), config, tensors_of, ["model.safetensors"])
            logits.append(logits_of(make.load(Path(folder), config), ids))
        read = {}
        if family in READ_BY_TRANSFORMERS:
            given_config = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(out, gguf_file=path.name, config=given_config, dtype=torch.float32, attn_implementation="eager")
            read["read_by_transformers"] = make.relative(logits_of(model, ids), logits[0])
            assert read["read_by_transformers"] < 1e-5, f"{family}: {read}"
    moved = make.relative(logits[1], logits[0])
    assert moved > 5e-3, f"{family}: quantization changes the logits by only {moved}"
    metadata = {**make.VERSIONS, "gguf": version("gguf"), "seed": str(SEED), "compute": "float32, eager attention, cpu, no cache"}
    make.write_safetensors({"ids": ids, "logits": logits[0]}, out / f"{family}.safetensors", metadata)
    types = sorted({kind.name for kind in quantizer.used.values()})
    facts = {"sizes": vars(s), "types": types, "unquantized_relative_error": moved, **read}
    print(family, path.stat().st_size, facts, flush=True)
    return facts


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=GOLDEN / "gguf_quantized")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    facts = {case[0]: make_case(out, number, *case) for number, case in enumerate(cases())}
    files = sorted(path for path in out.iterdir() if path.name != "provenance.json")
    for path in files:
        path.chmod(0o644)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    provenance = {**make.VERSIONS, "gguf": version("gguf"), "numpy": np.__version__, "seed": SEED, "cases": facts, "sha256": digests}
    (out / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")


logging.disable(logging.WARNING)
main()
