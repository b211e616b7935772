#!/usr/bin/env python3
"""Makes the golden fixtures in this folder: tiny random checkpoints and the results that transformers computes from them.

    python tests/golden/make.py [CASE ...] [--out DIR]

Requires torch, transformers and safetensors. Takes two minutes on a CPU. provenance.json records the versions.
A case is a directory with config.json, the weights as a hub repository stores them, and golden.safetensors:

    ids            I64 [T]       the input
    logits         F32 [T, V]    computed in float32, with eager attention, in one forward pass, without a cache
    hidden.<i>     F32 [T, C]    the residual stream after layer i, before the final norm
    greedy_prompt  I64 [P]       the first P of ids
    greedy         I64 [24]      the tokens that argmax appends; none is a stop id
    greedy_margin  F32 [24]      the logit of each token minus the second largest logit

The weights are written first. AutoModelForCausalLM.from_pretrained then reads the files to compute every golden value.
Almost all sizes of a case differ (see `assert_pairwise_different`), so a transposed matrix or a swapped head order cannot
pass.
The script also makes mxfp4.safetensors (every scale byte and nibble) and rope.json (inverse frequencies and attention
scaling of real configs).
"""
import argparse
import hashlib
import json
import logging
import platform
from pathlib import Path
from types import SimpleNamespace

import safetensors
import torch
import transformers
from safetensors.torch import save
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import families

SEED = 20_250_805
GREEDY = 24  # tokens to append
LOUD = 5     # a residual channel that is positive at every token; see mxfp4_edges
VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__, "safetensors": safetensors.__version__, "python": platform.python_version()}

# ---------------------------------------------------------------------------------------------------------------- the cases

def gpt_oss_config(s, **rest):
    return {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "vocab_size": s.V, "hidden_size": s.C,
        "intermediate_size": s.F, "num_hidden_layers": s.L, "num_attention_heads": s.H, "num_key_value_heads": s.K, "head_dim": s.D, "num_local_experts": s.E,
        "num_experts_per_tok": s.N, "sliding_window": s.W, "hidden_act": "silu", "initializer_range": 0.02, "output_router_logits": False, "router_aux_loss_coef": 0.9, "use_cache": True, **rest}

def llama_config(s, **rest):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": s.V, "hidden_size": s.C, "intermediate_size": s.F, "num_hidden_layers": s.L,
        "num_attention_heads": s.H, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, **rest}

