//! The tensor dimensions of one attention call, and the checks of the inputs.

use candle_core::{DType, Result, Tensor, bail};

use super::mask::AttentionMask;
use crate::kernels::constants::EAGER_MAX_HEAD_DIM;

/// The dimensions of the tensors in one attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    pub tokens: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Rows of the KV cache. Position p is stored in row p mod `cache_rows`.
    pub cache_rows: usize,
}

impl AttentionShape {
    /// Checks the inputs of [`attention`](super::attention()) and returns their sizes.
    ///
    /// Also checks that the cache has a row for every key that the queries see.
    pub(super) fn of_inputs(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        sinks: Option<&Tensor>,
        positions: &Tensor,
        mask: AttentionMask,
    ) -> Result<Self> {
        let (tokens, heads, head_dim) = q.dims3()?;
        let (cache_rows, kv_heads, kv_head_dim) = k.dims3()?;
        if kv_head_dim != head_dim
            || k.dims() != v.dims()
            || kv_heads == 0
            || heads % kv_heads != 0
            || head_dim > EAGER_MAX_HEAD_DIM
        {
            bail!(
                "attention: unsupported shapes: q {:?}, k {:?}, v {:?} (the maximum head_dim is {EAGER_MAX_HEAD_DIM})",
                q.dims(),
                k.dims(),
                v.dims()
            );
        }
        if k.dtype() != q.dtype() || v.dtype() != q.dtype() {
            bail!("attention: dtypes do not match: q {:?}, k {:?}, v {:?}", q.dtype(), k.dtype(), v.dtype());
        }
        if let Some(sinks) = sinks
            && (sinks.dims() != [heads] || sinks.dtype() != DType::F32)
        {
            bail!("attention: sinks are {:?} {:?}, expected F32 [{heads}]", sinks.dtype(), sinks.dims());
        }
        if positions.dims() != [tokens] || positions.dtype() != DType::U32 {
            bail!("attention: positions are {:?} {:?}, expected U32 [{tokens}]", positions.dtype(), positions.dims());
        }
        // Cache rows are reused. The key of the last query must not overwrite the oldest key that the first query sees.
        let visible = mask.window.unwrap_or(usize::MAX).min(mask.position + 1) + tokens - 1;
        if visible > cache_rows {
            bail!("attention: the queries see {visible} positions, but the cache has only {cache_rows} rows");
        }
        Ok(Self { tokens, heads, kv_heads, head_dim, cache_rows })
    }
}
