#!/usr/bin/env python3
"""Writes tests/golden/compressed: a tiny Llama, quantized to 8 bits in five ways, and its logits in transformers.

    python tests/golden/make_compressed.py [--out tests/golden/compressed]     # takes a few minutes on a CPU

Requires torch, transformers, safetensors and compressed-tensors; provenance.json lists the versions.
Each case is a folder with the same kinds of files that tests/golden/make.py writes:

    int8           int8 weights, one scale per row; int8 inputs, one scale per token (llm-compressor's W8A8)
    int8_weights   int8 weights, one scale per row; inputs are not quantized
    int8_packed    the same, with four weights packed into each int32 (llm-compressor's W8A16)
    fp8            E4M3 weights, one scale per row; E4M3 inputs, one scale per token (llm-compressor's FP8_DYNAMIC);
                   a pattern in `ignore` excludes one v_proj
    fp8_static     E4M3 weights, one scale per matrix; E4M3 inputs with an input_scale that clamps some of them
                   (llm-compressor's FP8)

transformers dequantizes the weights in the first forward pass (code x scale). compressed-tensors rounds the inputs of each
quantized layer in `fake_quantize`: it divides by the scale, clamps, rounds halves to even, and multiplies by the scale.
Both compute in the dtype of the model, here float32. `by_hand` is a second implementation that must produce the same bits.

If a single code is rounded the other way, the logits change by about 1e-3. The tokens are therefore chosen to keep every
input away from the rounding boundaries (`margin`). With int8, one input per token is always at a boundary: the largest
magnitude divided by the scale is 127.5, give or take the last bit. If that input is positive, its code is 127. If it is
negative, its code is -127 or -128. `make_loud` therefore makes one channel of each input large and positive, as in real
models.
"""

import argparse
import hashlib
import json
import logging
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.match import match_named_modules
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN = Path(__file__).parent
import make

SEED = 20261122
LOUD = 5  # the channel with large values
SIZES = SimpleNamespace(C=48, F=112, L=4, H=6, K=2, D=16, V=104, T=37)
# The midpoints between adjacent E4M3 values, from 0.5 on. Rounding smaller values differently has too little effect.
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
MIDPOINTS = ((E4M3[1:] + E4M3[:-1]) / 2)[E4M3[:-1] >= 0.5]


def cases():
    """Yields (name, format, config group, ignored layers)."""
    channel = {"num_bits": 8, "strategy": "channel", "symmetric": True}
    token = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
    tensor = {"num_bits": 8, "strategy": "tensor", "symmetric": True}
    int8, fp8 = {"type": "int"}, {"type": "float"}
    yield "int8", "int-quantized", {"weights": channel | int8, "input_activations": token | int8}, ["lm_head"]
    yield "int8_weights", "naive-quantized", {"weights": channel | int8}, ["lm_head"]
    yield "int8_packed", "pack-quantized", {"weights": channel | int8}, ["lm_head"]
    ignore = ["lm_head", "re:.*\\.1\\.self_attn\\.v_proj$"]
    yield "fp8", "float-quantized", {"weights": channel | fp8, "input_activations": token | fp8}, ignore
    yield "fp8_static", "float-quantized", {"weights": tensor | fp8, "input_activations": tensor | fp8}, ["lm_head"]


def base_config():
    s = SIZES
    return make.llama_config(
        s,
        num_key_value_heads=s.K,
        head_dim=s.D,
        rms_norm_eps=1e-05,
        max_position_embeddings=240,
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=False,
        bos_token_id=97,
        eos_token_id=[98, 99],
        torch_dtype="bfloat16",
        rope_theta=500.0,
    )


