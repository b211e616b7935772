//! Gemma 3, the text model alone or that of a multimodal checkpoint, whose pictures it does not see (arXiv 2503.19786;
//! transformers `modeling_gemma3.py`): Gemma 2's layers with norms of queries and keys in place of the soft cap on scores,
//! five sliding layers to a full one, and rotary frequencies of their own for the sliding ones.

use anyhow::{Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use super::common::{self, Common, Usual};
use super::gemma2;
use super::{Architecture, Family};
use crate::kernels::swiglu::Activation;
use crate::nn::attention::{Attention, AttentionConfig};
use crate::nn::decoder::{Frame, Place};
use crate::nn::kv_cache::LayerSpec;
use crate::nn::linear::Bias;
use crate::nn::mlp::Mlp;
use crate::nn::rope::{Lengths, RopeConfig};
use crate::weights::Weights;

pub const TEXT: Family = Family { model_type: "gemma3_text", architecture: "Gemma3ForCausalLM", read };
pub const MULTIMODAL: Family =
    Family { model_type: "gemma3", architecture: "Gemma3ForConditionalGeneration", read: read_multimodal };

/// Where the text model lies: alone, in a multimodal checkpoint, in one that transformers 5 has saved.
const PLACES: [&str; 3] = ["model", "language_model.model", "model.language_model"];

/// config.json.
#[derive(Debug, Deserialize)]
struct Config {
    query_pre_attn_scalar: f64,
    sliding_window_pattern: usize,
    final_logit_softcapping: Option<f32>,
    /// Of the sliding layers; `common` has the full ones'.
    sliding_rope: RopeConfig,
    #[serde(flatten)]
    common: Common,
}

fn read(mut json: Value) -> Result<Box<dyn Architecture>> {
    common::check_activation("gemma3", &json, "hidden_activation", &["gelu_pytorch_tanh"])?;
    common::refuse("gemma3", &json, &["use_bidirectional_attention", "attn_logit_softcapping"])?;
    split_rope(&mut json)?;
    let defaults = json!({
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
        "tie_word_embeddings": true, "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
        "rope_theta": 1e6
    });
    let config: Config = common::parse("gemma3", json, defaults)?;
    config.common.check()?;
    gemma2::check_positive("query_pre_attn_scalar", Some(config.query_pre_attn_scalar as f32))?;
    gemma2::check_positive("final_logit_softcapping", config.final_logit_softcapping)?;
    if config.sliding_window_pattern == 0 {
        bail!("sliding_window_pattern is 0");
    }
    Ok(Box::new(config))
}

fn read_multimodal(mut json: Value) -> Result<Box<dyn Architecture>> {
    let quantization = json["quantization_config"].take();
    let mut text = json["text_config"].take();
    let Some(fields) = text.as_object_mut() else { bail!("there is no text_config") };
    fields.insert("quantization_config".into(), quantization);
    read(text)
}

/// One base for full layers and one for sliding ones, in both spellings: `rope_theta`, `rope_scaling` and
/// `rope_local_base_freq`, or `rope_parameters` by type of layer.
fn split_rope(json: &mut Value) -> Result<()> {
    let local = json["rope_local_base_freq"].as_f64().unwrap_or(10_000.0);
    let by_type = json["rope_parameters"].take();
    let of = |layer_type: &str| by_type.get(layer_type).cloned();
    if !by_type.is_null() && of("full_attention").is_none() {
        bail!("rope_parameters has no full_attention");
    }
    // An older file's `rope_scaling` is for the full layers alone.
    let sliding = of("sliding_attention").filter(Value::is_object).unwrap_or_else(|| json!({}));
    json["sliding_rope"] = json!({"rope_theta": local, "rope_parameters": sliding});
    json["rope_parameters"] = of("full_attention").unwrap_or(Value::Null);
    Ok(())
}

impl Usual for Config {
    fn common(&self) -> &Common {
        &self.common
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let slides = |layer: usize| !(layer + 1).is_multiple_of(self.sliding_window_pattern);
        self.common.layers(|layer| self.common.window(layer, slides))
    }

    fn parts(&self, weights: &Weights, place: Place) -> Result<(Attention, Mlp)> {
        let bias = Bias::from(self.common.attention_bias);
        let attention = AttentionConfig {
            qkv_bias: bias,
            o_bias: bias,
            scale: self.query_pre_attn_scalar.powf(-0.5) as f32,
            qk_norm: Some(gemma2::norm(&self.common)),
            ..self.common.attention(place.spec)
        };
        let attention = Attention::load(&weights.at("self_attn"), attention, place.rotary)?;
        let mlp = self.common.mlp(weights)?;
        Ok((attention, Mlp::Gated(mlp.with(Activation::GeluTanh))))
    }

    fn frame(&self, weights: &Weights, context: usize) -> Result<Frame> {
        let model = PLACES.into_iter().find(|place| weights.contains(&format!("{place}.embed_tokens.weight")));
        let lengths = Lengths { max_position_embeddings: self.common.max_position_embeddings, context };
        Ok(Frame {
            final_softcap: self.final_logit_softcapping,
            sliding_frequencies: Some(self.sliding_rope.frequencies(self.common.head_dim(), lengths, 10_000.0)?),
            model: model.unwrap_or("model").into(),
            ..gemma2::frame(&self.common, weights, self.layers(), context)?
        })
    }
}
