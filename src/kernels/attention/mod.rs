//! Causal grouped-query attention over a KV cache. A sliding window, sinks and a soft cap are optional.
//!
//! A sink is a learned logit per head that takes part in the softmax but has no value vector.
//! The reference for sinks is `sdpa` in `gpt_oss/torch/model.py` of openai/gpt-oss.
//! With a sliding window of w keys, position i attends to the positions max(0, i-w+1) ..= i.
//!
//! - `backend`: the implementations of attention, and the choice among them
//! - `flash_attention`, `tile_kernel`: attention on tensor cores, and the choice of its kernel
//! - `portable_attention`: attention without tensor cores, and the reference on the CPU
//! - `candle_flash_attn`: attention with the crate candle-flash-attn
//! - `rope`: splits the output of the QKV projection, rotates q and k, and writes k and v to the KV cache
//! - `paged`: the KV cache as blocks; `inputs`, `shape`, `mask`: the inputs, sizes and mask of attention

mod backend;
#[cfg(feature = "flash-attn")]
mod candle_flash_attn;
#[cfg(feature = "cuda")]
mod flash_attention;
mod inputs;
mod mask;
mod paged;
mod portable_attention;
pub mod rope;
mod shape;
#[cfg(any(feature = "cuda", test))]
mod tile_kernel;

use candle_core::{Device, Result, Tensor};

use crate::kernels::{elements, to_f32};

pub use crate::kernels::constants::FLASH_HEAD_DIMS;
pub use backend::AttentionBackend;
#[cfg(feature = "cuda")]
pub use flash_attention::{FlashAttention, FlashTensors};
pub use inputs::AttentionInputs;
pub use mask::AttentionMask;
pub use paged::{BLOCK_TOKENS, CachedLayer, PassBlocks, QueryLayout, QuerySpan, slot};
pub use portable_attention::{ReferenceInputs, reference};
pub use shape::AttentionShape;

/// Computes attention over the cached keys and values. Returns the output in the shape and dtype of q.
///
/// Fails if the inputs do not match each other, or if `backend` does not support them.
/// On a CPU, `Auto` and `Portable` run [`reference()`].
pub fn attention(inputs: AttentionInputs, backend: AttentionBackend) -> Result<Tensor> {
    let AttentionInputs { q, layer, queries, blocks, sinks, mask, .. } = inputs;
    let shape = AttentionShape::of_inputs(inputs)?;
    let AttentionShape { tokens, heads, head_dim, .. } = shape;
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only builds with CUDA use `backend`"))]
    let backend = backend
        .choose(q.device().is_cuda(), q.dtype(), head_dim, mask.softcap)
        .map_err(|reason| candle_core::Error::msg(format!("cannot compute attention with '{backend}': {reason}")))?;
    match q.device() {
        Device::Cpu => {
            let sinks = sinks.map(Tensor::to_vec1::<f32>).transpose()?;
            let q_f32 = to_f32(q)?;
            let k = to_f32(layer.k)?;
            let v = to_f32(layer.v)?;
            let ((q_f32, ql), (k, kl), (v, vl)) =
                (q_f32.storage_and_layout(), k.storage_and_layout(), v.storage_and_layout());
            let reference_inputs = ReferenceInputs {
                q: elements(&q_f32, ql)?,
                k: elements(&k, kl)?,
                v: elements(&v, vl)?,
                sinks: sinks.as_deref(),
                spans: queries.spans(),
                tables: &blocks.tables.to_vec2()?,
            };
            let out = reference(reference_inputs, shape, mask);
            Tensor::from_vec(out, (tokens, heads, head_dim), &Device::Cpu)?.to_dtype(q.dtype())
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            // SAFETY: every backend writes every element of `out`.
            let out = unsafe { crate::kernels::scratch::empty((tokens, heads, head_dim), q.dtype(), q.device())? };
            match backend {
                AttentionBackend::Own => flash_attention::attention(device, inputs, &out)?,
                #[cfg(feature = "flash-attn")]
                AttentionBackend::CandleFlashAttn => candle_flash_attn::attention(device, inputs, &out)?,
                _ => portable_attention::launch(device, inputs, &out)?,
            }
            Ok(out)
        }
        _ => crate::kernels::unsupported("attention", q),
    }
}
