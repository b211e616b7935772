//! The self-attention of one layer.
//!
//! Steps: project to q, k and v; normalize q and k (some models); apply RoPE; cache k and v; attend; apply o_proj.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Tensor};

use super::kv_cache::{KvCache, LayerSpec};
use super::linear::{Bias, Linear};
use super::norm::{Norm, NormConfig};
use super::pass::{Pass, RowSelection};
use super::residual::{PartialForm, PartialOutput, PartialRows};
use super::rope::RotaryEmbedding;
use crate::kernels;
use crate::kernels::attention::rope::{HeadSizes, QkNorm, SplitQkvInputs, split_qkv};
use crate::kernels::attention::{AttentionBackend, AttentionInputs, AttentionMask, attention};
use crate::weights::Weights;
use crate::weights::inventory::kv_head_unit;
use crate::world::World;

/// Sizes and options of one attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionConfig {
    pub hidden_size: usize,
    pub heads: usize,
    pub spec: LayerSpec,
    pub qkv_bias: Bias,
    pub o_bias: Bias,
    pub sinks: Sinks,
    /// The config of `q_norm` and `k_norm`, which are applied to each head before RoPE.
    /// `None` if the model has no such norms.
    pub qk_norm: Option<NormConfig>,
    /// The factor by which the attention scores q·k are multiplied.
    pub scale: f32,
    /// The soft cap of attention scores, if any: a score s becomes cap · tanh(s / cap).
    pub softcap: Option<f32>,
}

impl AttentionConfig {
    /// Returns a config with a scale of 1/sqrt(head_dim), and without biases, sinks, q/k norms or a soft cap.
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

    /// Returns the output size of q_proj, which is also the input size of o_proj.
    fn q_size(&self) -> usize {
        self.heads * self.spec.head_dim
    }

    /// Returns the output size of k_proj, which is also the output size of v_proj.
    fn kv_size(&self) -> usize {
        self.spec.kv_heads * self.spec.head_dim
    }

    /// Returns the KV heads that this rank holds. The rank also holds the query heads that attend to these KV heads.
    /// Each rank's columns of `o_proj` start at a multiple of `column_unit`.
    fn kv_share(&self, world: &World, column_unit: usize) -> Range<usize> {
        let columns = self.heads / self.spec.kv_heads * self.spec.head_dim;
        world.share(self.spec.kv_heads, kv_head_unit(columns, column_unit))
    }
}

/// Whether a layer has a learned attention sink (a logit) for each head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sinks {
    With,
    Without,
}

/// Causal self-attention with grouped queries.
/// Biases, norms of q and k, sinks, a soft cap and a sliding window are optional.
pub struct Attention {
    /// The q_proj, k_proj and v_proj weights, stacked in this order.
    pub(crate) qkv_proj: Linear,
    pub(crate) o_proj: Linear,
    /// The attention sinks, f32 `[heads]`.
    pub(crate) sinks: Option<Tensor>,
    pub(crate) qk_norms: Option<QkNorms>,
    pub(crate) rotary: Arc<RotaryEmbedding>,
    /// The config. `heads` and `spec.kv_heads` count only the heads that this rank holds.
    pub(crate) config: AttentionConfig,
    /// The dtype of the layer's input and of the KV cache.
    dtype: DType,
}

/// The norms of each head of q and k before RoPE. Their weights have the shape `[head_dim]`.
pub(crate) struct QkNorms {
    pub q_norm: Norm,
    pub k_norm: Norm,
}

impl QkNorms {
    fn load(weights: &Weights, head_dim: usize, config: NormConfig) -> Result<Self> {
        let norm = |name| Norm::load(&weights.at(name), head_dim, config);
        Ok(Self { q_norm: norm("q_norm")?, k_norm: norm("k_norm")? })
    }

    /// Returns the size of both norms in bytes.
    fn bytes(&self) -> u64 {
        self.q_norm.bytes() + self.k_norm.bytes()
    }
}

/// The names of fused, transposed projections in a checkpoint, such as `c_attn` and `c_proj`.
#[derive(Clone, Copy)]
pub struct TransposedNames {
    pub qkv: &'static str,
    pub o: &'static str,
}

