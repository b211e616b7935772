//! Operations on quantized matrices on a GPU: matrix products, dequantization and embedding lookup.
//!
//! With [`SumOrder::Fastest`], a matrix product usually uses the first of these methods that supports the product:
//! - cuBLASLt in int8, for 2 or more tokens, if weights and activations are both int8
//! - cuBLASLt in FP8, for more than 32 tokens (8 with f32 inputs), if weights and activations are both FP8
//! - `quantized_few_tokens`, for 2 to 128 tokens in f16 or bf16; it converts each weight once per tile of tokens
//! - `quantized_matvec`, for up to 8 tokens; it reads the quantized weights once per token
//! - cuBLASLt with dequantized weights

use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, Tensor, bail};

use super::format::{GROUP_COLUMNS, WeightFormat};
use super::input_quantization::fake_quantize;
use super::quantized_few_tokens::{self, matmul_few_tokens};
use super::quantized_matrix::{InputQuantization, QuantizedMatrix};
use crate::kernels::constants::{QUANTIZED_ROW_THREADS, QUANTIZED_WARPS};
use crate::kernels::launch::{
    Arguments, Launch, LaunchShape, address, dtype_suffix, max_shared_bytes, module, multiprocessors,
};
use crate::kernels::matmul::cublas_lt::{EightBitType, gemm, matmul_8bit};
use crate::kernels::scratch;
use crate::kernels::sum_order::{SumOrder, each_row};

/// The maximum number of tokens for `quantized_matvec`, which reads the quantized weights once per token.
/// For more tokens, it is faster to dequantize the weights and multiply with cuBLASLt.
///
/// For example, a Q4_0 weight takes 4.5 bits. Dequantizing it to bf16 moves 36.5 bits: 4.5 read, 16 written, 16 read
/// again. This is about as much as reading the 4.5 bits 8 times.
const MATVEC_TOKENS: usize = 8;

/// The approximate number of weights to dequantize at a time for a product with cuBLASLt.
/// In bf16, this many weights take 32 MiB, which fits in the L2 cache of an A100, H100 or H200 (40 to 50 MB).
/// On a GPU with a smaller L2 cache, the matrix product reads some dequantized weights from device memory.
const DEQUANTIZED_AT_A_TIME: usize = 16 << 20;

/// Returns the size in bytes of the shared memory that a kernel needs for its input vector (`QuantizedInput`).
pub fn input_bytes(format: WeightFormat, columns: usize) -> usize {
    let groups = columns.div_ceil(GROUP_COLUMNS);
    match format {
        WeightFormat::Fp8 => 8 * (groups + 1) * 16,
        _ => 4 * (groups + 1) * 16 + groups * (8 + 4),
    }
}

/// Returns the dequantized matrix as `[rows, columns]` in the float dtype `dtype`.
pub fn dequantize(device: &CudaDevice, matrix: &QuantizedMatrix, dtype: DType) -> Result<Tensor> {
    let (rows, columns) = matrix.dims();
    // SAFETY: the kernel writes every element of `out`.
    let out = unsafe { scratch::empty((rows, columns), dtype, matrix.device())? };
    let arguments = Arguments::new().stack(std::slice::from_ref(matrix))?.tensor(&out)?.int(rows).int(columns);
    let shape = LaunchShape::one_thread_each(rows * columns.div_ceil(8));
    let kernel = format!("dequantize_{}", dtype_suffix(dtype)?);
    // SAFETY: `QuantizedMatrix::new` checked that the planes hold `rows` rows of `columns` columns.
    unsafe { Launch::new(module!("quantized_ops"), kernel, shape, arguments).enqueue(device)? };
    Ok(out)
}

/// Looks up the embedding rows `ids` and multiplies each row by `scale`. Returns f32 `[tokens, columns]`.
///
/// `ids` are u32 `[tokens]`. For an id that is not a row index, returns the last row.
pub fn embed(device: &CudaDevice, matrix: &QuantizedMatrix, ids: &Tensor, scale: f32) -> Result<Tensor> {
    let tokens = ids.dims1()?;
    let (rows, columns) = matrix.dims();
    if ids.dtype() != DType::U32 || rows == 0 {
        bail!("cannot look up embeddings: ids are {:?}, expected U32, for {rows} rows", ids.dtype());
    }
    // SAFETY: the kernel writes every element of `out`.
    let out = unsafe { scratch::empty((tokens, columns), DType::F32, matrix.device())? };
    let arguments =
        Arguments::new().stack(std::slice::from_ref(matrix))?.tensor(ids)?.tensor(&out)?.int(columns).float(scale);
    let shape = LaunchShape::linear(tokens, QUANTIZED_ROW_THREADS);
    // SAFETY: shapes and dtypes are checked above. The kernel reads no row past the last one.
    unsafe { Launch::new(module!("quantized_ops"), "quantized_embed", shape, arguments).enqueue(device)? };
    Ok(out)
}

