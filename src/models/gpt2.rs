//! GPT-2 (Radford et al., 2019; transformers `modeling_gpt2.py`): learned positions, LayerNorm, an MLP without a gate, and
//! matrices that are stored the other way round.

use anyhow::{Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use super::common;
use super::{Architecture, Family, Sizes};
use crate::kernels::swiglu::Activation;
use crate::nn::attention::{Attention, AttentionConfig};
use crate::nn::decoder::{Decoder, Frame, Names, Place};
use crate::nn::kv_cache::LayerSpec;
use crate::nn::linear::Linear;
use crate::nn::mlp::{Mlp, PlainMlp};
use crate::nn::norm::{NormConfig, NormKind};
use crate::nn::rope::Frequencies;
use crate::weights::Weights;

pub const FAMILY: Family = Family { model_type: "gpt2", architecture: "GPT2LMHeadModel", read };

const NAMES: Names = Names {
    embed_tokens: "wte",
    layers: "h",
    input_layernorm: "ln_1",
    post_attention_layernorm: "ln_2",
    after: None,
    norm: "ln_f",
};

/// config.json.
#[derive(Debug, Deserialize)]
struct Config {
    vocab_size: usize,
    n_embd: usize,
    n_layer: usize,
    n_head: usize,
    n_inner: Option<usize>,
    n_positions: usize,
    layer_norm_epsilon: f64,
    scale_attn_weights: bool,
    scale_attn_by_inverse_layer_idx: bool,
    tie_word_embeddings: bool,
}

fn read(json: Value) -> Result<Box<dyn Architecture>> {
    common::check_activation("gpt2", &json, "activation_function", &["gelu_new", "gelu_pytorch_tanh"])?;
    common::refuse("gpt2", &json, &["add_cross_attention"])?;
    let defaults = json!({
        "vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "layer_norm_epsilon": 1e-5, "scale_attn_weights": true, "scale_attn_by_inverse_layer_idx": false,
        "tie_word_embeddings": true
    });
    let config: Config = common::parse("gpt2", json, defaults)?;
    config.check()?;
    Ok(Box::new(config))
}

impl Config {
    fn check(&self) -> Result<()> {
        if self.n_head == 0 || !self.n_embd.is_multiple_of(self.n_head) {
            bail!("n_embd {} cannot be shared by n_head {}", self.n_embd, self.n_head);
        }
        Sizes {
            hidden_size: self.n_embd,
            layers: self.n_layer,
            heads: self.n_head,
            kv_heads: self.n_head,
            head_dim: self.head_dim(),
            intermediate_size: self.intermediate_size(),
            vocab_size: self.vocab_size,
            max_position_embeddings: self.n_positions,
        }
        .check()
    }

    fn head_dim(&self) -> usize {
        self.n_embd / self.n_head
    }

    fn intermediate_size(&self) -> usize {
        self.n_inner.unwrap_or(self.n_embd.saturating_mul(4))
    }

    /// Factor on q·k of a layer.
    fn scale(&self, layer: usize) -> f32 {
        let by_size = if self.scale_attn_weights { (self.head_dim() as f32).sqrt() } else { 1.0 };
        let by_layer = if self.scale_attn_by_inverse_layer_idx { (layer + 1) as f32 } else { 1.0 };
        1.0 / (by_size * by_layer)
    }

    /// Attention and MLP of one layer.
    fn parts(&self, weights: &Weights, place: Place) -> Result<(Attention, Mlp)> {
        let (hidden_size, intermediate_size) = (self.n_embd, self.intermediate_size());
        let config = AttentionConfig {
            scale: self.scale(place.index),
            ..AttentionConfig::new(hidden_size, self.n_head, place.spec)
        };
        let (attn, mlp) = (weights.at("attn"), weights.at("mlp"));
        let c_attn = Linear::load_transposed(&attn.at("c_attn"), hidden_size, 3 * hidden_size)?;
        let c_proj = Linear::load_transposed(&attn.at("c_proj"), hidden_size, hidden_size)?;
        let attention = Attention::new(&attn, config, place.rotary, c_attn, c_proj)?;
        let fc = Linear::load_transposed(&mlp.at("c_fc"), hidden_size, intermediate_size)?;
        let proj = Linear::load_transposed(&mlp.at("c_proj"), intermediate_size, hidden_size)?;
        Ok((attention, Mlp::Plain(PlainMlp::new(fc, proj, Activation::GeluTanh, weights.dtype()))))
    }
}

impl Architecture for Config {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn max_position_embeddings(&self) -> usize {
        self.n_positions
    }

    fn cache_layers(&self) -> Vec<LayerSpec> {
        vec![LayerSpec { kv_heads: self.n_head, head_dim: self.head_dim(), window: None }; self.n_layer]
    }

    fn build(&self, weights: &Weights, context: usize) -> Result<Decoder> {
        let norm = NormConfig { kind: NormKind::Layer, eps: self.layer_norm_epsilon };
        let frame = Frame {
            tie_word_embeddings: self.tie_word_embeddings,
            cache_layers: self.cache_layers(),
            // The oldest files lack the prefix.
            model: if weights.contains("transformer.wte.weight") { "transformer" } else { "" }.into(),
            names: NAMES,
            learned_positions: Some(("wpe", self.n_positions)),
            ..Frame::new(self.vocab_size, self.n_embd, norm, Frequencies::still())
        };
        Decoder::load(weights, context, frame, |weights, place| self.parts(weights, place))
    }
}
