//! Launches routed experts with dense or quantized weights for one token (`routed_experts.cu`).

use candle_core::{DType, Result, Tensor};

use super::buffers::{RmsNormParams, StepBuffers, check, check_f32};
use super::matvec::{check_weight, matvec_kernel, matvec_shape, matvec_shape_for};
use crate::kernels::exchange::{add_sum_of_sent, sender};
use crate::kernels::launch::{Arguments, Launch, LaunchList, dtype_suffix, module};
use crate::kernels::matrix::Matrix;
use crate::kernels::moe::routing::check_routing;
use crate::kernels::moe::routing::topk::Softmax;

/// Adds a launch that computes `h[n] = silu(gate(norm(x))) · up(norm(x))` for the n-th chosen expert.
///
/// `weight` is `[experts * 2 * intermediate, hidden]`. For each expert, the gate rows come before the up rows.
/// The router `logits` are f32 `[experts]`, and `h` is bf16 or f16 `[chosen, intermediate]`.
pub fn add_routed_gate_up(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    norm: RmsNormParams,
    weight: &Matrix,
    logits: &Tensor,
    h: &Tensor,
) -> Result<()> {
    let (chosen, rows) = h.dims2()?;
    let columns = buffers.x.dims1()?;
    let experts = logits.dims1()?;
    check_logits(logits, chosen)?;
    check_weight(weight, experts * 2 * rows, columns, h.dtype())?;
    check_f32("the norm weight", norm.weight, columns)?;
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(norm.weight)?
        .weight(weight)?
        .tensor(logits)?
        .tensor(h)?
        .int(experts)
        .int(chosen)
        .int(rows)
        .int(columns)
        .float(norm.eps)
        .quantization_of(weight)?;
    let kernel = matvec_kernel(weight, &format!("routed_gate_up_{}", dtype_suffix(h.dtype())?));
    let shape = matvec_shape(buffers, chosen * rows, weight);
    let launch = Launch::new(module!("routed_experts"), kernel, shape, arguments);
    let bytes = weight.bytes() / experts as u64 * chosen as u64;
    // SAFETY: shapes and dtypes are checked above. The kernel chooses only valid expert ids.
    // Overlap: all threads call `pdl_wait` before they access device memory.
    unsafe { launches.add(launch.with_bytes_moved(bytes)) }
}

/// Adds a launch that computes `partial += Σ routing weight · down(h)` over the chosen experts.
/// If several ranks run the layer together, a second launch writes the sum over these ranks to `x`.
/// The first launch may then send the updated elements of `partial` instead of storing them (see [`sender`]).
///
/// `weight` is `[experts * hidden, intermediate]`.
/// The router `logits` are f32 `[experts]`, and `h` is bf16 or f16 `[chosen, intermediate]`.
pub fn add_routed_down(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    weight: &Matrix,
    logits: &Tensor,
    softmax: Softmax,
    h: &Tensor,
) -> Result<()> {
    let (chosen, columns) = h.dims2()?;
    let rows = buffers.x.dims1()?;
    let experts = logits.dims1()?;
    check_logits(logits, chosen)?;
    check_weight(weight, experts * rows, columns, h.dtype())?;
    let arguments = Arguments::new()
        .tensor(&buffers.partial)?
        .tensor(h)?
        .tensor(logits)?
        .weight(weight)?
        .int(experts)
        .int(chosen)
        .int(rows)
        .int(columns)
        .flag(softmax == Softmax::OverAll)
        .quantization_of(weight)?
        .value(sender(&buffers.layer_world)?, []);
    let kernel = matvec_kernel(weight, &format!("routed_down_{}", dtype_suffix(h.dtype())?));
    let shape = matvec_shape_for(buffers, rows, weight, chosen);
    let launch = Launch::new(module!("routed_experts"), kernel, shape, arguments);
    let bytes = weight.bytes() / experts as u64 * chosen as u64;
    // SAFETY: shapes and dtypes are checked above. The kernel chooses only valid expert ids.
    // Overlap: all threads call `pdl_wait`. Before, they read only the weights, the router logits and the exchange
    // state. The previous kernel, from `add_routed_gate_up`, writes none of these.
    unsafe { launches.add(launch.with_bytes_moved(bytes))? };
    add_sum_of_sent(launches, &buffers.layer_world, &buffers.partial, &buffers.x)
}

fn check_logits(logits: &Tensor, chosen: usize) -> Result<()> {
    check_routing(chosen, logits.elem_count())?;
    check("the router logits", logits.dtype() == DType::F32, logits)
}
