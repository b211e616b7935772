//! Router logits of one token (`router.cu`).

use candle_core::{DType, Result, Tensor};

use super::buffers::{RmsNorm, StepBuffers, check, check_f32};
use super::mxfp4_experts::ExpertBuffers;
use crate::kernels::bytes;
use crate::kernels::launch::{Arguments, Launch, LaunchSequence, LaunchShape, module};

/// Adds the router logits of norm(x), f32 \[E\], and norm(x) as the input of MXFP4 experts.
///
/// weight f32 \[E, C\]; bias f32 \[E\]
pub fn add_router(
    sequence: &mut LaunchSequence,
    buffers: &StepBuffers,
    norm: RmsNorm,
    weight: &Tensor,
    bias: Option<&Tensor>,
    logits: &Tensor,
    mxfp4: Option<&ExpertBuffers>,
) -> Result<()> {
    let (experts, columns) = (logits.dims1()?, buffers.x.dims1()?);
    check_f32("router logits", logits, experts)?;
    let fits = weight.dtype() == DType::F32 && weight.dims() == [experts, columns] && columns % 8 == 0;
    check("a router", fits, weight)?;
    check_f32("a norm", norm.weight, columns)?;
    if let Some(bias) = bias {
        check_f32("the bias of a router", bias, experts)?;
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
    let launch = Launch::new(module!("router"), "decode_router_f32", LaunchShape::linear(experts, 256), arguments);
    // SAFETY: shapes and dtypes are checked above.
    unsafe { sequence.add(launch.with_bytes_moved(bytes(weight))) }
}