/// How a checkpoint stores the projections of an attention layer.
#[derive(Clone, Copy)]
enum Projections {
    /// Four matrices: `q_proj`, `k_proj`, `v_proj` and `o_proj`.
    Separate,
    /// Two matrices: `qkv_proj` and `o_proj`. `qkv_proj` contains the rows of q, k and v, in this order.
    Fused,
    /// Like `Fused`, but the two matrices have other names, are stored transposed, and have biases (GPT-2).
    FusedTransposed(TransposedNames),
}

impl Attention {
    /// Loads this rank's heads of `q_proj`, `k_proj`, `v_proj` and `o_proj`.
    /// Also loads the sinks and the q/k norms, if `config` has them.
    pub fn load(weights: &Weights, config: AttentionConfig, rotary: Arc<RotaryEmbedding>) -> Result<Self> {
        Self::load_heads(weights, config, Projections::Separate, rotary)
    }

    /// Like [`load`](Self::load), but the checkpoint has one matrix `qkv_proj` in place of q_proj, k_proj and v_proj.
    /// `qkv_proj` contains the rows of q, k and v, in this order.
    pub fn load_fused(weights: &Weights, config: AttentionConfig, rotary: Arc<RotaryEmbedding>) -> Result<Self> {
        Self::load_heads(weights, config, Projections::Fused, rotary)
    }

    /// Like [`load_fused`](Self::load_fused), for transposed matrices with biases.
    pub fn load_transposed(
        weights: &Weights,
        config: AttentionConfig,
        names: TransposedNames,
        rotary: Arc<RotaryEmbedding>,
    ) -> Result<Self> {
        Self::load_heads(weights, config, Projections::FusedTransposed(names), rotary)
    }

    fn load_heads(
        weights: &Weights,
        config: AttentionConfig,
        projections: Projections,
        rotary: Arc<RotaryEmbedding>,
    ) -> Result<Self> {
        let AttentionConfig { hidden_size, heads, spec, .. } = config;
        let q_size = config.q_size();
        let o_name = if let Projections::FusedTransposed(names) = projections { names.o } else { "o_proj" };
        let world = weights.world();
        let kv_heads = config.kv_share(world, weights.at(o_name).column_unit("weight", q_size)?);
        // Consecutive query heads share a KV head, and consecutive rows belong to the same head.
        let times = |range: &Range<usize>, factor: usize| range.start * factor..range.end * factor;
        let q_heads = times(&kv_heads, heads / spec.kv_heads);
        let own = QkvRows { q: times(&q_heads, spec.head_dim), kv: times(&kv_heads, spec.head_dim) };
        let o = weights.at(o_name).columns(own.q.clone(), q_size);
        let qkv_proj = load_qkv(weights, config, projections, &own)?;
        let o_proj = match projections {
            Projections::FusedTransposed(_) => Linear::load_transposed(&o, own.q.len(), hidden_size)?,
            _ => Linear::load(&o, own.q.len(), hidden_size, config.o_bias)?,
        };
        let sinks = weights.rows([q_heads.clone()], heads);
        let qk_norms = config.qk_norm.map(|norm| QkNorms::load(weights, spec.head_dim, norm)).transpose()?;
        let spec = LayerSpec { kv_heads: kv_heads.len(), ..spec };
        Ok(Self {
            qkv_proj,
            o_proj,
            sinks: match config.sinks {
                Sinks::With => Some(sinks.vector("sinks", q_heads.len(), DType::F32)?),
                Sinks::Without => None,
            },
            qk_norms,
            rotary,
            config: AttentionConfig { heads: q_heads.len(), spec, ..config },
            dtype: weights.dtype(),
        })
    }

    /// Returns the size in bytes of the weights that this rank holds.
    pub fn bytes(&self) -> u64 {
        let norms = self.qk_norms.as_ref().map_or(0, QkNorms::bytes);
        self.qkv_proj.bytes() + self.o_proj.bytes() + self.sinks.as_ref().map_or(0, kernels::bytes) + norms
    }

    /// Returns the dtype of the input and of the KV cache.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns `backend`, or the backend that `Auto` chooses for this layer. See [`AttentionBackend::choose`].
    pub(super) fn choose_backend(
        &self,
        backend: AttentionBackend,
        is_on_gpu: bool,
    ) -> Result<AttentionBackend, String> {
        backend.choose(is_on_gpu, self.dtype, self.config.spec.head_dim, self.config.softcap)
    }

