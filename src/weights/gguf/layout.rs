//! The tensor names of an architecture and the transformations that llama.cpp's converter applied to the tensors.
//!
//! Source: ggml-org/llama.cpp, `convert_hf_to_gguf.py` and `gguf-py/gguf/tensor_mapping.py`.

use anyhow::Result;
use serde_json::{Map, Value};

use super::keys::ArchitectureKeys;
use super::tensor_names::{LayerTensorName, ROPE_FACTOR_TENSORS};

/// A function that adds, changes or removes the config.json fields that depend on the architecture.
pub type AddFields = fn(&ArchitectureKeys, &mut Map<String, Value>) -> Result<()>;

/// The differences between the GGUF files of one architecture and a Hugging Face checkpoint.
pub struct ArchitectureLayout {
    /// The value of `general.architecture`.
    pub name: &'static str,
    /// The value of `model_type` in config.json, unless `add_fields` replaces it.
    pub model_type: &'static str,
    /// Whether the rows of q_proj and k_proj are permuted within each head in the GGUF file.
    /// The permutation makes the two rows of each RoPE pair adjacent.
    /// In the Hugging Face checkpoint, the two rows of a RoPE pair are half a head apart.
    pub is_permuted: bool,
    /// Whether the file stores each norm weight as the Hugging Face value plus 1.
    pub has_norms_plus_one: bool,
    /// Whether the Hugging Face checkpoint stores layer matrices transposed, as in the `Conv1D` layers of GPT-2.
    pub is_transposed: bool,
    pub outer: &'static OuterNames,
    /// The GGUF and Hugging Face names of layer tensors. Names in `parts` take precedence over `standard_parts`.
    pub parts: &'static [(&'static str, &'static str)],
    /// Either [`STANDARD_PARTS`], or an empty list if `parts` names all layer tensors.
    pub standard_parts: &'static [(&'static str, &'static str)],
    /// The GGUF names of the layer tensors that may have a bias.
    pub biased: &'static [&'static str],
    pub add_fields: AddFields,
}

/// The Hugging Face names of the embeddings, the layers and the final norm.
pub struct OuterNames {
    pub embed_tokens: &'static str,
    /// The name of the learned position embeddings, if the architecture has them.
    pub embed_positions: Option<&'static str>,
    pub layers: &'static str,
    pub norm: &'static str,
    pub has_norm_bias: bool,
}

/// The GGUF and Hugging Face names of layer tensors in Llama and most other architectures.
pub const STANDARD_PARTS: &[(&str, &str)] = &[
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

/// The kind of a tensor in a GGUF file.
#[derive(Debug, PartialEq, Eq)]
pub enum TensorKind {
    /// A weight or bias outside the routed experts. Holds the Hugging Face name of the tensor.
    Tensor(String),
    /// A tensor with weights or biases of routed experts.
    Expert,
    /// A tensor that is not a weight: RoPE factors, which belong in config.json, or the obsolete `attn_rot_embd`.
    NotAWeight,
}

impl ArchitectureLayout {
    /// Returns the kind of a tensor, or `None` if the architecture has no tensor of this name.
    /// Expert tensors, RoPE factors and `attn_rot_embd` have a kind in every architecture.
    pub fn kind(&self, name: &str) -> Option<TensorKind> {
        let tensor = |name: &str, suffix: &str| Some(TensorKind::Tensor(format!("{name}.{suffix}")));
        if ROPE_FACTOR_TENSORS.contains(&name) {
            return Some(TensorKind::NotAWeight);
        }
        let Some(LayerTensorName { layer, part, suffix }) = LayerTensorName::parse(name) else {
            let (part, suffix) = name.rsplit_once('.')?;
            return match (part, suffix) {
                ("token_embd", "weight") => tensor(self.outer.embed_tokens, suffix),
                ("position_embd", "weight") => tensor(self.outer.embed_positions?, suffix),
                ("output_norm", "weight") => tensor(self.outer.norm, suffix),
                ("output_norm", "bias") if self.outer.has_norm_bias => tensor(self.outer.norm, suffix),
                ("output", "weight") => tensor("lm_head", suffix),
                _ => None,
            };
        };
        // Old Mixtral files have one tensor per expert, such as `ffn_gate.7`. New files stack all experts.
        let (stem, expert) = part.split_once('.').unwrap_or((part, ""));
        if part.ends_with("_exps") || (expert.parse::<usize>().is_ok() && stem.starts_with("ffn_")) {
            return Some(TensorKind::Expert);
        }
        if part == "attn_rot_embd" {
            return Some(TensorKind::NotAWeight);
        }
        let (_, module) = self.parts.iter().chain(self.standard_parts).find(|(gguf, _)| *gguf == part)?;
        match suffix {
            "weight" if part == "attn_sinks" => {
                Some(TensorKind::Tensor(format!("{}.{layer}.{module}", self.outer.layers)))
            }
            "bias" if !self.biased.contains(&part) => None,
            "weight" | "bias" => tensor(&format!("{}.{layer}.{module}", self.outer.layers), suffix),
            _ => None,
        }
    }
}