def make_loud(weights):
    """Makes one input channel of every linear layer likely to be large and positive."""
    g = torch.Generator().manual_seed(SEED)
    weights["model.embed_tokens.weight"][:, LOUD] = 7 + 0.3 * torch.randn(SIZES.V, generator=g)
    for name, weight in weights.items():
        if name.endswith("layernorm.weight"):
            weight[LOUD] = 1.5
        if name.endswith(("v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            weight[LOUD] *= 0.3
            weight[LOUD, LOUD] = 0.8
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[LOUD] *= 0.1
            weight[:, LOUD :: SIZES.D] *= 0.3
        if name.endswith("o_proj.bias"):
            weight[LOUD] = 0.3


def quantize(name, format, group, ignore, config, weights):
    """Returns the quantization_config, the tensors without `input_scale`, and the quantized layers."""
    settings = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], "format": format, **group}},
        format=format,
        ignore=ignore,
        quantization_status="compressed",
    )
    scheme = settings.config_groups["group_0"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    stored = dict(weights)
    layers = [layer for layer, _ in match_named_modules(model, scheme.targets, ignore)]
    for layer in layers:
        weight = weights[layer + ".weight"].float()
        whole = scheme.weights.strategy == "tensor"
        low, high = (weight.min(), weight.max()) if whole else (weight.amin(1, True), weight.amax(1, True))
        scale, _ = calculate_qparams(low, high, scheme.weights)
        # Published files have bf16 scales. One case uses float32, which inferno can also read.
        scale = scale.to(torch.float32 if name == "int8_weights" else torch.bfloat16)
        tensors = NaiveQuantizationCompressor.compress({"weight": weight, "weight_scale": scale.float()}, scheme)
        stored[layer + ".weight"], stored[layer + ".weight_scale"] = tensors["weight"], scale
    section = {**json.loads(settings.model_dump_json()), "version": version("compressed-tensors")}
    return {**section, "sparsity_config": {}, "transform_config": {}}, stored, layers


def packed(stored, layers):
    """Returns the tensors, with the weights of the quantized layers packed."""
    tensors = dict(stored)
    for layer in layers:
        weight = tensors.pop(layer + ".weight")
        tensors[layer + ".weight_packed"] = pack_to_int32(weight, 8)
        tensors[layer + ".weight_shape"] = torch.tensor(weight.shape)
    return tensors


def load(folder, dtype=torch.float32):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    reports = {kind: names for kind, names in info.items() if names}
    assert not reports, f"{folder}: transformers reports {reports}"
    return model.eval()


def dynamic_scale(x, largest_code, dims=-1):
    scale = x.abs().amax(dims, keepdim=True) / largest_code
    return torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)


def int8_codes(x, scale):
    return (x / scale).clamp(-128, 127).round()


def fp8_codes(x, scale):
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def rounding(name):
    """Returns a function that rounds the input of a layer, or None if this case does not round inputs."""

    def int8(layer, x):
        scale = dynamic_scale(x, 127.5)
        return int8_codes(x, scale) * scale

    def fp8(layer, x):
        scale = dynamic_scale(x, 448)
        return fp8_codes(x, scale) * scale

    def fp8_static(layer, x):
        return fp8_codes(x, layer["input_scale"]) * layer["input_scale"]

    return {"int8": int8, "fp8": fp8, "fp8_static": fp8_static}.get(name)


def mistakes(name):
    """Returns functions that round the inputs incorrectly. Each one makes a different mistake."""

    def int8(largest_code, dims=-1, codes=int8_codes):
        def rounded(layer, x):
            scale = dynamic_scale(x, largest_code, dims)
            return codes(x, scale) * scale

        return rounded

    def fp8(largest_code, dims=-1):
        return int8(largest_code, dims, fp8_codes)

    def towards_zero(x, scale):
        return (x / scale).clamp(-128, 127).trunc()

    def e5m2(layer, x):
        return (x / layer["input_scale"]).to(torch.float8_e5m2).to(x.dtype) * layer["input_scale"]

    def none(layer, x):
        return x

    return {
        "int8": {
            "inputs not rounded": none,
            "largest magnitude / 127": int8(127),
            "a scale for all tokens": int8(127.5, (-2, -1)),
            "rounded towards zero": int8(127.5, codes=towards_zero),
        },
        "int8_weights": {"inputs as int8": int8(127.5)},
        "int8_packed": {"inputs as int8": int8(127.5)},
        "fp8": {
            "inputs not rounded": none,
            "largest magnitude / 240": fp8(240),
            "a scale for all tokens": fp8(448, (-2, -1)),
        },
        "fp8_static": {"inputs not rounded": none, "a scale for each token": fp8(448), "as E5M2": e5m2},
    }[name]


