//! Matrices whose weights stay quantized in memory: products with them, their rows as an embedding, their values.
//!
//! All formats share one layout, made for a warp that reads 32 columns a lane. For every row the bits of its elements lie
//! in **planes**, each in the order of the columns, so that every load is aligned:
//!
//! | plane  | for each 32 columns (a chunk) |
//! | ------ | ----------------------------- |
//! | low    | the low 2, 4 or 8 bits of q   |
//! | high   | the 1 or 2 bits above them, or nothing |
//! | scales | what the chunk is multiplied by; one f32 a row for `Int8` and `Fp8` |
//! | supers | two f16 for each 256 columns, by which scales are multiplied, or nothing |
//!
//! A value is scale · (q - zero) - min. The ggml formats take the same bytes as in their files, but for the 12 bytes of
//! scales of Q3_K, Q4_K and Q5_K, which become 16, and the one super-scale of Q3_K and Q6_K, beside which lie two bytes unused.
//!
//! q of a chunk as *quads*, four columns each, numbered 0 to 7; column i of quad j:
//! - 4 low bits: byte 4 (j / 2) + i, its low half for even j.
//! - 2 low bits, and 2 high ones: byte 4 (j / 4) + i, from bit 2 (j mod 4) on.
//! - 1 high bit: byte i, bit j.
//! - 8 bits: byte 4 j + i.

#[cfg(feature = "cuda")]
mod arguments;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod host;

use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

use crate::kernels::{elements, matmul::matmul_f32, to_f32};
use host::{HostPlanes, dot, round};

pub use host::{E4M3_MAX, pack};

/// Columns that one lane reads at a time.
pub const GROUP_COLUMNS: usize = 32;
/// Columns that share a super-scale.
pub const SUPERBLOCK_COLUMNS: usize = 256;

/// How q becomes a value. The numbers are the kernels' (`quantized.cuh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Format {
    Q4_0 = 0,
    Q4_1 = 1,
    Q5_0 = 2,
    Q5_1 = 3,
    Q8_0 = 4,
    Q2K = 5,
    Q3K = 6,
    Q4K = 7,
    Q5K = 8,
    Q6K = 9,
    /// Signed bytes and a scale for each row.
    Int8 = 10,
    /// E4M3 and a scale for each row.
    Fp8 = 11,
}

/// Bytes of each plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneBytes {
    /// For a chunk.
    pub low: usize,
    pub high: usize,
    /// For a chunk; 0 where a row has one scale.
    pub scales: usize,
    /// For 256 columns.
    pub supers: usize,
}

impl Format {
    pub const ALL: [Self; 12] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Int8,
        Self::Fp8,
    ];

    pub fn plane_bytes(self) -> PlaneBytes {
        let (low, high, scales, supers) = match self {
            Self::Q4_0 => (16, 0, 2, 0),
            Self::Q4_1 => (16, 0, 4, 0),
            Self::Q5_0 => (16, 4, 2, 0),
            Self::Q5_1 => (16, 4, 4, 0),
            Self::Q8_0 => (32, 0, 2, 0),
            Self::Q2K => (8, 0, 2, 4),
            Self::Q3K => (8, 4, 2, 4),
            Self::Q4K => (16, 0, 2, 4),
            Self::Q5K => (16, 4, 2, 4),
            Self::Q6K => (16, 8, 2, 4),
            Self::Int8 | Self::Fp8 => (32, 0, 0, 0),
        };
        PlaneBytes { low, high, scales, supers }
    }

    /// Whether every row has one scale.
    pub fn has_row_scales(self) -> bool {
        self.plane_bytes().scales == 0
    }

    /// Of one row of so many columns, each plane: low, high, scales, supers.
    pub fn row_bytes(self, columns: usize) -> [usize; 4] {
        let PlaneBytes { low, high, scales, supers } = self.plane_bytes();
        let chunks = columns.div_ceil(GROUP_COLUMNS);
        let scales = if self.has_row_scales() { size_of::<f32>() } else { scales * chunks };
        [low * chunks, high * chunks, scales, supers * (columns / SUPERBLOCK_COLUMNS)]
    }

    /// Of a whole matrix.
    pub fn bytes(self, rows: u64, columns: u64) -> u64 {
        (self.row_bytes(columns as usize).iter().sum::<usize>() as u64).saturating_mul(rows)
    }
}

/// How the input of a product is rounded to 8 bits first, as in the calibration of W8A8 and FP8 checkpoints.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InputRounding {
    /// The input stays as it is.
    None,
    /// To integers from -128 to 127. The scale of a token is its largest magnitude / 127.5 (compressed-tensors,
    /// `calculate_qparams`).
    Int8PerToken,
    /// To integers from -128 to 127, with this scale.
    Int8Static(f32),
    /// To E4M3. The scale of a token is its largest magnitude / 448.
    Fp8PerToken,
    /// To E4M3, with this scale.
    Fp8Static(f32),
}

