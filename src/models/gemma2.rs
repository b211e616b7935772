//! Gemma 2 (arXiv 2408.00118; transformers `modeling_gemma2.py`): norms before and after attention and MLP, GeGLU, soft caps
//! on scores and logits, a sliding window on every other layer, scaled embeddings.

use anyhow::{Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use super::common::{self, Common, Usual};
use super::{Architecture, Family};
use crate::kernels::swiglu::Activation;
use crate::nn::attention::{Attention, AttentionConfig};
use crate::nn::decoder::{Frame, Names, Place};
use crate::nn::kv_cache::LayerSpec;
use crate::nn::linear::Bias;
use crate::nn::mlp::Mlp;
use crate::nn::norm::{NormConfig, NormKind};
use crate::weights::Weights;

pub const FAMILY: Family = Family { model_type: "gemma2", architecture: "Gemma2ForCausalLM", read };

/// Gemma's `post_attention_layernorm` is what its name says; the norm before the MLP has another.
pub(super) const NAMES: Names = Names {
    post_attention_layernorm: "pre_feedforward_layernorm",
    after: Some(("post_attention_layernorm", "post_feedforward_layernorm")),
    ..Names::USUAL
};

/// config.json.
#[derive(Debug, Deserialize)]
struct Config {
    query_pre_attn_scalar: f64,
    attn_logit_softcapping: Option<f32>,
    final_logit_softcapping: Option<f32>,
    #[serde(flatten)]
    common: Common,
}

fn read(json: Value) -> Result<Box<dyn Architecture>> {
    common::check_activation("gemma2", &json, "hidden_activation", &["gelu_pytorch_tanh"])?;
    common::refuse("gemma2", &json, &["use_bidirectional_attention"])?;
    let defaults = json!({
        "max_position_embeddings": 8192, "head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": true,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0
    });
    let config: Config = common::parse("gemma2", json, defaults)?;
    config.common.check()?;
    check_positive("query_pre_attn_scalar", Some(config.query_pre_attn_scalar as f32))?;
    check_positive("attn_logit_softcapping", config.attn_logit_softcapping)?;
    check_positive("final_logit_softcapping", config.final_logit_softcapping)?;
    Ok(Box::new(config))
}

pub(super) fn check_positive(name: &str, value: Option<f32>) -> Result<()> {
    match value.filter(|value| !(value.is_finite() && *value > 0.0)) {
        Some(value) => bail!("{name} is {value}"),
        None => Ok(()),
    }
}

/// What is around Gemma's layers: norms that hold w - 1, and embeddings times sqrt(C), a factor that transformers rounds to
/// the dtype computed in.
pub(super) fn frame(common: &Common, weights: &Weights, layers: Vec<LayerSpec>, context: usize) -> Result<Frame> {
    let scale = candle_core::Tensor::new((common.hidden_size as f64).sqrt() as f32, &candle_core::Device::Cpu)?;
    let scale = scale.to_dtype(weights.dtype())?.to_dtype(candle_core::DType::F32)?.to_scalar::<f32>()?;
    let frame = common.frame(layers, context)?;
    Ok(Frame { norm: norm(common), names: NAMES, embed_scale: scale, ..frame })
}

pub(super) fn norm(common: &Common) -> NormConfig {
    NormConfig { kind: NormKind::RmsOffByOne, eps: common.rms_norm_eps }
}

impl Usual for Config {
    fn common(&self) -> &Common {
        &self.common
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.common.layers(|layer| self.common.window(layer, |layer| layer.is_multiple_of(2)))
    }

    fn parts(&self, weights: &Weights, place: Place) -> Result<(Attention, Mlp)> {
        let bias = Bias::from(self.common.attention_bias);
        let attention = AttentionConfig {
            qkv_bias: bias,
            o_bias: bias,
            scale: self.query_pre_attn_scalar.powf(-0.5) as f32,
            softcap: self.attn_logit_softcapping,
            ..self.common.attention(place.spec)
        };
        let attention = Attention::load(&weights.at("self_attn"), attention, place.rotary)?;
        let mlp = self.common.mlp(weights)?;
        Ok((attention, Mlp::Gated(mlp.with(Activation::GeluTanh))))
    }

    fn frame(&self, weights: &Weights, context: usize) -> Result<Frame> {
        let frame = frame(&self.common, weights, self.layers(), context)?;
        Ok(Frame { final_softcap: self.final_logit_softcapping, ..frame })
    }
}