/// Returns `x · Wᵀ` as f32 `[tokens, rows]`, where `W` is the vertical stack of the matrices in `stack`.
///
/// `x` is `[tokens, columns]` in any float dtype.
/// For each matrix, first quantizes `x` as the `input_quantization` of the matrix specifies.
pub fn matmul(device: &CudaDevice, stack: &[QuantizedMatrix], x: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
    let ((tokens, columns), x) = (x.dims2()?, x.contiguous()?);
    if let Some(matrix) = stack.iter().find(|matrix| matrix.dims().1 != columns) {
        bail!("cannot multiply: x has shape {:?}, and the matrix has shape {:?}", x.dims(), matrix.dims());
    }
    let has_few_tokens_kernel = quantized_few_tokens::is_supported(stack, columns, x.dtype());
    // With 8-bit inputs, tensor cores multiply 8-bit weights without converting them.
    // However, Hopper's tensor cores accumulate FP8 products with fewer mantissa bits than f32 has.
    // For up to 32 tokens, where memory bandwidth limits the speed, FP8 matrices are therefore multiplied as floats if
    // `quantized_few_tokens` or `quantized_matvec` supports the product.
    let eight_bit_types = stack.iter().map(|matrix| eight_bit_type(device, matrix)).collect::<Result<Vec<_>>>()?;
    let uses_eight_bits = eight_bit_types.iter().all(|eight_bit_type| match eight_bit_type {
        Some(EightBitType::Int8) => tokens > 1,
        Some(EightBitType::Fp8) => tokens > 32,
        None => false,
    });
    match sum_order {
        SumOrder::Fastest if has_few_tokens_kernel && !uses_eight_bits && quantized_few_tokens::is_fastest(tokens) => {
            return matmul_few_tokens(device, stack, &x, sum_order);
        }
        SumOrder::Fixed if has_few_tokens_kernel => return matmul_few_tokens(device, stack, &x, sum_order),
        SumOrder::Fixed if tokens > 1 => {
            return each_row(&x, |row| matmul(device, stack, row, SumOrder::Fastest));
        }
        _ => {}
    }
    let stride = stack.iter().map(|matrix| matrix.dims().0).sum();
    // SAFETY: the products below write every column of every row of `out`.
    let out = unsafe { scratch::empty((tokens, stride), DType::F32, x.device())? };
    // The quantized input of the previous matrix. The matrices of a stack usually have the same input quantization,
    // and can then share the quantized input.
    let mut quantized: Option<(InputQuantization, QuantizedRows)> = None;
    let mut first = 0;
    for (matrix, eight_bit_type) in stack.iter().zip(eight_bit_types) {
        let output = OutputColumns { tensor: &out, first, stride };
        match (matrix.input_quantization, eight_bit_type) {
            _ if tokens <= MATVEC_TOKENS && !uses_eight_bits && can_matvec(device, matrix)? => {
                matvec(device, matrix, &x, output)?
            }
            (InputQuantization::None, _) => matmul_dequantized(device, matrix, &x, output)?,
            (quantization, Some(eight_bit_type)) => {
                let rows = match quantized.take() {
                    Some((same, rows)) if same == quantization => rows,
                    _ => QuantizedRows::new(device, &x, quantization)?,
                };
                multiply_eight_bit(device, matrix, &rows, output, eight_bit_type)?;
                quantized = Some((quantization, rows));
            }
            (quantization, None) => {
                matmul_dequantized(device, matrix, &fake_quantize(device, &x, quantization)?, output)?
            }
        }
        first += matrix.dims().0;
    }
    Ok(out)
}

