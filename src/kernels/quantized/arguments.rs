//! Passes quantized matrices to kernels, as C structs that contain the addresses of the planes.

use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{Result, bail};

use super::quantized_matrix::{InputQuantization, QuantizedMatrix};
use crate::kernels::constants::{
    MAX_STACKED_MATRICES, QUANTIZATION_FP8_PER_TOKEN, QUANTIZATION_FP8_STATIC, QUANTIZATION_INT8_PER_TOKEN,
    QUANTIZATION_INT8_STATIC, QUANTIZATION_NONE,
};
use crate::kernels::launch::{Arguments, optional_address};

/// Mirrors `QuantizedMatrix` in `format.cuh`. The planes are device addresses, or 0 for planes that the format lacks.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct RawMatrix {
    low: u64,
    high: u64,
    scales: u64,
    supers: u64,
    format: i32,
    rows: i32,
}

/// Mirrors `QuantizedStack` in `format.cuh`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct RawStack {
    matrices: [RawMatrix; MAX_STACKED_MATRICES],
    row_ends: [i32; MAX_STACKED_MATRICES],
}

// The last bytes can be padding.
const _: () = assert!(size_of::<RawStack>() == (MAX_STACKED_MATRICES * 44).next_multiple_of(8));
// SAFETY: the struct has C layout and contains only integers. The kernels do not read the padding.
unsafe impl DeviceRepr for RawStack {}

impl RawStack {
    fn new(matrices: &[QuantizedMatrix]) -> Result<Self> {
        if matrices.is_empty() || matrices.len() > MAX_STACKED_MATRICES {
            bail!("cannot stack {} quantized matrices: a kernel accepts 1 to {MAX_STACKED_MATRICES}", matrices.len());
        }
        let columns = matrices[0].dims().1;
        if matrices.iter().any(|matrix| matrix.dims().1 != columns) {
            bail!("cannot stack quantized matrices: they have different numbers of columns");
        }
        let mut raw = Self::default();
        let mut row_end = 0;
        for (i, matrix) in matrices.iter().enumerate() {
            let [low, high, scales, supers] = &matrix.planes;
            let rows = i32::try_from(matrix.dims().0)?;
            row_end += matrix.dims().0;
            raw.matrices[i] = RawMatrix {
                low: optional_address(low.as_ref())?,
                high: optional_address(high.as_ref())?,
                scales: optional_address(scales.as_ref())?,
                supers: optional_address(supers.as_ref())?,
                format: matrix.format as i32,
                rows,
            };
            raw.row_ends[i] = i32::try_from(row_end)?;
        }
        Ok(raw)
    }
}

impl Arguments {
    /// Adds one argument: a vertical stack of 1 to `MAX_STACKED_MATRICES` matrices with the same number of columns.
    pub fn stack(self, matrices: &[QuantizedMatrix]) -> Result<Self> {
        Ok(self.value(RawStack::new(matrices)?, matrices.iter().flat_map(QuantizedMatrix::tensors)))
    }

    /// Adds the two arguments that tell a kernel how to quantize its input: the mode, and the static scale or 0.
    pub fn input_quantization(self, quantization: InputQuantization) -> Self {
        let (number, scale) = match quantization {
            InputQuantization::None => (QUANTIZATION_NONE, 0.0),
            InputQuantization::Int8PerToken => (QUANTIZATION_INT8_PER_TOKEN, 0.0),
            InputQuantization::Fp8PerToken => (QUANTIZATION_FP8_PER_TOKEN, 0.0),
            InputQuantization::Fp8Static(scale) => (QUANTIZATION_FP8_STATIC, scale),
            InputQuantization::Int8Static(scale) => (QUANTIZATION_INT8_STATIC, scale),
        };
        self.int(number).float(scale)
    }
}
