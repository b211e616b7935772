//! Launches the QKV projection for one token (`qkv.cu`).

use candle_core::{DType, Result, Tensor};

use super::buffers::{RmsNormParams, StepBuffers, check, check_f32};
use super::matvec::{check_weight, matvec_kernel, matvec_shape};
use crate::kernels::attention::CachedLayer;
use crate::kernels::launch::{Arguments, Launch, LaunchList, LaunchShape, dtype_suffix, module};
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
    pub scratch: &'t Tensor,
}

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
    let (columns, rows) = (buffers.x.dims1()?, (heads + 2 * kv_heads) * head_dim);
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
        check_f32("the scratch buffer for q and k", norms.scratch, (heads + kv_heads) * head_dim)?;
    }
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(norm.weight)?
        .weight(weight)?
        .optional(bias)?
        .tensor(cos)?
        .tensor(sin)?
        .tensor(&buffers.state)?
        .tensor(q)?
        .tensor(k)?
        .tensor(v)?
        .tensor(table)?
        .optional(qk_norm.map(|norms| norms.scratch))?
        .int(columns)
        .int(heads)
        .int(kv_heads)
        .int(head_dim)
        .int(2 * half_rotated)
        .float(norm.eps)
        .quantization_of(weight)?;
    let kernel = matvec_kernel(weight, &format!("qkv_{}", dtype_suffix(dtype)?));
    let launch = Launch::new(module!("qkv"), kernel, matvec_shape(buffers, rows / 2, weight), arguments);
    // SAFETY: the shapes and dtypes are checked above, except the lengths of the RoPE tables and of the block table.
    // `DecodeGraph` runs a step only if these tables cover its position, and rejects blocks that are not in the cache.
    // `StepBuffers::new` created `x` and `state`.
    unsafe { launches.add(launch.with_bytes_moved(weight.bytes()))? };
    let Some(norms) = qk_norm else { return Ok(()) };
    let arguments = Arguments::new()
        .tensor(norms.scratch)?
        .tensor(norms.q)?
        .tensor(norms.k)?
        .tensor(cos)?
        .tensor(sin)?
        .tensor(&buffers.state)?
        .tensor(q)?
        .tensor(k)?
        .tensor(table)?
        .int(heads)
        .int(kv_heads)
        .int(head_dim)
        .int(2 * half_rotated)
        .float(norms.eps);
    let shape = LaunchShape::one_warp_each(heads + kv_heads);
    let kernel = format!("decode_qk_norm_{}", dtype_suffix(dtype)?);
    // SAFETY: as for the first launch. The scratch buffer and the QK norm weights are also checked above.
    unsafe { launches.add(Launch::new(module!("qkv"), kernel, shape, arguments)) }
}