/// Returns whether the input vector of `matvec` fits in the shared memory of a thread block.
/// 1 KiB is reserved for static shared memory.
fn can_matvec(device: &CudaDevice, matrix: &QuantizedMatrix) -> Result<bool> {
    Ok(input_bytes(matrix.format, matrix.dims().1) + 1024 <= max_shared_bytes(device)?)
}

/// A view of an f32 tensor `[tokens, stride]` that starts at column `first`.
#[derive(Clone, Copy)]
struct OutputColumns<'t> {
    tensor: &'t Tensor,
    first: usize,
    stride: usize,
}

impl OutputColumns<'_> {
    /// Returns the address of column `first + column` in the first row.
    fn address(&self, column: usize) -> Result<u64> {
        Ok(address(self.tensor)? + ((self.first + column) * size_of::<f32>()) as u64)
    }
}

fn matvec(device: &CudaDevice, matrix: &QuantizedMatrix, x: &Tensor, output: OutputColumns) -> Result<()> {
    let (tokens, columns) = x.dims2()?;
    let (rows, _) = matrix.dims();
    let arguments = Arguments::new()
        .tensor(x)?
        .stack(std::slice::from_ref(matrix))?
        .address(output.address(0)?)
        .int(rows)
        .int(columns)
        .int(output.stride)
        .input_quantization(matrix.input_quantization);
    let blocks = rows.div_ceil(2 * QUANTIZED_WARPS).min(multiprocessors(device)?);
    let shape = LaunchShape::new((blocks, tokens, 1), 32 * QUANTIZED_WARPS)
        .with_shared_bytes(input_bytes(matrix.format, columns));
    let kernel = format!("quantized_matvec_{}", dtype_suffix(x.dtype())?);
    // SAFETY: the caller checked the shapes. `output` has a column for each row of the matrix.
    unsafe { Launch::new(module!("quantized_ops"), kernel, shape, arguments).enqueue(device) }
}

/// Multiplies the input of each token by the weights of the token's experts, which `ids` lists.
/// First quantizes `x` as the `input_quantization` of `experts` specifies.
/// Returns the products as `[tokens, chosen, rows]` in the dtype of `x`.
///
/// `experts` is `[number of experts * rows, columns]`. `ids` are u32 `[tokens, chosen]`.
/// `x` is `[tokens, columns]` if `pairs_per_x` is `chosen`, or `[tokens, chosen, columns]` if `pairs_per_x` is 1.
/// An id that is not less than the number of experts selects the last expert.
pub fn expert_matvec(
    device: &CudaDevice,
    experts: &QuantizedMatrix,
    rows: usize,
    x: &Tensor,
    ids: &Tensor,
    pairs_per_x: usize,
) -> Result<Tensor> {
    let (tokens, chosen) = ids.dims2()?;
    let (_, columns) = experts.dims();
    // SAFETY: the kernel writes `rows` elements for each pair of a token and an expert.
    let out = unsafe { scratch::empty((tokens, chosen, rows), x.dtype(), x.device())? };
    let arguments = Arguments::new()
        .tensor(x)?
        .stack(std::slice::from_ref(experts))?
        .tensor(ids)?
        .tensor(&out)?
        .int(rows)
        .int(columns)
        .int(pairs_per_x)
        .input_quantization(experts.input_quantization);
    let blocks = rows.div_ceil(2 * QUANTIZED_WARPS).min(multiprocessors(device)?);
    let shape = LaunchShape::new((blocks, tokens * chosen, 1), 32 * QUANTIZED_WARPS)
        .with_shared_bytes(input_bytes(experts.format, columns));
    let kernel = format!("quantized_experts_{}", dtype_suffix(x.dtype())?);
    // SAFETY: `expert_matmul` checked the shapes of `x` and `ids`. The kernel reads no expert past the last one.
    unsafe { Launch::new(module!("quantized_ops"), kernel, shape, arguments).enqueue(device)? };
    Ok(out)
}

fn matmul_dequantized(device: &CudaDevice, matrix: &QuantizedMatrix, x: &Tensor, output: OutputColumns) -> Result<()> {
    let (rows, columns) = matrix.dims();
    let rows_at_a_time = (DEQUANTIZED_AT_A_TIME / columns).next_multiple_of(128);
    for first in (0..rows).step_by(rows_at_a_time) {
        let weight = dequantize(device, &matrix.rows(first, rows_at_a_time.min(rows - first))?, x.dtype())?;
        // SAFETY: `output` has a column for each row of the matrix.
        unsafe { gemm(device, x, &weight, output.address(first)?, output.stride, DType::F32)? };
    }
    Ok(())
}