def cases():
    """Yields (name, sizes, config.json, storage dtype, shard file names).

    The letters of the sizes: V vocabulary, C hidden size, F intermediate size, L layers, H query heads, K key/value heads, D size of one head,
    E experts, N chosen experts, W window, T tokens.
    """
    # Like openai/gpt-oss-20b: MXFP4 experts, old config spelling, shards numbered from 0. Unlike there, the first layer has full attention.
    s = SimpleNamespace(C=64, F=96, L=3, H=10, K=2, D=16, E=7, N=4, W=9, V=113, T=75)
    yield "gpt_oss", s, gpt_oss_config(s, experts_per_token=s.N, rms_norm_eps=1e-05, max_position_embeddings=128, initial_context_length=32, swiglu_limit=7.0,
        layer_types=["full_attention", "sliding_attention", "full_attention"], tie_word_embeddings=False, eos_token_id=112, pad_token_id=109, torch_dtype="bfloat16",
        rope_theta=200, rope_scaling={"beta_fast": 3.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 32, "rope_type": "yarn", "truncate": False},
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
        ), torch.bfloat16, ["model-00000-of-00001.safetensors", "model-00001-of-00001.safetensors"]
    # Unquantized gpt-oss as saved by transformers 5: [E, C, 2F] and [E, F, C] experts in bf16, rope_parameters, YaRN truncated by default.
    s = SimpleNamespace(C=56, F=40, L=2, H=15, K=3, D=10, E=6, N=4, W=13, V=131, T=67)
    yield "gpt_oss_new", s, gpt_oss_config(s, rms_norm_eps=0.02, max_position_embeddings=240, layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=True, bos_token_id=127, eos_token_id=[130, 128], pad_token_id=129, dtype="bfloat16", transformers_version=transformers.__version__,
        rope_parameters={"beta_fast": 2.0, "beta_slow": 1.0, "factor": 6.0, "original_max_position_embeddings": 40, "rope_theta": 90.0, "rope_type": "yarn"},
        ), torch.bfloat16, ["model.safetensors"]
    # Like the first Llama 2: no head_dim, num_key_value_heads or rope_theta. It has multi-head attention, so H == K.
    s = SimpleNamespace(C=48, F=80, L=3, H=6, K=6, D=8, V=97, T=47)
    yield "llama2", s, llama_config(s, rms_norm_eps=1e-06, max_position_embeddings=64, pretraining_tp=1, rope_scaling=None, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, torch_dtype="float16", transformers_version="4.31.0.dev0"), torch.float16, ["model.safetensors"]
    # Like Llama 3.2: grouped queries, tied embeddings, llama3 scaling with all three frequency bands. T exceeds the original length.
    s = SimpleNamespace(C=80, F=56, L=3, H=8, K=2, D=10, V=137, T=61)
    yield "llama3", s, llama_config(s, num_key_value_heads=s.K, rms_norm_eps=1e-05, max_position_embeddings=240, tie_word_embeddings=True, attention_bias=False, mlp_bias=False,
        bos_token_id=128, eos_token_id=[129, 136, 135], torch_dtype="bfloat16", rope_theta=500.0,
        rope_scaling={"factor": 5.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 48, "rope_type": "llama3"},
        ), torch.bfloat16, ["model.safetensors"]
    # Llama as saved by transformers 5 with all options: biases everywhere, a head_dim other than C / H, six-digit shard numbers.
    s = SimpleNamespace(C=40, F=52, L=3, H=10, K=2, D=14, V=101, T=53)
    yield "llama_new", s, llama_config(s, num_key_value_heads=s.K, head_dim=s.D, rms_norm_eps=0.03, max_position_embeddings=96, tie_word_embeddings=False, attention_bias=True,
        mlp_bias=True, attention_dropout=0.0, pretraining_tp=1, bos_token_id=98, eos_token_id=99, pad_token_id=None, dtype="float32", transformers_version=transformers.__version__,
        rope_parameters={"factor": 2.5, "rope_theta": 3000.0, "rope_type": "linear"}), torch.float32, [f"model-{i + 1:06d}-of-000003.safetensors" for i in range(3)]
    # Two cases that the CUDA decode graph supports: head_dim 16, and MXFP4 scales in the range of real checkpoints.
    s = SimpleNamespace(C=96, F=64, L=3, H=10, K=2, D=16, E=7, N=4, W=9, V=113, T=75, edges=False)
    yield "gpt_oss_graph", s, gpt_oss_config(s, experts_per_token=s.N, rms_norm_eps=1e-05, max_position_embeddings=128, initial_context_length=32, swiglu_limit=7.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], tie_word_embeddings=False, eos_token_id=112, pad_token_id=109, torch_dtype="bfloat16",
        rope_theta=200, rope_scaling={"beta_fast": 3.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 32, "rope_type": "yarn", "truncate": False},
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
        ), torch.bfloat16, ["model.safetensors"]
    s = SimpleNamespace(C=72, F=104, L=4, H=6, K=2, D=16, V=139, T=59)
    yield "llama_graph", s, llama_config(s, num_key_value_heads=s.K, head_dim=s.D, rms_norm_eps=1e-05, max_position_embeddings=240, tie_word_embeddings=True, attention_bias=True,
        mlp_bias=False, bos_token_id=128, eos_token_id=[129, 136, 135], torch_dtype="bfloat16", rope_theta=500.0,
        rope_scaling={"factor": 5.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 48, "rope_type": "llama3"},
        ), torch.bfloat16, ["model.safetensors"]
    yield from families.cases()

OURS = ("gpt_oss", "llama")  # families whose weights and mistakes are defined in this file

def layers_of(model): return model.transformer.h if hasattr(model, "transformer") else model.model.layers
def attention_of(layer): return layer.attn if hasattr(layer, "attn") else layer.self_attn
def router_of(layer): return getattr(layer.mlp, "router", getattr(layer.mlp, "gate", None))

