//! The standard decoder: the architecture of Llama and of the families that follow it.

use anyhow::Result;

use super::config::CommonConfig;
use super::family::Architecture;
use crate::nn::attention::Attention;
use crate::nn::decoder::Decoder;
use crate::nn::decoder_config::{DecoderConfig, LayerInfo};
use crate::nn::kv_cache::LayerSpec;
use crate::nn::mlp::Mlp;
use crate::weights::Weights;

/// A family whose config.json has the fields of [`CommonConfig`]. It provides its layers; the rest is the same for all.
pub(super) trait StandardDecoder {
    fn common(&self) -> &CommonConfig;

    /// Returns what each layer keeps in the KV cache.
    fn layers(&self) -> Vec<LayerSpec>;

    /// Loads attention and MLP of one layer.
    fn load_parts(&self, weights: &Weights, layer: LayerInfo) -> Result<(Attention, Mlp)>;

    /// Returns the config of everything around attention and MLP.
    fn decoder_config(&self, _: &Weights, context: usize) -> Result<DecoderConfig> {
        self.common().decoder_config(self.layers(), context)
    }

    fn default_context(&self) -> usize {
        self.common().max_position_embeddings
    }
}

impl<T: StandardDecoder> Architecture for T {
    fn vocab_size(&self) -> usize {
        self.common().vocab_size
    }

    fn max_position_embeddings(&self) -> usize {
        self.common().max_position_embeddings
    }

    fn default_context(&self) -> usize {
        StandardDecoder::default_context(self)
    }

    fn cache_layers(&self) -> Vec<LayerSpec> {
        self.layers()
    }

    fn build(&self, weights: &Weights, context: usize) -> Result<Decoder> {
        let config = self.decoder_config(weights, context)?;
        Decoder::load(weights, context, config, |weights, layer| self.load_parts(weights, layer))
    }
}
