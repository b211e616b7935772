//! Projections back into the residual stream (`residual.cu`).

use candle_core::{Result, Tensor};

use super::buffers::{RmsNorm, StepBuffers, check_f32};
use super::matvec::{check_weight, matvec_kernel, matvec_shape};
use crate::kernels::launch::{Arguments, Launch, LaunchSequence, LaunchShape, dtype_suffix, module};
use crate::kernels::quantized::Matrix;

/// A norm of the result before it is added to the residual stream.
#[derive(Clone, Copy)]
pub struct PostNorm<'t> {
    pub norm: RmsNorm<'t>,
    /// Holds the result: f32 \[C\].
    pub scratch: &'t Tensor,
}

/// Adds x += W·y + bias, or x += norm(W·y + bias) with a `post_norm`.
///
/// weight \[C, R\]; y T \[R\]; bias f32 \[C\]
pub fn add_residual(
    sequence: &mut LaunchSequence,
    buffers: &StepBuffers,
    y: &Tensor,
    weight: &Matrix,
    bias: Option<&Tensor>,
    post_norm: Option<PostNorm>,
) -> Result<()> {
    let (rows, columns) = (buffers.x.dims1()?, y.elem_count());
    check_weight(weight, rows, columns, y.dtype())?;
    if let Some(bias) = bias {
        check_f32("a bias", bias, rows)?;
    }
    let out = post_norm.map_or(&buffers.x, |post_norm| post_norm.scratch);
    check_f32("the scratch buffer of a projection", out, rows)?;
    let arguments = Arguments::new()
        .optional(post_norm.is_none().then_some(&buffers.x))?
        .tensor(out)?
        .tensor(y)?
        .weight(weight)?
        .optional(bias)?
        .int(rows)
        .int(columns)
        .rounding(weight)?;
    let kernel = matvec_kernel(weight, &format!("residual_{}", dtype_suffix(y.dtype())?));
    let launch = Launch::new(module!("residual"), kernel, matvec_shape(buffers, rows, weight), arguments);
    // SAFETY: shapes and dtypes are checked above.
    unsafe { sequence.add(launch.with_bytes_moved(weight.bytes()))? };
    let Some(PostNorm { norm, scratch }) = post_norm else { return Ok(()) };
    check_f32("a norm", norm.weight, rows)?;
    let arguments =
        Arguments::new().tensor(&buffers.x)?.tensor(scratch)?.tensor(norm.weight)?.int(rows).float(norm.eps);
    // SAFETY: as above.
    // C is a multiple of 4, because `check_weight` wants multiples of 8 for the columns of the head.
    unsafe {
        sequence.add(Launch::new(module!("residual"), "decode_add_normed_f32", LaunchShape::linear(1, 1024), arguments))
    }
}