def by_hand(config, stored, layers, rounded, dtype=torch.float32):
    """Builds the quantized model without compressed-tensors."""
    plain = {name: config[name] for name in config if name != "quantization_config"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**plain), attn_implementation="eager", dtype=dtype)
    state = {name: tensor.to(dtype) for name, tensor in stored.items() if not name.endswith("_scale")}
    for name in layers:
        state[name + ".weight"] = state[name + ".weight"] * stored[name + ".weight_scale"].to(dtype)
        tensors = {"input_scale": stored[name + ".input_scale"].to(dtype)} if name + ".input_scale" in stored else {}
        if rounded is not None:
            hook = lambda module, args, tensors=tensors: (rounded(tensors, args[0]),)
            model.get_submodule(name).register_forward_pre_hook(hook)
    model.load_state_dict(state, strict=True)
    return model.eval()


def margin(name, tensors, x):
    """Returns, for each token of x [B, T, C], the smallest distance between a scaled input and a rounding boundary."""
    if name == "int8":
        y = x / dynamic_scale(x, 127.5)
        turn = (y.floor() + 0.5).clamp(-127.5, 126.5)
    else:
        scale = tensors["input_scale"].float() if name == "fp8_static" else dynamic_scale(x, 448)
        y = (x / scale).abs()
        above = torch.searchsorted(MIDPOINTS, y.contiguous()).clamp(1, len(MIDPOINTS) - 1)
        low, high = MIDPOINTS[above - 1], MIDPOINTS[above]
        turn = torch.where(y - low < high - y, low, high)
    return (y - turn).abs().amin(-1)