/// Returns the type of both inputs of 8-bit products with a matrix. Returns `None` if the matrix has no input
/// quantization, or if its format, its number of rows or the GPU does not support 8-bit products.
fn eight_bit_type(device: &CudaDevice, matrix: &QuantizedMatrix) -> Result<Option<EightBitType>> {
    let capability = device.cuda_stream().context().compute_capability().w()?;
    // cuBLASLt requires the rows of the result to be aligned to 16 bytes. A row length divisible by 16 guarantees this.
    let is_aligned = matrix.dims().0.is_multiple_of(16);
    Ok(match matrix.format {
        _ if matrix.input_quantization == InputQuantization::None => None,
        WeightFormat::Int8 if is_aligned => Some(EightBitType::Int8),
        WeightFormat::Fp8 if is_aligned && capability >= (8, 9) => Some(EightBitType::Fp8),
        _ => None,
    })
}

/// Rows of int8 or E4M3 values, with one scale per row.
struct QuantizedRows {
    /// The 8-bit values: u8 `[tokens, columns]`. Both dimensions are padded (see [`QuantizedRows::new`]).
    values: Tensor,
    /// f32 `[tokens]`: one scale per row, without padding.
    scales: Tensor,
}

impl QuantizedRows {
    /// Quantizes the rows of `x`, `[tokens, columns]`.
    fn new(device: &CudaDevice, x: &Tensor, quantization: InputQuantization) -> Result<Self> {
        let (tokens, columns) = x.dims2()?;
        // `matmul_8bit` requires multiples of 16 tokens and columns.
        // The low plane of the weights holds whole groups, so the columns of `x` are padded to a multiple of 32.
        let (padded_columns, padded_tokens) = (columns.next_multiple_of(GROUP_COLUMNS), tokens.next_multiple_of(16));
        // SAFETY: the kernel writes one row per token.
        // Padding rows stay uninitialized, but their products are not used.
        let values = unsafe { scratch::empty((padded_tokens, padded_columns), DType::U8, x.device())? };
        // SAFETY: the kernel writes one scale per token.
        let scales = unsafe { scratch::empty(tokens, DType::F32, x.device())? };
        let arguments = Arguments::new()
            .tensor(x)?
            .tensor(&values)?
            .tensor(&scales)?
            .int(columns)
            .int(padded_columns)
            .input_quantization(quantization);
        let kernel = format!("quantize_rows_{}", dtype_suffix(x.dtype())?);
        let launch = Launch::new(
            module!("quantized_ops"),
            kernel,
            LaunchShape::linear(tokens, QUANTIZED_ROW_THREADS),
            arguments,
        );
        // SAFETY: the tensors have the shapes that the kernel expects.
        unsafe { launch.enqueue(device)? };
        Ok(Self { values, scales })
    }
}

/// Multiplies `x` by 8-bit weights on tensor cores, applies the scales, and writes the products to `output`.
fn multiply_eight_bit(
    device: &CudaDevice,
    matrix: &QuantizedMatrix,
    x: &QuantizedRows,
    output: OutputColumns,
    eight_bit_type: EightBitType,
) -> Result<()> {
    let tokens = x.scales.dims1()?;
    let (rows, _) = matrix.dims();
    let (Some(low), Some(weight_scales)) = (&matrix.planes[0], &matrix.planes[2]) else {
        bail!("cannot multiply in 8 bits: format {:?} has no row scales", matrix.format)
    };
    let sums = matmul_8bit(device, &x.values, low, eight_bit_type)?;
    let arguments = Arguments::new()
        .tensor(&sums)?
        .tensor(&x.scales)?
        .tensor(weight_scales)?
        .address(output.address(0)?)
        .int(rows)
        .int(output.stride);
    let kernel = if eight_bit_type == EightBitType::Int8 { "rescale_int" } else { "rescale_float" };
    let shape = LaunchShape::new((tokens, rows.div_ceil(QUANTIZED_ROW_THREADS), 1), QUANTIZED_ROW_THREADS);
    // SAFETY: `sums` has a row for each token, and `output` has a column for each row of the matrix.
    unsafe { Launch::new(module!("quantized_ops"), kernel, shape, arguments).enqueue(device) }
}
