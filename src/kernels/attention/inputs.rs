//! The inputs of one attention call, the same for all backends.

use candle_core::Tensor;

use super::mask::AttentionMask;
use super::paged::{CachedLayer, PassBlocks, QueryLayout};
use crate::kernels::SumOrder;

/// The inputs of [`attention`](super::attention()).
#[derive(Clone, Copy)]
pub struct AttentionInputs<'t> {
    /// The query vectors, `[tokens, heads, head_dim]`, in the token order of `queries`.
    pub q: &'t Tensor,
    /// The cached keys and values, in the dtype of `q`.
    /// The keys and values of all positions that the queries attend to must already be in the cache.
    pub layer: CachedLayer<'t>,
    pub queries: &'t QueryLayout,
    /// The block tables of the sequences in `queries`, and the slots of their new tokens.
    pub blocks: &'t PassBlocks,
    /// The attention sinks, one logit per head: f32 `[heads]`. `None` for attention without sinks.
    pub sinks: Option<&'t Tensor>,
    pub mask: AttentionMask,
    pub sum_order: SumOrder,
}
