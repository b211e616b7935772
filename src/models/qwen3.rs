//! Dense Qwen3 models (arXiv 2505.09388; transformers `modeling_qwen3.py`): Qwen2 with q/k norms instead of biases.

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::config::{self, CommonConfig};
use super::family::{Architecture, Family};
use super::standard::{self, StandardDecoder};
use crate::nn::attention::{Attention, AttentionConfig};
use crate::nn::decoder_config::LayerInfo;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::mlp::Mlp;
use crate::nn::norm::NormConfig;
use crate::weights::{TensorTable, Weights};

pub const FAMILY: Family = Family {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    tensors: TensorTable(&[standard::DECODER, standard::ATTENTION, standard::QK_NORMS, standard::MLP]),
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
    config::normalize_activation("qwen3", &mut json, "hidden_act", &["silu"])?;
    config::reject_fields("qwen3", &json, &["use_mrope"])?;
    let defaults = json!({
        "max_position_embeddings": 32_768, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28
    });
    let mut config: Config = config::parse("qwen3", json, defaults)?;
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
        let norm = NormConfig::rms(self.common.rms_norm_eps);
        let attention = AttentionConfig { qk_norm: Some(norm), ..self.common.attention(layer.spec) };
        let attention = Attention::load(&weights.at("self_attn"), attention, layer.rotary)?;
        let mlp = self.common.load_mlp(weights)?;
        Ok((attention, Mlp::Gated(mlp)))
    }
}
