//! Mistral 7B, Nemo, Small, and other `MistralForCausalLM` models.
//!
//! The layers are the same as in Llama, except that config.json can give all layers a sliding window.
//! Mistral 7B v0.1 has a sliding window; v0.2 and v0.3 have none.
//!
//! Source: arXiv 2310.06825; transformers `modeling_mistral.py`.

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::config::{self, CommonConfig};
use super::family::{Architecture, Family};
use super::standard::{self, StandardDecoder};
use crate::nn::attention::Attention;
use crate::nn::decoder_config::LayerInfo;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::mlp::Mlp;
use crate::weights::{TensorTable, Weights};

pub const FAMILY: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    tensors: TensorTable(&[standard::DECODER, standard::ATTENTION, standard::MLP]),
    read,
};

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(flatten)]
    common: CommonConfig,
}

fn read(mut json: Value) -> Result<Box<dyn Architecture>> {
    config::normalize_activation("mistral", &mut json, "hidden_act", &["silu"])?;
    config::reject_fields("mistral", &json, &["attention_bias", "layer_types"])?;
    let defaults = json!({"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096});
    let config: Config = config::parse("mistral", json, defaults)?;
    config.common.validate()?;
    Ok(Box::new(config))
}

impl StandardDecoder for Config {
    fn common(&self) -> &CommonConfig {
        &self.common
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.common.sliding_layers()
    }

    fn load_sublayers(&self, weights: &Weights, layer: LayerInfo) -> Result<(Attention, Mlp)> {
        let attention = Attention::load(&weights.at("self_attn"), self.common.attention(layer.spec), layer.rotary)?;
        let mlp = self.common.load_mlp(weights)?;
        Ok((attention, Mlp::Gated(mlp)))
    }
}
