//! Launches of `quantized.cu`, and products on tensor cores.

use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, Tensor, bail};

use super::{Format, GROUP_COLUMNS, InputRounding, QuantizedMatrix};
use crate::kernels::launch::cuda::{Arg, address, attribute, launch, module, multiprocessors, suffix};
use crate::kernels::matmul::cublas_lt::{LowType, matmul_lt};
use crate::kernels::matmul::gemm;

/// Up to so many tokens weights are read once for each; from there on they are dequantized for a product on tensor cores,
/// which costs as much as reading them some eight times.
const MATVEC_TOKENS: usize = 8;
/// Warps of a block of `quantized_matvec` and of the decode step's products (`WARPS`).
pub const WARPS: usize = 16;
/// Elements that are dequantized at a time: they stay in L2 until the product has read them.
const DEQUANTIZED_AT_A_TIME: usize = 16 << 20;
/// Parts of one matrix (`MAX_PARTS`).
pub const MAX_PARTS: usize = 3;

/// `Quantized` of `quantized.cuh`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct RawMatrix {
    planes: [u64; 4],
    format: i32,
    rows: i32,
}

/// `Parts` of `quantized.cuh`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct RawParts {
    parts: [RawMatrix; MAX_PARTS],
    ends: [i32; MAX_PARTS],
}

// SAFETY: plain words, laid out as in C.
unsafe impl DeviceRepr for RawParts {}

impl RawParts {
    pub fn new(parts: &[QuantizedMatrix]) -> Result<Self> {
        if parts.is_empty() || parts.len() > MAX_PARTS {
            bail!("a quantized matrix in {} parts", parts.len());
        }
        let mut raw = Self::default();
        let mut end = 0;
        for (i, part) in parts.iter().enumerate() {
            let mut planes = [0; 4];
            for (to, plane) in planes.iter_mut().zip(&part.planes) {
                *to = plane.as_ref().map(address).transpose()?.unwrap_or(0);
            }
            let rows = part.dims().0;
            end += rows;
            raw.parts[i] = RawMatrix { planes, format: part.format as i32, rows: rows as i32 };
            raw.ends[i] = end as i32;
        }
        Ok(raw)
    }
}

impl InputRounding {
    /// `InputRounding` of `quantized.cuh`, and the scale.
    pub fn arguments(self) -> (usize, f32) {
        match self {
            Self::None => (0, 0.0),
            Self::Int8PerToken => (1, 0.0),
            Self::Fp8PerToken => (2, 0.0),
            Self::Fp8Static(scale) => (3, scale),
            Self::Int8Static(scale) => (4, scale),
        }
    }
}

/// Shared memory of a kernel that holds a vector of so many columns (`Vector`).
pub fn vector_bytes(format: Format, columns: usize) -> usize {
    let chunks = columns.div_ceil(GROUP_COLUMNS);
    match format {
        Format::Fp8 => 8 * (chunks + 1) * 16,
        _ => 4 * (chunks + 1) * 16 + chunks * (8 + 4),
    }
}

pub fn dequantize(device: &CudaDevice, matrix: &QuantizedMatrix, dtype: DType) -> Result<Tensor> {
    let (rows, columns) = matrix.dims();
    // SAFETY: the kernel writes every element.
    let out = unsafe { Tensor::empty((rows, columns), dtype, matrix.device())? };
    let parts = Arg::Parts(RawParts::new(std::slice::from_ref(matrix))?);
    let args = [parts, Arg::tensor(&out)?, rows.into(), columns.into()];
    let (grid, name) = ((rows * columns.div_ceil(8)).div_ceil(256), format!("dequantize_{}", suffix(dtype)?));
    // SAFETY: the planes hold rows of so many columns (`QuantizedMatrix::new`).
    unsafe { launch(device, &module!("quantized"), &name, (grid, 1, 1), 256, 0, &args)? };
    Ok(out)
}

pub fn embed(device: &CudaDevice, matrix: &QuantizedMatrix, ids: &Tensor, scale: f32) -> Result<Tensor> {
    let (tokens, (_, columns)) = (ids.dims1()?, matrix.dims());
    if ids.dtype() != DType::U32 {
        bail!("embed: ids are {:?}", ids.dtype());
    }
    // SAFETY: the kernel writes every element.
    let out = unsafe { Tensor::empty((tokens, columns), DType::F32, matrix.device())? };
    let parts = Arg::Parts(RawParts::new(std::slice::from_ref(matrix))?);
    let args = [parts, Arg::tensor(ids)?, Arg::tensor(&out)?, columns.into(), scale.into()];
    // SAFETY: shapes and dtypes checked above; ids are below R by contract.
    unsafe { launch(device, &module!("quantized"), "quantized_embed", (tokens, 1, 1), 256, 0, &args)? };
    Ok(out)
}

