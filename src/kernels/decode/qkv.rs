//! Launches the QKV projection for one token (`qkv.cu`).

use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, Tensor};

use super::buffers::{RmsNormParams, StepBuffers, check, check_f32};
use super::matvec::{check_weight, matvec_kernel, matvec_shape};
use crate::kernels::attention::CachedLayer;
use crate::kernels::launch::{
    Arguments, Launch, LaunchList, LaunchShape, address, dtype_suffix, kernel_size, module, optional_address,
};
use crate::kernels::matrix::Matrix;

/// The query, key and value projections of a layer, with the RoPE tables and the output buffers.
pub struct QkvProjection<'t> {
    /// The fused weight: `[(heads + 2 * kv_heads) * head_dim, hidden]`.
    pub weight: &'t Matrix,
    /// The fused bias: f32 `[(heads + 2 * kv_heads) * head_dim]`. `None` if the projections have no bias.
    pub bias: Option<&'t Tensor>,
    /// The cosine table: f32 `[positions, rotated / 2]`. RoPE rotates the first `rotated` elements of each head.
    pub cos: &'t Tensor,
    /// The sine table: f32 `[positions, rotated / 2]`.
    pub sin: &'t Tensor,
    /// The output buffer for the queries: bf16 or f16 `[heads, head_dim]`.
    pub q: &'t Tensor,
    /// The keys and values of the layer in the KV cache, in the dtype of `q`.
    pub layer: CachedLayer<'t>,
    /// The block table of the sequence: u32 `[1, blocks]`.
    pub table: &'t Tensor,
    /// The norms that apply to query heads and key heads before RoPE. `None` if the model has no QK norms.
    pub qk_norm: Option<QkNormBuffers<'t>>,
}

/// The RMSNorms for query heads and key heads, and the buffer for the input of these norms.
#[derive(Clone, Copy)]
pub struct QkNormBuffers<'t> {
    /// The weight of the query norm: f32 `[head_dim]`.
    pub q: &'t Tensor,
    /// The weight of the key norm: f32 `[head_dim]`.
    pub k: &'t Tensor,
    pub eps: f32,
    /// The buffer for q and k between the projection and the norms: f32 `[heads + kv_heads, head_dim]`.
    pub unnormalized: &'t Tensor,
}

/// Mirrors `QkvTarget` in `qkv.cu`. The tensors are device addresses, or 0 for tensors that are `None`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawTarget {
    bias: u64,
    cos: u64,
    sin: u64,
    q: u64,
    k: u64,
    v: u64,
    table: u64,
    unnormalized: u64,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    rotated: i32,
}

const _: () = assert!(size_of::<RawTarget>() == 8 * 8 + 4 * 4);
// SAFETY: the struct has C layout and contains only integers.
unsafe impl DeviceRepr for RawTarget {}

/// Adds a launch that applies a layer's norm, the QKV projection and its bias to `x`, and then RoPE to q and k.
/// If there are QK norms, this launch does not apply RoPE. A second launch then applies the QK norms and RoPE.
///
/// The launches write q to `projection.q`, and k and v to the KV cache.
/// The RoPE tables and the block table must cover every position at which the launches run.
pub fn add_qkv(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    norm: RmsNormParams,
    projection: &QkvProjection,
) -> Result<()> {
    let QkvProjection { weight, bias, cos, sin, q, layer: CachedLayer { k, v }, table, qk_norm } = *projection;
    let ((heads, head_dim), (_, kv_heads, kv_dim)) = (q.dims2()?, k.dims3()?);
    let columns = buffers.x.dims1()?;
    let rows = (heads + 2 * kv_heads) * head_dim;
    let (_, half_rotated) = cos.dims2()?;
    let dtype = q.dtype();
    check_weight(weight, rows, columns, dtype)?;
    check_f32("the norm weight", norm.weight, columns)?;
    let fits = kv_dim == head_dim && head_dim % 2 == 0 && k.dtype() == dtype && v.dtype() == dtype;
    check("the KV cache", fits && v.dims() == k.dims(), k)?;
    check("the block table", table.dtype() == DType::U32, table)?;
    check("the cosine table", cos.dtype() == DType::F32 && 2 * half_rotated <= head_dim, cos)?;
    check("the sine table", sin.dtype() == DType::F32 && sin.dims() == cos.dims(), sin)?;
    if let Some(bias) = bias {
        check_f32("the bias", bias, rows)?;
    }
    if let Some(norms) = qk_norm {
        check_f32("the query norm", norms.q, head_dim)?;
        check_f32("the key norm", norms.k, head_dim)?;
        check_f32("the buffer for unnormalized q and k", norms.unnormalized, (heads + kv_heads) * head_dim)?;
    }
    let unnormalized = qk_norm.map(|norms| norms.unnormalized);
    let target = RawTarget {
        bias: optional_address(bias)?,
        cos: address(cos)?,
        sin: address(sin)?,
        q: address(q)?,
        k: address(k)?,
        v: address(v)?,
        table: address(table)?,
        unnormalized: optional_address(unnormalized)?,
        heads: kernel_size(heads)?,
        kv_heads: kernel_size(kv_heads)?,
        head_dim: kernel_size(head_dim)?,
        rotated: kernel_size(2 * half_rotated)?,
    };
    let target_tensors = || [cos, sin, q, k, v, table].into_iter().chain(bias).chain(unnormalized);
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(norm.weight)?
        .weight(weight)?
        .tensor(&buffers.state)?
        .value(target, target_tensors())
        .int(columns)
        .float(norm.eps)
        .quantization_of(weight)?;
    let kernel = matvec_kernel(weight, &format!("qkv_{}", dtype_suffix(dtype)?));
    let launch = Launch::new(module!("qkv"), kernel, matvec_shape(buffers, rows / 2, weight), arguments);
    // SAFETY: the shapes and dtypes are checked above, except the lengths of the RoPE tables and of the block table.
    // `DecodeGraph` runs a step only if these tables cover its position, and rejects blocks that are not in the cache.
    // `StepBuffers::new` created `x` and `state`.
    // Overlap: all threads call `pdl_wait`. Before, they read only weights, which no kernel writes after loading.
    unsafe { launches.add(launch.with_bytes_moved(weight.bytes()))? };
    let Some(norms) = qk_norm else { return Ok(()) };
    let arguments = Arguments::new()
        .tensor(norms.q)?
        .tensor(norms.k)?
        .tensor(&buffers.state)?
        .value(target, target_tensors())
        .float(norms.eps);
    let shape = LaunchShape::one_warp_each(heads + kv_heads);
    let kernel = format!("decode_qk_norm_{}", dtype_suffix(dtype)?);
    // SAFETY: as for the first launch. The buffer for unnormalized q and k and the QK norm weights are also
    // checked above.
    // Overlap: all threads call `pdl_wait` before they access device memory.
    unsafe { launches.add(Launch::new(module!("qkv"), kernel, shape, arguments)) }
}
