//! Gemma 2 (arXiv 2408.00118; transformers `modeling_gemma2.py`).
//!
//! Main differences from Llama:
//! - norms before and after both attention and the MLP
//! - GeGLU and scaled embeddings
//! - soft caps on attention scores and logits
//! - a sliding window on every second layer

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use serde_json::{Value, json};

use super::config::{self, CommonConfig};
use super::family::{Architecture, Family};
use super::standard::{self, StandardDecoder};
use crate::nn::attention::{Attention, AttentionConfig};
use crate::nn::decoder_config::{DecoderConfig, DecoderNames, LayerInfo};
use crate::nn::kv_cache::LayerSpec;
use crate::nn::mlp::Mlp;
use crate::nn::norm::{NormConfig, NormKind};
use crate::weights::tensor_table::{Division::Whole, Form::F32, Group, TensorRow, tensor};
use crate::weights::{TensorTable, Weights};

pub const FAMILY: Family = Family {
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    tensors: TensorTable(&[standard::DECODER, standard::ATTENTION, standard::MLP, NORMS]),
    read,
};

/// The norms that Gemma 2 and Gemma 3 have in addition to the norms of the standard decoder.
pub(super) const NORMS: &[TensorRow] = &[
    tensor("pre_feedforward_layernorm", Group::Norms, F32, Whole),
    tensor("post_feedforward_layernorm", Group::Norms, F32, Whole),
];

/// The tensor names of Gemma 2 and Gemma 3. Unlike in Llama, `post_attention_layernorm` is the norm of the attention
/// output, and `pre_feedforward_layernorm` is the norm before the MLP.
pub(super) const NAMES: DecoderNames = DecoderNames {
    attention_post_norm: Some("post_attention_layernorm"),
    mlp_norm: "pre_feedforward_layernorm",
    mlp_post_norm: Some("post_feedforward_layernorm"),
    ..DecoderNames::LLAMA
};

#[derive(Debug, Deserialize)]
struct Config {
    query_pre_attn_scalar: f64,
    attn_logit_softcapping: Option<f32>,
    final_logit_softcapping: Option<f32>,
    #[serde(flatten)]
    common: CommonConfig,
}

fn read(mut json: Value) -> Result<Box<dyn Architecture>> {
    config::normalize_activation("gemma2", &mut json, "hidden_activation", &["gelu_pytorch_tanh"])?;
    config::reject_fields("gemma2", &json, &["use_bidirectional_attention"])?;
    let defaults = json!({
        "max_position_embeddings": 8192, "head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": true,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0
    });
    let config: Config = config::parse("gemma2", json, defaults)?;
    config.common.validate()?;
    config::check_scale("query_pre_attn_scalar", Some(config.query_pre_attn_scalar as f32))?;
    config::check_scale("attn_logit_softcapping", config.attn_logit_softcapping)?;
    config::check_scale("final_logit_softcapping", config.final_logit_softcapping)?;
    Ok(Box::new(config))
}

/// Returns a decoder config with the options that Gemma 2 and Gemma 3 share: the tensor names, norms of the kind
/// [`NormKind::RmsOffByOne`], and embeddings that are multiplied by sqrt(hidden_size).
pub(super) fn decoder_config(
    common: &CommonConfig,
    weights: &Weights,
    layers: Vec<LayerSpec>,
    context: usize,
) -> Result<DecoderConfig> {
    // Like transformers, round the embedding scale to the compute dtype.
    let scale = Tensor::new((common.hidden_size as f64).sqrt() as f32, &Device::Cpu)?;
    let scale = scale.to_dtype(weights.dtype())?.to_dtype(DType::F32)?.to_scalar::<f32>()?;
    let config = common.decoder_config(layers, context)?;
    Ok(DecoderConfig { norm: norm(common), names: NAMES, embed_scale: scale, ..config })
}

pub(super) fn norm(common: &CommonConfig) -> NormConfig {
    NormConfig { kind: NormKind::RmsOffByOne, eps: common.rms_norm_eps }
}

impl StandardDecoder for Config {
    fn common(&self) -> &CommonConfig {
        &self.common
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.common.layers(|layer| self.common.window(layer, |layer| layer.is_multiple_of(2)))
    }

    fn load_sublayers(&self, weights: &Weights, layer: LayerInfo) -> Result<(Attention, Mlp)> {
        let attention = AttentionConfig {
            scale: self.query_pre_attn_scalar.powf(-0.5) as f32,
            softcap: self.attn_logit_softcapping,
            ..self.common.attention(layer.spec)
        };
        let attention = Attention::load(&weights.at("self_attn"), attention, layer.rotary)?;
        let mlp = self.common.load_mlp(weights)?;
        Ok((attention, Mlp::Gated(mlp)))
    }

    fn decoder_config(&self, weights: &Weights, context: usize) -> Result<DecoderConfig> {
        let config = decoder_config(&self.common, weights, self.layers(), context)?;
        Ok(DecoderConfig { final_softcap: self.final_logit_softcapping, ..config })
    }
}
