//! Launches the kernels that compute `expert_matmul` on a GPU (`experts.cu`, `grouped_gemm.cu`, `quantized_ops.cu`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use super::expert_kernel::{ExpertFormat, ExpertKernel, ExpertProduct};
use super::expert_operands::{ExpertInputs, ExpertWeights};
use super::grouped_gemm::grouped_gemm;
use super::mxfp4::mxfp4_dims;
use super::routing::sort_by_expert::{SortedPairs, sort_by_expert};
use crate::kernels::constants::{EXPERT_GEMM_PAIRS, EXPERT_GEMM_ROWS, EXPERT_GEMM_THREADS};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};
use crate::kernels::quantized::{InputQuantization, QuantizedMatrix, fake_quantize, quantized_ops};
use crate::kernels::{SumOrder, scratch};

/// Computes [`expert_matmul`](super::experts::expert_matmul), which has checked all shapes and dtypes.
pub(super) fn expert_matmul(
    device: &CudaDevice,
    inputs: ExpertInputs,
    weights: &ExpertWeights,
    sum_order: SumOrder,
) -> Result<Tensor> {
    let ExpertInputs { x, bias, ids, .. } = inputs;
    let dims = weights.dims()?;
    let (experts, rows, columns) = dims;
    let format = match weights {
        ExpertWeights::Mxfp4 { .. } => ExpertFormat::Mxfp4,
        ExpertWeights::Dense(_) => ExpertFormat::Dense,
        ExpertWeights::Quantized(..) if bias.is_some() => {
            bail!("cannot multiply expert weights: quantized weights do not support a bias on a GPU")
        }
        ExpertWeights::Quantized(..) => ExpertFormat::Quantized,
        ExpertWeights::Mxfp4Tiles(_) => return unsupported_tiles(),
    };
    let pairs = ids.elem_count();
    let is_f32 = x.dtype() == DType::F32;
    match (weights, ExpertKernel::choose(ExpertProduct { format, pairs, experts, columns, is_f32, sum_order })) {
        (ExpertWeights::Mxfp4 { blocks, scales }, ExpertKernel::Gemv) => {
            let weights = Arguments::new().tensor(blocks)?.tensor(scales)?;
            gemv(device, "mxfp4", weights, dims, inputs)
        }
        (ExpertWeights::Mxfp4 { blocks, scales }, ExpertKernel::Gemm) => mxfp4_gemm(device, blocks, scales, inputs),
        (ExpertWeights::Dense(dense), ExpertKernel::Gemv) => {
            let weights = Arguments::new().tensor(dense)?.optional(None)?;
            gemv(device, "dense", weights, dims, inputs)
        }
        // SAFETY: `experts::expert_matmul` checked shapes and dtypes.
        (ExpertWeights::Dense(dense), ExpertKernel::Gemm) => unsafe { grouped_gemm(device, dense, inputs) },
        (ExpertWeights::Quantized(matrix, _), ExpertKernel::Gemv) => {
            quantized_ops::expert_matvec(device, matrix, rows, x, ids, inputs.pairs_per_x)
        }
        (ExpertWeights::Quantized(matrix, _), ExpertKernel::Gemm) => dequantized_gemm(device, matrix, experts, inputs),
        (ExpertWeights::Mxfp4Tiles(_), _) => unsupported_tiles(),
    }
}

fn unsupported_tiles() -> Result<Tensor> {
    bail!("cannot multiply expert weights: expert_matmul does not support MXFP4 tiles")
}

/// Dequantizes the weights of all experts to the dtype of x, and computes the product as for float weights.
fn dequantized_gemm(
    device: &CudaDevice,
    matrix: &QuantizedMatrix,
    experts: usize,
    inputs: ExpertInputs,
) -> Result<Tensor> {
    let ((all_rows, columns), x) = (matrix.dims(), inputs.x);
    let rounded = match matrix.input_quantization {
        InputQuantization::None => x.clone(),
        rounding => {
            let flat = x.reshape(((), columns))?;
            fake_quantize(device, &flat, rounding)?.reshape(x.shape())?
        }
    };
    let dense = matrix.dequantize(x.dtype())?.reshape((experts, all_rows / experts, columns))?;
    expert_matmul(device, ExpertInputs { x: &rounded, ..inputs }, &ExpertWeights::Dense(dense), SumOrder::Fastest)
}

/// Launches a GEMV kernel with one warp per element of the output.
/// `weights` holds the kernel's first two arguments, and the matrices have the dimensions `(experts, rows, columns)`.
fn gemv(
    device: &CudaDevice,
    kind: &str,
    weights: Arguments,
    (experts, rows, columns): (usize, usize, usize),
    inputs: ExpertInputs,
) -> Result<Tensor> {
    let ExpertInputs { x, bias, ids, pairs_per_x } = inputs;
    // SAFETY: the kernel writes every element of `out`.
    let out = unsafe { scratch::empty(inputs.output_shape(rows)?, x.dtype(), x.device())? };
    let arguments = weights
        .optional(bias)?
        .tensor(x)?
        .tensor(ids)?
        .tensor(&out)?
        .int(rows)
        .int(columns)
        .int(pairs_per_x)
        .int(experts);
    let kernel = format!("expert_gemv_{kind}_{}", dtype_suffix(x.dtype())?);
    let shape = LaunchShape::one_warp_each(rows).with_grid_y(ids.elem_count());
    // SAFETY: `experts::expert_matmul` checked shapes and dtypes. The kernel reads no expert past the last one.
    unsafe { Launch::new(module!("experts"), kernel, shape, arguments).enqueue(device)? };
    Ok(out)
}

fn mxfp4_gemm(device: &CudaDevice, blocks: &Tensor, scales: &Tensor, inputs: ExpertInputs) -> Result<Tensor> {
    let ExpertInputs { x, bias, ids, pairs_per_x } = inputs;
    let (experts, rows, columns) = mxfp4_dims(blocks, scales)?;
    // SAFETY: the kernel writes every element of `out`.
    let out = unsafe { scratch::empty(inputs.output_shape(rows)?, x.dtype(), x.device())? };
    let SortedPairs { sorted, offsets, .. } = sort_by_expert(device, ids, experts)?;
    let arguments = Arguments::new()
        .tensor(blocks)?
        .tensor(scales)?
        .optional(bias)?
        .tensor(x)?
        .tensor(&sorted)?
        .tensor(&offsets)?
        .tensor(&out)?
        .int(rows)
        .int(columns)
        .int(pairs_per_x)
        .int(experts);
    let kernel = format!("expert_gemm_mxfp4_{}", dtype_suffix(x.dtype())?);
    let tiles = ids.elem_count().div_ceil(EXPERT_GEMM_PAIRS) + experts;
    let shape = LaunchShape::new((rows.div_ceil(EXPERT_GEMM_ROWS), tiles, 1), EXPERT_GEMM_THREADS);
    // SAFETY: `experts::expert_matmul` checked shapes and dtypes. `sort_by_expert` lists only existing experts.
    // The grid covers the maximum number of tiles.
    unsafe { Launch::new(module!("experts"), kernel, shape, arguments).enqueue(device)? };
    Ok(out)
}
