//! Sizes, options and tensor names of a decoder, as a family in `models` fills them in.

use std::sync::Arc;

use super::kv_cache::LayerSpec;
use super::norm::NormConfig;
use super::rope::{RopeFrequencies, RotaryEmbedding};

/// Everything that a decoder has besides its attention and MLP.
pub struct DecoderConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub norm: NormConfig,
    /// Whether the output head uses the weights of the embedding.
    pub tie_word_embeddings: bool,
    pub frequencies: RopeFrequencies,
    /// RoPE frequencies of sliding-window layers, if they differ from those of full layers.
    pub sliding_frequencies: Option<RopeFrequencies>,
    pub cache_layers: Vec<LayerSpec>,
    /// Prefix of all tensor names but the output head's; empty if there is none.
    pub prefix: String,
    pub names: DecoderNames,
    /// Factor on the embeddings.
    pub embed_scale: f32,
    /// Name and length of a learned position embedding.
    pub learned_positions: Option<(&'static str, usize)>,
    /// With a cap, each logit l becomes cap · tanh(l / cap).
    pub final_softcap: Option<f32>,
}

impl DecoderConfig {
    /// Returns a config with the options of Llama. Callers fill in `cache_layers` and whatever differs.
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

/// The names of a decoder's tensors in a checkpoint.
#[derive(Clone, Copy)]
pub struct DecoderNames {
    pub embed_tokens: &'static str,
    pub layers: &'static str,
    /// The norm before attention.
    pub input_layernorm: &'static str,
    /// The norm before the MLP.
    pub post_attention_layernorm: &'static str,
    /// The norms of the attention output and of the MLP output.
    pub post_norms: Option<(&'static str, &'static str)>,
    /// The norm before the output head.
    pub norm: &'static str,
}

impl DecoderNames {
    /// The names that Llama uses, and most families after it.
    pub const LLAMA: Self = Self {
        embed_tokens: "embed_tokens",
        layers: "layers",
        input_layernorm: "input_layernorm",
        post_attention_layernorm: "post_attention_layernorm",
        post_norms: None,
        norm: "norm",
    };
}

/// The layer that a family is asked to load.
pub struct LayerInfo {
    pub index: usize,
    pub spec: LayerSpec,
    pub rotary: Arc<RotaryEmbedding>,
}
