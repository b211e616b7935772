//! Attention with the `candle-flash-attn` crate (FlashAttention 2).
//!
//! A sink adds exp(sink) to the softmax denominator. The crate's kernels do not support sinks, so this module applies
//! them afterwards: it multiplies the crate's output by sigmoid(lse - sink), where lse is the logarithm of the softmax
//! denominator without the sink.
//!
//! The crate's Rust API does not return lse, so this module calls the crate's C function.
//! The C function may change in any release, so the version of the crate is pinned.
//! `tests/it/kernels/attention.rs` compares the results of this module with the plain Rust reference.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};
// Links the crate's C library. This module calls no Rust function of the crate.
use candle_flash_attn as _;

use super::inputs::AttentionInputs;
use super::mask::AttentionMask;
use super::paged::slot;
use super::portable_attention::scale_by_sinks;
use crate::kernels::launch::address;

unsafe extern "C" {
    /// The crate's C function, as `src/ffi.rs` of candle-flash-attn 0.11.1 declares it.
    /// Strides are in elements. `softmax_lse` is f32 `[heads, tokens]`.
    fn run_mha(
        q: *const c_void,
        k: *const c_void,
        v: *const c_void,
        out: *const c_void,
        softmax_lse: *const c_void,
        alibi_slopes: *const c_void,
        cu_seqlens_q: *const i32,
        cu_seqlens_k: *const i32,
        q_batch_stride: u32,
        k_batch_stride: u32,
        v_batch_stride: u32,
        o_batch_stride: u32,
        alibi_slopes_batch_stride: u32,
        q_row_stride: u32,
        k_row_stride: u32,
        v_row_stride: u32,
        o_row_stride: u32,
        q_head_stride: u32,
        k_head_stride: u32,
        v_head_stride: u32,
        o_head_stride: u32,
        b: u32,
        h: u32,
        h_k: u32,
        d: u32,
        d_rounded: u32,
        softmax_scale: f32,
        seqlen_q: u32,
        seqlen_k: u32,
        seqlen_q_rounded: u32,
        seqlen_k_rounded: u32,
        total_q: u32,
        is_bf16: c_int,
        is_causal: c_int,
        unpadded_lse: c_int,
        window_size_left: c_int,
        window_size_right: c_int,
        softcap: f32,
        block_table: *const i32,
        block_table_batch_stride: u32,
        page_block_size: c_int,
        mm_prefix_ranges: *const i32,
        mm_prefix_range_batch_stride: u32,
        max_mm_prefix_ranges: c_int,
        stream: *mut c_void,
    );
}

/// Computes attention for all sequences into `out`, with one call of the crate's C function per sequence.
///
/// q and out are bf16 or f16 `[tokens, heads, head_dim]`, and `head_dim` is a multiple of 8.
/// [`attention`](super::attention) checks the inputs.
pub(super) fn attention(device: &CudaDevice, inputs: AttentionInputs, out: &Tensor) -> Result<()> {
    let AttentionInputs { q, layer, queries, blocks, sinks, mask, .. } = inputs;
    let tables: Vec<Vec<u32>> = blocks.tables.to_vec2()?;
    for (span, table) in queries.spans().iter().zip(&tables) {
        let visible = mask.first_key(span.position)..span.position + span.tokens;
        let rows: Vec<u32> = visible.map(|position| slot(table, position)).collect();
        let rows = Tensor::new(rows, q.device())?;
        let (k, v) = (layer.k.index_select(&rows, 0)?, layer.v.index_select(&rows, 0)?);
        let q = q.narrow(0, span.first, span.tokens)?.contiguous()?;
        let part = out.narrow(0, span.first, span.tokens)?;
        attend(device, (&q, &k, &v), sinks, mask, &part)?;
    }
    Ok(())
}

/// Computes attention for one sequence into `out`.
/// k and v hold the keys and values that at least one query of the sequence can see, in order of position.
fn attend(
    device: &CudaDevice,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    sinks: Option<&Tensor>,
    mask: AttentionMask,
    out: &Tensor,
) -> Result<()> {
    let ((tokens, heads, head_dim), (_, kv_heads, _)) = (q.dims3()?, k.dims3()?);
    let length = k.dim(0)?;
    // SAFETY: the kernel writes every element of `lse`.
    let lse = unsafe { Tensor::empty((heads, tokens), DType::F32, q.device())? };
    // As in the crate's Rust code, `is_causal` is 1 only without a window.
    // `left` is the maximum number of visible keys before a query's own key.
    let (is_causal, left) = mask.window.map_or((1, length), |window| (0, (window - 1).min(length)));
    let (q_row, kv_row) = ((heads * head_dim) as u32, (kv_heads * head_dim) as u32);
    let pointer = |tensor: &Tensor| address(tensor).map(|address| address as *const c_void);
    // SAFETY: `address` checks that the tensors are contiguous. The sizes and strides match the tensors.
    // The tensors' memory is freed in stream order, so it stays valid until the kernel has ended.
    unsafe {
        run_mha(
            /* q */ pointer(q)?,
            /* k */ pointer(k)?,
            /* v */ pointer(v)?,
            /* out */ pointer(out)?,
            /* softmax_lse */ pointer(&lse)?,
            /* alibi_slopes */ std::ptr::null(),
            /* cu_seqlens_q */ std::ptr::null(),
            /* cu_seqlens_k */ std::ptr::null(),
            /* q_batch_stride */ tokens as u32 * q_row,
            /* k_batch_stride */ length as u32 * kv_row,
            /* v_batch_stride */ length as u32 * kv_row,
            /* o_batch_stride */ tokens as u32 * q_row,
            /* alibi_slopes_batch_stride */ 0,
            /* q_row_stride */ q_row,
            /* k_row_stride */ kv_row,
            /* v_row_stride */ kv_row,
            /* o_row_stride */ q_row,
            /* q_head_stride */ head_dim as u32,
            /* k_head_stride */ head_dim as u32,
            /* v_head_stride */ head_dim as u32,
            /* o_head_stride */ head_dim as u32,
            /* b */ 1,
            /* h */ heads as u32,
            /* h_k */ kv_heads as u32,
            /* d */ head_dim as u32,
            /* d_rounded */ head_dim.next_multiple_of(32) as u32,
            /* softmax_scale */ mask.scale,
            /* seqlen_q */ tokens as u32,
            /* seqlen_k */ length as u32,
            /* seqlen_q_rounded */ tokens.next_multiple_of(128) as u32,
            /* seqlen_k_rounded */ length.next_multiple_of(128) as u32,
            /* total_q */ tokens as u32,
            /* is_bf16 */ c_int::from(q.dtype() == DType::BF16),
            is_causal,
            /* unpadded_lse */ 0,
            /* window_size_left */ left as c_int,
            /* window_size_right */ 0,
            /* softcap */ 0.0,
            /* block_table */ std::ptr::null(),
            /* block_table_batch_stride */ 0,
            /* page_block_size */ -1,
            /* mm_prefix_ranges */ std::ptr::null(),
            /* mm_prefix_range_batch_stride */ 0,
            /* max_mm_prefix_ranges */ 0,
            /* stream */ device.cuda_stream().cu_stream().cast(),
        );
    }
    match sinks {
        Some(sinks) => scale_by_sinks(device, out, &lse, sinks),
        None => Ok(()),
    }
}
