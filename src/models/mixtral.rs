//! Mixtral (arXiv 2401.04088; transformers `modeling_mixtral.py`): Mistral's layers with routed experts.

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::common::{self, Common, Usual};
use super::{Architecture, Family};
use crate::kernels::moe::topk::Softmax;
use crate::nn::attention::Attention;
use crate::nn::decoder::Place;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::mlp::Mlp;
use crate::nn::routed::{ExpertNames, RoutedConfig, RoutedMlp};
use crate::weights::Weights;

pub const FAMILY: Family = Family { model_type: "mixtral", architecture: "MixtralForCausalLM", read };

const EXPERT: ExpertNames = ExpertNames { gate: "w1", up: "w3", down: "w2" };

/// config.json.
#[derive(Debug, Deserialize)]
struct Config {
    #[serde(alias = "num_experts")]
    num_local_experts: usize,
    num_experts_per_tok: usize,
    #[serde(flatten)]
    common: Common,
}

fn read(json: Value) -> Result<Box<dyn Architecture>> {
    common::check_activation("mixtral", &json, "hidden_act", &["silu"])?;
    common::refuse("mixtral", &json, &["attention_bias", "layer_types"])?;
    let defaults = json!({
        "max_position_embeddings": 131_072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "num_local_experts": 8, "num_experts_per_tok": 2
    });
    let config: Config = common::parse("mixtral", json, defaults)?;
    config.common.check()?;
    config.experts().check()?;
    Ok(Box::new(config))
}

impl Config {
    fn experts(&self) -> RoutedConfig {
        RoutedConfig {
            hidden_size: self.common.hidden_size,
            intermediate_size: self.common.intermediate_size,
            experts: self.num_local_experts,
            chosen: self.num_experts_per_tok,
            softmax: Softmax::OverChosen,
        }
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
        let attention = Attention::load(&weights.at("self_attn"), self.common.attention(place.spec), place.rotary)?;
        // transformers 5 calls it `mlp` when it keeps the experts in one tensor.
        let name = if weights.contains("mlp.gate.weight") { "mlp" } else { "block_sparse_moe" };
        let experts = RoutedMlp::load(&weights.at(name), self.experts(), &EXPERT)?;
        Ok((attention, Mlp::Routed(experts)))
    }
}
