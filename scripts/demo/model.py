"""gpt-oss in PyTorch, with the parameter names of transformers.

Outside of training, the model computes the same logits as transformers' GptOssForCausalLM, up to rounding.
The code differs in two ways:

- Every expert runs for every token, and experts that are not selected get a routing weight of 0.
  For a small model, running all experts is faster than selecting some.
- During training, the forward pass rounds expert weights to MXFP4. The model thus adapts to the rounding.

Dimensions: B batch, T tokens, S keys, H query heads, K KV heads, D head size, C hidden size, I intermediate size,
E experts, V vocabulary.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

# No two dimensions are equal, so confusing two of them usually causes a shape error.
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 2000,
    "hidden_size": 224,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "num_local_experts": 10,
    "num_experts_per_tok": 3,
    "experts_per_token": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 64,
    "initial_context_length": 512,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
    },
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "router_aux_loss_coef": 0.9,
    "output_router_logits": False,
    "tie_word_embeddings": False,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}

# ---- MXFP4: blocks of 32 values that share a power-of-two scale ----
# An FP4 value has a sign and one of eight magnitudes.

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4_round(weight):
    """Rounds a weight [..., in] to MXFP4. Returns FP4 values [..., in/32, 32] and scale exponents [..., in/32, 1]."""
    blocks = weight.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exponents = torch.ceil(torch.log2(largest / 6))  # the smallest scale that clips no value
    scaled = blocks * torch.exp2(-exponents)
    gap = 0.5 + 0.5 * (scaled.abs() >= 2) + (scaled.abs() >= 4)  # the distance between adjacent magnitudes
    return torch.round(scaled / gap) * gap, exponents


def mxfp4_dequantize(values, exponents):
    return (values * torch.exp2(exponents)).flatten(-2)


def mxfp4_pack(weight):
    """Packs a weight [..., in] into U8 blocks [..., in/32, 16], low nibble first, and E8M0 scales [..., in/32]."""
    values, exponents = mxfp4_round(weight)
    codes = torch.searchsorted(MAGNITUDES, values.abs()) + 8 * (values < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents[..., 0] + 127).to(torch.uint8)


def mxfp4_unpack(blocks, scales):
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    values = MAGNITUDES[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    return mxfp4_dequantize(values, scales[..., None].float() - 127)


def through_mxfp4(weight):
    """Rounds the weight to MXFP4. The backward pass ignores the rounding (straight-through estimator)."""
    return weight + (mxfp4_dequantize(*mxfp4_round(weight)) - weight).detach()


# ---- the layers ----


def yarn_frequencies(config):
    """Returns YaRN's rotation frequencies [D/2] in radians per token, and the factor that scales cos and sin."""
    yarn, dim, base = config.rope_scaling, config.head_dim, config.rope_theta
    frequencies = base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    context = yarn["original_max_position_embeddings"]

    def dimension_of(turns):
        """Returns the fractional index of the frequency that makes `turns` turns over the original context."""
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(dimension_of(yarn["beta_fast"]), 0), min(dimension_of(yarn["beta_slow"]), dim - 1)
    interpolate = ((torch.arange(dim // 2) - low) / (high - low)).clamp(0, 1)
    mixed = frequencies / yarn["factor"] * interpolate + frequencies * (1 - interpolate)
    return mixed, 0.1 * math.log(yarn["factor"]) + 1


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, H, K, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = nn.Linear(C, H * D)
        self.k_proj = nn.Linear(C, K * D)
        self.v_proj = nn.Linear(C, K * D)
        self.o_proj = nn.Linear(H * D, C)
        self.sinks = nn.Parameter(torch.zeros(H))

    def forward(self, x, cos, sin, masked, past):
        """`masked` [B or 1, 1, T, S] is true for masked keys.

        `past` is the list of cached keys and values, which this call extends. None disables the cache.
        """
        split = lambda y, heads: y.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)
        q = rotate(split(self.q_proj(x), self.heads), cos, sin).to(x.dtype)  # [B, H, T, D]
        k = rotate(split(self.k_proj(x), self.kv_heads), cos, sin).to(x.dtype)  # [B, K, T, D]
        v = split(self.v_proj(x), self.kv_heads)
        if past is not None:
            k, v = past[:] = [torch.cat([old, new], dim=2) for old, new in zip(past, (k, v))] if past else [k, v]
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = (q @ k.transpose(2, 3)).float() * self.head_dim**-0.5
        scores = scores.masked_fill(masked, -math.inf)
        sinks = self.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]  # a sink has no value vector
        return self.o_proj((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, E, I = config.hidden_size, config.num_local_experts, config.intermediate_size
        self.limit = config.swiglu_limit
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, C))  # rows: gate 0, up 0, gate 1, up 1, ...
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(E, 2 * I))
        self.down_proj = nn.Parameter(torch.empty(E, C, I))
        self.down_proj_bias = nn.Parameter(torch.zeros(E, C))

    def forward(self, x, mix):
        """`x` is [B, T, C]. `mix` [B, T, E] contains the routing weights, which are 0 for experts not selected."""
        through = through_mxfp4 if self.training else lambda weight: weight
        gate_up = F.linear(x, through(self.gate_up_proj).flatten(0, 1), self.gate_up_proj_bias.flatten())
        gate, up = gate_up.unflatten(-1, (mix.shape[-1], -1, 2)).unbind(-1)  # [B, T, E, I]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        act = gate * torch.sigmoid(1.702 * gate) * (up + 1) * mix[..., None]
        down = through(self.down_proj).transpose(0, 1).flatten(1)  # [C, E*I]
        return F.linear(act.flatten(-2), down) + mix @ self.down_proj_bias.to(mix.dtype)


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.chosen = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_local_experts)
        self.experts = Experts(config)

    def forward(self, x):
        scores = self.router(x).float()
        top, index = scores.topk(self.chosen, dim=-1)
        mix = torch.zeros_like(scores).scatter(-1, index, top.softmax(-1))
        # The load-balancing loss of Switch Transformers: 1 if all experts are used equally, and usually higher if the
        # router prefers some experts.
        used = (mix > 0).float().mean((0, 1)) / self.chosen
        balance = (used * scores.softmax(-1).mean((0, 1))).sum() * scores.shape[-1]
        return self.experts(x, mix.to(x.dtype)), balance


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x, cos, sin, masked, past=None):
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin, masked, past))
        y, balance = self.mlp(self.post_attention_layernorm(x))
        return x + self.dropout(y), balance