/// A matrix \[R, C\]. Each plane is U8 \[R, bytes of a row\] or absent.
#[derive(Clone, Debug)]
pub struct QuantizedMatrix {
    pub format: Format,
    columns: usize,
    planes: [Option<Tensor>; 4],
    pub input_rounding: InputRounding,
}

impl QuantizedMatrix {
    /// `planes` hold the rows one after the other; they go to `device`.
    pub fn new(format: Format, columns: usize, planes: [Vec<u8>; 4], device: &Device) -> Result<Self> {
        let row_bytes = format.row_bytes(columns);
        let rows = planes[0].len() / row_bytes[0].max(1);
        let whole = if format.plane_bytes().supers > 0 {
            SUPERBLOCK_COLUMNS
        } else if format.has_row_scales() {
            1
        } else {
            GROUP_COLUMNS
        };
        let fits = planes.iter().zip(row_bytes).all(|(plane, bytes)| plane.len() == rows * bytes);
        if !fits || rows == 0 || !columns.is_multiple_of(whole) {
            let sizes = planes.each_ref().map(Vec::len);
            bail!("planes of {sizes:?} bytes are no rows of {columns} in {format:?}");
        }
        let mut tensors = [const { None }; 4];
        for ((tensor, plane), bytes) in tensors.iter_mut().zip(planes).zip(row_bytes) {
            if bytes > 0 {
                *tensor = Some(Tensor::from_vec(plane, (rows, bytes), device)?);
            }
        }
        Ok(Self { format, columns, planes: tensors, input_rounding: InputRounding::None })
    }

    /// All that it holds in memory.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.planes.iter().flatten()
    }

    pub fn with_input_rounding(self, input_rounding: InputRounding) -> Self {
        Self { input_rounding, ..self }
    }

    fn low(&self) -> &Tensor {
        self.planes[0].as_ref().expect("every format has low bits")
    }

    /// R, C
    pub fn dims(&self) -> (usize, usize) {
        (self.low().dims()[0], self.columns)
    }

    pub fn device(&self) -> &Device {
        self.low().device()
    }

    pub fn bytes(&self) -> u64 {
        self.tensors().map(crate::kernels::bytes).sum()
    }

    /// Rows `first` to `first + rows`, sharing memory.
    pub fn rows(&self, first: usize, rows: usize) -> Result<Self> {
        let mut planes = self.planes.clone();
        for plane in planes.iter_mut().flatten() {
            *plane = plane.narrow(0, first, rows)?;
        }
        Ok(Self { planes, ..self.clone() })
    }

    /// The values in a float dtype, \[R, C\].
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        let (rows, columns) = self.dims();
        match self.device() {
            Device::Cpu => {
                let values = self.on_host(|host| {
                    let mut values = vec![0.0; rows * columns];
                    values.par_chunks_mut(columns).enumerate().for_each(|(row, values)| host.row(row, values));
                    Ok(values)
                })?;
                Tensor::from_vec(values, (rows, columns), &Device::Cpu)?.to_dtype(dtype)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => cuda::dequantize(device, self, dtype),
            #[allow(unreachable_patterns)]
            _ => crate::kernels::unsupported("dequantize", self.low()),
        }
    }

    /// x \[T, C\] of a float dtype, rounded as `input_rounding` says, times the transposed matrix → \[T, R\] f32.
    pub fn matmul(&self, x: &Tensor) -> Result<Tensor> {
        let ((tokens, columns), (rows, _)) = (x.dims2()?, self.dims());
        if columns != self.columns {
            bail!("a product of x {:?} with a matrix {:?}", x.dims(), self.dims());
        }
        match self.device() {
            Device::Cpu => {
                let x = round(&to_f32(x)?, self.input_rounding)?;
                let (storage, layout) = x.storage_and_layout();
                let x: &[f32] = elements(&storage, layout)?;
                let mut products = vec![0.0; rows * tokens];
                self.on_host(|host| {
                    products.par_chunks_mut(tokens.max(1)).enumerate().for_each_init(
                        || vec![0.0; columns],
                        |values, (row, products)| {
                            host.row(row, values);
                            for (product, x) in products.iter_mut().zip(x.chunks_exact(columns)) {
                                *product = dot(values, x);
                            }
                        },
                    );
                    Ok(())
                })?;
                Tensor::from_vec(products, (rows, tokens), &Device::Cpu)?.t()?.contiguous()
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => cuda::matmul(device, std::slice::from_ref(self), x),
            #[allow(unreachable_patterns)]
            _ => crate::kernels::unsupported("a product with a quantized matrix", x),
        }
    }

    /// Rows for ids u32 \[T\], each below R (not checked on a GPU), times `scale`, as f32 \[T, C\].
    pub fn embed(&self, ids: &Tensor, scale: f32) -> Result<Tensor> {
        match self.device() {
            Device::Cpu => {
                let ids: Vec<u32> = ids.to_vec1()?;
                let (rows, columns) = self.dims();
                if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
                    bail!("row {id} of {rows}");
                }
                let mut values = vec![0.0; ids.len() * columns];
                self.on_host(|host| {
                    for (values, &id) in values.chunks_exact_mut(columns).zip(&ids) {
                        host.row(id as usize, values);
                        values.iter_mut().for_each(|value| *value *= scale);
                    }
                    Ok(())
                })?;
                Tensor::from_vec(values, (ids.len(), columns), &Device::Cpu)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => cuda::embed(device, self, ids, scale),
            #[allow(unreachable_patterns)]
            _ => crate::kernels::unsupported("embed", ids),
        }
    }

    fn on_host<R>(&self, then: impl FnOnce(&HostPlanes) -> Result<R>) -> Result<R> {
        let guards = self.planes.each_ref().map(|plane| plane.as_ref().map(Tensor::storage_and_layout));
        let mut planes = [&[][..]; 4];
        for (plane, guard) in planes.iter_mut().zip(&guards) {
            if let Some((storage, layout)) = guard {
                *plane = elements::<u8>(storage, layout)?;
            }
        }
        then(&HostPlanes { format: self.format, row_bytes: self.format.row_bytes(self.columns), planes })
    }
}

