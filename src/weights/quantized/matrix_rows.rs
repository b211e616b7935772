//! [`MatrixRows`]: the rows of a quantized matrix, which ranks convert alone or together.

use std::ops::Range;

use anyhow::{Result, bail};
use candle_core::Device;
use rayon::prelude::*;

use super::row::{pack_row, quantize_row, quantize_row_8bit};
use super::target::{QuantizationTarget, weight_format};
use crate::kernels::quantized::{InputQuantization, QuantizedMatrix, WeightFormat};
use crate::weights::ggml::GgmlType;
use crate::weights::reading::{RowBuffer, RowSource, RowsToConvert, SharedReads};

/// The format and the dimensions of a quantized matrix.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedShape {
    pub format: WeightFormat,
    pub rows: usize,
    pub columns: usize,
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
    pub fn columns(self, range: Range<usize>, shared: Option<(&SharedReads, String)>) -> Result<Self> {
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

    /// Writes all rows to the planes, using all cores.
    /// Calls `after_row` after each row, except in `RowWriter::Together`, which records the progress of its rank itself.
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
                let mut rest = planes;
                let whole_length = whole_bytes.iter().sum();
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