def assert_pairwise_different(name, s):
    sizes = {**vars(s), "G": s.H // s.K, "2F": 2 * s.F, "HD": s.H * s.D, "KD": s.K * s.D}
    allowed = [{"H", "K"}, {"HD", "KD"}, {"C", "HD"}, {"C", "KD"}] if name == "llama2" else [{"C", "HD"}] if name == "llama3" else families.SAME.get(name, [])
    clash = [f"{a} = {b} = {sizes[a]}" for a in sizes for b in sizes if a < b and sizes[a] == sizes[b] and {a, b} not in allowed]
    assert not clash, f"{name}: {clash}"

# -------------------------------------------------------------------------------------------------------------- the weights

def make_weights(s, config, dtype, g):
    """Returns tensors by Hugging Face name. They are scaled so that every part matters: peaked attention, varied routing, clamped gates."""
    if config["model_type"] not in OURS: return {name: t.to(dtype) for name, t in families.make_weights(s, config, g).items()}
    oss, bias, tied = config["model_type"] == "gpt_oss", config.get("attention_bias", False), config["tie_word_embeddings"]
    loud = "quantization_config" in config
    rand = lambda *shape, std: torch.randn(*shape, generator=g) * std
    w = {}
    def linear(name, o, i, gain, bias):
        w[name + ".weight"] = rand(o, i, std=gain * i**-0.5)
        if bias: w[name + ".bias"] = rand(o, std=0.4)
    def norm(name):
        w[name + ".weight"] = (1 + rand(s.C, std=0.35)).clamp(0.2, 2.0)
        if loud: w[name + ".weight"][LOUD] = 0.5

    w["model.embed_tokens.weight"] = rand(s.V, s.C, std=0.3 if tied else 1.0)
    if loud: w["model.embed_tokens.weight"][:, LOUD] = 5 + rand(s.V, std=0.3)
    for i in range(s.L):
        layer = f"model.layers.{i}."
        norm(layer + "input_layernorm")
        linear(layer + "self_attn.q_proj", s.H * s.D, s.C, 1.4, bias)
        linear(layer + "self_attn.k_proj", s.K * s.D, s.C, 1.4, bias)
        linear(layer + "self_attn.v_proj", s.K * s.D, s.C, 1.0, bias)
        linear(layer + "self_attn.o_proj", s.C, s.H * s.D, 1.0, bias)
        if loud: w[layer + "self_attn.o_proj.weight"][LOUD] *= 0.3
        norm(layer + "post_attention_layernorm")
        if oss:
            w[layer + "self_attn.sinks"] = 1 + rand(s.H, std=1.5)
            linear(layer + "mlp.router", s.E, s.C, 1.5, True)
            experts = layer + "mlp.experts."
            w[experts + "gate_up_proj_bias"] = rand(s.E, 2 * s.F, std=0.5)
            w[experts + "down_proj_bias"] = rand(s.E, s.C, std=0.3)
            if "quantization_config" in config:
                random_mxfp4(w, experts + "gate_up_proj", (s.E, 2 * s.F, s.C), (121, 126), g)
                random_mxfp4(w, experts + "down_proj", (s.E, s.C, s.F), (116, 120), g)
                if getattr(s, "edges", True): mxfp4_edges(w, experts, s)
            else:
                w[experts + "gate_up_proj"] = rand(s.E, s.C, 2 * s.F, std=4 * s.C**-0.5)
                w[experts + "down_proj"] = rand(s.E, s.F, s.C, std=0.1 * s.F**-0.5)
        else:
            linear(layer + "mlp.gate_proj", s.F, s.C, 1.5, config.get("mlp_bias", False))
            linear(layer + "mlp.up_proj", s.F, s.C, 1.5, config.get("mlp_bias", False))
            linear(layer + "mlp.down_proj", s.C, s.F, 0.7, config.get("mlp_bias", False))
    norm("model.norm")
    if tied: w["model.norm.weight"] *= 2
    if not tied: linear("lm_head", s.V, s.C, 3.0, False)
    return {name: t if t.dtype == torch.uint8 else t.to(dtype) for name, t in w.items()}

def random_mxfp4(w, name, shape, scales, g):
    """Adds a random [E, out, in] matrix in OpenAI's layout: blocks [E, out, in/32, 16] with two nibbles per byte, low first; scales [E, out, in/32]."""
    E, o, i = shape
    w[name + "_blocks"] = torch.randint(0, 256, (E, o, i // 32, 16), generator=g, dtype=torch.uint8)
    w[name + "_scales"] = torch.randint(*scales, (E, o, i // 32), generator=g, dtype=torch.uint8)

def mxfp4_edges(w, experts, s):
    """Sets extreme scale bytes in experts 1 and 4 without overflow: up rows that reach the swiglu limit at every token
    (their weight for the channel LOUD, which is always positive, outweighs all others), rows near zero, and zeros of
    both signs with the largest finite scale."""
    zeros = torch.arange(16, dtype=torch.uint8).remainder(2) * 0x88  # +0 +0 -0 -0 ..
    block, byte, high = LOUD // 32, LOUD % 32 // 2, LOUD % 2
    for e in (1, 4):
        blocks, scales = w[experts + "gate_up_proj_blocks"][e], w[experts + "gate_up_proj_scales"][e]
        for f, (scale, nibble) in enumerate([(254, 0x1), (254, 0x9), (253, 0x2), (200, 0x7), (160, 0xF), (0, None), (1, None), (64, None), (254, 0x0)]):
            up = 2 * f + 1  # gate and up are interleaved: odd rows are up
            if nibble is None: scales[up] = scale; continue
            blocks[up, block] = zeros
            blocks[up, block, byte] = nibble << (4 if high else 0)
            scales[up, block] = scale
        blocks, scales = w[experts + "down_proj_blocks"][e], w[experts + "down_proj_scales"][e]
        blocks[2, 1] = zeros; scales[2, 1] = 254
        scales[3] = 0; scales[4] = 1; scales[7, 2] = 60

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]

def dequantize(blocks, scales):
    """Decodes MXFP4 independently of transformers, in float64, one value at a time: [.., out, in/32, 16] to float32 [.., out, in]."""
    values = [[FP4[n] * 2.0 ** (s - 127) for byte in row for n in (byte & 15, byte >> 4)] for row, s in zip(blocks.reshape(-1, 16).tolist(), scales.reshape(-1).tolist())]
    return torch.tensor(values, dtype=torch.float64).float().reshape(*blocks.shape[:-2], -1)

def write_safetensors(tensors, file, metadata):
    """Writes a safetensors file with sorted metadata, so that equal runs write equal bytes."""
    data = save({k: v.contiguous() for k, v in tensors.items()}, metadata)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    header = json.dumps({"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size:])

def write_checkpoint(folder, config, weights, files):
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.json")]: old.unlink()
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    names = list(weights)
    if len(files) == 3: shard_of = {n: i % 3 for i, n in enumerate(names)}  # scattered
    else:  # two shards: split between the blocks and the scales of one tensor
        cut = next((i for i, n in enumerate(names) if n == "model.layers.1.mlp.experts.gate_up_proj_scales"), len(names)) if len(files) == 2 else len(names)
        shard_of = {n: int(i >= cut) for i, n in enumerate(names)}
    for i, file in enumerate(files):
        write_safetensors({n: weights[n] for n in names if shard_of[n] == i}, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in weights.values())}, "weight_map": {n: files[shard_of[n]] for n in sorted(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

# ------------------------------------------------------------------------------------------------------------ transformers

def load(folder, config, dtype=torch.float32):
    quantized = {"quantization_config": Mxfp4Config(dequantize=True)} if "quantization_config" in config else {}
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", output_loading_info=True, **quantized)
    left = {k: v for k, v in info.items() if v}
    assert not left, f"{folder}: transformers reports {left}"
    return model.to(dtype).eval()

@torch.no_grad()
def forward(model, ids):
    """Runs one forward pass without a cache. Returns logits [T, V] and the values seen by hooks, including inner values of gpt-oss layers."""
    seen = SimpleNamespace(hidden=[], router=[], loud=[], gates=[], attention=[])
    hooks = []
    for layer in layers_of(model):
        hooks.append(layer.register_forward_hook(lambda m, a, out: seen.hidden.append((out[0] if isinstance(out, tuple) else out)[0])))
        hooks.append(attention_of(layer).register_forward_hook(lambda m, a, out: seen.attention.append(out[1][0])))
        if router_of(layer) is not None: hooks.append(router_of(layer).register_forward_hook(lambda m, a, out: seen.router.append(out)))
        if not hasattr(layer.mlp, "router"): continue
        hooks.append(layer.post_attention_layernorm.register_forward_hook(lambda m, a, out: seen.loud.append(out[0, :, LOUD])))
        experts = layer.mlp.experts
        experts._apply_gate = lambda gate_up, e=experts: (seen.gates.append(gate_up), type(e)._apply_gate(e, gate_up))[1]
    logits = model(input_ids=torch.as_tensor(ids)[None], use_cache=False).logits[0]
    for hook in hooks: hook.remove()
    return logits, seen

@torch.no_grad()
def routing_gap(model, batch):
    """Returns the smallest margin in any layer between the last chosen expert and the next one, for the last token of each sequence."""
    gaps, hooks = [], []
    for layer in filter(lambda layer: router_of(layer) is not None, model.model.layers):
        def keep(m, a, out): top = out[0].reshape(*batch.shape, -1)[:, -1].sort(descending=True).values; gaps.append(top[:, m.top_k - 1] - top[:, m.top_k])
        hooks.append(router_of(layer).register_forward_hook(keep))
    model(input_ids=batch, use_cache=False)
    for hook in hooks: hook.remove()
    return torch.stack(gaps).min(0).values

def choose_ids(model, s, g):
    """Returns random ids. With experts, prefers a large routing margin, so rounding rarely changes the experts."""
    ids = []
    for _ in range(s.T):
        candidates = torch.randperm(s.V, generator=g)[:16]
        candidates = candidates[~torch.isin(candidates, torch.tensor(ids[-20:], dtype=torch.long))]
        if not hasattr(s, "E"): ids.append(int(candidates[0])); continue
        batch = torch.cat([torch.tensor(ids, dtype=torch.long).expand(len(candidates), -1), candidates[:, None]], 1)
        ids.append(int(candidates[routing_gap(model, batch).argmax()]))
    return ids

@torch.no_grad()
def greedy(model, prompt):
    ids, margins = list(prompt), []
    for _ in range(GREEDY):
        (best, second), tokens = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        ids.append(int(tokens[0])); margins.append(float(best - second))
    return ids[len(prompt):], margins

def choose_greedy(model, ids, s, config):
    """Chooses a prompt length by its greedy continuation: no stop id, varied tokens, and the largest minimum margin."""
    stops = config["eos_token_id"] if isinstance(config["eos_token_id"], list) else [config["eos_token_id"]]
    lengths = range(s.T // 2 - 8, s.T - 2, 2)
    runs = [(p, *greedy(model, ids[:p])) for p in lengths]
    runs = [r for r in runs if not set(r[1]) & set(stops)]
    varied = [r for r in runs if len(set(r[1])) >= 6] or sorted(runs, key=lambda r: -len(set(r[1])))[:3]
    return max(varied, key=lambda r: min(r[2]))

def built_by_hand(folder, config, weights, model):
    """Builds the same model from the tensors in memory, with the MXFP4 decoder of this script and without from_pretrained."""
    state = {} if config["model_type"] in OURS else families.state(config, weights)
    for name, t in weights.items() if config["model_type"] in OURS else []:
        if name.endswith("_blocks"):
            state[name[:-7]] = dequantize(t, weights[name[:-7] + "_scales"]).transpose(1, 2).contiguous()
        elif not name.endswith("_scales"): state[name] = t.float()
    if config["model_type"] in OURS and config["tie_word_embeddings"]: state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for name, t in model.state_dict().items(): assert torch.equal(t, state[name]) and torch.equal(t.signbit(), state[name].signbit()), f"{name}: transformers changed a value"
    plain = AutoConfig.from_pretrained(folder)
    if hasattr(plain, "quantization_config"): del plain.quantization_config
    other = AutoModelForCausalLM.from_config(plain, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32).eval()
    other.load_state_dict(state, strict=True)
    return other

def relative(a, b): return float((a.double() - b.double()).abs().max() / b.double().abs().max())

def mistakes_in_config(s, config):
    """Simulates mistakes in reading config.json. Returns {mistake: config entries to overwrite}."""
    if config["model_type"] not in OURS: return families.mistakes_in_config(s, config)
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    rope, theta = config.get(key) or {}, (config.get(key) or config).get("rope_theta", config.get("rope_theta", 10000.0))
    wrong = {"rms_norm_eps x 10": {"rms_norm_eps": config["rms_norm_eps"] * 10}}
    wrong["rope_theta x 1.1"] = {key: {**rope, "rope_theta": theta * 1.1}} if rope else {"rope_theta": theta * 1.1}
    if rope:
        wrong["no rope scaling"] = {key: {"rope_type": "default", "rope_theta": theta}}
        others = {"factor": rope["factor"] + 1}
        if rope["rope_type"] == "yarn": others |= {"truncate": not rope.get("truncate", True), "attention_factor": 1.0, "beta_fast": 32.0}
        if rope["rope_type"] == "llama3": others |= {"original_max_position_embeddings": 56, "low_freq_factor": 1.5, "high_freq_factor": 3.0}
        wrong |= {f"{k} {v}": {key: {**rope, k: v}} for k, v in others.items()}
    if hasattr(s, "E"):
        other = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
        wrong |= {"window + 1": {"sliding_window": s.W + 1}, "window - 1": {"sliding_window": s.W - 1}, "one expert fewer": {"num_experts_per_tok": s.N - 1},
            "layer_types swapped": {"layer_types": [other[t] for t in config["layer_types"]]}}
    return wrong

def mistakes_in_layers(s, config, weights):
    """Simulates mistakes in the computation. Returns {mistake: function that changes a loaded decoder layer}."""
    if config["model_type"] not in OURS: return families.mistakes_in_layers(s, config, weights)
    def zero(name): return lambda layer: [p.data.zero_() for n, p in layer.named_parameters() if n.endswith(name)]
    def rows(change, *projections): return lambda layer: [setattr(x, "data", change(x.data).contiguous()) for p in projections for x in getattr(layer.self_attn, p).parameters()]
    biases = ["q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias", "gate_proj.bias", "up_proj.bias", "down_proj.bias", "router.bias", "gate_up_proj_bias", "down_proj_bias"]
    wrong = {f"no {b}": zero(b) for b in biases if any(n.endswith(b) for n in weights)}
    wrong["rope pairs interleaved"] = rows(lambda x: x.unflatten(0, (-1, 2, s.D // 2)).transpose(1, 2).flatten(0, 2), "q_proj", "k_proj")
    if s.H != s.K: wrong["query heads grouped by the other axis"] = rows(lambda x: x.unflatten(0, (s.K, s.H // s.K, s.D)).transpose(0, 1).flatten(0, 2), "q_proj")
    if hasattr(s, "E"):
        wrong |= {
            "no sinks": lambda layer: layer.self_attn.sinks.data.fill_(-1e4),
            "sinks 0": zero("sinks"),
            "swiglu limit 8": lambda layer: setattr(layer.mlp.experts, "limit", 8.0),
            "swiglu alpha 1": lambda layer: setattr(layer.mlp.experts, "alpha", 1.0),
            "gate and up swapped": lambda layer: layer.mlp.experts.gate_up_proj.data.copy_(layer.mlp.experts.gate_up_proj.data.unflatten(2, (-1, 2)).flip(3).flatten(2)),
            "softmax over all experts": lambda layer: layer.mlp.router.register_forward_hook(lambda m, a, out: (out[0], out[0].softmax(-1).gather(1, out[2]), out[2]))}
    return wrong

def sensitivity(folder, config, s, weights, ids, logits):
    """Returns how much each mistake changes the logits. Fails if the tests would miss a mistake."""
    moved, file = {}, folder / "config.json"
    right = file.read_text()
    for what, edit in mistakes_in_config(s, config).items():
        file.write_text(json.dumps({**config, **edit}))
        try: moved[what] = relative(forward(load(folder, config), ids)[0], logits)
        finally: file.write_text(right)
    for what, change in mistakes_in_layers(s, config, weights).items():
        model = load(folder, config)
        for layer in layers_of(model): change(layer)
        moved[what] = relative(forward(model, ids)[0], logits)
    blind = {k: v for k, v in moved.items() if v < 1e-2 and not k.startswith("rms_norm_eps")}
    assert not blind, f"{folder}: these mistakes would pass: {blind}"
    return moved

def mean_nll(logits, ids): return float(torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])))

def make_case(out, number, name, s, config, dtype, files):
    assert_pairwise_different(name, s)
    g = torch.Generator().manual_seed(SEED + number)
    weights, folder = make_weights(s, config, dtype, g), out / name
    write_checkpoint(folder, config, weights, files)

    # Compute the golden values from the files.
    model = load(folder, config)
    assert type(model).__name__ == config["architectures"][0] and model.config._attn_implementation == "eager"
    ids = choose_ids(model, s, g)
    logits, seen = forward(model, ids)
    prompt, continued, margins = choose_greedy(model, ids, s, config)

    # Check the values against a second load, a model built by hand, and `generate` with a cache. Measure the errors of float64 and bfloat16.
    assert torch.equal(forward(load(folder, config), ids)[0], logits), "a second load differs"
    assert torch.equal(forward(built_by_hand(folder, config, weights, model), ids)[0], logits), "the model built by hand differs"
    generated = model.generate(torch.tensor([ids[:prompt]]), attention_mask=torch.ones(1, prompt, dtype=torch.long), do_sample=False,
        max_new_tokens=GREEDY, min_new_tokens=GREEDY, use_cache=True, eos_token_id=None, pad_token_id=0)[0, prompt:].tolist()
    assert generated == continued, f"generate differs: {generated} {continued}"
    in_f64, in_bf16 = forward(load(folder, config, torch.float64), ids)[0], forward(load(folder, config, torch.bfloat16), ids)[0].float()
    probabilities = logits.double().softmax(-1)
    facts = {
        "sizes": vars(s), "seed": SEED + number, "weights": str(dtype).removeprefix("torch."), "greedy_prompt": prompt, "greedy_distinct": len(set(continued)), "greedy_margin_min": min(margins),
        "logits_std": float(logits.std()), "logits_abs_max": float(logits.abs().max()), "top1_probability_mean": float(probabilities.max(-1).values.mean()), "mean_nll": mean_nll(logits, ids),
        "hidden_rms": [float(h.pow(2).mean().sqrt()) for h in seen.hidden],
        "attention_top1_mean": [float(a.max(-1).values[:, s.T // 2:].mean()) for a in seen.attention],
        "float64_relative_error": relative(in_f64, logits),
        "bfloat16_relative_error": relative(in_bf16, logits), "bfloat16_top1_agreement": float((in_bf16.argmax(-1) == logits.argmax(-1)).float().mean()),
        "bfloat16_mean_kl": float((probabilities * (probabilities.log() - in_bf16.double().log_softmax(-1))).sum(-1).mean()), "bfloat16_mean_nll": mean_nll(in_bf16, ids)}
    facts["sensitivity"] = sensitivity(folder, config, s, weights, ids, logits)
    assert torch.isfinite(logits).all() and all(torch.isfinite(h).all() for h in seen.hidden)
    if hasattr(s, "E"):
        used = torch.stack([torch.bincount(r[2].flatten(), minlength=s.E) for r in seen.router])
        top = torch.cat([r[0].sort(descending=True).values for r in seen.router])
        facts |= {"expert_use": used.tolist(), "routing_gap_min": float((top[:, s.N - 1] - top[:, s.N]).min())}
        assert used.min() > 0, facts
    if config["model_type"] == "gpt_oss":
        gate, up = torch.cat([x[:, ::2].flatten() for x in seen.gates]), torch.cat([x[:, 1::2].flatten() for x in seen.gates])
        facts |= {"gate_above_7": float((gate > 7).float().mean()), "gate_below_-7": float((gate < -7).float().mean()), "up_beyond_7": float((up.abs() > 7).float().mean()),
            "up_abs_max": float(up.abs().max()),
            "sink_probability_mean": [1 - float(a.sum(-1).mean()) for a in seen.attention]}
        assert facts["gate_above_7"] > 0.01 and torch.isfinite(gate).all() and torch.isfinite(up).all(), facts
    if "quantization_config" in config:
        scales = torch.cat([t.flatten() for n, t in weights.items() if n.endswith("_scales")])
        nibbles = torch.cat([t.flatten() for n, t in weights.items() if n.endswith("_blocks")])
        facts |= {"scale_bytes": scales.unique().tolist(), "nibbles": len(torch.cat([nibbles & 15, nibbles >> 4]).unique()), "loud_min": min(float(x.min()) for x in seen.loud)}
        assert facts["nibbles"] == 16 and facts["loud_min"] > 0.2, facts

    golden = {"ids": torch.tensor(ids), "logits": logits, "greedy_prompt": torch.tensor(ids[:prompt]), "greedy": torch.tensor(continued), "greedy_margin": torch.tensor(margins)}
    golden |= {f"hidden.{i}": h for i, h in enumerate(seen.hidden)}
    write_safetensors(golden, folder / "golden.safetensors",
        metadata={**VERSIONS, "case": name, "seed": str(SEED + number), "mean_nll": repr(facts["mean_nll"]), "compute": "float32, eager attention, cpu, one forward, use_cache false"})
    return facts

# --------------------------------------------------------------------------------------------------------- MXFP4 and RoPE

def make_mxfp4(out):
    """Writes each scale byte once, with all sixteen nibbles twice in shuffled order, and the values that transformers decodes."""
    g = torch.Generator().manual_seed(SEED)
    nibbles = torch.stack([torch.cat([torch.randperm(16, generator=g), torch.randperm(16, generator=g)]) for _ in range(256)]).to(torch.uint8)
    blocks = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).reshape(2, 64, 2, 16)  # E, out, in/32, 16
    scales = torch.randperm(256, generator=g).to(torch.uint8).reshape(2, 64, 2)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).contiguous()  # transformers returns [E, in, out]
    in_bf16 = convert_moe_packed_tensors(blocks, scales).transpose(1, 2).float()
    same = lambda a, b: torch.equal(a.nan_to_num(1.5), b.nan_to_num(1.5)) and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())
    flat = expected.reshape(256, 32)
    exact = dequantize(blocks, scales).reshape(256, 32)
    assert same(expected, in_bf16), "bf16 changed a value"
    assert same(flat, exact), "transformers differs from nibble x 2^(scale - 127)"
    write_safetensors({"blocks": blocks, "scales": scales, "expected": expected}, out / "mxfp4.safetensors",
        metadata={**VERSIONS, "seed": str(SEED), "shape": "blocks [E, out, in/32, 16], scales [E, out, in/32], expected float32 [E, out, in]"})
    at = lambda byte: sorted({str(float(v)) for v in flat[(scales.flatten() == byte).nonzero()[0, 0]]})
    return {"rows": 256, "scale_0": at(0), "scale_254": at(254), "scale_255": at(255), "subnormals_kept": bool(flat[scales.flatten() == 0].abs().max() > 0)}

def make_rope(out, tiny):
    """Writes inv_freq [D/2] and the attention scaling of every variant, computed by the rotary module of the family."""
    oss = {"model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "num_attention_heads": 64, "max_position_embeddings": 131072}
    llama = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072}
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn"}
    keys = ["model_type", "head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"]
    llama3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
    variants = {
        "default, Llama-2-7b": {**llama, "max_position_embeddings": 4096},
        "default, rope_theta 500000": {**llama, "rope_theta": 500000.0, "rope_scaling": None},
        "default, new spelling": {**llama, "head_dim": 80, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        "linear": {**llama, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "linear, new spelling": {**llama, "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}},
        "llama3, Llama-3.1-8B": {**llama, "rope_theta": 500000.0, "rope_scaling": llama3},
        "llama3, Llama-3.2-1B": {**llama, "head_dim": 64, "hidden_size": 2048, "rope_theta": 500000.0, "rope_scaling": {**llama3, "factor": 32.0}},
        "yarn, gpt-oss-20b (truncate false)": {**oss, "rope_theta": 150000, "rope_scaling": {**yarn, "truncate": False}},
        "yarn, gpt-oss-20b, new spelling": {**oss, "rope_parameters": {**yarn, "truncate": False, "rope_theta": 150000}},
        "yarn, truncate true": {**oss, "rope_theta": 150000, "rope_scaling": {**yarn, "truncate": True}},
        "yarn, truncate absent": {**oss, "rope_theta": 150000, "rope_scaling": yarn},
        "yarn, attention_factor given": {**oss, "rope_theta": 150000, "rope_scaling": {**yarn, "truncate": False, "attention_factor": 1.25}},
        **{f"tests/golden/{name}": {k: v for k, v in config.items() if k in keys} for name, config in tiny.items() if config["model_type"] in OURS}}
    entries = []
    for name, config in variants.items():
        module = GptOssRotaryEmbedding if config["model_type"] == "gpt_oss" else LlamaRotaryEmbedding
        rope = module(AutoConfig.for_model(**json.loads(json.dumps(config))))
        entries.append({"name": name, "config": config, "attention_scaling": float(rope.attention_scaling), "inv_freq": rope.inv_freq.tolist()})
    head = {**VERSIONS, "inv_freq": "float32 values, printed so that parsing as float64 and rounding to float32 is exact"}
    lines = ",\n  ".join(json.dumps(e) for e in entries)
    (out / "rope.json").write_text(f'{{"provenance": {json.dumps(head)},\n "variants": [\n  {lines}\n]}}\n')
    return {e["name"]: {"pairs": len(e["inv_freq"]), "attention_scaling": e["attention_scaling"]} for e in entries}

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("case", nargs="*", help="make only these (default: all cases, mxfp4, rope and provenance)"); ap.add_argument("--out", type=Path, default=Path(__file__).parent)
    a = ap.parse_args()
    torch.set_num_threads(1); logging.getLogger("transformers").setLevel(logging.ERROR); transformers.utils.logging.disable_progress_bar()
    print("provenance:", VERSIONS, "seed", SEED)
    report = {**VERSIONS, "seed": SEED, "cases": {}}
    every = list(cases())
    for number, (name, *case) in enumerate(every, 1):
        if a.case and name not in a.case: continue
        report["cases"][name] = facts = make_case(a.out, number, name, *case)
        print(f"\n{name}"); [print(f"  {k}: {v}") for k, v in facts.items()]
    if a.case: return
    report["mxfp4"], report["rope"] = make_mxfp4(a.out), make_rope(a.out, {name: config for name, _, config, *_ in every})
    report["sha256"] = {str(f.relative_to(a.out)): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted([*a.out.glob("*/*.*"), *a.out.glob("*.safetensors"), a.out / "rope.json"])
        if f.parent == a.out or f.parent.name in report["cases"]}
    (a.out / "provenance.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\nmxfp4", report["mxfp4"]); [print("rope", k, v) for k, v in report["rope"].items()]
    sizes = {str(f.relative_to(a.out)): f.stat().st_size for f in sorted(a.out.rglob("*")) if f.is_file()}
    print("\nbytes:", *(f"{v:8} {k}" for k, v in sizes.items()), f"{sum(sizes.values()):8} in all", sep="\n")

if __name__ == "__main__": main()
