//! Quantizes activations to 8 bits (`fake_quantize` in `quantized_ops.cu`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::quantized_matrix::InputQuantization;
use crate::kernels::constants::QUANTIZED_ROW_THREADS;
use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};
use crate::kernels::scratch;

/// Quantizes `x`, `[tokens, columns]`, to 8 bits. Returns the dequantized values in the dtype of `x`.
pub fn fake_quantize(device: &CudaDevice, x: &Tensor, quantization: InputQuantization) -> Result<Tensor> {
    launch_fake_quantize(device, x, quantization, None)
}

/// Quantizes `x`, `[tokens, columns]`, to 8 bits.
/// Returns the 8-bit values in the dtype of `x`, which holds them exactly, and the scales, f32 `[tokens]`.
pub fn quantize_without_scale(
    device: &CudaDevice,
    x: &Tensor,
    quantization: InputQuantization,
) -> Result<(Tensor, Tensor)> {
    // SAFETY: the kernel writes one scale per token.
    let scales = unsafe { scratch::empty(x.dim(0)?, DType::F32, x.device())? };
    Ok((launch_fake_quantize(device, x, quantization, Some(&scales))?, scales))
}

fn launch_fake_quantize(
    device: &CudaDevice,
    x: &Tensor,
    quantization: InputQuantization,
    scales: Option<&Tensor>,
) -> Result<Tensor> {
    let (tokens, columns) = x.dims2()?;
    // SAFETY: the kernel writes every element of `out`.
    let out = unsafe { scratch::empty(x.dims(), x.dtype(), x.device())? };
    let arguments =
        Arguments::new().tensor(x)?.tensor(&out)?.optional(scales)?.int(columns).input_quantization(quantization);
    let kernel = format!("fake_quantize_{}", dtype_suffix(x.dtype())?);
    let launch =
        Launch::new(module!("quantized_ops"), kernel, LaunchShape::linear(tokens, QUANTIZED_ROW_THREADS), arguments);
    // SAFETY: `x` and `out` have the same shape and dtype, and `scales`, if any, has one scale per token.
    unsafe { launch.enqueue(device)? };
    Ok(out)
}
