//! Llama 2 through 3.3 (text models), TinyLlama, DeepSeek-R1-Distill-Llama, and other `LlamaForCausalLM` models.
//!
//! Source: arXiv 2302.13971, 2407.21783; transformers `modeling_llama.py`.

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::config::{self, CommonConfig};
use super::family::{Architecture, Family};
use super::standard::{self, StandardDecoder};
use crate::nn::attention::Attention;
use crate::nn::decoder_config::LayerInfo;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::linear::Bias;
use crate::nn::mlp::{GatedMlp, Mlp};
use crate::weights::{TensorTable, Weights};

pub const FAMILY: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    tensors: TensorTable(&[standard::DECODER, standard::ATTENTION, standard::MLP]),
    read,
};

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(default)]
    mlp_bias: bool,
    #[serde(flatten)]
    common: CommonConfig,
}

fn read(mut json: Value) -> Result<Box<dyn Architecture>> {
    config::normalize_activation("llama", &mut json, "hidden_act", &["silu"])?;
    let config: Config = config::parse("llama", json, json!({"max_position_embeddings": 2048}))?;
    config.common.validate()?;
    Ok(Box::new(config))
}

impl StandardDecoder for Config {
    fn common(&self) -> &CommonConfig {
        &self.common
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.common.layers(|_| None)
    }

    fn load_sublayers(&self, weights: &Weights, layer: LayerInfo) -> Result<(Attention, Mlp)> {
        let attention = Attention::load(&weights.at("self_attn"), self.common.attention(layer.spec), layer.rotary)?;
        let mlp = GatedMlp::load(&weights.at("mlp"), self.common.mlp(), Bias::from(self.mlp_bias))?;
        Ok((attention, Mlp::Gated(mlp)))
    }
}