/// x \[T, C\] times the transposed parts, one below the other → \[T, R\] f32.
pub fn matmul(device: &CudaDevice, parts: &[QuantizedMatrix], x: &Tensor) -> Result<Tensor> {
    let ((tokens, columns), x) = (x.dims2()?, x.contiguous()?);
    if let Some(part) = parts.iter().find(|part| part.dims().1 != columns) {
        bail!("a product of x {:?} with a matrix {:?}", x.dims(), part.dims());
    }
    let stride = parts.iter().map(|part| part.dims().0).sum();
    // SAFETY: the products below write every column of every row.
    let out = unsafe { Tensor::empty((tokens, stride), DType::F32, x.device())? };
    let mut first = 0;
    for part in parts {
        let to = Output { tensor: &out, first, stride };
        match part.input_rounding {
            _ if tokens <= MATVEC_TOKENS && fits(device, part)? => matvec(device, part, &x, to)?,
            InputRounding::None => dequantized(device, part, &x, to)?,
            rounding => match low_type(device, part)? {
                Some(kind) => low_precision(device, part, &x, to, kind)?,
                None => dequantized(device, part, &round_floats(device, &x, rounding)?, to)?,
            },
        }
        first += part.dims().0;
    }
    Ok(out)
}

/// Whether a block of this GPU can hold the vector of a product, and 1 KiB beside it.
fn fits(device: &CudaDevice, part: &QuantizedMatrix) -> Result<bool> {
    let most = attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    Ok(vector_bytes(part.format, part.dims().1) + 1024 <= most)
}

/// Columns `first` and on of f32 \[T, stride\].
#[derive(Clone, Copy)]
struct Output<'t> {
    tensor: &'t Tensor,
    first: usize,
    stride: usize,
}

impl Output<'_> {
    fn address(&self, row: usize) -> Result<u64> {
        Ok(address(self.tensor)? + ((self.first + row) * size_of::<f32>()) as u64)
    }
}

fn matvec(device: &CudaDevice, part: &QuantizedMatrix, x: &Tensor, to: Output) -> Result<()> {
    let ((tokens, columns), (rows, _)) = (x.dims2()?, part.dims());
    let (rounding, by) = part.input_rounding.arguments();
    let args = [
        Arg::tensor(x)?,
        Arg::Parts(RawParts::new(std::slice::from_ref(part))?),
        Arg::Address(to.address(0)?),
        rows.into(),
        columns.into(),
        to.stride.into(),
        rounding.into(),
        by.into(),
    ];
    let name = format!("quantized_matvec_{}", suffix(x.dtype())?);
    let blocks = rows.div_ceil(2 * WARPS).min(multiprocessors(device)?);
    let (grid, block) = ((blocks, tokens, 1), 32 * WARPS);
    // SAFETY: shapes checked by the caller; `to` has room for R columns of T rows.
    unsafe { launch(device, &module!("quantized"), &name, grid, block, vector_bytes(part.format, columns), &args) }
}

/// Products with the experts of `rows` rows that `ids` u32 \[T, N\] names, each below E (not checked): x \[T, C\], shared by
/// `pairs_per_x` = N experts, or \[T, N, C\] → \[T, N, R\] of x's dtype.
pub fn expert_matvec(
    device: &CudaDevice,
    experts: &QuantizedMatrix,
    rows: usize,
    x: &Tensor,
    ids: &Tensor,
    pairs_per_x: usize,
) -> Result<Tensor> {
    let ((tokens, chosen), (_, columns)) = (ids.dims2()?, experts.dims());
    // SAFETY: the kernel writes R elements for each of the T·N pairs.
    let out = unsafe { Tensor::empty((tokens, chosen, rows), x.dtype(), x.device())? };
    let (rounding, by) = experts.input_rounding.arguments();
    let args = [
        Arg::tensor(x)?,
        Arg::Parts(RawParts::new(std::slice::from_ref(experts))?),
        Arg::tensor(ids)?,
        Arg::tensor(&out)?,
        rows.into(),
        columns.into(),
        pairs_per_x.into(),
        rounding.into(),
        by.into(),
    ];
    let name = format!("quantized_experts_{}", suffix(x.dtype())?);
    let grid = (rows.div_ceil(2 * WARPS).min(multiprocessors(device)?), tokens * chosen, 1);
    // SAFETY: `expert_matmul` checked how x and ids go together; ids are below E by contract.
    unsafe {
        let shared = vector_bytes(experts.format, columns);
        launch(device, &module!("quantized"), &name, grid, 32 * WARPS, shared, &args)?;
    }
    Ok(out)
}

