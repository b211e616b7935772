//! Llama 2, 3, 3.1, 3.2, 3.3, TinyLlama, DeepSeek-R1-Distill-Llama and whatever else says `LlamaForCausalLM`
//! (arXiv 2302.13971, 2407.21783; transformers `modeling_llama.py`).

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::common::{self, Common, Usual};
use super::{Architecture, Family};
use crate::nn::attention::{Attention, AttentionConfig};
use crate::nn::decoder::Place;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::linear::Bias;
use crate::nn::mlp::{GatedMlp, Mlp};
use crate::weights::Weights;

pub const FAMILY: Family = Family { model_type: "llama", architecture: "LlamaForCausalLM", read };

/// config.json.
#[derive(Debug, Deserialize)]
struct Config {
    #[serde(default)]
    mlp_bias: bool,
    #[serde(flatten)]
    common: Common,
}

fn read(json: Value) -> Result<Box<dyn Architecture>> {
    common::check_activation("llama", &json, "hidden_act", &["silu"])?;
    let config: Config = common::parse("llama", json, json!({"max_position_embeddings": 2048}))?;
    config.common.check()?;
    Ok(Box::new(config))
}

impl Usual for Config {
    fn common(&self) -> &Common {
        &self.common
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.common.layers(|_| None)
    }

    fn parts(&self, weights: &Weights, place: Place) -> Result<(Attention, Mlp)> {
        let bias = Bias::from(self.common.attention_bias);
        let attention = AttentionConfig { qkv_bias: bias, o_bias: bias, ..self.common.attention(place.spec) };
        let attention = Attention::load(&weights.at("self_attn"), attention, place.rotary)?;
        let Common { hidden_size, intermediate_size, .. } = self.common;
        let mlp = GatedMlp::load(&weights.at("mlp"), hidden_size, intermediate_size, Bias::from(self.mlp_bias))?;
        Ok((attention, Mlp::Gated(mlp)))
    }
}
