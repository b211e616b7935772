//! Llama 2, 3, 3.1, 3.2, 3.3, TinyLlama, DeepSeek-R1-Distill-Llama and whatever else says `LlamaForCausalLM`
//! (arXiv 2302.13971, 2407.21783; transformers `modeling_llama.py`).

use std::sync::Arc;

use anyhow::{Result, bail};
use serde::Deserialize;
use serde_json::Value;

use super::{Architecture, Family, Sizes};
use crate::nn::attention::{Attention, AttentionConfig, Sinks};
use crate::nn::decoder::{Decoder, Frame};
use crate::nn::kv_cache::LayerSpec;
use crate::nn::linear::Bias;
use crate::nn::mlp::{GatedMlp, Mlp};
use crate::nn::rope::{Frequencies, RopeConfig, Rotary};
use crate::weights::Weights;

pub const FAMILY: Family = Family { model_type: "llama", architecture: "LlamaForCausalLM", read };

/// config.json.
#[derive(Debug, Deserialize)]
struct Config {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    #[serde(default = "default_max_position_embeddings")]
    max_position_embeddings: usize,
    #[serde(default = "default_eps")]
    rms_norm_eps: f64,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(flatten)]
    rope: RopeConfig,
}

fn default_max_position_embeddings() -> usize {
    2048
}

fn default_eps() -> f64 {
    1e-6
}

fn read(json: Value) -> Result<Box<dyn Architecture>> {
    if let Some(method) = json["quantization_config"]["quant_method"].as_str() {
        bail!("quantisation '{method}' is not supported for llama yet; choose a repository in F16, BF16 or F32");
    }
    if let Some(activation) = json["hidden_act"].as_str().filter(|&activation| activation != "silu") {
        bail!("hidden_act '{activation}' is not supported for llama (silu)");
    }
    let config: Config = serde_json::from_value(json)?;
    config.check()?;
    Ok(Box::new(config))
}

impl Config {
    fn check(&self) -> Result<()> {
        Sizes {
            hidden_size: self.hidden_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads: self.kv_heads(),
            head_dim: self.head_dim(),
            intermediate_size: self.intermediate_size,
            vocab_size: self.vocab_size,
            max_position_embeddings: self.max_position_embeddings,
        }
        .check()?;
        self.frequencies()?;
        Ok(())
    }

    fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    fn frequencies(&self) -> Result<Frequencies> {
        self.rope.frequencies(self.head_dim(), self.max_position_embeddings, 10_000.0)
    }

    /// Attention and MLP of one layer.
    fn parts(&self, weights: &Weights, spec: LayerSpec, rotary: Arc<Rotary>) -> Result<(Attention, Mlp)> {
        let bias = Bias::from(self.attention_bias);
        let attention = AttentionConfig {
            hidden_size: self.hidden_size,
            heads: self.num_attention_heads,
            spec,
            qkv_bias: bias,
            o_bias: bias,
            sinks: Sinks::Without,
        };
        let attention = Attention::load(&weights.at("self_attn"), attention, rotary)?;
        let (hidden_size, bias) = (self.hidden_size, Bias::from(self.mlp_bias));
        let mlp = GatedMlp::load(&weights.at("mlp"), hidden_size, self.intermediate_size, bias)?;
        Ok((attention, Mlp::Gated(mlp)))
    }
}

impl Architecture for Config {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn max_position_embeddings(&self) -> usize {
        self.max_position_embeddings
    }

    fn cache_layers(&self) -> Vec<LayerSpec> {
        let spec = LayerSpec { kv_heads: self.kv_heads(), head_dim: self.head_dim(), window: None };
        vec![spec; self.num_hidden_layers]
    }

    fn build(&self, weights: &Weights, context: usize) -> Result<Decoder> {
        let frame = Frame {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            rms_norm_eps: self.rms_norm_eps,
            tie_word_embeddings: self.tie_word_embeddings,
            frequencies: self.frequencies()?,
            cache_layers: self.cache_layers(),
        };
        Decoder::load(weights, context, frame, |weights, spec, rotary| self.parts(weights, spec, rotary))
    }
}
