//! The standard decoder: the architecture of Llama and of the families based on it.

use anyhow::Result;

use super::config::CommonConfig;
use super::family::Architecture;
use crate::nn::attention::Attention;
use crate::nn::decoder::Decoder;
use crate::nn::decoder_config::{DecoderConfig, LayerInfo};
use crate::nn::kv_cache::LayerSpec;
use crate::nn::mlp::Mlp;
use crate::weights::tensor_table::{
    Dimension::{Heads, Intermediate, Vocabulary},
    Division::{Columns, Rows, Whole},
    Form::{F32, Matrix},
    Group, TensorRow, tensor,
};
use crate::weights::{TensorTable, Weights};

/// The tensors of the standard decoder outside attention and the MLPs.
pub(super) const DECODER: &[TensorRow] = &[
    tensor("embed_tokens", Group::Embedding, Matrix, Whole),
    tensor("input_layernorm", Group::Norms, F32, Whole),
    tensor("post_attention_layernorm", Group::Norms, F32, Whole),
    tensor("norm", Group::Norms, F32, Whole),
    tensor("lm_head", Group::Head, Matrix, Rows(Vocabulary)),
    // The RoPE frequencies (`inv_freq`), which some checkpoints contain. inferno computes them from config.json.
    TensorRow::UnloadedModule("rotary_emb"),
];

pub(super) const ATTENTION: &[TensorRow] = &[
    tensor("self_attn.q_proj", Group::Attention, Matrix, Rows(Heads)),
    tensor("self_attn.k_proj", Group::Attention, Matrix, Rows(Heads)),
    tensor("self_attn.v_proj", Group::Attention, Matrix, Rows(Heads)),
    tensor("self_attn.o_proj", Group::Attention, Matrix, Columns(Heads)),
];

pub(super) const QK_NORMS: &[TensorRow] =
    &[tensor("self_attn.q_norm", Group::Norms, F32, Whole), tensor("self_attn.k_norm", Group::Norms, F32, Whole)];

pub(super) const MLP: &[TensorRow] = &[
    tensor("mlp.gate_proj", Group::Mlp, Matrix, Rows(Intermediate)),
    tensor("mlp.up_proj", Group::Mlp, Matrix, Rows(Intermediate)),
    tensor("mlp.down_proj", Group::Mlp, Matrix, Columns(Intermediate)),
];

/// The experts as transformers 5 stores them: the matrices of all experts of a layer stacked in two tensors.
pub(super) const STACKED_EXPERTS: &[TensorRow] = &[
    tensor("experts.gate_up_proj", Group::Experts, Matrix, Rows(Intermediate)),
    tensor("experts.down_proj", Group::Experts, Matrix, Columns(Intermediate)),
];

/// The config of a family whose config.json has the fields of [`CommonConfig`].
/// Families with a standard decoder differ mainly in how they load attention and MLPs.
pub(super) trait StandardDecoder: Send + Sync {
    fn common(&self) -> &CommonConfig;

    /// Returns the KV cache spec of each layer.
    fn layers(&self) -> Vec<LayerSpec>;

    /// Loads the attention and the MLP of one layer.
    fn load_sublayers(&self, weights: &Weights, layer: LayerInfo) -> Result<(Attention, Mlp)>;

    /// Returns the config of the decoder, except the configs of its attention and MLPs.
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

    fn hidden_size(&self) -> usize {
        self.common().hidden_size
    }

    fn intermediate_size(&self) -> usize {
        self.common().intermediate_size
    }

    fn cache_layers(&self) -> Vec<LayerSpec> {
        self.layers()
    }

    fn build(&self, weights: &Weights, context: usize, tensors: TensorTable) -> Result<Decoder> {
        let config = self.decoder_config(weights, context)?;
        Decoder::load(weights, context, config, tensors, |weights, layer| self.load_sublayers(weights, layer))
    }
}
