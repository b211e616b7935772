//! Self-attention of one layer: projections, RoPE, cache, attention, output projection.

use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Tensor};

use super::decoder::Pass;
use super::kv_cache::{KvCache, LayerCache, LayerSpec};
use super::linear::{Bias, Linear};
use super::rope::Rotary;
use crate::kernels::{
    self,
    attention::{Sight, attention},
    rope::split_qkv,
};
use crate::weights::Weights;

/// Sizes and options of a layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionConfig {
    pub hidden_size: usize,
    pub heads: usize,
    pub spec: LayerSpec,
    pub qkv_bias: Bias,
    pub o_bias: Bias,
    pub sinks: Sinks,
}

/// Whether a layer has a learned sink logit per head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sinks {
    With,
    Without,
}

pub struct Attention {
    /// q_proj, k_proj and v_proj, one below the other.
    pub(crate) qkv_proj: Linear,
    pub(crate) o_proj: Linear,
    /// f32 `[H]`
    pub(crate) sinks: Option<Tensor>,
    pub(crate) rotary: Arc<Rotary>,
    pub(crate) config: AttentionConfig,
    /// Of the projections, the cache, and the product of queries and keys.
    dtype: DType,
}

impl Attention {
    pub fn load(weights: &Weights, config: AttentionConfig, rotary: Arc<Rotary>) -> Result<Self> {
        let AttentionConfig { hidden_size, heads, spec, qkv_bias, o_bias, sinks } = config;
        let (q_size, kv_size) = (heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        Ok(Self {
            qkv_proj: Linear::load_stacked(
                &[(weights.at("q_proj"), q_size), (weights.at("k_proj"), kv_size), (weights.at("v_proj"), kv_size)],
                hidden_size,
                qkv_bias,
            )?,
            o_proj: Linear::load(&weights.at("o_proj"), q_size, hidden_size, o_bias)?,
            sinks: (sinks == Sinks::With).then(|| weights.float_as("sinks", &[heads], DType::F32)).transpose()?,
            rotary,
            config,
            dtype: weights.dtype(),
        })
    }

    /// Bytes of the weights.
    pub fn bytes(&self) -> u64 {
        self.qkv_proj.bytes() + self.o_proj.bytes() + self.sinks.as_ref().map_or(0, kernels::bytes)
    }

    /// The dtype that inputs must have.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// x \[T, C\] of all sequences of the pass → \[T, C\] f32; keys and values go to each sequence's cache.
    pub fn forward(&self, x: &Tensor, layer: usize, pass: &Pass, caches: &mut [&mut KvCache]) -> Result<Tensor> {
        let (tokens, _) = x.dims2()?;
        let LayerSpec { kv_heads, head_dim, window } = self.config.spec;
        let heads = self.config.heads;

        // 1. project and rotate
        let qkv = self.qkv_proj.product(x)?;
        let rotation = self.rotary.at(pass.positions());
        let (q, k, v) =
            split_qkv(&qkv, self.qkv_proj.bias.as_ref(), rotation, (heads, kv_heads, head_dim), self.dtype)?;

        // 2. attend, each sequence over its own cache
        let scale = 1.0 / (head_dim as f32).sqrt();
        let attend = |q: &Tensor, cached: &LayerCache, positions: &Tensor, sight: Sight| {
            attention(q, cached.k(), cached.v(), self.sinks.as_ref(), positions, sight, pass.backend())
        };
        let mut outputs = Vec::with_capacity(caches.len());
        for (span, cache) in pass.spans().zip(caches.iter_mut()) {
            let rows = |tensor: &Tensor| tensor.narrow(0, span.start, span.len())?.contiguous();
            let position = cache.len();
            let cached = cache.write(layer, &rows(&k)?, &rows(&v)?)?;
            let sight = Sight { position, window, scale };
            let positions = pass.positions().narrow(0, span.start, span.len())?;
            outputs.push(attend(&rows(&q)?, cached, &positions, sight)?);
        }

        // 3. project back
        let y = if outputs.len() == 1 { outputs.remove(0) } else { Tensor::cat(&outputs, 0)? };
        self.o_proj.forward(&y.reshape((tokens, heads * head_dim))?)
    }
}
