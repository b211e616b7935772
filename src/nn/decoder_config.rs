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
    /// The learned position embedding, in models that have one instead of RoPE.
    pub learned_positions: Option<LearnedPositions>,
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

/// The name and the size of a learned position embedding, `[positions, hidden]`.
#[derive(Clone, Copy)]
pub struct LearnedPositions {
    /// The name of the module in a checkpoint, such as `wpe`.
    pub name: &'static str,
    /// The number of positions, which limits the context.
    pub positions: usize,
}

/// The names of a decoder's embedding, layers and norms in a checkpoint.
#[derive(Clone, Copy)]
pub struct DecoderNames {
    pub embed_tokens: &'static str,
    pub layers: &'static str,
    /// The norm before attention.
    pub attention_norm: &'static str,
    /// The norm of the attention output, if the model has one.
    pub attention_post_norm: Option<&'static str>,
    /// The norm before the MLP.
    pub mlp_norm: &'static str,
    /// The norm of the MLP output, if the model has one.
    pub mlp_post_norm: Option<&'static str>,
    /// The norm before the output head.
    pub norm: &'static str,
}

impl DecoderNames {
    /// The names that Llama and most other families use.
    pub const LLAMA: Self = Self {
        embed_tokens: "embed_tokens",
        layers: "layers",
        attention_norm: "input_layernorm",
        attention_post_norm: None,
        mlp_norm: "post_attention_layernorm",
        mlp_post_norm: None,
        norm: "norm",
    };
}

/// The index, KV cache spec and RoPE tables of a layer to load.
pub struct LayerInfo {
    pub index: usize,
    pub spec: LayerSpec,
    pub rotary: Arc<RotaryEmbedding>,
}
