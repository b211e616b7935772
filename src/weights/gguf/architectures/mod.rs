//! The supported architectures of GGUF files, and how their files differ from Hugging Face checkpoints.
//!
//! - `layout`: the names of the tensors, and the transformations of their values and rows
//! - `keys`, `config_fields`: the metadata keys of an architecture, and the config.json fields that depend on it

mod config_fields;
mod keys;
mod layout;

use anyhow::Result;
use config_fields as fields;
pub use keys::{ArchitectureKeys, widen};
pub use layout::{ArchitectureLayout, GgufTensorKind};
use layout::{OuterNames, STANDARD_MODULES};

use crate::error::Error;

const OUTER: OuterNames = OuterNames {
    embed_tokens: "model.embed_tokens",
    embed_positions: None,
    layers: "model.layers",
    norm: "model.norm",
    has_norm_bias: false,
};
const GPT2_OUTER: OuterNames = OuterNames {
    embed_tokens: "transformer.wte",
    embed_positions: Some("transformer.wpe"),
    layers: "transformer.h",
    norm: "transformer.ln_f",
    has_norm_bias: true,
};

const Q_NORM: (&str, &str) = ("attn_q_norm", "self_attn.q_norm");
const K_NORM: (&str, &str) = ("attn_k_norm", "self_attn.k_norm");
const GEMMA: [(&str, &str); 3] = [
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

const ATTENTION: &[&str] = &["attn_q", "attn_k", "attn_v", "attn_output"];

const LLAMA: ArchitectureLayout = ArchitectureLayout {
    name: "llama",
    model_type: "llama",
    is_permuted: true,
    has_norms_plus_one: false,
    is_transposed: false,
    outer: &OUTER,
    modules: &[],
    standard_modules: STANDARD_MODULES,
    biased: &["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"],
    add_fields: fields::llama,
};

/// The base of most layouts: [`LLAMA`] without permuted rows, biases and architecture-specific config fields.
const PLAIN: ArchitectureLayout =
    ArchitectureLayout { is_permuted: false, biased: &[], add_fields: fields::none, ..LLAMA };

/// The supported architectures, in the order in which error messages list them.
const LAYOUTS: &[ArchitectureLayout] = &[
    LLAMA,
    ArchitectureLayout { name: "mistral", ..LLAMA },
    ArchitectureLayout {
        name: "qwen2",
        model_type: "qwen2",
        biased: &["attn_q", "attn_k", "attn_v"],
        add_fields: fields::sliding_window,
        ..PLAIN
    },
    ArchitectureLayout {
        name: "qwen3",
        model_type: "qwen3",
        modules: &[Q_NORM, K_NORM],
        biased: ATTENTION,
        add_fields: fields::sliding_window,
        ..PLAIN
    },
    ArchitectureLayout {
        name: "qwen3moe",
        model_type: "qwen3_moe",
        modules: &[Q_NORM, K_NORM],
        biased: ATTENTION,
        add_fields: fields::qwen3_moe,
        ..PLAIN
    },
    ArchitectureLayout {
        name: "phi3",
        model_type: "phi3",
        modules: &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")],
        add_fields: fields::phi3,
        ..PLAIN
    },
    ArchitectureLayout {
        name: "gemma2",
        model_type: "gemma2",
        has_norms_plus_one: true,
        modules: &GEMMA,
        add_fields: fields::gemma2,
        ..PLAIN
    },
    ArchitectureLayout {
        name: "gemma3",
        model_type: "gemma3_text",
        has_norms_plus_one: true,
        modules: &[GEMMA[0], GEMMA[1], GEMMA[2], Q_NORM, K_NORM],
        add_fields: fields::gemma3,
        ..PLAIN
    },
    ArchitectureLayout {
        name: "gpt2",
        model_type: "gpt2",
        is_transposed: true,
        outer: &GPT2_OUTER,
        modules: &[
            ("attn_norm", "ln_1"),
            ("attn_qkv", "attn.c_attn"),
            ("attn_output", "attn.c_proj"),
            ("ffn_norm", "ln_2"),
            ("ffn_up", "mlp.c_fc"),
            ("ffn_down", "mlp.c_proj"),
        ],
        standard_modules: &[],
        biased: &["attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down"],
        add_fields: fields::gpt2,
        ..PLAIN
    },
    ArchitectureLayout {
        name: "gpt-oss",
        model_type: "gpt_oss",
        modules: &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("attn_sinks", "self_attn.sinks"),
            ("ffn_gate_inp", "mlp.router"),
        ],
        biased: &["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp"],
        add_fields: fields::gpt_oss,
        ..PLAIN
    },
];

/// Returns the layout of the architecture `name`. Fails with [`Error::UnsupportedArchitecture`] if `name` is unknown.
pub fn find(name: &str) -> Result<&'static ArchitectureLayout> {
    LAYOUTS.iter().find(|layout| layout.name == name).ok_or_else(|| {
        let supported = LAYOUTS.iter().map(|layout| layout.name).collect::<Vec<_>>().join(", ");
        let supported = format!("{supported} (in GGUF files)");
        Error::UnsupportedArchitecture { found: name.to_string(), supported }.into()
    })
}
