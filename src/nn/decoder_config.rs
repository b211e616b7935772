//! The sizes, options and tensor names of a decoder. Each model family in `models` provides its own decoder config.

use std::sync::Arc;

use super::kv_cache::LayerSpec;
use super::norm::NormConfig;
use super::rope::{RopeFrequencies, RotaryEmbedding};

/// The config of a decoder, except the configs of its attention and MLPs.
pub struct DecoderConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub norm: NormConfig,
    /// Whether the output head shares the weights of the embedding.
    pub tie_word_embeddings: bool,
    pub frequencies: RopeFrequencies,
    /// The RoPE frequencies of sliding-window layers. `None` if all layers use `frequencies`.
    pub sliding_frequencies: Option<RopeFrequencies>,
    pub cache_layers: Vec<LayerSpec>,
    /// The prefix of all tensor names except `lm_head`. Empty in some GPT-2 checkpoints.
    pub prefix: String,
    pub names: DecoderNames,
    /// The factor by which token embeddings are multiplied.
    pub embed_scale: f32,
    /// The tensor name and the number of positions of the learned position embedding, if any.
    pub learned_positions: Option<(&'static str, usize)>,
    /// The soft cap of logits, if any: a logit l becomes cap · tanh(l / cap).
    pub final_softcap: Option<f32>,
}

impl DecoderConfig {
    /// Returns a config with Llama's options. Callers set `cache_layers` and every option that differs from Llama.
    pub fn new(vocab_size: usize, hidden_size: usize, norm: NormConfig, frequencies: RopeFrequencies) -> Self {
        Self {
            vocab_size,
            hidden_size,
            norm,
            tie_word_embeddings: false,
            frequencies,
            sliding_frequencies: None,
            cache_layers: Vec::new(),
            prefix: "model".into(),
            names: DecoderNames::LLAMA,
            embed_scale: 1.0,
            learned_positions: None,
            final_softcap: None,
        }
    }
}

/// The names of a decoder's embedding, layers and norms in a checkpoint.
#[derive(Clone, Copy)]
pub struct DecoderNames {
    pub embed_tokens: &'static str,
    pub layers: &'static str,
    /// The norm before attention.
    pub attention_norm: &'static str,
    /// The norm before the MLP.
    pub mlp_norm: &'static str,
    /// The norms of the attention output and of the MLP output, if the model has them.
    pub post_norms: Option<(&'static str, &'static str)>,
    /// The norm before the output head.
    pub norm: &'static str,
}

impl DecoderNames {
    /// The names that Llama and most other families use.
    pub const LLAMA: Self = Self {
        embed_tokens: "embed_tokens",
        layers: "layers",
        attention_norm: "input_layernorm",
        mlp_norm: "post_attention_layernorm",
        post_norms: None,
        norm: "norm",
    };
}

/// The index, KV cache spec and RoPE tables of a layer to load.
pub struct LayerInfo {
    pub index: usize,
    pub spec: LayerSpec,
    pub rotary: Arc<RotaryEmbedding>,
}
