//! Checks, launch shapes and arguments for the decode kernels that multiply a [`Matrix`] by vectors.
//!
//! In the kernels, `DenseStream` (`dense_matvec.cuh`) multiplies dense weights, and `QuantizedStream`
//! (`quantized/stream.cuh`) multiplies quantized weights.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, bail};

use super::buffers::StepBuffers;
use crate::kernels::constants::{DECODE_MAX_WARPS, QUANTIZED_WARPS};
use crate::kernels::launch::{Arguments, LaunchShape, max_shared_bytes};
use crate::kernels::matrix::Matrix;
use crate::kernels::quantized::{GROUP_COLUMNS, quantized_ops};

/// Returns whether the decode kernels support `weight` with `inputs` input vectors on this GPU.
///
/// The number of columns must be a multiple of 8, and all input vectors must fit in shared memory.
/// The weight must not be [`Matrix::Concatenated`]. Dtypes are checked by `check_weight` instead.
pub fn has_decode_kernel(device: &CudaDevice, weight: &Matrix, inputs: usize) -> Result<bool> {
    // Reserve 1 KiB for static shared memory. Every decode kernel that multiplies a `Matrix` needs less.
    let fits = weight.dims().1.is_multiple_of(8) && input_bytes(weight, inputs) + 1024 <= max_shared_bytes(device)?;
    Ok(fits && !matches!(weight, Matrix::Concatenated(_)))
}

/// Returns how many bytes of shared memory `inputs` input vectors of `weight` need.
pub(super) fn input_bytes(weight: &Matrix, inputs: usize) -> usize {
    let (_, columns) = weight.dims();
    match weight {
        Matrix::Quantized(parts) => {
            quantized_ops::input_bytes(parts[0].format, inputs * columns.next_multiple_of(GROUP_COLUMNS))
        }
        _ => inputs * columns * size_of::<f32>(),
    }
}

/// Returns the launch shape for a kernel with one input vector. See [`matvec_shape_for`].
pub(super) fn matvec_shape(buffers: &StepBuffers, strips: usize, weight: &Matrix) -> LaunchShape {
    matvec_shape_for(buffers, strips, weight, 1)
}

/// Returns the launch shape for a kernel with `inputs` input vectors that multiplies `strips` strips.
///
/// Each warp processes one strip at a time. The grid has at most one block per multiprocessor.
/// A block has strips / multiprocessors warps, rounded up, but at least 4 and at most the kernel's maximum.
pub(super) fn matvec_shape_for(buffers: &StepBuffers, strips: usize, weight: &Matrix, inputs: usize) -> LaunchShape {
    let max_warps = if matches!(weight, Matrix::Dense(_)) { DECODE_MAX_WARPS } else { QUANTIZED_WARPS };
    let warps = strips.div_ceil(buffers.multiprocessors).clamp(4, max_warps);
    let blocks = strips.div_ceil(warps).min(buffers.multiprocessors);
    LaunchShape::linear(blocks, 32 * warps).with_shared_bytes(input_bytes(weight, inputs))
}

/// Returns the kernel's full name: `decode_{name}` for a dense weight, otherwise `quantized_{name}`.
pub(super) fn matvec_kernel(weight: &Matrix, name: &str) -> String {
    match weight {
        Matrix::Dense(_) => format!("decode_{name}"),
        _ => format!("quantized_{name}"),
    }
}

/// Fails unless `weight` has shape `[rows, columns]` and a kernel supports it for activations in `dtype`.
/// Does not check whether the input vectors fit in shared memory (see [`has_decode_kernel`]).
pub(super) fn check_weight(weight: &Matrix, rows: usize, columns: usize, dtype: DType) -> Result<()> {
    let (has_kernel, kind) = match weight {
        Matrix::Dense(weight) => (weight.dtype() == dtype, weight.dtype().as_str()),
        Matrix::Quantized(_) => (true, "quantized"),
        Matrix::Concatenated(_) => (false, "concatenated"),
    };
    let fits = weight.dims() == (rows, columns) && columns.is_multiple_of(8);
    if fits && has_kernel && matches!(dtype, DType::BF16 | DType::F16) {
        return Ok(());
    }
    bail!(
        "cannot plan a decode step: no kernel for a {kind} weight of shape {:?} with activations in {dtype:?}; \
         expected shape {:?}",
        weight.dims(),
        (rows, columns)
    )
}

impl Arguments {
    /// Adds a weight: a dense weight as an address, or a quantized weight as a stack of matrices.
    /// Fails for [`Matrix::Concatenated`].
    pub(super) fn weight(self, weight: &Matrix) -> Result<Self> {
        match weight {
            Matrix::Dense(weight) => self.tensor(weight),
            Matrix::Quantized(stack) => self.stack(stack),
            Matrix::Concatenated(_) => {
                bail!("cannot plan a decode step: no single kernel supports all matrices of a fused weight")
            }
        }
    }

    /// Adds two weights: dense weights as two addresses, or quantized weights as one stack.
    /// Fails unless both weights are dense or both are quantized.
    pub(super) fn two_weights(self, first: &Matrix, second: &Matrix) -> Result<Self> {
        match (first, second) {
            (Matrix::Dense(first), Matrix::Dense(second)) => self.tensor(first)?.tensor(second),
            (Matrix::Quantized(first), Matrix::Quantized(second)) => self.stack(&[first.as_slice(), second].concat()),
            _ => bail!("cannot plan a decode step: no kernel supports a dense weight together with a quantized weight"),
        }
    }

    /// Adds the arguments that specify how to quantize the input of a quantized weight, or nothing for a dense weight.
    /// Fails if the matrices of the weight quantize their input differently.
    pub(super) fn quantization_of(self, weight: &Matrix) -> Result<Self> {
        let Matrix::Quantized(_) = weight else { return Ok(self) };
        let Some(quantization) = weight.input_quantization() else {
            bail!("cannot plan a decode step: the matrices of a fused weight need different input quantization")
        };
        Ok(self.input_quantization(quantization))
    }
}