class GptOss(nn.Module):
    def __init__(self, config=CONFIG):
        super().__init__()
        self.config = config = SimpleNamespace(**config)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        frequencies, self.rope_factor = yarn_frequencies(config)
        self.register_buffer("frequencies", frequencies, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and "bias" not in name:
                into_residual = name.endswith(("o_proj.weight", "down_proj"))
                nn.init.normal_(parameter, std=0.04 / (2 * config.num_hidden_layers) ** 0.5 if into_residual else 0.04)

    def forward(self, ids, padding=None, cache=None):
        """Returns the logits [B, T, V] for ids [B, T], and the mean load-balancing loss of the layers.

        `padding` [B] is the number of padding positions at the start of each row.
        `cache` has one list of keys and values per layer, empty before the first call. None disables the cache.
        Each call extends the cache, so the next call needs only the new ids.
        """
        past = cache[0][0].shape[2] if cache and cache[0] else 0
        keys = torch.arange(past + ids.shape[1], device=ids.device)
        positions = keys[past:]
        angles = positions[:, None].float() * self.frequencies  # [T, D/2]
        cos, sin = angles.cos() * self.rope_factor, angles.sin() * self.rope_factor
        full = (keys > positions[:, None])[None, None]  # [1, 1, T, S]
        if padding is not None:
            full = full | (keys < padding[:, None])[:, None, None]
        sliding = full | (keys <= positions[:, None] - self.config.sliding_window)
        x = self.model.embed_tokens(ids)
        balance = 0
        for i, layer in enumerate(self.model.layers):
            masked = sliding if self.config.layer_types[i] == "sliding_attention" else full
            x, used = layer(x, cos, sin, masked, cache[i] if cache else None)
            balance = balance + used / len(self.model.layers)
        return self.lm_head(self.model.norm(x)), balance

    @torch.no_grad()
    def generate(self, prompts, stop_ids, max_tokens):
        """Completes prompts (lists of ids) greedily in one batch. Returns the ids generated before a stop token."""
        device, longest = self.frequencies.device, max(map(len, prompts))
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        stops = torch.tensor(stop_ids, device=device)
        cache = [[] for _ in self.model.layers]
        written, done = [], torch.zeros(len(prompts), dtype=torch.bool, device=device)
        while len(written) < max_tokens and not done.all():
            ids = self(ids, padding, cache)[0][:, -1:].argmax(-1)
            ids[done] = stops[0]
            done = done | torch.isin(ids[:, 0], stops)
            written.append(ids)
        answers = torch.cat(written, dim=1).tolist()
        end = lambda row: next((i for i, id in enumerate(row) if id in stop_ids), len(row))
        return [row[: end(row)] for row in answers]


# ---- the snapshot ----


def snapshot_tensors(model):
    """Returns the tensors of a snapshot: expert matrices packed as MXFP4, everything else in BF16."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().float().cpu()
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors[name + "_blocks"], tensors[name + "_scales"] = mxfp4_pack(tensor)
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def load_snapshot(folder, device="cpu"):
    """Loads a snapshot that train.py wrote. Dequantizes the experts and computes in f32."""
    folder = Path(folder)
    model = GptOss(json.loads((folder / "config.json").read_text()))
    state = {}
    for name, tensor in (tensors := load_file(folder / "model.safetensors")).items():
        if name.endswith("_blocks"):
            name = name.removesuffix("_blocks")
            state[name] = mxfp4_unpack(tensor, tensors[name + "_scales"])
        elif not name.endswith("_scales"):
            state[name] = tensor.float()
    model.load_state_dict(state)
    return model.to(device).eval()
