//! Mistral 7B, Nemo, Small and whatever else says `MistralForCausalLM` (arXiv 2310.06825; transformers
//! `modeling_mistral.py`): Llama's layers, all of them with a sliding window in v0.1 and none later.

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::common::{self, Common, Usual};
use super::{Architecture, Family};
use crate::nn::attention::Attention;
use crate::nn::decoder::Place;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::mlp::Mlp;
use crate::weights::Weights;

pub const FAMILY: Family = Family { model_type: "mistral", architecture: "MistralForCausalLM", read };

/// config.json.
#[derive(Debug, Deserialize)]
struct Config {
    #[serde(flatten)]
    common: Common,
}

fn read(json: Value) -> Result<Box<dyn Architecture>> {
    common::check_activation("mistral", &json, "hidden_act", &["silu"])?;
    common::refuse("mistral", &json, &["attention_bias", "layer_types"])?;
    let defaults = json!({"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096});
    let config: Config = common::parse("mistral", json, defaults)?;
    config.common.check()?;
    Ok(Box::new(config))
}

impl Usual for Config {
    fn common(&self) -> &Common {
        &self.common
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.common.all_sliding()
    }

    fn parts(&self, weights: &Weights, place: Place) -> Result<(Attention, Mlp)> {
        let attention = Attention::load(&weights.at("self_attn"), self.common.attention(place.spec), place.rotary)?;
        let mlp = self.common.mlp(weights)?;
        Ok((attention, Mlp::Gated(mlp)))
    }
}
