//! Queries, keys and values of one token (`qkv.cu`).

use candle_core::{Result, Tensor};

use super::buffers::{RmsNorm, StepBuffers, check, check_f32};
use super::matvec::{check_weight, matvec_kernel, matvec_shape};
use crate::kernels::launch::{Arguments, Launch, LaunchSequence, LaunchShape, dtype_suffix, module};
use crate::kernels::quantized::Matrix;

/// The projection of a layer to queries, keys and values, and where they go.
pub struct QkvProjection<'t> {
    /// \[(H + 2K) · D, C\]
    pub weight: &'t Matrix,
    /// f32 \[(H + 2K) · D\]
    pub bias: Option<&'t Tensor>,
    /// f32 \[P, R/2\]: the first R elements of a head rotate.
    pub cos: &'t Tensor,
    /// f32 \[P, R/2\]
    pub sin: &'t Tensor,
    /// T \[H, D\]
    pub q: &'t Tensor,
    /// The KV cache: T \[S, K, D\].
    pub k: &'t Tensor,
    /// The KV cache: T \[S, K, D\].
    pub v: &'t Tensor,
    /// The norms of the heads of q and k, ahead of RoPE.
    pub qk_norm: Option<QkNorm<'t>>,
}

/// RMSNorm of each head of q and k.
#[derive(Clone, Copy)]
pub struct QkNorm<'t> {
    /// f32 \[D\]
    pub q: &'t Tensor,
    /// f32 \[D\]
    pub k: &'t Tensor,
    pub eps: f32,
    /// Holds q and k between the two kernels: f32 \[H + K, D\].
    pub scratch: &'t Tensor,
}

/// Adds norm, projection, bias and RoPE; q goes to its buffer, k and v go to the cache.
pub fn add_qkv(
    sequence: &mut LaunchSequence,
    buffers: &StepBuffers,
    norm: RmsNorm,
    projection: &QkvProjection,
) -> Result<()> {
    let QkvProjection { weight, bias, cos, sin, q, k, v, qk_norm } = *projection;
    let ((heads, head_dim), (cache_rows, kv_heads, kv_dim)) = (q.dims2()?, k.dims3()?);
    let (columns, rows) = (buffers.x.dims1()?, (heads + 2 * kv_heads) * head_dim);
    let half_rotated = cos.dim(1)?;
    let dtype = q.dtype();
    check_weight(weight, rows, columns, dtype)?;
    check_f32("a norm", norm.weight, columns)?;
    let fits = kv_dim == head_dim && head_dim % 2 == 0 && k.dtype() == dtype && v.dtype() == dtype;
    check("a KV cache", fits && v.dims() == k.dims(), k)?;
    check("a table of angles", cos.dims() == sin.dims() && 2 * half_rotated <= head_dim, cos)?;
    if let Some(bias) = bias {
        check_f32("a bias", bias, rows)?;
    }
    if let Some(norms) = qk_norm {
        check_f32("a norm of queries", norms.q, head_dim)?;
        check_f32("a norm of keys", norms.k, head_dim)?;
        check_f32("the scratch buffer of queries and keys", norms.scratch, (heads + kv_heads) * head_dim)?;
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
        .optional(qk_norm.map(|norms| norms.scratch))?
        .int(columns)
        .int(heads)
        .int(kv_heads)
        .int(head_dim)
        .int(2 * half_rotated)
        .int(cache_rows)
        .float(norm.eps)
        .rounding(weight)?;
    let kernel = matvec_kernel(weight, &format!("qkv_{}", dtype_suffix(dtype)?));
    let launch = Launch::new(module!("qkv"), kernel, matvec_shape(buffers, rows / 2, weight), arguments);
    // SAFETY: shapes and dtypes are checked above; the position is below P and its cache row is taken modulo S.
    unsafe { sequence.add(launch.with_bytes_moved(weight.bytes()))? };
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
        .int(heads)
        .int(kv_heads)
        .int(head_dim)
        .int(2 * half_rotated)
        .int(cache_rows)
        .float(norms.eps);
    let shape = LaunchShape::linear((heads + kv_heads).div_ceil(8), 256);
    let kernel = format!("decode_qk_norm_{}", dtype_suffix(dtype)?);
    // SAFETY: as above.
    unsafe { sequence.add(Launch::new(module!("qkv"), kernel, shape, arguments)) }
}
