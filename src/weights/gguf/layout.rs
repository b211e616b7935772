//! The tensor names of one architecture, and what the converter did to its tensors.
//!
//! Source: ggml-org/llama.cpp, `convert_hf_to_gguf.py` and `gguf-py/gguf/tensor_mapping.py`.

use anyhow::Result;
use serde_json::{Map, Value};

use super::keys::ArchitectureKeys;
use super::tensor_names::{LayerTensorName, ROPE_FACTOR_TENSORS};

/// Adds the config.json fields that one architecture has beyond the common ones.
pub type AddFields = fn(&ArchitectureKeys, &mut Map<String, Value>) -> Result<()>;

/// How the files of one architecture differ from a Hugging Face checkpoint.
pub struct Layout {
    /// The value of `general.architecture`.
    pub name: &'static str,
    /// The value of `model_type` in config.json.
    pub model_type: &'static str,
    /// Whether the rows of q and k are interleaved, so that the two rows of a rotated pair are neighbors.
    pub permuted: bool,
    /// Whether norms are stored as w + 1.
    pub norms_plus_one: bool,
    /// Whether matrices are transposed: GPT-2's `Conv1D`.
    pub transposed: bool,
    /// The Hugging Face names outside of layers.
    pub outer: &'static OuterNames,
    /// Hugging Face names of a layer's tensors, where they differ from [`STANDARD_PARTS`].
    pub parts: &'static [(&'static str, &'static str)],
    /// The parts that may have a bias.
    pub biased: &'static [&'static str],
    /// Adds this architecture's own fields to config.json.
    pub add_fields: AddFields,
}

/// Hugging Face names of the embedding, the layers, and the last norm.
pub struct OuterNames {
    pub embed_tokens: &'static str,
    pub layers: &'static str,
    pub norm: &'static str,
}

/// The names of a layer's tensors in Llama and most others, with a dense MLP or a router.
const STANDARD_PARTS: &[(&str, &str)] = &[
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
/// What a tensor in a file stands for.
#[derive(Debug, PartialEq, Eq)]
pub enum Role {
    /// A tensor of the model, with its Hugging Face name.
    Tensor(String),
    /// A part of a layer's routed experts, which several tensors form together.
    Expert,
    /// Not a weight: RoPE factors, which config.json holds, or an obsolete tensor.
    NotAWeight,
}

impl Layout {
    /// Returns what a tensor stands for. `None` for a tensor that this architecture does not have.
    pub fn role(&self, name: &str) -> Option<Role> {
        let tensor = |name: &str, suffix: &str| Some(Role::Tensor(format!("{name}.{suffix}")));
        if ROPE_FACTOR_TENSORS.contains(&name) {
            return Some(Role::NotAWeight);
        }
        let Some(LayerTensorName { layer, part, suffix }) = LayerTensorName::parse(name) else {
            let (part, suffix) = name.rsplit_once('.')?;
            return match (part, suffix) {
                ("token_embd", "weight") => tensor(self.outer.embed_tokens, suffix),
                ("position_embd", "weight") if self.transposed => tensor("transformer.wpe", suffix),
                ("output_norm", "weight") => tensor(self.outer.norm, suffix),
                ("output_norm", "bias") if self.transposed => tensor(self.outer.norm, suffix),
                ("output", "weight") => tensor("lm_head", suffix),
                _ => None,
            };
        };
        // Old files of Mixtral have one tensor per expert, `ffn_gate.7`; new ones have all experts in one.
        let (stem, expert) = part.split_once('.').unwrap_or((part, ""));
        if part.ends_with("_exps") || (expert.parse::<usize>().is_ok() && stem.starts_with("ffn_")) {
            return Some(Role::Expert);
        }
        if part == "attn_rot_embd" {
            return Some(Role::NotAWeight);
        }
        let standard = if self.transposed { &[] } else { STANDARD_PARTS };
        let (_, module) = self.parts.iter().chain(standard).find(|(gguf, _)| *gguf == part)?;
        match suffix {
            "weight" if part == "attn_sinks" => Some(Role::Tensor(format!("{}.{layer}.{module}", self.outer.layers))),
            "bias" if !self.biased.contains(&part) => None,
            "weight" | "bias" => tensor(&format!("{}.{layer}.{module}", self.outer.layers), suffix),
            _ => None,
        }
    }
}
