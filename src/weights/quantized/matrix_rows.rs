//! Builds quantized matrices from quantized rows in a file, or from floats that are quantized during loading.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use float8::F8E4M3;
use rayon::prelude::*;
use safetensors::tensor::Dtype;

use super::ggml::{self, GgmlType, split_group, super_scales};
use super::reading::{RowBuffer, RowSource, RowsToConvert, SharedReads};
use crate::kernels::quantized::{E4M3_MAX, GROUP_COLUMNS, InputQuantization, QuantizedMatrix, WeightFormat, pack};

/// The format and the dimensions of a quantized matrix.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedShape {
    pub format: WeightFormat,
    pub rows: usize,
    pub columns: usize,
}

/// The format to which loading quantizes float matrices (see [`WeightsBuilder`](super::WeightsBuilder)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizationTarget {
    /// Blocks of a ggml type.
    Blocks(GgmlType),
    /// E4M3 with one scale per row.
    Fp8,
    /// Int8 with one scale per row.
    Int8,
}

impl QuantizationTarget {
    const NAMES: [(&str, Self); 12] = [
        ("q8_0", Self::Blocks(GgmlType::Q8_0)),
        ("q6_k", Self::Blocks(GgmlType::Q6K)),
        ("q5_k", Self::Blocks(GgmlType::Q5K)),
        ("q4_k", Self::Blocks(GgmlType::Q4K)),
        ("q3_k", Self::Blocks(GgmlType::Q3K)),
        ("q2_k", Self::Blocks(GgmlType::Q2K)),
        ("q5_1", Self::Blocks(GgmlType::Q5_1)),
        ("q5_0", Self::Blocks(GgmlType::Q5_0)),
        ("q4_1", Self::Blocks(GgmlType::Q4_1)),
        ("q4_0", Self::Blocks(GgmlType::Q4_0)),
        ("fp8", Self::Fp8),
        ("int8", Self::Int8),
    ];

    /// Returns the format of a matrix with `columns` columns, or `None` if the matrix is loaded as floats.
    pub fn weight_format(self, columns: usize) -> Option<WeightFormat> {
        match self {
            Self::Fp8 => Some(WeightFormat::Fp8),
            Self::Int8 => Some(WeightFormat::Int8),
            Self::Blocks(ggml_type) => weight_format(Self::fitting_type(ggml_type, columns)?),
        }
    }

    /// Returns `ggml_type` if a row of `columns` values consists of whole blocks of this type.
    /// Otherwise, returns the fallback type if a row consists of whole blocks of that type, or else `None`.
    /// Only K-quants have a fallback type, which has shorter blocks and more bits per value.
    /// The fallback types are those of llama.cpp, except Q4_0 (IQ4_NL in llama.cpp).
    fn fitting_type(ggml_type: GgmlType, columns: usize) -> Option<GgmlType> {
        let fallback = match ggml_type {
            GgmlType::Q2K | GgmlType::Q3K => GgmlType::Q4_0,
            GgmlType::Q4K => GgmlType::Q5_0,
            GgmlType::Q5K => GgmlType::Q5_1,
            GgmlType::Q6K => GgmlType::Q8_0,
            other => other,
        };
        [ggml_type, fallback].into_iter().find(|ggml_type| columns.is_multiple_of(ggml_type.block_length()))
    }
}

impl FromStr for QuantizationTarget {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::NAMES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        known.map(|(_, target)| *target).ok_or_else(|| {
            let names: Vec<_> = Self::NAMES.iter().map(|(name, _)| *name).collect();
            format!("choose one of {}", names.join(", "))
        })
    }
}

impl fmt::Display for QuantizationTarget {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, target)| target == self).map_or("", |(name, _)| name);
        f.pad(name)
    }
}

