//! The tensor names of an architecture and the transformations that llama.cpp's converter applied to the tensors.
//!
//! Source: ggml-org/llama.cpp, `convert_hf_to_gguf.py` and `gguf-py/gguf/tensor_mapping.py`.

use anyhow::Result;
use serde_json::{Map, Value};

use super::keys::ArchitectureKeys;
use crate::weights::gguf::tensor_names::{LayerTensorName, ROPE_FACTOR_TENSORS};

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
    /// The GGUF and Hugging Face names of the modules in a layer. Names in `modules` take precedence over `standard_modules`.
    pub modules: &'static [(&'static str, &'static str)],
    /// Either [`STANDARD_MODULES`], or an empty list if `modules` names all modules in a layer.
    pub standard_modules: &'static [(&'static str, &'static str)],
    /// The GGUF names of the modules that may have a bias.
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

/// The GGUF and Hugging Face names of the modules in a layer of Llama and most other architectures.
pub const STANDARD_MODULES: &[(&str, &str)] = &[
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

/// What a tensor of a GGUF file is for the model.
#[derive(Debug, PartialEq, Eq)]
pub enum GgufTensorKind {
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
    pub fn kind(&self, name: &str) -> Option<GgufTensorKind> {
        let tensor = |name: &str, suffix: &str| Some(GgufTensorKind::Tensor(format!("{name}.{suffix}")));
        if ROPE_FACTOR_TENSORS.contains(&name) {
            return Some(GgufTensorKind::NotAWeight);
        }
        let Some(LayerTensorName { layer, module, suffix }) = LayerTensorName::parse(name) else {
            let (module, suffix) = name.rsplit_once('.')?;
            return match (module, suffix) {
                ("token_embd", "weight") => tensor(self.outer.embed_tokens, suffix),
                ("position_embd", "weight") => tensor(self.outer.embed_positions?, suffix),
                ("output_norm", "weight") => tensor(self.outer.norm, suffix),
                ("output_norm", "bias") if self.outer.has_norm_bias => tensor(self.outer.norm, suffix),
                ("output", "weight") => tensor("lm_head", suffix),
                _ => None,
            };
        };
        // Old Mixtral files have one tensor per expert, such as `ffn_gate.7`. New files stack all experts.
        let (stem, expert) = module.split_once('.').unwrap_or((module, ""));
        if module.ends_with("_exps") || (expert.parse::<usize>().is_ok() && stem.starts_with("ffn_")) {
            return Some(GgufTensorKind::Expert);
        }
        if module == "attn_rot_embd" {
            return Some(GgufTensorKind::NotAWeight);
        }
        let (_, hf_module) = self.modules.iter().chain(self.standard_modules).find(|(gguf, _)| *gguf == module)?;
        match suffix {
            "weight" if module == "attn_sinks" => {
                Some(GgufTensorKind::Tensor(format!("{}.{layer}.{hf_module}", self.outer.layers)))
            }
            "bias" if !self.biased.contains(&module) => None,
            "weight" | "bias" => tensor(&format!("{}.{layer}.{hf_module}", self.outer.layers), suffix),
            _ => None,
        }
    }
}