fn dequantized(device: &CudaDevice, part: &QuantizedMatrix, x: &Tensor, to: Output) -> Result<()> {
    let (rows, columns) = part.dims();
    let at_a_time = (DEQUANTIZED_AT_A_TIME / columns).next_multiple_of(128);
    for first in (0..rows).step_by(at_a_time) {
        let weight = dequantize(device, &part.rows(first, at_a_time.min(rows - first))?, x.dtype())?;
        // SAFETY: `to` has room for R columns of T rows.
        unsafe { gemm(device, x, &weight, to.address(first)?, to.stride)? };
    }
    Ok(())
}

/// What tensor cores can multiply a matrix in, if both sides are in 8 bits.
fn low_type(device: &CudaDevice, part: &QuantizedMatrix) -> Result<Option<LowType>> {
    let capability = device.cuda_stream().context().compute_capability().w()?;
    // cuBLASLt wants rows of the result that begin at multiples of 16 bytes.
    let fits = part.dims().0.is_multiple_of(16);
    Ok(match part.format {
        Format::Int8 if fits => Some(LowType::Int8),
        Format::Fp8 if fits && capability >= (8, 9) => Some(LowType::Fp8),
        _ => None,
    })
}

/// x \[T, C\] rounded to codes, and as floats again.
pub fn round_floats(device: &CudaDevice, x: &Tensor, rounding: InputRounding) -> Result<Tensor> {
    let (tokens, columns) = x.dims2()?;
    let (how, by) = rounding.arguments();
    // SAFETY: the kernel writes every element.
    let out = unsafe { Tensor::empty(x.dims(), x.dtype(), x.device())? };
    let args = [Arg::tensor(x)?, Arg::tensor(&out)?, columns.into(), how.into(), by.into()];
    let name = format!("round_floats_{}", suffix(x.dtype())?);
    // SAFETY: both are [T, C] of one dtype.
    unsafe { launch(device, &module!("quantized"), &name, (tokens, 1, 1), 256, 0, &args)? };
    Ok(out)
}

/// With both sides in 8 bits, on tensor cores.
fn low_precision(device: &CudaDevice, part: &QuantizedMatrix, x: &Tensor, to: Output, kind: LowType) -> Result<()> {
    let ((tokens, columns), (rows, _)) = (x.dims2()?, part.dims());
    // The libraries ask for multiples of 16.
    let (padded, all) = (columns.next_multiple_of(GROUP_COLUMNS), tokens.next_multiple_of(16));
    // SAFETY: the kernel writes the rows of all tokens; what is read of the others goes nowhere.
    let q = unsafe { Tensor::empty((all, padded), DType::U8, x.device())? };
    // SAFETY: the kernel writes a scale for each token.
    let scales = unsafe { Tensor::empty(tokens, DType::F32, x.device())? };
    let (how, by) = part.input_rounding.arguments();
    let args = [
        Arg::tensor(x)?,
        Arg::tensor(&q)?,
        Arg::tensor(&scales)?,
        columns.into(),
        padded.into(),
        how.into(),
        by.into(),
    ];
    let name = format!("round_rows_{}", suffix(x.dtype())?);
    // SAFETY: shapes as the kernel takes them.
    unsafe { launch(device, &module!("quantized"), &name, (tokens, 1, 1), 256, 0, &args)? };

    let (Some(low), Some(weight_scales)) = (&part.planes[0], &part.planes[2]) else { bail!("no scales of rows") };
    let sums = matmul_lt(device, kind, low, &q)?;
    let args = [
        Arg::tensor(&sums)?,
        Arg::tensor(&scales)?,
        Arg::tensor(weight_scales)?,
        Arg::Address(to.address(0)?),
        rows.into(),
        to.stride.into(),
    ];
    let name = if kind == LowType::Int8 { "unround_int" } else { "unround_float" };
    // SAFETY: `sums` [T and more, R]; `to` has room for R columns of T rows.
    unsafe { launch(device, &module!("quantized"), name, (tokens, rows.div_ceil(256), 1), 256, 0, &args) }
}
