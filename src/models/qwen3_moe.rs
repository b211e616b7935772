//! Qwen3 with a mixture of experts, such as Qwen3-30B-A3B (arXiv 2505.09388; transformers `modeling_qwen3_moe.py`).

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::config::{self, CommonConfig};
use super::family::{Architecture, Family};
use super::standard::{self, StandardDecoder};
use crate::kernels::moe::routing::topk::Softmax;
use crate::nn::attention::{Attention, AttentionConfig};
use crate::nn::checks::{check_range, check_size};
use crate::nn::decoder_config::LayerInfo;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::linear::Bias;
use crate::nn::mlp::{GatedMlp, Mlp};
use crate::nn::moe::{ExpertNames, GatedMoe, GatedMoeConfig};
use crate::nn::norm::NormConfig;
use crate::weights::tensor_table::{
    Dimension::Intermediate,
    Division::{Columns, Rows, Whole},
    Form::{F32, Matrix},
    Group, TensorRow, tensor,
};
use crate::weights::{TensorTable, Weights};

pub const FAMILY: Family = Family {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    tensors: TensorTable(&[
        standard::DECODER,
        standard::ATTENTION,
        standard::QK_NORMS,
        standard::MLP,
        standard::STACKED_EXPERTS,
        EXPERTS,
    ]),
    read,
};

/// The router, and the experts of checkpoints that store the matrices of each expert separately.
const EXPERTS: &[TensorRow] = &[
    tensor("mlp.gate", Group::Mlp, F32, Whole),
    tensor("experts.*.gate_proj", Group::Experts, Matrix, Rows(Intermediate)),
    tensor("experts.*.up_proj", Group::Experts, Matrix, Rows(Intermediate)),
    tensor("experts.*.down_proj", Group::Experts, Matrix, Columns(Intermediate)),
];

const EXPERT_NAMES: ExpertNames = ExpertNames { gate: "gate_proj", up: "up_proj", down: "down_proj" };

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
    common: CommonConfig,
}

fn read(mut json: Value) -> Result<Box<dyn Architecture>> {
    config::normalize_activation("qwen3_moe", &mut json, "hidden_act", &["silu"])?;
    config::reject_fields("qwen3_moe", &json, &["layer_types"])?;
    let defaults = json!({
        "max_position_embeddings": 32_768, "sliding_window": 4096, "norm_topk_prob": false, "decoder_sparse_step": 1,
        "num_key_value_heads": 4
    });
    let mut config: Config = config::parse("qwen3_moe", json, defaults)?;
    if !config.use_sliding_window {
        config.common.sliding_window = None;
    }
    config.common.validate()?;
    config.moe_config().validate()?;
    check_size("decoder_sparse_step", config.decoder_sparse_step)?;
    let dense_layers = config.mlp_only_layers.as_ref().map_or(0, Vec::len);
    check_range("the length of mlp_only_layers", dense_layers, 0..=config.common.num_hidden_layers)?;
    Ok(Box::new(config))
}

impl Config {
    fn moe_config(&self) -> GatedMoeConfig {
        GatedMoeConfig {
            hidden_size: self.common.hidden_size,
            intermediate_size: self.moe_intermediate_size,
            experts: self.num_experts,
            experts_per_token: self.num_experts_per_tok,
            softmax: if self.norm_topk_prob { Softmax::OverChosen } else { Softmax::OverAll },
        }
    }

    /// Returns whether a layer has experts instead of a dense MLP.
    fn is_sparse(&self, layer: usize) -> bool {
        let is_excluded = self.mlp_only_layers.as_ref().is_some_and(|layers| layers.contains(&layer));
        !is_excluded && (layer + 1).is_multiple_of(self.decoder_sparse_step)
    }
}

impl StandardDecoder for Config {
    fn common(&self) -> &CommonConfig {
        &self.common
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.common.sliding_layers()
    }

    fn load_sublayers(&self, weights: &Weights, layer: LayerInfo) -> Result<(Attention, Mlp)> {
        let norm = NormConfig::rms(self.common.rms_norm_eps);
        let attention = AttentionConfig { qk_norm: Some(norm), ..self.common.attention(layer.spec) };
        let attention = Attention::load(&weights.at("self_attn"), attention, layer.rotary)?;
        let weights = weights.at("mlp");
        let mlp = if self.is_sparse(layer.index) {
            Mlp::GatedMoe(GatedMoe::load(&weights, self.moe_config(), &EXPERT_NAMES)?)
        } else {
            Mlp::Gated(GatedMlp::load(&weights, self.common.mlp(), Bias::Without)?)
        };
        Ok((attention, mlp))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_layers_are_chosen_as_in_transformers() {
        let sizes = json!({
            "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 6, "num_attention_heads": 2,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "max_position_embeddings": 64,
            "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": true, "hidden_act": "silu"
        });
        let config: Config = config::parse("qwen3_moe", sizes, json!({})).unwrap();
        assert_eq!((0..6).filter(|&layer| config.is_sparse(layer)).collect::<Vec<_>>(), [1, 5]);
        assert_eq!(config.moe_config().softmax, Softmax::OverChosen);
    }
}
