//! The interface of a model family: parsing config.json and building the decoder.

use anyhow::Result;
use serde_json::Value;

use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::LayerSpec;
use crate::weights::{TensorTable, Weights};

/// A family of models that share one architecture.
pub struct Family {
    /// The `model_type` in config.json.
    pub model_type: &'static str,
    /// The first entry of `architectures` in config.json. Identifies the family if config.json has no `model_type`.
    pub architecture: &'static str,
    /// How the tensors of a checkpoint are stored, kept in memory and divided among ranks.
    /// The table must agree with the tensors that [`Architecture::build`] loads.
    pub tensors: TensorTable,
    /// Parses and validates config.json.
    pub read: fn(Value) -> Result<Box<dyn Architecture>>,
}

/// The validated config of one model. [`Self::build`] loads the model's decoder.
pub trait Architecture: Send + Sync {
    /// Returns the number of rows in the embedding, which can exceed the number of tokens in the tokenizer.
    fn vocab_size(&self) -> usize;

    /// Returns the longest context that the model supports.
    fn max_position_embeddings(&self) -> usize;

    /// Returns the upper limit of the default context. The engine may choose a shorter default.
    ///
    /// The limit is `max_position_embeddings`, except in Phi-3 models with LongRoPE: there, it is the longest context
    /// that uses the short factors, so the long factors are opt-in.
    fn default_context(&self) -> usize {
        self.max_position_embeddings()
    }

    /// Returns the size of the residual stream.
    fn hidden_size(&self) -> usize;

    /// Returns `intermediate_size` in config.json: the intermediate size of a dense MLP or, in Mixtral and gpt-oss,
    /// of one expert. For GPT-2, returns `n_inner`, or 4 · `n_embd` if config.json has no `n_inner`.
    fn intermediate_size(&self) -> usize;

    /// Returns the KV cache spec of each layer.
    fn cache_layers(&self) -> Vec<LayerSpec>;

    /// Loads the model for contexts of up to `context` positions. `tensors` is the table of the family.
    /// Callers use [`ModelConfig::build`](super::ModelConfig::build).
    fn build(&self, weights: &Weights, context: usize, tensors: TensorTable) -> Result<Decoder>;
}