    /// Computes attention for the tokens of all sequences, and writes the new keys and values to the cache.
    ///
    /// x is `[tokens, hidden]`. Returns this rank's partial result for the tokens that `rows` selects,
    /// `[rows, hidden]`, in the form `form`. If the rank holds no heads, its partial result is zeros in f32.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        layer: usize,
        pass: &Pass,
        cache: &KvCache,
        rows: RowSelection,
        form: PartialForm,
    ) -> Result<PartialOutput<'_>> {
        if self.config.heads == 0 {
            let rows = Tensor::zeros((pass.row_count(rows), self.config.hidden_size), DType::F32, x.device())?;
            return Ok(PartialOutput { rows: PartialRows::Summed(rows), bias: self.o_proj.bias.as_ref() });
        }
        let y = pass.select(rows, &self.attend(x, layer, pass, cache)?)?;
        self.o_proj.forward_partial(&y, pass.sum_order(), form)
    }

    /// Returns the attention output of the heads of this rank, `[tokens, heads * head_dim]`.
    /// The rank must hold at least one head.
    fn attend(&self, x: &Tensor, layer: usize, pass: &Pass, cache: &KvCache) -> Result<Tensor> {
        let (tokens, _) = x.dims2()?;
        let AttentionConfig { heads, spec, scale, softcap, .. } = self.config;
        let LayerSpec { kv_heads, head_dim, window } = spec;
        let (cached, blocks) = (cache.layer(layer), pass.blocks(cache.layout().group(layer)));

        // 1. project, normalize and rotate; write k and v to the cache
        let qkv = self.qkv_proj.matmul_terms(x, pass.sum_order())?;
        let norms = self.qk_norms.as_ref().map(|QkNorms { q_norm, k_norm }| QkNorm {
            q: &q_norm.weight,
            k: &k_norm.weight,
            eps: q_norm.eps,
        });
        let rotation = self.rotary.rotation(pass.queries().positions());
        let sizes = HeadSizes { heads, kv_heads, head_dim };
        let (bias, slots) = (self.qkv_proj.bias.as_ref(), &blocks.slots);
        let inputs = SplitQkvInputs { qkv: &qkv, bias, norms, rotation, sizes, layer: cached, slots };
        let q = split_qkv(inputs)?;

        // 2. attend: each token attends only to its own sequence
        let mask = AttentionMask { window, scale, softcap };
        let (queries, sinks) = (pass.queries(), self.sinks.as_ref());
        let sum_order = pass.sum_order();
        let inputs = AttentionInputs { q: &q, layer: cached, queries, blocks, sinks, mask, sum_order };
        Ok(attention(inputs, pass.backend())?.reshape((tokens, heads * head_dim))?)
    }
}

/// This rank's rows of q_proj, and of both k_proj and v_proj.
struct QkvRows {
    q: Range<usize>,
    kv: Range<usize>,
}

/// Loads this rank's rows of q_proj, k_proj and v_proj, stacked in this order.
fn load_qkv(weights: &Weights, config: AttentionConfig, projections: Projections, own: &QkvRows) -> Result<Linear> {
    let AttentionConfig { hidden_size, qkv_bias, .. } = config;
    let (q_size, kv_size) = (config.q_size(), config.kv_size());
    let QkvRows { q, kv } = own;
    if let Projections::Separate = projections {
        let part = |name, rows: &Range<usize>, size| (weights.at(name).rows([rows.clone()], size), rows.len());
        let parts = [part("q_proj", q, q_size), part("k_proj", kv, kv_size), part("v_proj", kv, kv_size)];
        return Linear::load_stacked(&parts, hidden_size, qkv_bias);
    }
    // A fused matrix has the rows of q, then those of k, then those of v.
    let rows = q.len() + 2 * kv.len();
    let k = q_size + kv.start..q_size + kv.end;
    let v = k.start + kv_size..k.end + kv_size;
    let fused = |name| weights.at(name).rows([q.clone(), k, v], q_size + 2 * kv_size);
    match projections {
        Projections::FusedTransposed(names) => Linear::load_transposed(&fused(names.qkv), hidden_size, rows),
        _ => Linear::load(&fused("qkv_proj"), hidden_size, rows, qkv_bias),
    }
}
