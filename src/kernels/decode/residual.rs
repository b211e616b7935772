//! Launches the projections whose outputs are added to the residual stream (`residual.cu`).

use candle_core::{Result, Tensor};

use super::buffers::{RmsNormParams, StepBuffers, check_f32};
use super::matvec::{check_weight, matvec_kernel, matvec_shape};
use crate::kernels::constants::DECODE_SINGLE_BLOCK_THREADS;
use crate::kernels::exchange::{add_sum_of_sent, sender};
use crate::kernels::launch::{Arguments, Launch, LaunchList, LaunchShape, dtype_suffix, module};
use crate::kernels::matrix::Matrix;

/// A norm that is applied to the output of a projection before the residual addition.
#[derive(Clone, Copy)]
pub struct PostNorm<'t> {
    pub norm: RmsNormParams<'t>,
    /// The buffer for the output of the projection: f32 `[hidden]`.
    pub unnormalized: &'t Tensor,
}

/// Adds a launch that computes `partial += W·y + bias`.
/// If several ranks run the layer together, a second launch writes the sum over these ranks to `x`.
/// The first launch may then send the updated elements of `partial` instead of storing them (see [`sender`]).
/// With a `post_norm`, the launches compute `x += norm(s)` instead, where `s` is the sum of `W·y` over the ranks that
/// run the layer, plus the bias.
///
/// `weight` is `[hidden, columns]`, `y` is bf16 or f16 `[columns]`, and `bias` is f32 `[hidden]`.
pub fn add_residual(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    y: &Tensor,
    weight: &Matrix,
    bias: Option<&Tensor>,
    post_norm: Option<PostNorm>,
) -> Result<()> {
    let rows = buffers.x.dims1()?;
    let columns = y.elem_count();
    check_weight(weight, rows, columns, y.dtype())?;
    // The sum over the ranks must contain the bias only once.
    let bias = bias.filter(|_| buffers.layer_world.is_first());
    if let Some(bias) = bias {
        check_f32("the bias", bias, rows)?;
    }
    let out = post_norm.map_or(&buffers.partial, |post_norm| post_norm.unnormalized);
    check_f32("the output of a projection", out, rows)?;
    let arguments = Arguments::new()
        .optional(post_norm.is_none().then_some(&buffers.partial))?
        .tensor(out)?
        .tensor(y)?
        .weight(weight)?
        .optional(bias)?
        .int(rows)
        .int(columns)
        .quantization_of(weight)?
        .value(sender(&buffers.layer_world)?, []);
    let kernel = matvec_kernel(weight, &format!("residual_{}", dtype_suffix(y.dtype())?));
    let launch = Launch::new(module!("residual"), kernel, matvec_shape(buffers, rows, weight), arguments);
    // SAFETY: shapes and dtypes are checked above.
    // Overlap: all threads call `pdl_wait`. Before, they read only the weight and the exchange state. The previous
    // kernel writes neither (see `Sender` in `exchange.cuh`).
    unsafe { launches.add(launch.with_bytes_moved(weight.bytes()))? };
    let Some(PostNorm { norm, unnormalized }) = post_norm else {
        return add_sum_of_sent(launches, &buffers.layer_world, &buffers.partial, &buffers.x);
    };
    add_sum_of_sent(launches, &buffers.layer_world, unnormalized, unnormalized)?;
    check_f32("the norm weight", norm.weight, rows)?;
    let arguments =
        Arguments::new().tensor(&buffers.x)?.tensor(unnormalized)?.tensor(norm.weight)?.int(rows).float(norm.eps);
    // SAFETY: shapes and dtypes are checked above.
    // The kernel needs a hidden size that is a multiple of 4. `add_qkv` and `add_head` accept only multiples of 8.
    // Overlap: all threads call `pdl_wait` before they access device memory.
    unsafe {
        launches.add(Launch::new(
            module!("residual"),
            "decode_add_normed_f32",
            LaunchShape::linear(1, DECODE_SINGLE_BLOCK_THREADS),
            arguments,
        ))
    }
}
