//! Mixtral (arXiv 2401.04088; transformers `modeling_mixtral.py`): Mistral with a mixture of experts.

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::config::{self, CommonConfig};
use super::family::{Architecture, Family};
use super::standard::{self, StandardDecoder};
use crate::kernels::moe::routing::topk::Softmax;
use crate::nn::attention::Attention;
use crate::nn::decoder_config::LayerInfo;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::mlp::Mlp;
use crate::nn::moe::{ExpertNames, GatedMoe, GatedMoeConfig};
use crate::weights::tensor_table::{
    Dimension::Intermediate,
    Division::{Columns, Rows, Whole},
    Form::{F32, Matrix},
    Group, TensorRow, tensor,
};
use crate::weights::{TensorTable, Weights};

pub const FAMILY: Family = Family {
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    tensors: TensorTable(&[standard::DECODER, standard::ATTENTION, standard::STACKED_EXPERTS, EXPERTS]),
    read,
};

/// The router, and the experts of checkpoints that store the matrices of each expert separately.
const EXPERTS: &[TensorRow] = &[
    tensor("block_sparse_moe.gate", Group::Mlp, F32, Whole),
    tensor("mlp.gate", Group::Mlp, F32, Whole),
    tensor("experts.*.w1", Group::Experts, Matrix, Rows(Intermediate)),
    tensor("experts.*.w3", Group::Experts, Matrix, Rows(Intermediate)),
    tensor("experts.*.w2", Group::Experts, Matrix, Columns(Intermediate)),
];

const EXPERT_NAMES: ExpertNames = ExpertNames { gate: "w1", up: "w3", down: "w2" };

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(alias = "num_experts")]
    num_local_experts: usize,
    num_experts_per_tok: usize,
    #[serde(flatten)]
    common: CommonConfig,
}

fn read(mut json: Value) -> Result<Box<dyn Architecture>> {
    config::normalize_activation("mixtral", &mut json, "hidden_act", &["silu"])?;
    config::reject_fields("mixtral", &json, &["attention_bias", "layer_types"])?;
    let defaults = json!({
        "max_position_embeddings": 131_072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "num_local_experts": 8, "num_experts_per_tok": 2
    });
    let config: Config = config::parse("mixtral", json, defaults)?;
    config.common.validate()?;
    config.moe_config().validate()?;
    Ok(Box::new(config))
}

impl Config {
    fn moe_config(&self) -> GatedMoeConfig {
        GatedMoeConfig {
            hidden_size: self.common.hidden_size,
            intermediate_size: self.common.intermediate_size,
            experts: self.num_local_experts,
            experts_per_token: self.num_experts_per_tok,
            softmax: Softmax::OverChosen,
        }
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
        let attention = Attention::load(&weights.at("self_attn"), self.common.attention(layer.spec), layer.rotary)?;
        // transformers 5 names the MoE layer `mlp`. Older versions name it `block_sparse_moe`.
        let name = if weights.contains("mlp.gate.weight") { "mlp" } else { "block_sparse_moe" };
        let moe = GatedMoe::load(&weights.at(name), self.moe_config(), &EXPERT_NAMES)?;
        Ok((attention, Mlp::GatedMoe(moe)))
    }
}
