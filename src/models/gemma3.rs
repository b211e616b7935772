//! Gemma 3 (arXiv 2503.19786; transformers `modeling_gemma3.py`).
//!
//! Supports the text model, alone or from a multimodal checkpoint, but not images.
//!
//! Main differences from Gemma 2:
//! - q/k norms instead of the soft cap on attention scores
//! - five sliding-window layers per full-attention layer
//! - separate RoPE frequencies for sliding-window layers

use anyhow::{Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use super::config::{self, CommonConfig};
use super::family::{Architecture, Family};
use super::gemma2;
use super::standard::{self, StandardDecoder};
use crate::nn::attention::{Attention, AttentionConfig};
use crate::nn::checks::check_size;
use crate::nn::decoder_config::{DecoderConfig, LayerInfo};
use crate::nn::kv_cache::LayerSpec;
use crate::nn::mlp::Mlp;
use crate::nn::rope::{RopeConfig, RopeFrequencies, RopeLengths};
use crate::weights::tensor_table::TensorRow;
use crate::weights::{TensorTable, Weights};

const TENSORS: TensorTable =
    TensorTable(&[VISION, standard::DECODER, standard::ATTENTION, standard::QK_NORMS, standard::MLP, gemma2::NORMS]);

/// The modules for images. Their rows come first, because the other rows also match tensors of these modules.
const VISION: &[TensorRow] =
    &[TensorRow::UnloadedModule("vision_tower"), TensorRow::UnloadedModule("multi_modal_projector")];

pub const TEXT: Family =
    Family { model_type: "gemma3_text", architecture: "Gemma3ForCausalLM", tensors: TENSORS, read };
pub const MULTIMODAL: Family = Family {
    model_type: "gemma3",
    architecture: "Gemma3ForConditionalGeneration",
    tensors: TENSORS,
    read: read_multimodal,
};

/// The prefixes of tensor names in text-only checkpoints, in older multimodal checkpoints,
/// and in multimodal checkpoints that transformers 5 saved.
const PREFIXES: [&str; 3] = ["model", "language_model.model", "model.language_model"];

#[derive(Debug, Deserialize)]
struct Config {
    query_pre_attn_scalar: f64,
    sliding_window_pattern: usize,
    final_logit_softcapping: Option<f32>,
    /// The RoPE config of sliding-window layers. `common` contains the RoPE config of full-attention layers.
    sliding_rope: RopeConfig,
    #[serde(flatten)]
    common: CommonConfig,
}

fn read(mut json: Value) -> Result<Box<dyn Architecture>> {
    config::normalize_activation("gemma3", &mut json, "hidden_activation", &["gelu_pytorch_tanh"])?;
    config::reject_fields("gemma3", &json, &["use_bidirectional_attention", "attn_logit_softcapping"])?;
    split_rope(&mut json)?;
    let defaults = json!({
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
        "tie_word_embeddings": true, "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
        "rope_theta": 1e6
    });
    let config: Config = config::parse("gemma3", json, defaults)?;
    config.common.validate()?;
    config::check_scale("query_pre_attn_scalar", Some(config.query_pre_attn_scalar as f32))?;
    config::check_scale("final_logit_softcapping", config.final_logit_softcapping)?;
    check_size("sliding_window_pattern", config.sliding_window_pattern)?;
    config.sliding_frequencies(config.common.max_position_embeddings)?;
    Ok(Box::new(config))
}

fn read_multimodal(mut json: Value) -> Result<Box<dyn Architecture>> {
    let quantization = json["quantization_config"].take();
    let mut text = json["text_config"].take();
    let Some(fields) = text.as_object_mut() else { bail!("text_config is missing") };
    fields.insert("quantization_config".into(), quantization);
    read(text)
}

/// Splits the RoPE fields into two RoPE configs: the top-level fields keep the config of full-attention layers,
/// and `sliding_rope` gets the config of sliding-window layers.
///
/// Newer files have a `rope_parameters` object with one entry per layer type.
/// Older files have the fields `rope_theta`, `rope_scaling` and `rope_local_base_freq`.
/// Fails if `rope_parameters` has no entry for full-attention layers.
fn split_rope(json: &mut Value) -> Result<()> {
    let local = json["rope_local_base_freq"].as_f64().unwrap_or(10_000.0);
    let by_type = json["rope_parameters"].take();
    let parameters = |layer_type: &str| by_type.get(layer_type).cloned();
    if !by_type.is_null() && parameters("full_attention").is_none() {
        bail!("rope_parameters has no entry for full_attention");
    }
    // In older files, `rope_scaling` applies to full-attention layers only, so `sliding_rope` gets no scaling.
    let sliding = parameters("sliding_attention").filter(Value::is_object).unwrap_or_else(|| json!({}));
    json["sliding_rope"] = json!({"rope_theta": local, "rope_parameters": sliding});
    json["rope_parameters"] = parameters("full_attention").unwrap_or(Value::Null);
    Ok(())
}

impl Config {
    fn sliding_frequencies(&self, context: usize) -> Result<RopeFrequencies> {
        let lengths = RopeLengths { max_position_embeddings: self.common.max_position_embeddings, context };
        self.sliding_rope.frequencies(self.common.head_dim(), lengths, 10_000.0)
    }
}

impl StandardDecoder for Config {
    fn common(&self) -> &CommonConfig {
        &self.common
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let is_sliding = |layer: usize| !(layer + 1).is_multiple_of(self.sliding_window_pattern);
        self.common.layers(|layer| self.common.window(layer, is_sliding))
    }

    fn load_sublayers(&self, weights: &Weights, layer: LayerInfo) -> Result<(Attention, Mlp)> {
        let attention = AttentionConfig {
            scale: self.query_pre_attn_scalar.powf(-0.5) as f32,
            qk_norm: Some(gemma2::norm(&self.common)),
            ..self.common.attention(layer.spec)
        };
        let attention = Attention::load(&weights.at("self_attn"), attention, layer.rotary)?;
        let mlp = self.common.load_mlp(weights)?;
        Ok((attention, Mlp::Gated(mlp)))
    }

    fn decoder_config(&self, weights: &Weights, context: usize) -> Result<DecoderConfig> {
        let prefix = PREFIXES.into_iter().find(|prefix| weights.contains(&format!("{prefix}.embed_tokens.weight")));
        Ok(DecoderConfig {
            final_softcap: self.final_logit_softcapping,
            sliding_frequencies: Some(self.sliding_frequencies(context)?),
            prefix: prefix.unwrap_or("model").into(),
            ..gemma2::decoder_config(&self.common, weights, self.layers(), context)?
        })
    }
}
