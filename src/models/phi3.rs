//! Phi-3, Phi-3.5 and Phi-4, without the vision and MoE ones (arXiv 2404.14219; transformers `modeling_phi3.py`): Llama's
//! layers with fused projections, LongRoPE in those for long contexts, a rotated part of each head in Phi-4-mini.

use anyhow::{Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use super::common::{self, Common, Usual};
use super::{Architecture, Family};
use crate::nn::attention::Attention;
use crate::nn::decoder::Place;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::mlp::{GatedMlp, Mlp};
use crate::weights::Weights;

pub const FAMILY: Family = Family { model_type: "phi3", architecture: "Phi3ForCausalLM", read };

/// config.json.
#[derive(Debug, Deserialize)]
struct Config {
    #[serde(flatten)]
    common: Common,
}

fn read(mut json: Value) -> Result<Box<dyn Architecture>> {
    common::check_activation("phi3", &json, "hidden_act", &["silu"])?;
    common::refuse("phi3", &json, &["attention_bias", "layer_types"])?;
    for key in ["rope_scaling", "rope_parameters"] {
        rename_longrope(&mut json[key])?;
    }
    let defaults = json!({
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5
    });
    let config: Config = common::parse("phi3", json, defaults)?;
    config.common.check_partial()?;
    Ok(Box::new(config))
}

/// Before LongRoPE had its name, Phi-3's files said `su`, and some `yarn`, which is another rule elsewhere.
fn rename_longrope(scaling: &mut Value) -> Result<()> {
    let Some(fields) = scaling.as_object_mut() else { return Ok(()) };
    for key in ["type", "rope_type"] {
        match fields.get_mut(key) {
            Some(Value::String(name)) if name == "su" || name == "yarn" => *name = "longrope".into(),
            Some(Value::String(name)) if name != "longrope" && name != "default" => {
                bail!("rope scaling '{name}' is not supported for phi3 (default, longrope)")
            }
            _ => {}
        }
    }
    Ok(())
}

impl Usual for Config {
    fn common(&self) -> &Common {
        &self.common
    }

    fn usual_context(&self) -> usize {
        let all = self.common.max_position_embeddings;
        self.common.rope.short_context().map_or(all, |short| short.min(all))
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.common.all_sliding()
    }

    fn parts(&self, weights: &Weights, place: Place) -> Result<(Attention, Mlp)> {
        let attention = self.common.attention(place.spec);
        let attention = Attention::load_fused(&weights.at("self_attn"), attention, place.rotary)?;
        let Common { hidden_size, intermediate_size, .. } = self.common;
        let mlp = GatedMlp::load_fused(&weights.at("mlp"), hidden_size, intermediate_size)?;
        Ok((attention, Mlp::Gated(mlp)))
    }
}