/// Returns the memory format of a quantized ggml type. Returns `None` for float types and for MXFP4.
pub fn weight_format(ggml_type: GgmlType) -> Option<WeightFormat> {
    Some(match ggml_type {
        GgmlType::Q4_0 => WeightFormat::Q4_0,
        GgmlType::Q4_1 => WeightFormat::Q4_1,
        GgmlType::Q5_0 => WeightFormat::Q5_0,
        GgmlType::Q5_1 => WeightFormat::Q5_1,
        GgmlType::Q8_0 => WeightFormat::Q8_0,
        GgmlType::Q2K => WeightFormat::Q2K,
        GgmlType::Q3K => WeightFormat::Q3K,
        GgmlType::Q4K => WeightFormat::Q4K,
        GgmlType::Q5K => WeightFormat::Q5K,
        GgmlType::Q6K => WeightFormat::Q6K,
        GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 | GgmlType::Mxfp4 => return None,
    })
}

/// The index of the plane that stores the scales of a quantized matrix.
const SCALES_PLANE: usize = 2;

/// The rows of one matrix in a file. Building the matrix converts the rows to the memory format.
pub struct MatrixRows<'c> {
    pub format: WeightFormat,
    pub rows: usize,
    pub columns: usize,
    pub input_quantization: InputQuantization,
    writer: RowWriter<'c>,
}

