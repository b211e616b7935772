//! Attention without tensor cores, for every dtype and for head sizes up to 256.
//!
//! This file launches the kernels in `eager_attention.cu` and implements the reference in plain Rust.

use rayon::prelude::*;

use super::mask::AttentionMask;
use super::shape::AttentionShape;

#[cfg(feature = "cuda")]
pub(super) use with_cuda::launch;
#[cfg(feature = "flash-attn")]
pub(super) use with_cuda::scale_by_sinks;

#[cfg(feature = "cuda")]
mod with_cuda {
    use candle_core::cuda_backend::CudaDevice;
    use candle_core::{Result, Tensor};

    use super::{AttentionMask, AttentionShape};
    use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};

    /// Writes the attention of q, k and v to `out`. The caller has checked all shapes and dtypes.
    pub fn launch(
        device: &CudaDevice,
        (q, k, v): (&Tensor, &Tensor, &Tensor),
        sinks: Option<&Tensor>,
        mask: AttentionMask,
        shape: AttentionShape,
        out: &Tensor,
    ) -> Result<()> {
        let AttentionShape { tokens, heads, kv_heads, head_dim, cache_rows } = shape;
        let arguments = Arguments::new()
            .tensor(q)?
            .tensor(k)?
            .tensor(v)?
            .optional(sinks)?
            .tensor(out)?
            .int(heads)
            .int(kv_heads)
            .int(head_dim)
            .int(cache_rows)
            .int(mask.position)
            .int(mask.window.unwrap_or(0))
            .float(mask.scale)
            .float(mask.softcap.unwrap_or(0.0));
        // If there are few blocks, each needs many warps to keep enough loads in flight. Otherwise, 4 warps suffice.
        let warps = if tokens * heads <= 512 { 32 } else { 4 };
        let shared_bytes = warps * (head_dim + 2) * size_of::<f32>();
        let kernel = format!("attention_{}", dtype_suffix(q.dtype())?);
        let shape = LaunchShape::new((tokens, heads, 1), 32 * warps).with_shared_bytes(shared_bytes);
        // SAFETY: the caller has checked shapes and dtypes; the kernel wraps positions modulo the number of cache rows.
        unsafe { Launch::new(module!("eager_attention"), kernel, shape, arguments).enqueue(device) }
    }

    /// Applies sinks to attention output that was computed without sinks: out · sigmoid(lse - sink).
    ///
    /// - out: `[tokens, heads, head_dim]`
    /// - lse: f32 `[heads, tokens]`, the logarithm of each softmax denominator
    /// - sinks: f32 `[heads]`
    #[cfg(feature = "flash-attn")]
    pub fn scale_by_sinks(device: &CudaDevice, out: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<()> {
        let (tokens, heads, head_dim) = out.dims3()?;
        let arguments = Arguments::new().tensor(out)?.tensor(lse)?.tensor(sinks)?.int(tokens).int(heads).int(head_dim);
        let kernel = format!("scale_by_sinks_{}", dtype_suffix(out.dtype())?);
        let shape = LaunchShape::new((tokens, heads, 1), 32);
        // SAFETY: the caller guarantees that out, lse and sinks have these shapes.
        unsafe { Launch::new(module!("eager_attention"), kernel, shape, arguments).enqueue(device) }
    }
}

/// Computes attention in plain Rust: scores, softmax with the sink in its denominator, weighted sum of values.
///
/// - q: `[tokens, heads, head_dim]`
/// - k, v: `[cache_rows, kv_heads, head_dim]`
/// - sinks: `[heads]`
///
/// Returns `[tokens, heads, head_dim]`.
pub fn reference(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    sinks: Option<&[f32]>,
    shape: AttentionShape,
    mask: AttentionMask,
) -> Vec<f32> {
    let AttentionShape { tokens, heads, kv_heads, head_dim, cache_rows } = shape;
    let mut out = vec![0f32; tokens * heads * head_dim];
    out.par_chunks_exact_mut(head_dim).enumerate().for_each(|(row, out)| {
        let (token, head) = (row / heads, row % heads);
        let kv_head = head / (heads / kv_heads);
        let last = mask.position + token;
        let first = mask.window.map_or(0, |window| (last + 1).saturating_sub(window));
        let query = &q[row * head_dim..][..head_dim];
        let offset = |position: usize| ((position % cache_rows) * kv_heads + kv_head) * head_dim;
        let score = |position| {
            let score = dot(query, &k[offset(position)..][..head_dim]) * mask.scale;
            mask.softcap.map_or(score, |cap| cap * (score / cap).tanh())
        };
        let scores: Vec<f32> = (first..=last).map(score).collect();
        let sink = sinks.map(|sinks| sinks[head]);
        let max = scores.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
        let mut total = sink.map_or(0.0, |sink| (sink - max).exp());
        for (position, score) in (first..=last).zip(&scores) {
            let weight = (score - max).exp();
            total += weight;
            for (out, value) in out.iter_mut().zip(&v[offset(position)..][..head_dim]) {
                *out += weight * value;
            }
        }
        out.iter_mut().for_each(|value| *value /= total);
    });
    out
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
