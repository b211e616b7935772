//! A quantized matrix in host or device memory.

use candle_core::{Device, Result, Tensor, bail};

use super::format::{GROUP_COLUMNS, SUPERBLOCK_COLUMNS, WeightFormat};

/// How a matrix product quantizes its input (the activations) to 8 bits.
/// The checkpoint specifies this quantization, for example in W8A8 or FP8 models.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InputQuantization {
    /// The input is not quantized.
    None,
    /// Quantizes to integers from -128 to 127 with one scale per token.
    /// The scale is the token's largest magnitude divided by 127.5 (compressed-tensors, `calculate_qparams`).
    Int8PerToken,
    /// Quantizes to integers from -128 to 127 with the static scale of the checkpoint.
    Int8Static(f32),
    /// Quantizes to E4M3 with one scale per token. The scale is the token's largest magnitude divided by 448.
    Fp8PerToken,
    /// Quantizes to E4M3 with the static scale of the checkpoint.
    Fp8Static(f32),
}

/// A quantized matrix, `[rows, columns]`.
#[derive(Clone, Debug)]
pub struct QuantizedMatrix {
    pub format: WeightFormat,
    pub(super) columns: usize,
    /// The low, high, scales and supers planes (see [`super`]), each u8 `[rows, bytes per row]`.
    /// `None` for planes that the format lacks.
    pub(super) planes: [Option<Tensor>; 4],
    pub input_quantization: InputQuantization,
}

impl QuantizedMatrix {
    /// Creates a matrix and copies its planes (low, high, scales and supers) to `device`.
    /// Each plane holds its rows one after another. Planes that the format lacks are empty.
    ///
    /// Fails if the matrix has no rows, or if the sizes of the planes or the number of columns do not match the format.
    pub fn new(format: WeightFormat, columns: usize, planes: [Vec<u8>; 4], device: &Device) -> Result<Self> {
        let row_bytes = format.row_bytes(columns);
        let rows = planes[0].len() / row_bytes[0].max(1);
        let column_multiple = if format.plane_bytes().supers > 0 {
            SUPERBLOCK_COLUMNS
        } else if format.has_row_scales() {
            1
        } else {
            GROUP_COLUMNS
        };
        let fits = planes.iter().zip(row_bytes).all(|(plane, bytes)| plane.len() == rows * bytes);
        if !fits || rows == 0 || !columns.is_multiple_of(column_multiple) {
            let sizes = planes.each_ref().map(Vec::len);
            bail!("cannot create a {format:?} matrix with {columns} columns from planes of {sizes:?} bytes");
        }
        let mut tensors = [const { None }; 4];
        for ((tensor, plane), bytes) in tensors.iter_mut().zip(planes).zip(row_bytes) {
            if bytes > 0 {
                *tensor = Some(Tensor::from_vec(plane, (rows, bytes), device)?);
            }
        }
        Ok(Self { format, columns, planes: tensors, input_quantization: InputQuantization::None })
    }

    /// Returns the planes that exist in this format.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.planes.iter().flatten()
    }

    /// Sets how products with this matrix quantize their input.
    pub fn with_input_quantization(self, input_quantization: InputQuantization) -> Self {
        Self { input_quantization, ..self }
    }

    pub(super) fn low(&self) -> &Tensor {
        self.planes[0].as_ref().expect("every format should have a low plane")
    }

    /// Returns `(rows, columns)`.
    pub fn dims(&self) -> (usize, usize) {
        (self.low().dims()[0], self.columns)
    }

    pub fn device(&self) -> &Device {
        self.low().device()
    }

    /// Returns the size of all planes, in bytes.
    pub fn bytes(&self) -> u64 {
        self.tensors().map(crate::kernels::bytes).sum()
    }

    /// Returns `rows` rows, starting at row `first`. The result shares memory with this matrix.
    pub fn rows(&self, first: usize, rows: usize) -> Result<Self> {
        let mut planes = self.planes.clone();
        for plane in planes.iter_mut().flatten() {
            *plane = plane.narrow(0, first, rows)?;
        }
        Ok(Self { planes, ..self.clone() })
    }
}
