//! What each architecture's tensors are called in GGUF files, and what was done to them when the file was made
//! (ggml-org/llama.cpp, `convert_hf_to_gguf.py` and `gguf-py/gguf/tensor_mapping.py`).

use anyhow::Result;

use super::config;
use crate::error::Error;

/// What is peculiar to the files of one architecture.
pub struct Layout {
    /// `general.architecture`.
    pub name: &'static str,
    /// `model_type` of config.json.
    pub model_type: &'static str,
    /// Whether rows of q and k were put in the order of rotated pairs.
    pub permuted: bool,
    /// Whether norms are stored as w + 1.
    pub norms_plus_one: bool,
    /// Whether matrices were turned round, GPT-2's `Conv1D`.
    pub transposed: bool,
    /// Where layers are, what is around them.
    pub outer: &'static Outer,
    /// Parts of a layer that have other names than [`USUAL`].
    parts: &'static [(&'static str, &'static str)],
    /// Parts that may have a bias.
    biased: &'static [&'static str],
    /// Fields of config.json beyond those that all have.
    pub config: config::Fields,
}

pub struct Outer {
    pub embed_tokens: &'static str,
    pub layers: &'static str,
    pub norm: &'static str,
}

const OUTER: Outer = Outer { embed_tokens: "model.embed_tokens", layers: "model.layers", norm: "model.norm" };
const GPT2: Outer = Outer { embed_tokens: "transformer.wte", layers: "transformer.h", norm: "transformer.ln_f" };

/// Of layers as in Llama; with one MLP or routed ones.
const USUAL: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
];
const Q_NORM: (&str, &str) = ("attn_q_norm", "self_attn.q_norm");
const K_NORM: (&str, &str) = ("attn_k_norm", "self_attn.k_norm");
const GEMMA: [(&str, &str); 3] = [
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

const ATTENTION: &[&str] = &["attn_q", "attn_k", "attn_v", "attn_output"];

const LLAMA: Layout = Layout {
    name: "llama",
    model_type: "llama",
    permuted: true,
    norms_plus_one: false,
    transposed: false,
    outer: &OUTER,
    parts: &[],
    biased: &["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"],
    config: config::llama,
};

/// A plain layout to start from: rows as they were, no biases.
const PLAIN: Layout = Layout { permuted: false, biased: &[], config: config::nothing, ..LLAMA };

/// Every architecture whose files can be read.
const LAYOUTS: &[Layout] = &[
    LLAMA,
    Layout { name: "mistral", ..LLAMA },
    Layout {
        name: "qwen2",
        model_type: "qwen2",
        biased: &["attn_q", "attn_k", "attn_v"],
        config: config::sliding,
        ..PLAIN
    },
    Layout {
        name: "qwen3",
        model_type: "qwen3",
        parts: &[Q_NORM, K_NORM],
        biased: ATTENTION,
        config: config::sliding,
        ..PLAIN
    },
    Layout {
        name: "qwen3moe",
        model_type: "qwen3_moe",
        parts: &[Q_NORM, K_NORM],
        biased: ATTENTION,
        config: config::qwen3_moe,
        ..PLAIN
    },
    Layout {
        name: "phi3",
        model_type: "phi3",
        parts: &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")],
        config: config::phi3,
        ..PLAIN
    },
    Layout {
        name: "gemma2",
        model_type: "gemma2",
        norms_plus_one: true,
        parts: &GEMMA,
        config: config::gemma2,
        ..PLAIN
    },
    Layout {
        name: "gemma3",
        model_type: "gemma3_text",
        norms_plus_one: true,
        parts: &[GEMMA[0], GEMMA[1], GEMMA[2], Q_NORM, K_NORM],
        config: config::gemma3,
        ..PLAIN
    },
    Layout {
        name: "gpt2",
        model_type: "gpt2",
        transposed: true,
        outer: &GPT2,
        parts: &[
            ("attn_norm", "ln_1"),
            ("attn_qkv", "attn.c_attn"),
            ("attn_output", "attn.c_proj"),
            ("ffn_norm", "ln_2"),
            ("ffn_up", "mlp.c_fc"),
            ("ffn_down", "mlp.c_proj"),
        ],
        biased: &["attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down"],
        config: config::gpt2,
        ..PLAIN
    },
    Layout {
        name: "gpt-oss",
        model_type: "gpt_oss",
        parts: &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("attn_sinks", "self_attn.sinks"),
            ("ffn_gate_inp", "mlp.router"),
        ],
        biased: &["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp"],
        config: config::gpt_oss,
        ..PLAIN
    },
];

