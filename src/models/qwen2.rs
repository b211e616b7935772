//! Qwen2, Qwen2.5, QwQ, and other `Qwen2ForCausalLM` models.
//!
//! The layers are the same as in Llama, with biases on q, k and v.
//! config.json can enable a sliding window.
//! Without `layer_types`, the window then applies to layers from index `max_window_layers` on.
//!
//! Source: arXiv 2407.10671; transformers `modeling_qwen2.py`.

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::config::{self, CommonConfig};
use super::family::{Architecture, Family};
use super::standard::{self, StandardDecoder};
use crate::nn::attention::{Attention, AttentionConfig};
use crate::nn::decoder_config::LayerInfo;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::linear::Bias;
use crate::nn::mlp::Mlp;
use crate::weights::{TensorTable, Weights};

pub const FAMILY: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    tensors: TensorTable(&[standard::DECODER, standard::ATTENTION, standard::MLP]),
    read,
};

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(default)]
    use_sliding_window: bool,
    max_window_layers: usize,
    #[serde(flatten)]
    common: CommonConfig,
}

fn read(mut json: Value) -> Result<Box<dyn Architecture>> {
    config::normalize_activation("qwen2", &mut json, "hidden_act", &["silu"])?;
    config::reject_fields("qwen2", &json, &["use_mrope"])?;
    let defaults = json!({"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28});
    let mut config: Config = config::parse("qwen2", json, defaults)?;
    if !config.use_sliding_window {
        config.common.sliding_window = None;
    }
    config.common.validate()?;
    Ok(Box::new(config))
}

impl StandardDecoder for Config {
    fn common(&self) -> &CommonConfig {
        &self.common
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.common.layers(|layer| self.common.window(layer, |layer| layer >= self.max_window_layers))
    }

    fn load_sublayers(&self, weights: &Weights, layer: LayerInfo) -> Result<(Attention, Mlp)> {
        // Qwen2 has these biases regardless of `attention_bias` in config.json.
        let attention = self.common.attention(layer.spec);
        let attention = AttentionConfig { qkv_bias: Bias::With, o_bias: Bias::Without, ..attention };
        let attention = Attention::load(&weights.at("self_attn"), attention, layer.rotary)?;
        let mlp = self.common.load_mlp(weights)?;
        Ok((attention, Mlp::Gated(mlp)))
    }
}
