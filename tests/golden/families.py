"""The golden cases of all families except gpt-oss and Llama: configs, weights, and mistakes that the tests must detect.
make.py uses this module.

Weights have the names used in hub repositories, with one tensor per expert matrix, not the names that transformers 5 saves.
`state` returns the parameters that transformers should load. `cases` in make.py defines the letters of the sizes. In this file,
M is the intermediate size of experts if it differs from F, and P is the number of positions of GPT-2.
"""
from types import SimpleNamespace

import torch

ROPE = {"rope_theta": 500.0}

def config_of(architecture, s, **rest):
    """Returns the config fields that all families but GPT-2 share."""
    heads = {} if s.H == s.K else {"num_key_value_heads": s.K}
    return {"architectures": [architecture], "vocab_size": s.V, "hidden_size": s.C, "intermediate_size": s.F, "num_hidden_layers": s.L, "num_attention_heads": s.H, **heads,
        "initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, **rest}

def cases():
    # All layers have a window, as in Mistral 7B v0.1. head_dim differs from C / H, as in Nemo. The decode graph supports this case.
    s = SimpleNamespace(C=40, F=56, L=4, H=6, K=2, D=16, W=11, V=97, T=53)
    yield "mistral", s, config_of("MistralForCausalLM", s, model_type="mistral", head_dim=s.D, hidden_act="silu", max_position_embeddings=240, rms_norm_eps=1e-05, sliding_window=s.W,
        tie_word_embeddings=False, torch_dtype="bfloat16", **ROPE), torch.bfloat16, ["model.safetensors"]
    # Qwen2.5 with a window on the upper layers, which no published model has. The decode graph supports this case.
    s = SimpleNamespace(C=96, F=40, L=4, H=6, K=2, D=16, W=9, V=109, T=51)
    yield "qwen2", s, config_of("Qwen2ForCausalLM", s, model_type="qwen2", hidden_act="silu", max_position_embeddings=240, rms_norm_eps=1e-06, use_sliding_window=True, sliding_window=s.W,
        max_window_layers=2, use_mrope=False, tie_word_embeddings=True, torch_dtype="bfloat16", **ROPE), torch.bfloat16, ["model.safetensors"]
    # Qwen3 as saved by transformers 5.
    s = SimpleNamespace(C=40, F=72, L=4, H=6, K=2, D=16, V=101, T=49)
    yield "qwen3", s, config_of("Qwen3ForCausalLM", s, model_type="qwen3", head_dim=s.D, hidden_act="silu", max_position_embeddings=240, rms_norm_eps=1e-06, attention_bias=False,
        use_sliding_window=False, sliding_window=None, max_window_layers=4, layer_types=["full_attention"] * s.L, tie_word_embeddings=False, dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}), torch.bfloat16, ["model.safetensors"]
    # Like Qwen3-30B-A3B, but the softmax is over all experts, and one layer has no experts.
    s = SimpleNamespace(C=40, F=72, L=3, H=8, K=2, D=10, E=7, N=5, M=24, V=103, T=47)
    yield "qwen3_moe", s, config_of("Qwen3MoeForCausalLM", s, model_type="qwen3_moe", head_dim=s.D, hidden_act="silu", max_position_embeddings=240, rms_norm_eps=1e-06, attention_bias=False,
        use_sliding_window=False, sliding_window=None, max_window_layers=3, num_experts=s.E, num_experts_per_tok=s.N, moe_intermediate_size=s.M, norm_topk_prob=False, decoder_sparse_step=1,
        mlp_only_layers=[1], router_aux_loss_coef=0.001, output_router_logits=False, tie_word_embeddings=False, rope_scaling=None, torch_dtype="bfloat16", **ROPE), torch.bfloat16, ["model.safetensors"]
    s = SimpleNamespace(C=32, F=20, L=4, H=15, K=3, D=6, E=7, N=2, V=89, T=45)
    yield "mixtral", s, config_of("MixtralForCausalLM", s, model_type="mixtral", head_dim=s.D, hidden_act="silu", max_position_embeddings=240, rms_norm_eps=1e-05, sliding_window=None,
        num_local_experts=s.E, num_experts_per_tok=s.N, router_aux_loss_coef=0.02, output_router_logits=False, tie_word_embeddings=False, torch_dtype="bfloat16", **ROPE), torch.bfloat16, ["model.safetensors"]
    # Phi-3-mini-128k with phi-3-medium's grouped heads. The context exceeds the original length, so the long factors apply. All layers have a window.
    s = SimpleNamespace(C=80, F=44, L=3, H=8, K=2, D=10, W=13, V=107, T=83)
    yield "phi3", s, config_of("Phi3ForCausalLM", s, model_type="phi3", hidden_act="silu", max_position_embeddings=240, original_max_position_embeddings=32, rms_norm_eps=1e-05,
        sliding_window=s.W, resid_pdrop=0.0, embd_pdrop=0.0, pad_token_id=None, tie_word_embeddings=False, torch_dtype="bfloat16", rope_theta=500.0, rope_scaling={"type": "longrope",
        "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0], "long_factor": [1.2, 1.9, 2.6, 3.9, 6.0]}), torch.bfloat16, ["model.safetensors"]
    # Phi-4-mini: RoPE on part of each head, tied embeddings. The context is within the original length, so the short factors apply.
    s = SimpleNamespace(C=48, F=28, L=4, H=6, K=2, D=8, V=113, T=45)
    yield "phi4", s, config_of("Phi3ForCausalLM", s, model_type="phi3", hidden_act="silu", max_position_embeddings=640, original_max_position_embeddings=160, rms_norm_eps=1e-05,
        sliding_window=None, resid_pdrop=0.0, embd_pdrop=0.0, pad_token_id=None, partial_rotary_factor=0.75, tie_word_embeddings=True, torch_dtype="bfloat16", rope_theta=500.0,
        rope_scaling={"type": "longrope", "short_factor": [1.3, 1.7, 2.2], "long_factor": [1.0, 3.0, 9.0]}), torch.bfloat16, ["model.safetensors"]
    s = SimpleNamespace(C=56, F=36, L=3, H=8, K=2, D=10, W=9, V=105, T=45)
    yield "gemma2", s, config_of("Gemma2ForCausalLM", s, model_type="gemma2", head_dim=s.D, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", max_position_embeddings=240,
        rms_norm_eps=1e-06, sliding_window=s.W, query_pre_attn_scalar=14, attn_logit_softcapping=3.0, final_logit_softcapping=2.0, attention_bias=False, pad_token_id=0,
        torch_dtype="bfloat16", **ROPE), torch.bfloat16, ["model.safetensors"]
    s = SimpleNamespace(C=48, F=36, L=4, H=6, K=2, D=14, W=7, V=115, T=51)
    yield "gemma3", s, config_of("Gemma3ForCausalLM", s, model_type="gemma3_text", head_dim=s.D, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=240, rms_norm_eps=1e-06,
        sliding_window=s.W, sliding_window_pattern=3, query_pre_attn_scalar=10, attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=False, pad_token_id=0,
        rope_local_base_freq=50.0, rope_scaling={"rope_type": "linear", "factor": 2.0}, torch_dtype="bfloat16", rope_theta=100.0), torch.bfloat16, ["model.safetensors"]
    # GPT-2 as in openai-community/gpt2: no prefix, F32.
    s = SimpleNamespace(C=40, F=44, L=3, H=5, K=5, D=8, P=163, V=97, T=47)
    yield "gpt2", s, {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": s.V, "n_embd": s.C, "n_layer": s.L, "n_head": s.H, "n_inner": s.F, "n_positions": s.P, "n_ctx": s.P,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "initializer_range": 0.02, "bos_token_id": 96, "eos_token_id": 96,
        "scale_attn_by_inverse_layer_idx": True}, torch.float32, ["model.safetensors"]
    # Four of the cases above, in sizes that the decode graph supports.
    s = SimpleNamespace(C=40, F=56, L=4, H=15, K=3, D=16, E=7, N=2, V=89, T=45)
    yield "mixtral_graph", s, config_of("MixtralForCausalLM", s, model_type="mixtral", head_dim=s.D, hidden_act="silu", max_position_embeddings=240, rms_norm_eps=1e-05, sliding_window=None,
        num_local_experts=s.E, num_experts_per_tok=s.N, tie_word_embeddings=False, torch_dtype="bfloat16", **ROPE), torch.bfloat16, ["model.safetensors"]
    s = SimpleNamespace(C=56, F=72, L=3, H=8, K=2, D=16, E=9, N=5, M=48, V=103, T=47)
    yield "qwen3_moe_graph", s, config_of("Qwen3MoeForCausalLM", s, model_type="qwen3_moe", head_dim=s.D, hidden_act="silu", max_position_embeddings=240, rms_norm_eps=1e-06, attention_bias=False,
        use_sliding_window=False, sliding_window=None, max_window_layers=3, num_experts=s.E, num_experts_per_tok=s.N, moe_intermediate_size=s.M, norm_topk_prob=False, decoder_sparse_step=1,
        mlp_only_layers=[1], tie_word_embeddings=False, rope_scaling=None, torch_dtype="bfloat16", **ROPE), torch.bfloat16, ["model.safetensors"]
    s = SimpleNamespace(C=56, F=40, L=3, H=8, K=2, D=16, W=9, V=105, T=45)
    yield "gemma2_graph", s, config_of("Gemma2ForCausalLM", s, model_type="gemma2", head_dim=s.D, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", max_position_embeddings=240,
        rms_norm_eps=1e-06, sliding_window=s.W, query_pre_attn_scalar=20, attn_logit_softcapping=3.0, final_logit_softcapping=2.0, attention_bias=False, pad_token_id=0,
        torch_dtype="bfloat16", **ROPE), torch.bfloat16, ["model.safetensors"]
    s = SimpleNamespace(C=24, F=40, L=3, H=2, K=1, D=256, W=7, V=115, T=51)
    yield "gemma3_graph", s, config_of("Gemma3ForCausalLM", s, model_type="gemma3_text", head_dim=s.D, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=240, rms_norm_eps=1e-06,
        sliding_window=s.W, sliding_window_pattern=3, query_pre_attn_scalar=200, attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=False, pad_token_id=0,
        rope_local_base_freq=50.0, rope_scaling={"rope_type": "linear", "factor": 2.0}, torch_dtype="bfloat16", rope_theta=100.0), torch.bfloat16, ["model.safetensors"]

# Sizes that may be equal, because one determines the other.
SAME = {"gemma3_graph": [{"G", "H"}, {"D", "KD"}], "qwen2": [{"C", "HD"}], "phi3": [{"C", "HD"}], "phi4": [{"C", "HD"}], "gpt2": [{"H", "K"}, {"HD", "KD"}, {"C", "HD"}, {"C", "KD"}]}

def make_weights(s, config, g):
    """Returns float32 tensors by their names in hub repositories."""
    family = config["model_type"]
    gemma, moe, tied = family.startswith("gemma"), family in ("qwen3_moe", "mixtral"), config.get("tie_word_embeddings", True)
    rand = lambda *shape, std: torch.randn(*shape, generator=g) * std
    w = {}
    def linear(name, o, i, gain, bias=False):
        w[name + ".weight"] = rand(o, i, std=gain * i**-0.5)
        if bias: w[name + ".bias"] = rand(o, std=0.4)
    def norm(name, size=s.C):
        weight = (1 + rand(size, std=0.35)).clamp(0.2, 2.0)
        w[name + ".weight"] = weight - 1 if gemma else weight
    if family == "gpt2": return gpt2_weights(s, rand)

    w["model.embed_tokens.weight"] = rand(s.V, s.C, std=0.15 if gemma else 0.3 if tied else 1.0)
    for i in range(s.L):
        layer = f"model.layers.{i}."
        norm(layer + "input_layernorm")
        bias = family == "qwen2"
        linear(layer + "self_attn.q_proj", s.H * s.D, s.C, 1.4, bias)
        linear(layer + "self_attn.k_proj", s.K * s.D, s.C, 0.9 if family == "phi3" else 1.4, bias)
        linear(layer + "self_attn.v_proj", s.K * s.D, s.C, 1.0, bias)
        linear(layer + "self_attn.o_proj", s.C, s.H * s.D, 1.0)
        if family in ("qwen3", "qwen3_moe", "gemma3_text"): norm(layer + "self_attn.q_norm", s.D); norm(layer + "self_attn.k_norm", s.D)
        norm(layer + "post_attention_layernorm")
        if gemma: norm(layer + "pre_feedforward_layernorm"); norm(layer + "post_feedforward_layernorm")
        if moe and i not in config.get("mlp_only_layers", []):
            block, names = (layer + "block_sparse_moe.", ("w1", "w3", "w2")) if family == "mixtral" else (layer + "mlp.", ("gate_proj", "up_proj", "down_proj"))
            linear(block + "gate", s.E, s.C, 1.5)
            for e in range(s.E):
                size = getattr(s, "M", s.F)
                for name, o, i_, gain in zip(names, (size, size, s.C), (s.C, s.C, size), (1.5, 1.5, 0.7)): linear(f"{block}experts.{e}.{name}", o, i_, gain)
        else:
            linear(layer + "mlp.gate_proj", s.F, s.C, 1.5)
            linear(layer + "mlp.up_proj", s.F, s.C, 1.5)
            linear(layer + "mlp.down_proj", s.C, s.F, 0.7)
        if family == "phi3":
            fuse = lambda to, *names, layer=layer: w.update({layer + to: torch.cat([w.pop(layer + name) for name in names])})
            fuse("self_attn.qkv_proj.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
            fuse("mlp.gate_up_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight")
    norm("model.norm")
    if tied and not gemma: w["model.norm.weight"] *= 2
    if not tied: linear("lm_head", s.V, s.C, 3.0)
    return w

def gpt2_weights(s, rand):
    w = {"wte.weight": rand(s.V, s.C, std=0.3), "wpe.weight": rand(s.P, s.C, std=0.2)}
    def conv(name, i, o, gain): w[name + ".weight"], w[name + ".bias"] = rand(i, o, std=gain * i**-0.5), rand(o, std=0.3)
    def norm(name): w[name + ".weight"], w[name + ".bias"] = (1 + rand(s.C, std=0.35)).clamp(0.2, 2.0), rand(s.C, std=0.3)
    for i in range(s.L):
        layer = f"h.{i}."
        norm(layer + "ln_1"); conv(layer + "attn.c_attn", s.C, 3 * s.C, 1.5); conv(layer + "attn.c_proj", s.C, s.C, 1.0)
        norm(layer + "ln_2"); conv(layer + "mlp.c_fc", s.C, s.F, 1.5); conv(layer + "mlp.c_proj", s.F, s.C, 0.7)
    norm("ln_f")
    return w

def state(config, weights):
    """Returns the parameters that transformers should load from the file."""
    family, out = config["model_type"], {}
    for name, t in weights.items():
        name = "transformer." + name if family == "gpt2" else name.replace("block_sparse_moe", "mlp")
        if ".experts." in name:
            place, rest = name.split(".experts.")
            e, matrix, _ = rest.split(".")
            out.setdefault((place, matrix), {})[int(e)] = t.float()
        else: out[name] = t.float()
    stacks = {key: torch.stack([out[key][e] for e in sorted(out[key])]) for key in [k for k in out if isinstance(k, tuple)]}
    for place, matrix in stacks:
        del out[place, matrix]
        gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        if matrix == down: out[place + ".experts.down_proj"] = stacks[place, down]
        if matrix == gate: out[place + ".experts.gate_up_proj"] = torch.cat([stacks[place, gate], stacks[place, up]], 1)
    embedding = out["transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"]
    if config.get("tie_word_embeddings", True): out["lm_head.weight"] = embedding
    return out

def mistakes_in_config(s, config):
    """Simulates mistakes in reading config.json. Returns {mistake: config entries to overwrite}."""
    family, wrong = config["model_type"], {}
    if family == "gpt2": return {"scale by layer": {"scale_attn_by_inverse_layer_idx": False}, "no scale": {"scale_attn_weights": False}, "gelu as relu": {"activation_function": "relu"}}
    if "rope_parameters" in config: wrong["rope_theta x 1.1"] = {"rope_parameters": {**config["rope_parameters"], "rope_theta": 550.0}}
    else: wrong["rope_theta x 1.1"] = {"rope_theta": config["rope_theta"] * 1.1}
    if hasattr(s, "W"): wrong |= {"window + 1": {"sliding_window": s.W + 1}, "window - 1": {"sliding_window": s.W - 1}}
    if hasattr(s, "N"): wrong["one expert fewer"] = {"num_experts_per_tok": s.N - 1}
    scaling = config.get("rope_scaling")
    if family == "qwen2": wrong |= {"one layer more slides": {"max_window_layers": 1}, "none slides": {"use_sliding_window": False}}
    if family == "qwen3_moe": wrong["shares of the chosen"] = {"norm_topk_prob": True}
    if family == "phi3":
        other = {"short_factor": scaling["long_factor"], "long_factor": scaling["short_factor"]}
        wrong |= {"short and long swapped": {"rope_scaling": {**scaling, **other}}, "attention_factor 1": {"rope_scaling": {**scaling, "attention_factor": 1.0}}}
    if family == "gemma2":
        wrong |= {"layer_types swapped": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "scale of D": {"query_pre_attn_scalar": s.D},
            "no cap on scores": {"attn_logit_softcapping": None}, "no cap on logits": {"final_logit_softcapping": None}, "silu": {"hidden_activation": "silu"}}
    if family == "gemma3_text":
        wrong |= {"another pattern": {"sliding_window_pattern": 2}, "scale of D": {"query_pre_attn_scalar": s.D}, "local base x 1.1": {"rope_local_base_freq": 55.0},
            "no rope scaling": {"rope_scaling": None}, "silu": {"hidden_activation": "silu"}}
    return wrong

def mistakes_in_layers(s, config, weights):
    """Simulates mistakes in the computation. Returns {mistake: function that changes a loaded decoder layer}."""
    family = config["model_type"]
    def zero(name): return lambda layer: [p.data.zero_() for n, p in layer.named_parameters() if n.endswith(name)]
    def swap(name, dim): return lambda layer: [p.data.copy_(p.data.unflatten(dim, (2, -1)).flip(dim).flatten(dim, dim + 1)) for n, p in layer.named_parameters() if n.endswith(name)]
    wrong = {f"no {b}": zero(b) for b in ("q_proj.bias", "k_proj.bias", "v_proj.bias", "c_attn.bias", "c_fc.bias", "c_proj.bias", "ln_1.bias", "ln_2.bias") if any(n.endswith(b) for n in weights)}
    # Gemma's norms store w - 1, so zero means a weight of one.
    wrong |= {f"no {n}": zero(n + ".weight") for n in ("q_norm", "k_norm", "pre_feedforward_layernorm", "post_feedforward_layernorm", "post_attention_layernorm") if any(n + ".weight" in name for name in weights)}
    if family == "phi3": wrong["gate and up swapped"] = swap("gate_up_proj.weight", 0)
    if family in ("qwen3_moe", "mixtral"): wrong["gate and up swapped"] = swap("experts.gate_up_proj", 1)
    return wrong