/// How ranks convert the rows of a matrix: each rank alone, or all ranks together.
enum RowWriter<'c> {
    /// This rank converts the rows alone.
    Alone(WriteRow<'c>),
    /// All ranks convert whole rows of `columns` columns together. This rank keeps only the columns in `kept`.
    Together { reads: SharedReads, name: String, columns: usize, kept: Range<usize>, write: WriteRow<'c> },
}

/// A function that writes the row with the given index to the four planes of `kernels::quantized`:
/// low, high, scales and supers.
/// The function may use the thread's `RowBuffer` to read the row.
pub type WriteRow<'c> = Box<dyn Fn(usize, &mut RowBuffer, [&mut [u8]; 4]) -> Result<()> + Sync + 'c>;

impl<'c> MatrixRows<'c> {
    pub fn new(shape: QuantizedShape, input_quantization: InputQuantization, write: WriteRow<'c>) -> Self {
        let QuantizedShape { format, rows, columns } = shape;
        Self { format, rows, columns, input_quantization, writer: RowWriter::Alone(write) }
    }

    /// Creates rows from blocks of a ggml type. Returns `None` for float types and for MXFP4.
    pub fn from_blocks(ggml_type: GgmlType, rows: usize, columns: usize, source: impl RowSource + 'c) -> Option<Self> {
        let format = weight_format(ggml_type)?;
        let write = move |row: usize, buffer: &mut RowBuffer, planes: [&mut [u8]; 4]| {
            pack_row(ggml_type, format, source.row(row, buffer)?, planes);
            Ok(())
        };
        Some(Self::new(QuantizedShape { format, rows, columns }, InputQuantization::None, Box::new(write)))
    }

    /// Creates rows from floats. Each row is quantized when it is written. `row` fills a slice with the row's values.
    /// Returns `None` if `target` does not support rows of `columns` values.
    pub fn from_floats(
        target: QuantizationTarget,
        rows: usize,
        columns: usize,
        row: impl Fn(usize, &mut RowBuffer, &mut [f32]) -> Result<()> + Sync + 'c,
    ) -> Option<Self> {
        let format = target.weight_format(columns)?;
        let write = move |index: usize, buffer: &mut RowBuffer, planes: [&mut [u8]; 4]| {
            let mut values = vec![0.0; columns];
            row(index, buffer, &mut values)?;
            let block_type = match target {
                QuantizationTarget::Blocks(ggml_type) => QuantizationTarget::fitting_type(ggml_type, columns),
                QuantizationTarget::Fp8 | QuantizationTarget::Int8 => None,
            };
            if !values.iter().all(|value| value.is_finite()) {
                bail!("cannot quantize row {index}: it contains NaN or infinity");
            }
            match block_type {
                None => quantize_row_8bit(format, &values, planes),
                Some(ggml_type) => {
                    pack_row(ggml_type, format, &quantize_row(ggml_type, values)?, planes);
                }
            }
            Ok(())
        };
        Some(Self::new(QuantizedShape { format, rows, columns }, InputQuantization::None, Box::new(write)))
    }

    /// Keeps only the rows with the given indices. This rank converts these rows without the other ranks.
    pub fn rows(self, indices: Vec<usize>) -> Self {
        let Self { format, columns, input_quantization, writer, .. } = self;
        let (RowWriter::Alone(write) | RowWriter::Together { write, .. }) = writer;
        let rows = indices.len();
        let write =
            move |row: usize, buffer: &mut RowBuffer, planes: [&mut [u8]; 4]| write(indices[row], buffer, planes);
        Self::new(QuantizedShape { format, rows, columns }, input_quantization, Box::new(write))
    }

    /// Keeps only a range of the columns, or all columns.
    /// Fails if the range starts or ends within a [unit of columns](WeightFormat::column_unit).
    ///
    /// If `shared` is given, all ranks convert the whole rows together. The string in `shared` is the matrix name.
    pub(super) fn columns(self, range: Range<usize>, shared: Option<(&SharedReads, String)>) -> Result<Self> {
        let Self { format, rows, columns, input_quantization, writer } = self;
        let (RowWriter::Alone(write) | RowWriter::Together { write, .. }) = writer;
        let unit = format.column_unit();
        let is_border = |column: usize| column.is_multiple_of(unit) || column == columns;
        if !is_border(range.start) || !is_border(range.end) {
            bail!("cannot load columns {range:?} of a {format:?} matrix: start and end must be multiples of {unit}");
        }
        let kept_columns = range.len();
        let writer = match shared {
            Some((reads, name)) => RowWriter::Together { reads: reads.clone(), name, columns, kept: range, write },
            None if kept_columns == columns => RowWriter::Alone(write),
            None => RowWriter::Alone(Box::new(move |row, buffer, planes| {
                let mut bytes = format.row_bytes(columns).map(|bytes| vec![0; bytes]);
                write(row, buffer, bytes.each_mut().map(Vec::as_mut_slice))?;
                copy_columns(format, range.start, bytes.each_ref().map(Vec::as_slice), planes);
                Ok(())
            })),
        };
        Ok(Self { format, rows, columns: kept_columns, input_quantization, writer })
    }

    /// Converts this rank's share of the rows if all ranks convert the rows together. Otherwise, does nothing.
    /// A rank calls this function if it keeps no columns of the matrix.
    pub fn join(&self) -> Result<()> {
        match &self.writer {
            RowWriter::Alone(_) => Ok(()),
            RowWriter::Together { .. } => self.write_to([&mut [], &mut [], &mut [], &mut []], &|| {}),
        }
    }

    /// Writes all rows to the planes, using all cores. Calls `after_row` after each row, except in `RowWriter::Together`,
    /// which records the progress of its rank itself.
    fn write_to(&self, planes: [&mut [u8]; 4], after_row: &(dyn Fn() + Sync)) -> Result<()> {
        let row_bytes = self.format.row_bytes(self.columns);
        match &self.writer {
            RowWriter::Alone(write) => plane_rows(planes, row_bytes, self.rows)
                .with_min_len(16)
                .enumerate()
                .try_for_each_init(RowBuffer::default, |buffer, (row, planes)| {
                    write(row, buffer, planes)?;
                    after_row();
                    Ok(())
                }),
            RowWriter::Together { reads, name, columns, kept, write } => {
                let whole_bytes = self.format.row_bytes(*columns);
                let write = |row: usize, buffer: &mut RowBuffer, mut bytes: &mut [u8]| {
                    let planes = whole_bytes.map(|length| bytes.split_off_mut(..length).unwrap_or_default());
                    write(row, buffer, planes)
                };
                let (mut rest, whole_length) = (planes, whole_bytes.iter().sum());
                let rows_to_convert = RowsToConvert { name, rows: self.rows, row_length: whole_length };
                reads.convert_rows(rows_to_convert, write, |rows, bytes| {
                    if kept.is_empty() {
                        return Ok(());
                    }
                    let own = split_planes(&mut rest, row_bytes.map(|bytes| rows.len() * bytes));
                    let rows = plane_rows(own, row_bytes, rows.len()).zip(bytes.par_chunks_exact(whole_length));
                    rows.with_min_len(16).for_each(|(planes, mut whole)| {
                        let whole = whole_bytes.map(|length| whole.split_off(..length).unwrap_or_default());
                        copy_columns(self.format, kept.start, whole, planes);
                    });
                    Ok(())
                })
            }
        }
    }

    /// Builds one matrix from the rows of several matrices, using all cores.
    /// All matrices must have the same format, number of columns and input quantization.
    /// `after_row` is called after each row, so that other ranks see that this rank makes progress.
    pub fn build(matrices: &[&Self], device: &Device, after_row: &(dyn Fn() + Sync)) -> Result<QuantizedMatrix> {
        let [first, ..] = matrices else { bail!("cannot build a matrix without rows") };
        let (format, columns) = (first.format, first.columns);
        if let Some(empty) = matrices.iter().find(|matrix| matrix.rows * columns == 0) {
            bail!("cannot build a matrix of {} rows and {columns} columns", empty.rows);
        }
        let rows: usize = matrices.iter().map(|matrix| matrix.rows).sum();
        let row_bytes = format.row_bytes(columns);
        let mut planes = row_bytes.map(|bytes| vec![0u8; rows * bytes]);
        let mut rest = planes.each_mut().map(Vec::as_mut_slice);
        for matrix in matrices {
            matrix.write_to(split_planes(&mut rest, row_bytes.map(|bytes| matrix.rows * bytes)), after_row)?;
        }
        let matrix = QuantizedMatrix::new(format, columns, planes, device)?;
        Ok(matrix.with_input_quantization(first.input_quantization))
    }
}

/// Quantizes a row to blocks of a ggml type. The blocks dequantize to the same values as those of ggml's quantizers.
fn quantize_row(ggml_type: GgmlType, values: Vec<f32>) -> Result<Vec<u8>> {
    let mut bytes = vec![0; values.len() / ggml_type.block_length() * ggml_type.block_bytes()];
    let mut blocks = bytes.chunks_exact_mut(ggml_type.block_bytes()).zip(values.chunks_exact(ggml_type.block_length()));
    if blocks.all(|(block, values)| ggml::quantize(ggml_type, values, block)) {
        return Ok(bytes);
    }
    // `ggml::quantize` supports only K-quants. For the other types, candle's quantizers match the results of ggml.
    let columns = values.len();
    let row = Tensor::from_vec(values, columns, &Device::Cpu)?;
    Ok(QTensor::quantize(&row, candle_type(ggml_type)?)?.data()?.to_vec())
}

/// Returns the candle type for a legacy ggml type (Q4_0 to Q8_0). Fails for all other types.
fn candle_type(ggml_type: GgmlType) -> Result<GgmlDType> {
    Ok(match ggml_type {
        GgmlType::Q4_0 => GgmlDType::Q4_0,
        GgmlType::Q4_1 => GgmlDType::Q4_1,
        GgmlType::Q5_0 => GgmlDType::Q5_0,
        GgmlType::Q5_1 => GgmlDType::Q5_1,
        GgmlType::Q8_0 => GgmlDType::Q8_0,
        other => bail!("cannot quantize to {other}"),
    })
}

/// Splits off and returns the first bytes of each plane. `lengths` has the number of bytes for each plane.
fn split_planes<'p>(planes: &mut [&'p mut [u8]; 4], lengths: [usize; 4]) -> [&'p mut [u8]; 4] {
    let mut lengths = lengths.into_iter();
    planes.each_mut().map(|plane| {
        let (first, rest) = std::mem::take(plane).split_at_mut(lengths.next().unwrap_or(0));
        *plane = rest;
        first
    })
}

