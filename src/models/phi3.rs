//! Phi-3, Phi-3.5, Phi-4, and other `Phi3ForCausalLM` models (arXiv 2404.14219; transformers `modeling_phi3.py`).
//!
//! Phi-3-small and the vision and MoE variants are other architectures, which inferno does not support.
//!
//! Differences from Llama: fused projections, a sliding window in some models, and LongRoPE in long-context models.
//! In Phi-4-mini, RoPE rotates only part of each head.

use anyhow::{Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use super::config::{self, CommonConfig};
use super::family::{Architecture, Family};
use super::standard::{self, StandardDecoder};
use crate::nn::attention::Attention;
use crate::nn::decoder_config::LayerInfo;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::mlp::{GatedMlp, Mlp};
use crate::text::quote;
use crate::weights::tensor_table::{
    Dimension::{Heads, Intermediate},
    Division::{Columns, Rows},
    Form::Matrix,
    Group, TensorRow, tensor,
};
use crate::weights::{TensorTable, Weights};

pub const FAMILY: Family = Family {
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    tensors: TensorTable(&[standard::DECODER, PROJECTIONS]),
    read,
};

/// The projections of attention and of the MLP. `qkv_proj` and `gate_up_proj` are fused.
const PROJECTIONS: &[TensorRow] = &[
    tensor("self_attn.qkv_proj", Group::Attention, Matrix, Rows(Heads)),
    tensor("self_attn.o_proj", Group::Attention, Matrix, Columns(Heads)),
    tensor("mlp.gate_up_proj", Group::Mlp, Matrix, Rows(Intermediate)),
    tensor("mlp.down_proj", Group::Mlp, Matrix, Columns(Intermediate)),
];

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(flatten)]
    common: CommonConfig,
}

fn read(mut json: Value) -> Result<Box<dyn Architecture>> {
    config::normalize_activation("phi3", &mut json, "hidden_act", &["silu"])?;
    config::reject_fields("phi3", &json, &["attention_bias", "layer_types"])?;
    for key in ["rope_scaling", "rope_parameters"] {
        rename_longrope(&mut json[key])?;
    }
    let defaults = json!({
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5
    });
    let config: Config = config::parse("phi3", json, defaults)?;
    config.common.validate_with_partial_rope()?;
    Ok(Box::new(config))
}

/// Renames the RoPE types `su` and `yarn` to `longrope`. Older Phi files use these names for LongRoPE.
/// In other model families, `yarn` is a different RoPE scaling method.
/// Fails for RoPE types other than `su`, `yarn`, `longrope` and `default`.
fn rename_longrope(scaling: &mut Value) -> Result<()> {
    let Some(fields) = scaling.as_object_mut() else { return Ok(()) };
    for key in ["type", "rope_type"] {
        match fields.get_mut(key) {
            Some(Value::String(name)) if name == "su" || name == "yarn" => *name = "longrope".into(),
            Some(Value::String(name)) if name != "longrope" && name != "default" => {
                bail!("RoPE scaling {} is not supported for phi3; supported: default, longrope", quote(name))
            }
            _ => {}
        }
    }
    Ok(())
}

impl StandardDecoder for Config {
    fn common(&self) -> &CommonConfig {
        &self.common
    }

    fn default_context(&self) -> usize {
        let max_context = self.common.max_position_embeddings;
        self.common.rope.short_context().map_or(max_context, |short| short.min(max_context))
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.common.sliding_layers()
    }

    fn load_sublayers(&self, weights: &Weights, layer: LayerInfo) -> Result<(Attention, Mlp)> {
        let attention = self.common.attention(layer.spec);
        let attention = Attention::load_fused(&weights.at("self_attn"), attention, layer.rotary)?;
        let mlp = GatedMlp::load_fused(&weights.at("mlp"), self.common.mlp())?;
        Ok((attention, Mlp::Gated(mlp)))
    }
}
