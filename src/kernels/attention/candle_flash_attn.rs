//! The kernels of the crate candle-flash-attn (FlashAttention 2) behind [`attention`](crate::kernels::attention::attention).
//!
//! They know nothing of sinks, and the crate keeps to itself the one thing that makes up for it: the logarithm of each
//! softmax's denominator. So its C function is called here directly. With it a sink is exact: the true denominator has
//! exp(sink) more, and out · sigmoid(lse - sink) is the value with it. The function is no stable interface; the crate's
//! version is pinned, and `tests/it/kernels.rs` judges it by the reference.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};
// Nothing of its Rust side: only that its library is linked.
use candle_flash_attn as _;

use crate::kernels::attention::Sight;
use crate::kernels::launch::cuda::{Arg, address, launch, module, suffix};

unsafe extern "C" {
    /// As declared in candle-flash-attn 0.11.1, src/ffi.rs. Strides are in elements; `softmax_lse` is f32 \[H, T\].
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

/// The keys and values that the queries see, in the order of their positions, \[L, K, D\]. A ring that has gone round is
/// copied; else these are views.
fn in_order(k: &Tensor, v: &Tensor, tokens: usize, sight: Sight) -> Result<(Tensor, Tensor)> {
    let (rows, end) = (k.dim(0)?, sight.position + tokens);
    let first = sight.window.map_or(0, |window| (sight.position + 1).saturating_sub(window));
    let (row, length) = (first % rows, end - first);
    let of = |tensor: &Tensor| match row + length <= rows {
        true => tensor.narrow(0, row, length),
        false => Tensor::cat(&[tensor.narrow(0, row, rows - row)?, tensor.narrow(0, 0, row + length - rows)?], 0),
    };
    Ok((of(k)?, of(v)?))
}

/// q \[T, H, D\], k and v \[S, K, D\] in bf16 or f16, D a multiple of 8, checked by the caller; writes `out` \[T, H, D\].
pub(super) fn attention(
    device: &CudaDevice,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    sinks: Option<&Tensor>,
    sight: Sight,
    out: &Tensor,
) -> Result<()> {
    let ((tokens, heads, head_dim), (_, kv_heads, _)) = (q.dims3()?, k.dims3()?);
    let (k, v) = in_order(k, v, tokens, sight)?;
    let length = k.dim(0)?;
    // SAFETY: the kernel writes every element.
    let denominators = unsafe { Tensor::empty((heads, tokens), DType::F32, q.device())? };
    // As the crate sets them: causal without a window; with one, so many keys to the left and none to the right.
    let (is_causal, left) = sight.window.map_or((1, length), |window| (0, (window - 1).min(length)));
    let (q_row, kv_row) = ((heads * head_dim) as u32, (kv_heads * head_dim) as u32);
    let pointer = |tensor: &Tensor| address(tensor).map(|address| address as *const c_void);
    // SAFETY: the tensors are contiguous (`address` checks it) and of these sizes and strides; the stream is the one on
    // which their memory is allocated and freed.
    unsafe {
        run_mha(
            pointer(q)?,
            pointer(&k)?,
            pointer(&v)?,
            pointer(out)?,
            pointer(&denominators)?,
            std::ptr::null(),
            std::ptr::null(),
            std::ptr::null(),
            tokens as u32 * q_row,
            length as u32 * kv_row,
            length as u32 * kv_row,
            tokens as u32 * q_row,
            0,
            q_row,
            kv_row,
            kv_row,
            q_row,
            head_dim as u32,
            head_dim as u32,
            head_dim as u32,
            head_dim as u32,
            1,
            heads as u32,
            kv_heads as u32,
            head_dim as u32,
            head_dim.next_multiple_of(32) as u32,
            sight.scale,
            tokens as u32,
            length as u32,
            tokens.next_multiple_of(128) as u32,
            length.next_multiple_of(128) as u32,
            tokens as u32,
            c_int::from(q.dtype() == DType::BF16),
            is_causal,
            0,
            left as c_int,
            0,
            0.0,
            std::ptr::null(),
            0,
            -1,
            std::ptr::null(),
            0,
            0,
            device.cuda_stream().cu_stream().cast(),
        );
    }
    let Some(sinks) = sinks else { return Ok(()) };
    let args = [
        Arg::tensor(out)?,
        Arg::tensor(&denominators)?,
        Arg::tensor(sinks)?,
        tokens.into(),
        heads.into(),
        head_dim.into(),
    ];
    let name = format!("scale_by_sinks_{}", suffix(q.dtype())?);
    // SAFETY: out has T·H·D elements, the denominators H·T, the sinks H.
    unsafe { launch(device, &module!("attention"), &name, (tokens, heads, 1), 32, 0, &args) }
}