@torch.no_grad()
def margins(name, stored, layers, model, batch):
    """Returns, for each sequence of the batch, the smallest margin of its last token over all quantized layers."""
    smallest, hooks = [], []
    for layer in layers:
        tensors = {"input_scale": stored.get(layer + ".input_scale")}
        hook = lambda module, args, tensors=tensors: smallest.append(margin(name, tensors, args[0])[:, -1])
        hooks.append(model.get_submodule(layer).register_forward_pre_hook(hook))
    model(input_ids=batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(smallest).amin(0)


def choose_ids(name, stored, layers, model):
    """Chooses a token for each position: randomly, or with the largest margin if inputs are rounded.

    Each token differs from the 12 tokens before it. Returns the tokens and the smallest margin.
    """
    ids, least = [], []
    g = torch.Generator().manual_seed(SEED)
    for _ in range(SIZES.T):
        candidates = torch.randperm(SIZES.V, generator=g)
        candidates = candidates[~torch.isin(candidates, torch.tensor(ids[-12:], dtype=torch.long))]
        if name in ("int8_weights", "int8_packed"):
            ids.append(int(candidates[0]))
            continue
        batch = torch.cat([torch.tensor(ids, dtype=torch.long).expand(len(candidates), -1), candidates[:, None]], 1)
        best, at = margins(name, stored, layers, model, batch).max(0)
        ids.append(int(candidates[at]))
        least.append(float(best))
    return ids, min(least, default=None)


@torch.no_grad()
def find_input_scales(config, stored, layers):
    """Sets input scales slightly too small for the inputs of random tokens, so some inputs are clamped."""
    model = by_hand(config, stored, layers, None)
    largest = {}
    for layer in layers:
        hook = lambda module, args, layer=layer: largest.update({layer: args[0].abs().max().reshape(1)})
        model.get_submodule(layer).register_forward_pre_hook(hook)
    g = torch.Generator().manual_seed(SEED)
    model(input_ids=torch.randint(SIZES.V, (4, SIZES.T), generator=g), use_cache=False)
    for layer in layers:
        stored[layer + ".input_scale"] = (0.8 * largest[layer] / 448).to(torch.bfloat16)


@torch.no_grad()
def clamped(stored, layers, model, ids):
    """Returns the fraction of inputs whose magnitude exceeds 448 times their scale."""
    found, hooks = [], []
    for layer in layers:
        scale = stored[layer + ".input_scale"].float()
        hook = lambda module, args, scale=scale: found.append(((args[0] / scale).abs() > 448).float().mean())
        hooks.append(model.get_submodule(layer).register_forward_pre_hook(hook))
    model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return float(torch.stack(found).mean())


def make_case(out, name, format, group, ignore):
    config = base_config()
    g = torch.Generator().manual_seed(SEED)
    weights = make.make_weights(SIZES, config, torch.float32, g)
    make_loud(weights)
    weights = {tensor: weight.to(torch.bfloat16) for tensor, weight in weights.items()}
    section, stored, layers = quantize(name, format, group, ignore, config, weights)
    config["quantization_config"] = section
    if name == "fp8_static":
        find_input_scales(config, stored, layers)
    folder = out / name
    tensors = packed(stored, layers) if format == "pack-quantized" else stored
    make.write_checkpoint(folder, config, tensors, ["model.safetensors"])

    # Compute the golden values from the written files.
    model = load(folder)
    model(input_ids=torch.tensor([[0]]))  # dequantizes the weights
    ids, least = choose_ids(name, stored, layers, model)
    logits, seen = make.forward(model, ids)
    prompt, continued, leads = make.choose_greedy(model, ids, SIZES, config)

    # Compare with `by_hand`, float64, bfloat16 and the mistakes.
    hand = by_hand(config, stored, layers, rounding(name))
    assert torch.equal(make.forward(hand, ids)[0], logits), f"{name}: by_hand computes different logits"
    moved = {}
    for mistake, rounded in mistakes(name).items():
        moved[mistake] = make.relative(make.forward(by_hand(config, stored, layers, rounded), ids)[0], logits)
    assert min(moved.values()) > 2e-3, moved
    facts = {
        "sizes": vars(SIZES),
        "quantized_layers": len(layers),
        "rounding_margin_min": least,
        "greedy_prompt": prompt,
        "greedy_distinct": len(set(continued)),
        "greedy_margin_min": min(leads),
        "logits_abs_max": float(logits.abs().max()),
        "mean_nll": make.mean_nll(logits, ids),
        "hidden_rms": [float(hidden.pow(2).mean().sqrt()) for hidden in seen.hidden],
        "unquantized_relative_error": make.relative(make.forward(by_hand(config, weights, [], None), ids)[0], logits),
        "float64_relative_error": make.relative(make.forward(load(folder, torch.float64), ids)[0], logits),
        "bfloat16_relative_error": make.relative(make.forward(load(folder, torch.bfloat16), ids)[0], logits),
        "sensitivity": moved,
    }
    if name == "fp8_static":
        facts["clamped"] = clamped(stored, layers, model, ids)
        assert facts["clamped"] > 1e-3, facts
    # A different order of summation must not change any code.
    assert facts["float64_relative_error"] < 1e-5, facts
    assert all(torch.isfinite(hidden).all() for hidden in seen.hidden)

    golden = {
        "ids": torch.tensor(ids),
        "logits": logits,
        "greedy_prompt": torch.tensor(ids[:prompt]),
        "greedy": torch.tensor(continued),
        "greedy_margin": torch.tensor(leads),
    }
    golden |= {f"hidden.{layer}": hidden for layer, hidden in enumerate(seen.hidden)}
    metadata = {**versions(), "case": name, "seed": str(SEED), "compute": "float32, eager attention, cpu, no cache"}
    make.write_safetensors(golden, folder / "golden.safetensors", metadata)
    return facts


def versions():
    return {**make.VERSIONS, "compressed-tensors": version("compressed-tensors")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=GOLDEN / "compressed")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    make.assert_pairwise_different("compressed", SIZES)
    facts = {name: make_case(out, name, *rest) for name, *rest in cases()}
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name != "provenance.json")
    digests = {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    provenance = {**versions(), "seed": SEED, "cases": facts, "sha256": digests}
    (out / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")


logging.disable(logging.WARNING)
main()
