//! GPT-2 (Radford et al., 2019; transformers `modeling_gpt2.py`).
//!
//! GPT-2 has learned position embeddings, LayerNorm, and an MLP without a gate.
//! The matrices of attention and of the MLP are stored transposed.

use anyhow::{Result, bail};
use candle_nn::Activation;
use serde::Deserialize;
use serde_json::{Value, json};

use super::config::{self, ModelSizes};
use super::family::{Architecture, Family};
use crate::nn::attention::{Attention, AttentionConfig, TransposedNames};
use crate::nn::decoder::Decoder;
use crate::nn::decoder_config::{DecoderConfig, DecoderNames, LayerInfo, LearnedPositions};
use crate::nn::kv_cache::LayerSpec;
use crate::nn::mlp::{Mlp, MlpConfig, PlainMlp};
use crate::nn::norm::{NormConfig, NormKind};
use crate::nn::rope::RopeFrequencies;
use crate::weights::tensor_table::{
    Dimension::{Heads, Intermediate, Vocabulary},
    Division::{Columns, Rows, Whole},
    Form::{ComputeDtype, F32, Matrix, Transposed, Unloaded},
    Group, TensorRow, tensor,
};
use crate::weights::{TensorTable, Weights};

pub const FAMILY: Family =
    Family { model_type: "gpt2", architecture: "GPT2LMHeadModel", tensors: TensorTable(&[TENSORS]), read };

const TENSORS: &[TensorRow] = &[
    tensor("wte", Group::Embedding, Matrix, Whole),
    tensor("wpe", Group::Embedding, ComputeDtype, Whole),
    tensor("ln_1", Group::Norms, F32, Whole),
    tensor("attn.c_attn", Group::Attention, Transposed, Rows(Heads)),
    tensor("attn.c_proj", Group::Attention, Transposed, Columns(Heads)),
    tensor("ln_2", Group::Norms, F32, Whole),
    tensor("mlp.c_fc", Group::Mlp, Transposed, Rows(Intermediate)),
    tensor("mlp.c_proj", Group::Mlp, Transposed, Columns(Intermediate)),
    tensor("ln_f", Group::Norms, F32, Whole),
    tensor("lm_head", Group::Head, Matrix, Rows(Vocabulary)),
    // In some checkpoints, each layer has the causal mask (`bias`) and the score of masked positions (`masked_bias`).
    // inferno needs neither.
    tensor("attn.bias", Group::Attention, Unloaded, Whole),
    tensor("attn.masked_bias", Group::Attention, Unloaded, Whole),
];

const NAMES: DecoderNames = DecoderNames {
    embed_tokens: "wte",
    layers: "h",
    attention_norm: "ln_1",
    attention_post_norm: None,
    mlp_norm: "ln_2",
    mlp_post_norm: None,
    norm: "ln_f",
};

#[derive(Debug, Deserialize)]
struct Config {
    vocab_size: usize,
    n_embd: usize,
    n_layer: usize,
    n_head: usize,
    n_inner: Option<usize>,
    n_positions: usize,
    layer_norm_epsilon: f64,
    hidden_act: Activation,
    scale_attn_weights: bool,
    scale_attn_by_inverse_layer_idx: bool,
    tie_word_embeddings: bool,
}

fn read(mut json: Value) -> Result<Box<dyn Architecture>> {
    config::normalize_activation("gpt2", &mut json, "activation_function", &["gelu_new", "gelu_pytorch_tanh"])?;
    config::reject_fields("gpt2", &json, &["add_cross_attention"])?;
    let defaults = json!({
        "vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "layer_norm_epsilon": 1e-5, "scale_attn_weights": true, "scale_attn_by_inverse_layer_idx": false,
        "tie_word_embeddings": true
    });
    let config: Config = config::parse("gpt2", json, defaults)?;
    config.validate()?;
    Ok(Box::new(config))
}

impl Config {
    fn validate(&self) -> Result<()> {
        config::check_eps("layer_norm_epsilon", self.layer_norm_epsilon)?;
        if self.n_head == 0 || !self.n_embd.is_multiple_of(self.n_head) {
            bail!("n_embd {} is not a multiple of n_head {}", self.n_embd, self.n_head);
        }
        ModelSizes {
            hidden_size: self.n_embd,
            layers: self.n_layer,
            heads: self.n_head,
            kv_heads: self.n_head,
            head_dim: self.head_dim(),
            intermediate_size: self.intermediate_size(),
            vocab_size: self.vocab_size,
            max_position_embeddings: self.n_positions,
        }
        .validate()
    }

    fn head_dim(&self) -> usize {
        self.n_embd / self.n_head
    }

    /// Returns the factor by which a layer multiplies its attention scores.
    fn attention_scale(&self, layer: usize) -> f32 {
        let size_divisor = if self.scale_attn_weights { (self.head_dim() as f32).sqrt() } else { 1.0 };
        let layer_divisor = if self.scale_attn_by_inverse_layer_idx { (layer + 1) as f32 } else { 1.0 };
        1.0 / (size_divisor * layer_divisor)
    }

    /// Loads the attention and the MLP of one layer.
    fn load_sublayers(&self, weights: &Weights, layer: LayerInfo) -> Result<(Attention, Mlp)> {
        let (hidden_size, intermediate_size) = (self.n_embd, self.intermediate_size());
        let config = AttentionConfig {
            scale: self.attention_scale(layer.index),
            ..AttentionConfig::new(hidden_size, self.n_head, layer.spec)
        };
        let names = TransposedNames { qkv: "c_attn", o: "c_proj" };
        let attention = Attention::load_transposed(&weights.at("attn"), config, names, layer.rotary)?;
        let mlp = MlpConfig { hidden_size, intermediate_size, activation: self.hidden_act };
        let mlp = PlainMlp::load_transposed(&weights.at("mlp"), mlp)?;
        Ok((attention, Mlp::Plain(mlp)))
    }
}

impl Architecture for Config {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn max_position_embeddings(&self) -> usize {
        self.n_positions
    }

    fn hidden_size(&self) -> usize {
        self.n_embd
    }

    fn intermediate_size(&self) -> usize {
        self.n_inner.unwrap_or(self.n_embd.saturating_mul(4))
    }

    fn cache_layers(&self) -> Vec<LayerSpec> {
        vec![LayerSpec { kv_heads: self.n_head, head_dim: self.head_dim(), window: None }; self.n_layer]
    }

    fn build(&self, weights: &Weights, context: usize, tensors: TensorTable) -> Result<Decoder> {
        let norm = NormConfig { kind: NormKind::Layer, eps: self.layer_norm_epsilon };
        let config = DecoderConfig {
            tie_word_embeddings: self.tie_word_embeddings,
            cache_layers: self.cache_layers(),
            // In the oldest checkpoints, tensor names do not have the `transformer` prefix.
            prefix: if weights.contains("transformer.wte.weight") { "transformer" } else { "" }.into(),
            names: NAMES,
            learned_positions: Some(LearnedPositions { name: "wpe", positions: self.n_positions }),
            ..DecoderConfig::new(self.vocab_size, self.n_embd, norm, RopeFrequencies::none())
        };
        Decoder::load(weights, context, config, tensors, |weights, layer| self.load_sublayers(weights, layer))
    }
}
