//! Attention without tensor cores, for every compute dtype and for head sizes up to 256.
//!
//! Launches the kernels in `portable_attention.cu` on a GPU, and computes attention in plain Rust on a CPU.

use rayon::prelude::*;

use super::mask::AttentionMask;
use super::paged::{QuerySpan, slot};
use super::shape::AttentionShape;

#[cfg(feature = "cuda")]
pub(super) use with_cuda::launch;
#[cfg(feature = "flash-attn")]
pub(super) use with_cuda::scale_by_sinks;

#[cfg(feature = "cuda")]
mod with_cuda {
    use candle_core::cuda_backend::CudaDevice;
    use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
    use candle_core::{Result, Tensor};

    use crate::kernels::SumOrder;
    use crate::kernels::attention::{AttentionInputs, CachedLayer};
    use crate::kernels::launch::{
        Arguments, Launch, LaunchShape, address, dtype_suffix, kernel_size, module, optional_address,
    };

    /// Mirrors `AttentionArguments` in `portable_attention.cu`.
    /// The tensors are device addresses, or 0 for tensors that are `None`.
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct RawArguments {
        q: u64,
        k: u64,
        v: u64,
        sinks: u64,
        out: u64,
        positions: u64,
        sequences: u64,
        tables: u64,
        table_blocks: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        window: i32,
        scale: f32,
        softcap: f32,
    }

    // The last 4 bytes are padding.
    const _: () = assert!(size_of::<RawArguments>() == 8 * 8 + 8 * 4);
    // SAFETY: the struct has C layout and contains only numbers. The kernel does not read the padding.
    unsafe impl DeviceRepr for RawArguments {}

    /// Computes attention for all queries into `out`. [`attention`](super::super::attention) checks the inputs.
    pub fn launch(device: &CudaDevice, inputs: AttentionInputs, out: &Tensor) -> Result<()> {
        let AttentionInputs { q, layer: CachedLayer { k, v }, queries, blocks, sinks, mask, sum_order } = inputs;
        let (tokens, heads, head_dim) = q.dims3()?;
        let (_, kv_heads, _) = k.dims3()?;
        let positions = queries.positions();
        let sequences = queries.sequences();
        let tables = &blocks.tables;
        let raw = RawArguments {
            q: address(q)?,
            k: address(k)?,
            v: address(v)?,
            sinks: optional_address(sinks)?,
            out: address(out)?,
            positions: address(positions)?,
            sequences: address(sequences)?,
            tables: address(tables)?,
            table_blocks: kernel_size(tables.dim(1)?)?,
            heads: kernel_size(heads)?,
            kv_heads: kernel_size(kv_heads)?,
            head_dim: kernel_size(head_dim)?,
            window: kernel_size(mask.window.unwrap_or(0))?,
            scale: mask.scale,
            softcap: mask.softcap.unwrap_or(0.0),
        };
        let used = [q, k, v, out, positions, sequences, tables].into_iter().chain(sinks);
        let arguments = Arguments::new().value(raw, used);
        // With few thread blocks, each block needs many warps to keep enough loads in flight.
        // With many thread blocks, 4 warps per block are enough.
        // The number of warps determines the summation order, so `SumOrder::Fixed` always uses 32 warps.
        let warps = if tokens * heads <= 512 || sum_order == SumOrder::Fixed { 32 } else { 4 };
        let shared_bytes = warps * (head_dim + 2) * size_of::<f32>();
        let kernel = format!("attention_{}", dtype_suffix(q.dtype())?);
        let shape = LaunchShape::new((tokens, heads, 1), 32 * warps).with_shared_bytes(shared_bytes);
        // SAFETY: `AttentionShape::of_inputs`, which `attention` calls, has checked shapes and dtypes.
        // `PassBlocks::new` or the batch graph has checked that the tables map all positions to blocks of the cache.
        unsafe { Launch::new(module!("portable_attention"), kernel, shape, arguments).enqueue(device) }
    }

    /// Applies sinks to attention output that was computed without sinks: out · sigmoid(lse - sink).
    ///
    /// - out: `[tokens, heads, head_dim]`
    /// - lse: f32 `[heads, tokens]`, the logarithm of each softmax denominator without the sink
    /// - sinks: f32 `[heads]`
    #[cfg(feature = "flash-attn")]
    pub fn scale_by_sinks(device: &CudaDevice, out: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<()> {
        let (tokens, heads, head_dim) = out.dims3()?;
        let arguments = Arguments::new().tensor(out)?.tensor(lse)?.tensor(sinks)?.int(tokens).int(heads).int(head_dim);
        let kernel = format!("scale_by_sinks_{}", dtype_suffix(out.dtype())?);
        let shape = LaunchShape::new((tokens, heads, 1), 32);
        // SAFETY: `candle_flash_attn::attend`, the only caller, passes tensors with the shapes and dtypes listed above.
        unsafe { Launch::new(module!("portable_attention"), kernel, shape, arguments).enqueue(device) }
    }
}

/// The inputs of [`reference()`].
#[derive(Clone, Copy)]
pub struct ReferenceInputs<'t> {
    /// The queries: `[tokens, heads, head_dim]`.
    pub q: &'t [f32],
    /// The keys in the cache: `[rows, kv_heads, head_dim]`.
    pub k: &'t [f32],
    /// The values in the cache: `[rows, kv_heads, head_dim]`.
    pub v: &'t [f32],
    /// The attention sinks, one logit per head: `[heads]`. `None` for attention without sinks.
    pub sinks: Option<&'t [f32]>,
    /// The new tokens of each sequence.
    pub spans: &'t [QuerySpan],
    /// The block table of each sequence.
    pub tables: &'t [Vec<u32>],
}

/// Computes attention in plain Rust: the CPU implementation, and the reference in tests of the GPU kernels.
///
/// Returns `[tokens, heads, head_dim]`.
pub fn reference(inputs: ReferenceInputs, shape: AttentionShape, mask: AttentionMask) -> Vec<f32> {
    let ReferenceInputs { q, k, v, sinks, spans, tables } = inputs;
    let AttentionShape { tokens, heads, kv_heads, head_dim } = shape;
    let mut out = vec![0f32; tokens * heads * head_dim];
    out.par_chunks_exact_mut(head_dim).enumerate().for_each(|(row, out)| {
        let (token, head) = (row / heads, row % heads);
        let kv_head = head / (heads / kv_heads);
        let sequence = spans.partition_point(|span| span.first + span.tokens <= token);
        let QuerySpan { first, position, .. } = spans[sequence];
        let last_key = position + token - first;
        let first_key = mask.first_key(last_key);
        let query = &q[row * head_dim..][..head_dim];
        let offset = |position| (slot(&tables[sequence], position) as usize * kv_heads + kv_head) * head_dim;
        let score = |position| {
            let score = dot(query, &k[offset(position)..][..head_dim]) * mask.scale;
            mask.softcap.map_or(score, |cap| cap * (score / cap).tanh())
        };
        let scores: Vec<f32> = (first_key..=last_key).map(score).collect();
        let sink = sinks.map(|sinks| sinks[head]);
        let max = scores.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
        let mut total = sink.map_or(0.0, |sink| (sink - max).exp());
        for (position, score) in (first_key..=last_key).zip(&scores) {
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
