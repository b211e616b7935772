//! gpt-oss (openai/gpt-oss, `gpt_oss/torch/model.py`; transformers `modeling_gpt_oss.py`).
//!
//! gpt-oss has MXFP4 experts, attention sinks, a sliding window on every second layer, and YaRN.

use anyhow::Result;
use serde::Deserialize;
use serde_json::Value;

use super::config::{self, LayerType, ModelSizes};
use super::family::{Architecture, Family};
use super::standard;
use crate::kernels::moe::routing::check_routing;
use crate::nn::attention::{Attention, AttentionConfig, Sinks};
use crate::nn::decoder::Decoder;
use crate::nn::decoder_config::{DecoderConfig, LayerInfo};
use crate::nn::kv_cache::LayerSpec;
use crate::nn::linear::Bias;
use crate::nn::mlp::Mlp;
use crate::nn::moe::{ClampedMoe, ClampedMoeConfig};
use crate::nn::norm::NormConfig;
use crate::nn::rope::{RopeConfig, RopeFrequencies, RopeLengths};
use crate::weights::tensor_table::{
    Dimension::{Heads, Intermediate},
    Division::{Columns, Rows, Whole},
    Form::{F32, Transposed},
    Group, TensorRow, tensor,
};
use crate::weights::{TensorTable, Weights};

pub const FAMILY: Family = Family {
    model_type: "gpt_oss",
    architecture: "GptOssForCausalLM",
    tensors: TensorTable(&[standard::DECODER, standard::ATTENTION, TENSORS]),
    read,
};

/// The sinks, the router and the experts. The experts are either MXFP4 or transposed float matrices.
const TENSORS: &[TensorRow] = &[
    tensor("self_attn.sinks", Group::Attention, F32, Rows(Heads)),
    tensor("mlp.router", Group::Mlp, F32, Whole),
    tensor("mlp.experts.gate_up_proj", Group::Experts, Transposed, Rows(Intermediate)),
    tensor("mlp.experts.down_proj", Group::Experts, Transposed, Columns(Intermediate)),
];

#[derive(Debug, Deserialize)]
struct Config {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    num_local_experts: usize,
    #[serde(alias = "experts_per_token")]
    num_experts_per_tok: usize,
    #[serde(default = "default_sliding_window")]
    sliding_window: Option<usize>,
    layer_types: Option<Vec<LayerType>>,
    max_position_embeddings: usize,
    #[serde(default = "default_eps")]
    rms_norm_eps: f64,
    #[serde(default = "default_swiglu_limit")]
    swiglu_limit: f32,
    #[serde(default = "default_attention_bias")]
    attention_bias: bool,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(flatten)]
    rope: RopeConfig,
}

fn default_sliding_window() -> Option<usize> {
    Some(128)
}

fn default_eps() -> f64 {
    1e-5
}

fn default_swiglu_limit() -> f32 {
    7.0
}

fn default_attention_bias() -> bool {
    true
}

fn read(mut json: Value) -> Result<Box<dyn Architecture>> {
    // OpenAI's files have both `num_experts_per_tok` and its alias `experts_per_token`. serde does not accept both.
    if let Some(fields) = json.as_object_mut().filter(|fields| fields.contains_key("num_experts_per_tok")) {
        fields.remove("experts_per_token");
    }
    let config: Config = config::from_json(json)?;
    config.validate()?;
    Ok(Box::new(config))
}

impl Config {
    fn validate(&self) -> Result<()> {
        ModelSizes {
            hidden_size: self.hidden_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            intermediate_size: self.intermediate_size,
            vocab_size: self.vocab_size,
            max_position_embeddings: self.max_position_embeddings,
        }
        .validate()?;
        check_routing(self.num_experts_per_tok, self.num_local_experts)?;
        config::check_layer_types(self.layer_types.as_ref(), self.num_hidden_layers)?;
        config::check_window(self.sliding_window)?;
        config::check_scale("swiglu_limit", Some(self.swiglu_limit))?;
        config::check_eps("rms_norm_eps", self.rms_norm_eps)?;
        self.frequencies()?;
        Ok(())
    }

    fn frequencies(&self) -> Result<RopeFrequencies> {
        // gpt-oss uses YaRN, which does not depend on the length of the loaded context.
        let max_position_embeddings = self.max_position_embeddings;
        let lengths = RopeLengths { max_position_embeddings, context: max_position_embeddings };
        self.rope.frequencies(self.head_dim, lengths, 150_000.0)
    }

    /// Returns the type of a layer. Without `layer_types`, layers with an even index have a sliding window.
    fn layer_type(&self, layer: usize) -> LayerType {
        let default = if layer.is_multiple_of(2) { LayerType::SlidingAttention } else { LayerType::FullAttention };
        self.layer_types.as_ref().map_or(default, |types| types[layer])
    }

    /// Loads the attention and the MLP of one layer.
    fn load_sublayers(&self, weights: &Weights, layer: LayerInfo) -> Result<(Attention, Mlp)> {
        let bias = Bias::from(self.attention_bias);
        let attention = AttentionConfig {
            qkv_bias: bias,
            o_bias: bias,
            sinks: Sinks::With,
            ..AttentionConfig::new(self.hidden_size, self.num_attention_heads, layer.spec)
        };
        let moe = ClampedMoeConfig {
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            experts: self.num_local_experts,
            experts_per_token: self.num_experts_per_tok,
            swiglu_limit: self.swiglu_limit,
        };
        let attention = Attention::load(&weights.at("self_attn"), attention, layer.rotary)?;
        let moe = ClampedMoe::load(&weights.at("mlp"), moe)?;
        Ok((attention, Mlp::ClampedMoe(moe)))
    }
}

impl Architecture for Config {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn max_position_embeddings(&self) -> usize {
        self.max_position_embeddings
    }

    fn hidden_size(&self) -> usize {
        self.hidden_size
    }

    fn intermediate_size(&self) -> usize {
        self.intermediate_size
    }

    fn cache_layers(&self) -> Vec<LayerSpec> {
        let window = |layer| match self.layer_type(layer) {
            LayerType::SlidingAttention => self.sliding_window,
            LayerType::FullAttention => None,
        };
        (0..self.num_hidden_layers)
            .map(|layer| LayerSpec {
                kv_heads: self.num_key_value_heads,
                head_dim: self.head_dim,
                window: window(layer),
            })
            .collect()
    }

    fn build(&self, weights: &Weights, context: usize, tensors: TensorTable) -> Result<Decoder> {
        let norm = NormConfig::rms(self.rms_norm_eps);
        let config = DecoderConfig {
            tie_word_embeddings: self.tie_word_embeddings,
            cache_layers: self.cache_layers(),
            ..DecoderConfig::new(self.vocab_size, self.hidden_size, norm, self.frequencies()?)
        };
        Decoder::load(weights, context, config, tensors, |weights, layer| self.load_sublayers(weights, layer))
    }
}