/// Splits each plane into `rows` rows. `row_bytes` has the bytes per row of each plane, which may be 0.
fn plane_rows(
    planes: [&mut [u8]; 4],
    row_bytes: [usize; 4],
    rows: usize,
) -> impl IndexedParallelIterator<Item = [&mut [u8]; 4]> {
    let mut rest = planes;
    let split: Vec<_> = (0..rows).map(|_| split_planes(&mut rest, row_bytes)).collect();
    split.into_par_iter()
}

/// Fills `planes` with columns of a row, beginning at column `start`. `whole` contains the planes of the whole row.
fn copy_columns(format: WeightFormat, start: usize, whole: [&[u8]; 4], planes: [&mut [u8]; 4]) {
    let before = format.row_bytes(start);
    for (index, (plane, bytes)) in planes.into_iter().zip(whole).enumerate() {
        // Copy a row scale whole, because it applies to every column of the row.
        let start = if index == SCALES_PLANE && format.has_row_scales() { 0 } else { before[index] };
        plane.copy_from_slice(&bytes[start..start + plane.len()]);
    }
}

/// Packs a row of ggml blocks into the planes of a memory format.
fn pack_row(ggml_type: GgmlType, format: WeightFormat, bytes: &[u8], planes: [&mut [u8]; 4]) {
    let sizes = format.plane_bytes();
    let [low, high, scales, supers] = planes;
    let groups = ggml_type.block_length() / GROUP_COLUMNS;
    for (index, block) in bytes.chunks_exact(ggml_type.block_bytes()).enumerate() {
        for group in 0..groups {
            let at = index * groups + group;
            let q = split_group(ggml_type, block, group, &mut scales[at * sizes.scales..][..sizes.scales]);
            let high = if sizes.high == 0 { &mut [][..] } else { &mut high[at * sizes.high..][..sizes.high] };
            pack(&q, &mut low[at * sizes.low..][..sizes.low], high);
        }
        let super_scales = super_scales(ggml_type, block);
        supers[index * sizes.supers..][..super_scales.len()].copy_from_slice(super_scales);
    }
}

