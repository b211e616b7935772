//! Launches the kernel for the gate and up projections and the activation of a gated MLP (`gate_up.cu`).

use candle_core::{Result, Tensor};

use super::buffers::{RmsNormParams, StepBuffers, check_f32};
use super::matvec::{check_weight, matvec_kernel, matvec_shape};
use crate::kernels::activation::Activation;
use crate::kernels::launch::{Arguments, Launch, LaunchList, dtype_suffix, module};
use crate::kernels::matrix::Matrix;

/// The gate or up projection of a gated MLP.
#[derive(Clone, Copy)]
pub struct Projection<'t> {
    /// The weight matrix: `[intermediate, hidden]`.
    pub weight: &'t Matrix,
    /// The bias: f32 `[intermediate]`. `None` if the projection has no bias.
    pub bias: Option<&'t Tensor>,
}

/// Adds a launch that computes `h = activation(gate(norm(x))) · up(norm(x))`.
///
/// `h` is bf16 or f16 `[intermediate]`. Dense weights have the dtype of `h`.
/// The weights must both be dense, or both be quantized with the same input quantization.
pub fn add_gate_up(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    norm: RmsNormParams,
    gate: Projection,
    up: Projection,
    activation: Activation,
    h: &Tensor,
) -> Result<()> {
    let rows = h.dims1()?;
    let columns = buffers.x.dims1()?;
    check_f32("the norm weight", norm.weight, columns)?;
    for projection in [gate, up] {
        check_weight(projection.weight, rows, columns, h.dtype())?;
        if let Some(bias) = projection.bias {
            check_f32("the bias", bias, rows)?;
        }
    }
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(norm.weight)?
        .two_weights(gate.weight, up.weight)?
        .optional(gate.bias)?
        .optional(up.bias)?
        .tensor(h)?
        .int(rows)
        .int(columns)
        .int(activation.code())
        .float(norm.eps)
        .quantization_of(gate.weight)?;
    let kernel = matvec_kernel(gate.weight, &format!("gate_up_{}", dtype_suffix(h.dtype())?));
    let launch = Launch::new(module!("gate_up"), kernel, matvec_shape(buffers, rows, gate.weight), arguments);
    let bytes = gate.weight.bytes() + up.weight.bytes();
    // SAFETY: shapes and dtypes are checked above.
    // Overlap: all threads call `pdl_wait`. Before, they read only weights, which no kernel writes after loading.
    unsafe { launches.add(launch.with_bytes_moved(bytes)) }
}
