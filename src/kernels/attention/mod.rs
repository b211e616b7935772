//! Causal grouped-query attention over a KV cache, with an optional sliding window and optional sinks.
//!
//! A sink is a learned logit per head that takes part in the softmax but has no value.
//! The reference for sinks is `sdpa` in `gpt_oss/torch/model.py` of openai/gpt-oss.
//! With a sliding window of w keys, position i sees the keys i-w+1 ..= i.

mod backend;
#[cfg(feature = "flash-attn")]
mod candle_flash_attn;
mod eager_attention;
#[cfg(feature = "cuda")]
mod flash_attention;
mod mask;
pub mod rope;
mod shape;

use candle_core::{Device, Result, Tensor};

use crate::kernels::{elements, to_f32};

pub use crate::kernels::constants::FLASH_HEAD_DIMS;
pub use backend::AttentionBackend;
pub use eager_attention::reference;
#[cfg(feature = "cuda")]
pub use flash_attention::{EarlyReads, FlashAttention, FlashTensors};
pub use mask::AttentionMask;
pub use shape::AttentionShape;

/// Returns the attention of the queries over the cached keys and values, in the shape and dtype of q.
///
/// - q: `[tokens, heads, head_dim]`
/// - k, v: `[cache_rows, kv_heads, head_dim]` in q's dtype. Position p is stored in row p mod `cache_rows`.
///   All positions that the queries see must have been written.
/// - sinks: f32 `[heads]`
/// - positions: u32 `[tokens]`, the positions of the queries, on the device
///
/// On a CPU, `backend` must be `Auto` or `Eager`. Both run [`reference`].
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sinks: Option<&Tensor>,
    positions: &Tensor,
    mask: AttentionMask,
    backend: AttentionBackend,
) -> Result<Tensor> {
    let shape = AttentionShape::of_inputs(q, k, v, sinks, positions, mask)?;
    let AttentionShape { tokens, heads, head_dim, .. } = shape;
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    let backend = backend
        .choose(q.device().is_cuda(), q.dtype(), head_dim, mask.softcap)
        .map_err(|reason| candle_core::Error::msg(format!("cannot compute attention with '{backend}': {reason}")))?;
    match q.device() {
        Device::Cpu => {
            let sinks = sinks.map(Tensor::to_vec1::<f32>).transpose()?;
            let (queries, keys, values) = (to_f32(q)?, to_f32(k)?, to_f32(v)?);
            let ((queries, ql), (keys, kl), (values, vl)) =
                (queries.storage_and_layout(), keys.storage_and_layout(), values.storage_and_layout());
            let (queries, keys, values) = (elements(&queries, ql)?, elements(&keys, kl)?, elements(&values, vl)?);
            let out = reference(queries, keys, values, sinks.as_deref(), shape, mask);
            Tensor::from_vec(out, (tokens, heads, head_dim), &Device::Cpu)?.to_dtype(q.dtype())
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            // SAFETY: every backend writes every element.
            let out = unsafe { Tensor::empty((tokens, heads, head_dim), q.dtype(), q.device())? };
            match backend {
                AttentionBackend::Own => {
                    let flash = FlashAttention::new(device, q, k, mask)?;
                    flash.enqueue(device, (q, k, v), sinks, positions, &out)?;
                }
                #[cfg(feature = "flash-attn")]
                AttentionBackend::CandleFlashAttn => {
                    candle_flash_attn::attention(device, (q, k, v), sinks, mask, &out)?;
                }
                _ => eager_attention::launch(device, (q, k, v), sinks, mask, shape, &out)?,
            }
            Ok(out)
        }
        _ => crate::kernels::unsupported("attention", q),
    }
}