/// Tensors that config.json says otherwise, and those that no longer mean anything.
const BESIDE: &[&str] = &["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// What a tensor of a file is in the model.
#[derive(Debug, PartialEq, Eq)]
pub enum Role {
    /// One of the model's, by this name.
    Tensor(String),
    /// Of a layer's routed experts, which are put together from several.
    Expert,
    /// Not one of the model's tensors.
    Beside,
}

/// A name of the form `blk.N.part.weight`.
pub struct InLayer<'n> {
    pub layer: usize,
    pub part: &'n str,
    pub suffix: &'n str,
}

impl<'n> InLayer<'n> {
    pub fn parse(name: &'n str) -> Option<Self> {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let (part, suffix) = rest.rsplit_once('.')?;
        Some(Self { layer: layer.parse().ok()?, part, suffix })
    }
}

impl Layout {
    /// The layout of an architecture. Fails with [`Error::UnsupportedArchitecture`] for one that is not listed.
    pub fn find(name: &str) -> Result<&'static Self> {
        LAYOUTS.iter().find(|layout| layout.name == name).ok_or_else(|| {
            let supported = LAYOUTS.iter().map(|layout| layout.name).collect::<Vec<_>>().join(", ");
            let supported = format!("{supported} (of GGUF files)");
            Error::UnsupportedArchitecture { found: name.to_string(), supported }.into()
        })
    }

    /// What a tensor is in the model; none for one that has no place in this architecture.
    pub fn role(&self, name: &str) -> Option<Role> {
        let of = |name: &str, suffix: &str| Some(Role::Tensor(format!("{name}.{suffix}")));
        if BESIDE.contains(&name) {
            return Some(Role::Beside);
        }
        let Some(InLayer { layer, part, suffix }) = InLayer::parse(name) else {
            let (part, suffix) = name.rsplit_once('.')?;
            return match (part, suffix) {
                ("token_embd", "weight") => of(self.outer.embed_tokens, suffix),
                ("position_embd", "weight") if self.transposed => of("transformer.wpe", suffix),
                ("output_norm", "weight") => of(self.outer.norm, suffix),
                ("output_norm", "bias") if self.transposed => of(self.outer.norm, suffix),
                ("output", "weight") => of("lm_head", suffix),
                _ => None,
            };
        };
        // Old files of Mixtral have `ffn_gate.7` for each expert, new ones a stack.
        let (stem, expert) = part.split_once('.').unwrap_or((part, ""));
        if part.ends_with("_exps") || (expert.parse::<usize>().is_ok() && stem.starts_with("ffn_")) {
            return Some(Role::Expert);
        }
        if part == "attn_rot_embd" {
            return Some(Role::Beside);
        }
        let usual = if self.transposed { &[] } else { USUAL };
        let (_, named) = self.parts.iter().chain(usual).find(|(ours, _)| *ours == part)?;
        match suffix {
            "weight" if part == "attn_sinks" => Some(Role::Tensor(format!("{}.{layer}.{named}", self.outer.layers))),
            "bias" if !self.biased.contains(&part) => None,
            "weight" | "bias" => of(&format!("{}.{layer}.{named}", self.outer.layers), suffix),
            _ => None,
        }
    }
}