/// Quantizes a row to int8 or E4M3. The scale maps the largest magnitude to 127 (int8) or 448 (E4M3).
fn quantize_row_8bit(format: WeightFormat, values: &[f32], planes: [&mut [u8]; 4]) {
    let [low, _, scales, _] = planes;
    let max = values.iter().fold(0.0f32, |max, value| max.max(value.abs()));
    let scale = if format == WeightFormat::Int8 { max / 127.0 } else { max / E4M3_MAX };
    for (q, value) in low.iter_mut().zip(values) {
        let value = if scale > 0.0 { value / scale } else { 0.0 };
        *q = match format {
            WeightFormat::Int8 => value.round_ties_even() as i8 as u8,
            _ => F8E4M3::from_f32(value).to_bits(),
        };
    }
    scales.copy_from_slice(&scale.to_le_bytes());
}

/// Converts F32, F16, BF16 or E4M3 elements to f32.
/// Fails for other dtypes, or if the number of bytes does not match the number of values.
pub fn read_floats(dtype: Dtype, bytes: &[u8], values: &mut [f32]) -> Result<()> {
    let ggml_type = match dtype {
        Dtype::F32 => GgmlType::F32,
        Dtype::F16 => GgmlType::F16,
        Dtype::BF16 => GgmlType::Bf16,
        Dtype::F8_E4M3 if bytes.len() == values.len() => {
            values.iter_mut().zip(bytes).for_each(|(value, byte)| *value = F8E4M3::from_bits(*byte).to_f32());
            return Ok(());
        }
        other => bail!("cannot read {other} as floats"),
    };
    ggml_type.dequantize(bytes, values).context("cannot read a row of floats")
}
