//! Qwen2, Qwen2.5, QwQ and whatever else says `Qwen2ForCausalLM` (arXiv 2407.10671; transformers `modeling_qwen2.py`):
//! Llama's layers with biases on q, k and v; upper layers may slide, though no published model's do.

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
use crate::weights::Weights;

pub const FAMILY: Family = Family { model_type: "qwen2", architecture: "Qwen2ForCausalLM", read };

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
    common::check_activation("qwen2", &json, "hidden_act", &["silu"])?;
    common::refuse("qwen2", &json, &["use_mrope"])?;
    let defaults = json!({"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28});
    let mut config: Config = common::parse("qwen2", json, defaults)?;
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
        let attention = AttentionConfig { qkv_bias: Bias::With, ..self.common.attention(place.spec) };
        let attention = Attention::load(&weights.at("self_attn"), attention, place.rotary)?;
        let mlp = self.common.mlp(weights)?;
        Ok((attention, Mlp::Gated(mlp)))
    }
}
