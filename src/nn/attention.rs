//! The self-attention of one layer.
//!
//! The steps: project to q, k and v; normalize q and k; apply RoPE; write k and v to the cache; attend; apply o_proj.

use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Tensor};

use super::kv_cache::{KvCache, LayerSpec};
use super::linear::{Bias, Linear};
use super::norm::{Norm, NormConfig};
use super::pass::Pass;
use super::rope::RotaryEmbedding;
use crate::kernels::{
    self,
    attention::{
        AttentionInputs, AttentionMask, attention,
        rope::{HeadSizes, QkNorm, split_qkv},
    },
};
use crate::weights::Weights;

/// Sizes and options of one attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionConfig {
    pub hidden_size: usize,
    pub heads: usize,
    pub spec: LayerSpec,
    pub qkv_bias: Bias,
    pub o_bias: Bias,
    pub sinks: Sinks,
    /// The norms applied to each head of q and k before RoPE: `q_norm` and `k_norm`, each `[head_dim]`.
    pub qk_norm: Option<NormConfig>,
    /// The factor by which the attention scores q·k are multiplied.
    pub scale: f32,
    /// The soft cap, if any. Each score s becomes cap · tanh(s / cap).
    pub softcap: Option<f32>,
}

impl AttentionConfig {
    /// Returns the config of most families: no biases, sinks or q/k norms, and a scale of 1/sqrt(head_dim).
    pub fn new(hidden_size: usize, heads: usize, spec: LayerSpec) -> Self {
        Self {
            hidden_size,
            heads,
            spec,
            qkv_bias: Bias::Without,
            o_bias: Bias::Without,
            sinks: Sinks::Without,
            qk_norm: None,
            scale: 1.0 / (spec.head_dim as f32).sqrt(),
            softcap: None,
        }
    }

    /// Returns the output size of q_proj, and the output size that k_proj and v_proj share.
    fn projection_sizes(&self) -> (usize, usize) {
        (self.heads * self.spec.head_dim, self.spec.kv_heads * self.spec.head_dim)
    }
}

/// Whether a layer has a learned attention sink (a logit) for each head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sinks {
    With,
    Without,
}

pub struct Attention {
    /// The q_proj, k_proj and v_proj weights, stacked in this order.
    pub(crate) qkv_proj: Linear,
    pub(crate) o_proj: Linear,
    /// f32 `[heads]`
    pub(crate) sinks: Option<Tensor>,
    /// The norms of q and k.
    pub(crate) qk_norm: Option<(Norm, Norm)>,
    pub(crate) rotary: Arc<RotaryEmbedding>,
    pub(crate) config: AttentionConfig,
    /// The dtype of the layer's input and of the KV cache.
    dtype: DType,
}

impl Attention {
    /// Loads `q_proj`, `k_proj`, `v_proj` and `o_proj`.
    pub fn load(weights: &Weights, config: AttentionConfig, rotary: Arc<RotaryEmbedding>) -> Result<Self> {
        let (q_size, kv_size) = config.projection_sizes();
        let parts = [(weights.at("q_proj"), q_size), (weights.at("k_proj"), kv_size), (weights.at("v_proj"), kv_size)];
        let qkv_proj = Linear::load_stacked(&parts, config.hidden_size, config.qkv_bias)?;
        let o_proj = Linear::load(&weights.at("o_proj"), q_size, config.hidden_size, config.o_bias)?;
        Self::new(weights, config, rotary, qkv_proj, o_proj)
    }

    /// Loads `qkv_proj` and `o_proj`. `qkv_proj` contains the rows of q, k and v, in this order.
    pub fn load_fused(weights: &Weights, config: AttentionConfig, rotary: Arc<RotaryEmbedding>) -> Result<Self> {
        let (q_size, kv_size) = config.projection_sizes();
        let (hidden_size, qkv_size) = (config.hidden_size, q_size + 2 * kv_size);
        let qkv_proj = Linear::load(&weights.at("qkv_proj"), hidden_size, qkv_size, config.qkv_bias)?;
        let o_proj = Linear::load(&weights.at("o_proj"), q_size, hidden_size, config.o_bias)?;
        Self::new(weights, config, rotary, qkv_proj, o_proj)
    }

    /// Builds the layer from loaded projections. Sinks and q/k norms are loaded from `weights`.
    pub fn new(
        weights: &Weights,
        config: AttentionConfig,
        rotary: Arc<RotaryEmbedding>,
        qkv_proj: Linear,
        o_proj: Linear,
    ) -> Result<Self> {
        let AttentionConfig { heads, spec, sinks, qk_norm, .. } = config;
        let norm = |name, config| Norm::load(&weights.at(name), spec.head_dim, config);
        Ok(Self {
            qkv_proj,
            o_proj,
            sinks: (sinks == Sinks::With).then(|| weights.float_as("sinks", &[heads], DType::F32)).transpose()?,
            qk_norm: match qk_norm {
                Some(config) => Some((norm("q_norm", config)?, norm("k_norm", config)?)),
                None => None,
            },
            rotary,
            config,
            dtype: weights.dtype(),
        })
    }

    /// Returns the size of all weights in bytes.
    pub fn bytes(&self) -> u64 {
        let norms = self.qk_norm.as_ref().map_or(0, |(q, k)| q.bytes() + k.bytes());
        self.qkv_proj.bytes() + self.o_proj.bytes() + self.sinks.as_ref().map_or(0, kernels::bytes) + norms
    }

    /// Returns the dtype that inputs must have.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Computes attention for the tokens of all sequences. Maps x `[tokens, hidden]` to f32 `[tokens, hidden]`.
    /// Writes the new keys and values to the cache.
    ///
    /// The result does not include the bias of `o_proj`. It is returned separately, so that the next norm can add it.
    pub fn forward(&self, x: &Tensor, layer: usize, pass: &Pass, cache: &KvCache) -> Result<(Tensor, Option<&Tensor>)> {
        let (tokens, _) = x.dims2()?;
        let AttentionConfig { heads, spec, scale, softcap, .. } = self.config;
        let LayerSpec { kv_heads, head_dim, window } = spec;
        let (cached, blocks) = (cache.layer(layer), pass.blocks(cache.layout().group(layer)));

        // 1. project, normalize and rotate; write k and v to the cache
        let qkv = self.qkv_proj.matmul(x, pass.sum_order())?;
        let norms = self.qk_norm.as_ref().map(|(q, k)| QkNorm { q: &q.weight, k: &k.weight, eps: q.eps });
        let rotation = self.rotary.rotation(pass.queries().positions());
        let sizes = HeadSizes { heads, kv_heads, head_dim };
        let q = split_qkv(&qkv, self.qkv_proj.bias.as_ref(), norms, rotation, sizes, cached, &blocks.slots)?;

        // 2. attend: each token attends only to its own sequence
        let mask = AttentionMask { window, scale, softcap };
        let (queries, sinks) = (pass.queries(), self.sinks.as_ref());
        let sum_order = pass.sum_order();
        let inputs = AttentionInputs { q: &q, layer: cached, queries, blocks, sinks, mask, sum_order };
        let y = attention(inputs, pass.backend())?;

        // 3. project back
        let y = y.reshape((tokens, heads * head_dim))?;
        Ok((self.o_proj.matmul(&y, sum_order)?, self.o_proj.bias.as_ref()))
    }
}
