//! Qwen3 with routed experts, such as Qwen3-30B-A3B (arXiv 2505.09388; transformers `modeling_qwen3_moe.py`).

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::common::{self, Common, Usual};
use super::{Architecture, Family};
use crate::kernels::moe::topk::Softmax;
use crate::nn::attention::{Attention, AttentionConfig};
use crate::nn::decoder::Place;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::linear::Bias;
use crate::nn::mlp::{GatedMlp, Mlp};
use crate::nn::norm::NormConfig;
use crate::nn::routed::{ExpertNames, RoutedConfig, RoutedMlp};
use crate::weights::Weights;

pub const FAMILY: Family = Family { model_type: "qwen3_moe", architecture: "Qwen3MoeForCausalLM", read };

const EXPERT: ExpertNames = ExpertNames { gate: "gate_proj", up: "up_proj", down: "down_proj" };

/// config.json.
#[derive(Debug, Deserialize)]
struct Config {
    #[serde(default)]
    use_sliding_window: bool,
    #[serde(alias = "num_local_experts")]
    num_experts: usize,
    num_experts_per_tok: usize,
    moe_intermediate_size: usize,
    norm_topk_prob: bool,
    decoder_sparse_step: usize,
    mlp_only_layers: Option<Vec<usize>>,
    #[serde(flatten)]
    common: Common,
}

fn read(json: Value) -> Result<Box<dyn Architecture>> {
    common::check_activation("qwen3_moe", &json, "hidden_act", &["silu"])?;
    common::refuse("qwen3_moe", &json, &["layer_types"])?;
    let defaults = json!({
        "max_position_embeddings": 32_768, "sliding_window": 4096, "norm_topk_prob": false, "decoder_sparse_step": 1,
        "num_key_value_heads": 4
    });
    let mut config: Config = common::parse("qwen3_moe", json, defaults)?;
    if !config.use_sliding_window {
        config.common.sliding_window = None;
    }
    config.common.check()?;
    config.experts().check()?;
    Ok(Box::new(config))
}

impl Config {
    fn experts(&self) -> RoutedConfig {
        RoutedConfig {
            hidden_size: self.common.hidden_size,
            intermediate_size: self.moe_intermediate_size,
            experts: self.num_experts,
            chosen: self.num_experts_per_tok,
            softmax: if self.norm_topk_prob { Softmax::OverChosen } else { Softmax::OverAll },
        }
    }

    /// Whether a layer has experts rather than one MLP.
    fn is_sparse(&self, layer: usize) -> bool {
        let excepted = self.mlp_only_layers.as_ref().is_some_and(|layers| layers.contains(&layer));
        !excepted && (layer + 1).is_multiple_of(self.decoder_sparse_step)
    }
}

impl Usual for Config {
    fn common(&self) -> &Common {
        &self.common
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.common.all_sliding()
    }

    fn parts(&self, weights: &Weights, place: Place) -> Result<(Attention, Mlp)> {
        let (bias, norm) = (Bias::from(self.common.attention_bias), NormConfig::rms(self.common.rms_norm_eps));
        let attention = self.common.attention(place.spec);
        let attention = AttentionConfig { qkv_bias: bias, o_bias: bias, qk_norm: Some(norm), ..attention };
        let attention = Attention::load(&weights.at("self_attn"), attention, place.rotary)?;
        let Common { hidden_size, intermediate_size, .. } = self.common;
        let weights = weights.at("mlp");
        let mlp = match self.is_sparse(place.index) {
            true => Mlp::Routed(RoutedMlp::load(&weights, self.experts(), &EXPERT)?),
            false => Mlp::Gated(GatedMlp::load(&weights, hidden_size, intermediate_size, Bias::Without)?),
        };
        Ok((attention, mlp))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_sparse_as_transformers_counts_them() {
        let sizes = json!({
            "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 6, "num_attention_heads": 2,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "max_position_embeddings": 64,
            "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": true
        });
        let config: Config = common::parse("qwen3_moe", sizes, json!({})).unwrap();
        assert_eq!((0..6).filter(|&layer| config.is_sparse(layer)).collect::<Vec<_>>(), [1, 5]);
        assert_eq!(config.experts().softmax, Softmax::OverChosen);
    }
}