/// What a layer multiplies by: floats, or quantized matrices, or both, one below the other and equally wide.
#[derive(Clone, Debug)]
pub enum Matrix {
    /// `[R, C]`
    Dense(Tensor),
    /// Parts whose input is rounded in one way.
    Quantized(Vec<QuantizedMatrix>),
    /// Unlike parts.
    Mixed(Vec<Matrix>),
}

impl Matrix {
    /// R, C
    pub fn dims(&self) -> (usize, usize) {
        match self {
            Self::Dense(weight) => (weight.dims()[0], weight.dims()[1]),
            Self::Quantized(parts) => (parts.iter().map(|part| part.dims().0).sum(), parts[0].dims().1),
            Self::Mixed(parts) => (parts.iter().map(|part| part.dims().0).sum(), parts[0].dims().1),
        }
    }

    pub fn device(&self) -> &Device {
        match self {
            Self::Dense(weight) => weight.device(),
            Self::Quantized(parts) => parts[0].device(),
            Self::Mixed(parts) => parts[0].device(),
        }
    }

    pub fn bytes(&self) -> u64 {
        match self {
            Self::Dense(weight) => crate::kernels::bytes(weight),
            Self::Quantized(parts) => parts.iter().map(QuantizedMatrix::bytes).sum(),
            Self::Mixed(parts) => parts.iter().map(Matrix::bytes).sum(),
        }
    }

    /// How it is quantized; none for floats, and for what is in several formats.
    pub fn format(&self) -> Option<Format> {
        match self {
            Self::Quantized(parts) => Some(parts[0].format).filter(|one| parts.iter().all(|part| part.format == *one)),
            _ => None,
        }
    }

    /// How the input of a product with it is rounded; none for floats, and where parts ask for different things.
    pub fn input_rounding(&self) -> Option<InputRounding> {
        match self {
            Self::Quantized(parts) => {
                Some(parts[0].input_rounding).filter(|one| parts.iter().all(|part| part.input_rounding == *one))
            }
            _ => None,
        }
    }

    /// Rows `first` to `first + rows`, sharing memory. Rows of several parts are not asked for.
    pub fn rows(&self, first: usize, rows: usize) -> Result<Self> {
        Ok(match self {
            Self::Dense(weight) => Self::Dense(weight.narrow(0, first, rows)?),
            Self::Quantized(parts) if parts.len() == 1 => Self::Quantized(vec![parts[0].rows(first, rows)?]),
            _ => bail!("rows of a matrix in several parts"),
        })
    }

    /// x \[T, C\], of the weight's dtype where that is dense → \[T, R\] f32.
    pub fn matmul(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => matmul_f32(x, weight),
            Self::Quantized(parts) => match self.device() {
                #[cfg(feature = "cuda")]
                Device::Cuda(device) => cuda::matmul(device, parts, x),
                _ => {
                    let products = parts.iter().map(|part| part.matmul(x)).collect::<Result<Vec<_>>>()?;
                    Tensor::cat(&products, 1)
                }
            },
            Self::Mixed(parts) => Tensor::cat(&parts.iter().map(|part| part.matmul(x)).collect::<Result<Vec<_>>>()?, 1),
        }
    }

    /// Rows for ids u32 \[T\], each below R (not checked on a GPU), times `scale`, as f32 \[T, C\].
    pub fn embed(&self, ids: &Tensor, scale: f32) -> Result<Tensor> {
        match self {
            Self::Dense(table) => crate::kernels::rows::embed(table, ids, scale),
            Self::Quantized(parts) if parts.len() == 1 => parts[0].embed(ids, scale),
            _ => bail!("an embedding in several parts"),
        }
    }
}
