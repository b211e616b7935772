//! Qwen3, dense (arXiv 2505.09388; transformers `modeling_qwen3.py`): Qwen2's layers with a norm of each query and key in
//! place of the biases.

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::common::{self, Common, Usual};
use super::{Architecture, Family};
use crate::nn::attention::{Attention, AttentionConfig};
use crate::nn::decoder::Place;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::linear::Bias;
use crate::nn::mlp::Mlp;
use crate::nn::norm::NormConfig;
use crate::weights::Weights;

pub const FAMILY: Family = Family { model_type: "qwen3", architecture: "Qwen3ForCausalLM", read };

/// config.json.
#[derive(Debug, Deserialize)]
struct Config {
    #[serde(default)]
    use_sliding_window: bool,
    max_window_layers: usize,
    #[serde(flatten)]
    common: Common,
}

fn read(json: Value) -> Result<Box<dyn Architecture>> {
    common::check_activation("qwen3", &json, "hidden_act", &["silu"])?;
    common::refuse("qwen3", &json, &["use_mrope"])?;
    let defaults = json!({
        "max_position_embeddings": 32_768, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28
    });
    let mut config: Config = common::parse("qwen3", json, defaults)?;
    if !config.use_sliding_window {
        config.common.sliding_window = None;
    }
    config.common.check()?;
    Ok(Box::new(config))
}

impl Usual for Config {
    fn common(&self) -> &Common {
        &self.common
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.common.layers(|layer| self.common.window(layer, |layer| layer >= self.max_window_layers))
    }

    fn parts(&self, weights: &Weights, place: Place) -> Result<(Attention, Mlp)> {
        let (bias, norm) = (Bias::from(self.common.attention_bias), NormConfig::rms(self.common.rms_norm_eps));
        let attention = self.common.attention(place.spec);
        let attention = AttentionConfig { qkv_bias: bias, o_bias: bias, qk_norm: Some(norm), ..attention };
        let attention = Attention::load(&weights.at("self_attn"), attention, place.rotary)?;
        let mlp = self.common.mlp(weights)?;
        Ok((attention, Mlp::Gated(mlp)))
    }
}
