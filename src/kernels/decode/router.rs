//! Launches the router for one token (`router.cu`).

use candle_core::{DType, Result, Tensor};

use super::buffers::{RmsNormParams, StepBuffers, check, check_f32};
use super::mxfp4_experts::ExpertBuffers;
use crate::kernels::bytes;
use crate::kernels::constants::DECODE_ROUTER_THREADS;
use crate::kernels::launch::{Arguments, Launch, LaunchList, LaunchShape, module};

/// Adds a launch that computes the router logits of `norm(x)`.
/// With `mxfp4`, the launch also writes `norm(x)`, scaled to fit in f16, to the buffers in `mxfp4`.
///
/// `weight` is f32 `[experts, hidden]`. `bias` and `logits` are f32 `[experts]`.
pub fn add_router(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    norm: RmsNormParams,
    weight: &Tensor,
    bias: Option<&Tensor>,
    logits: &Tensor,
    mxfp4: Option<&ExpertBuffers>,
) -> Result<()> {
    let experts = logits.dims1()?;
    let columns = buffers.x.dims1()?;
    check_f32("the router logits", logits, experts)?;
    let fits = weight.dtype() == DType::F32 && weight.dims() == [experts, columns] && columns % 8 == 0;
    check("the router weight", fits, weight)?;
    check_f32("the norm weight", norm.weight, columns)?;
    if let Some(bias) = bias {
        check_f32("the router bias", bias, experts)?;
    }
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(norm.weight)?
        .tensor(weight)?
        .optional(bias)?
        .tensor(logits)?
        .optional(mxfp4.map(|experts| &experts.normed))?
        .optional(mxfp4.map(|experts| &experts.normed_scale))?
        .int(columns)
        .int(experts)
        .float(norm.eps);
    let launch = Launch::new(
        module!("router"),
        "decode_router_f32",
        LaunchShape::linear(experts, DECODE_ROUTER_THREADS),
        arguments,
    );
    // SAFETY: shapes and dtypes are checked above.
    // `ExpertBuffers::new` allocates `normed` with the size of x, and `normed_scale` with one element.
    // Overlap: all threads call `pdl_wait`. Before, they read only weights, which no kernel writes after loading.
    unsafe { launches.add(launch.with_bytes_moved(bytes(weight))) }
}
