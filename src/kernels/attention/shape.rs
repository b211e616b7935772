//! The dimensions of one attention call, and the checks of its inputs.

use candle_core::{DType, Result, Tensor, bail};

use super::inputs::AttentionInputs;
use super::paged::{BLOCK_TOKENS, CachedLayer};
use crate::kernels::constants::PORTABLE_MAX_HEAD_DIM;

/// The dimensions of the tensors in one attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    pub tokens: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl AttentionShape {
    /// Returns the dimensions of the inputs of [`attention`](super::attention()). Fails if the inputs do not match.
    pub(super) fn of_inputs(inputs: AttentionInputs) -> Result<Self> {
        let AttentionInputs { q, layer, queries, blocks, sinks, .. } = inputs;
        let shape = Self::of_tensors(q, layer, sinks)?;
        if queries.tokens() != shape.tokens {
            bail!(
                "cannot compute attention: q has {} tokens, but the sequences of the pass have {} new tokens",
                shape.tokens,
                queries.tokens()
            );
        }
        queries.check(blocks)?;
        Ok(shape)
    }

    /// Returns the dimensions of q, k and v.
    ///
    /// Fails if q, k, v and the sinks do not match, if the number of cache rows is not a multiple of [`BLOCK_TOKENS`],
    /// or if the head size exceeds [`PORTABLE_MAX_HEAD_DIM`].
    pub(super) fn of_tensors(q: &Tensor, layer: CachedLayer, sinks: Option<&Tensor>) -> Result<Self> {
        let CachedLayer { k, v } = layer;
        let (tokens, heads, head_dim) = q.dims3()?;
        let (rows, kv_heads, kv_head_dim) = k.dims3()?;
        if kv_head_dim != head_dim
            || k.dims() != v.dims()
            || kv_heads == 0
            || !heads.is_multiple_of(kv_heads)
            || !rows.is_multiple_of(BLOCK_TOKENS)
            || head_dim > PORTABLE_MAX_HEAD_DIM
        {
            bail!(
                "cannot compute attention: unsupported shapes: q {:?}, k {:?}, v {:?} \
                 (the maximum head_dim is {PORTABLE_MAX_HEAD_DIM}, and a block has {BLOCK_TOKENS} rows)",
                q.dims(),
                k.dims(),
                v.dims()
            );
        }
        if k.dtype() != q.dtype() || v.dtype() != q.dtype() {
            let q = q.dtype();
            let k = k.dtype();
            let v = v.dtype();
            bail!("cannot compute attention: dtypes do not match: q {q:?}, k {k:?}, v {v:?}");
        }
        if let Some(sinks) = sinks
            && (sinks.dims() != [heads] || sinks.dtype() != DType::F32)
        {
            let (dtype, dims) = (sinks.dtype(), sinks.dims());
            bail!("cannot compute attention: sinks are {dtype:?} {dims:?}, expected F32 [{heads}]");
        }
        Ok(Self { tokens, heads, kv_heads, head_dim })
    }
}
