//! Quantized matrices made of what a checkpoint has: blocks of a GGUF file as they are, or floats quantized while they are
//! loaded.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use float8::F8E4M3;
use rayon::prelude::*;
use safetensors::tensor::Dtype;

use super::ggml::{self, GgmlType, split};
use crate::kernels::quantized::{E4M3_MAX, Format, GROUP_COLUMNS, InputRounding, QuantizedMatrix, pack};

/// What `--quantize` makes of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizationTarget {
    /// Blocks of a ggml type.
    Blocks(GgmlType),
    /// E4M3 and a scale for each row.
    Fp8,
    /// Signed bytes and a scale for each row.
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

    /// What rows of so many columns become; none if they stay floats.
    pub fn format(self, columns: usize) -> Option<Format> {
        match self {
            Self::Fp8 => Some(Format::Fp8),
            Self::Int8 => Some(Format::Int8),
            Self::Blocks(of) => format(Self::blocks(of, columns)?),
        }
    }

    /// The type itself, or the next larger one whose blocks are shorter, as llama.cpp's quantization chooses it.
    fn blocks(of: GgmlType, columns: usize) -> Option<GgmlType> {
        let shorter = match of {
            GgmlType::Q2K | GgmlType::Q3K => GgmlType::Q4_0,
            GgmlType::Q4K => GgmlType::Q5_0,
            GgmlType::Q5K => GgmlType::Q5_1,
            GgmlType::Q6K => GgmlType::Q8_0,
            other => other,
        };
        [of, shorter].into_iter().find(|of| columns.is_multiple_of(of.block_length()))
    }
}

impl FromStr for QuantizationTarget {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::NAMES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        known.map(|(_, quantize)| *quantize).ok_or_else(|| {
            let names: Vec<_> = Self::NAMES.iter().map(|(name, _)| *name).collect();
            format!("choose one of {}", names.join(", "))
        })
    }
}

impl fmt::Display for QuantizationTarget {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, quantize)| quantize == self).map_or("", |(name, _)| name);
        f.pad(name)
    }
}

/// How the blocks of a type are kept in memory; none for types that become floats.
pub fn format(ggml_type: GgmlType) -> Option<Format> {
    Some(match ggml_type {
        GgmlType::Q4_0 => Format::Q4_0,
        GgmlType::Q4_1 => Format::Q4_1,
        GgmlType::Q5_0 => Format::Q5_0,
        GgmlType::Q5_1 => Format::Q5_1,
        GgmlType::Q8_0 => Format::Q8_0,
        GgmlType::Q2K => Format::Q2K,
        GgmlType::Q3K => Format::Q3K,
        GgmlType::Q4K => Format::Q4K,
        GgmlType::Q5K => Format::Q5K,
        GgmlType::Q6K => Format::Q6K,
        GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 | GgmlType::Mxfp4 => return None,
    })
}

/// The rows of one matrix before they are laid out.
pub struct MatrixRows<'c> {
    pub format: Format,
    pub rows: usize,
    pub columns: usize,
    pub rounding: InputRounding,
    pub write: WriteRow<'c>,
}

/// Writes a row's part of each plane.
pub type WriteRow<'c> = Box<dyn Fn(usize, [&mut [u8]; 4]) -> Result<()> + Sync + 'c>;

impl<'c> MatrixRows<'c> {
    /// Blocks of a ggml type; `row` has their bytes.
    pub fn from_blocks(
        ggml_type: GgmlType,
        rows: usize,
        columns: usize,
        row: impl Fn(usize) -> &'c [u8] + Sync + 'c,
    ) -> Option<Self> {
        let format = format(ggml_type)?;
        let write = move |index: usize, planes: [&mut [u8]; 4]| {
            lay_out(ggml_type, format, row(index), planes);
            Ok(())
        };
        Some(Self { format, rows, columns, rounding: InputRounding::None, write: Box::new(write) })
    }

    /// Floats, which are quantized here; `row` writes them. None if they are to stay floats.
    pub fn from_floats(
        quantize: QuantizationTarget,
        rows: usize,
        columns: usize,
        row: impl Fn(usize, &mut [f32]) -> Result<()> + Sync + 'c,
    ) -> Option<Self> {
        let format = quantize.format(columns)?;
        let write = move |index: usize, planes: [&mut [u8]; 4]| {
            let mut values = vec![0.0; columns];
            row(index, &mut values)?;
            let blocks = match quantize {
                QuantizationTarget::Blocks(of) => QuantizationTarget::blocks(of, columns),
                QuantizationTarget::Fp8 | QuantizationTarget::Int8 => None,
            };
            if !values.iter().all(|value| value.is_finite()) {
                bail!("row {index} holds what is no number, which cannot be quantized");
            }
            match blocks {
                None => scale_row(format, &values, planes),
                Some(ggml_type) => {
                    lay_out(ggml_type, format, &ggml_blocks(ggml_type, values)?, planes);
                }
            }
            Ok(())
        };
        Some(Self { format, rows, columns, rounding: InputRounding::None, write: Box::new(write) })
    }

    /// All rows of several matrices of one format, one below the other. The whole machine takes part.
    pub fn build(parts: &[&Self], device: &Device) -> Result<QuantizedMatrix> {
        let [first, ..] = parts else { bail!("a matrix without rows") };
        let (format, columns) = (first.format, first.columns);
        if columns == 0 || parts.iter().any(|part| part.rows == 0) {
            bail!("a matrix of {} rows and {columns} columns", first.rows);
        }
        let rows: usize = parts.iter().map(|part| part.rows).sum();
        let row_bytes = format.row_bytes(columns);
        let mut planes = row_bytes.map(|bytes| vec![0u8; rows * bytes]);
        let mut rest = planes.each_mut().map(Vec::as_mut_slice);
        for part in parts {
            let here = rest.each_mut().map(std::mem::take);
            let mut split = [(); 4].map(|()| (&mut [][..], &mut [][..]));
            for ((split, plane), bytes) in split.iter_mut().zip(here).zip(row_bytes) {
                *split = plane.split_at_mut(part.rows * bytes);
            }
            let [low, high, scales, supers] = split;
            rest = [low.1, high.1, scales.1, supers.1];
            let [low, high, scales, supers] = [low.0, high.0, scales.0, supers.0];
            // Planes that a format lacks have rows of no bytes, which rayon cannot count.
            low.par_chunks_mut(row_bytes[0])
                .zip(chunks(high, row_bytes[1], part.rows))
                .zip(chunks(scales, row_bytes[2], part.rows))
                .zip(chunks(supers, row_bytes[3], part.rows))
                .with_min_len(16)
                .enumerate()
                .try_for_each(|(row, (((low, high), scales), supers))| {
                    (part.write)(row, [low, high, scales, supers])
                })?;
        }
        let matrix = QuantizedMatrix::new(format, columns, planes, device)?;
        Ok(matrix.with_input_rounding(first.rounding))
    }
}

/// A row as ggml would quantize it.
fn ggml_blocks(ggml_type: GgmlType, values: Vec<f32>) -> Result<Vec<u8>> {
    let mut bytes = vec![0; values.len() / ggml_type.block_length() * ggml_type.block_bytes()];
    let mut blocks = bytes.chunks_exact_mut(ggml_type.block_bytes()).zip(values.chunks_exact(ggml_type.block_length()));
    if blocks.all(|(block, values)| ggml::quantize(ggml_type, values, block)) {
        return Ok(bytes);
    }
    // candle's quantizers of the others are ggml's.
    let columns = values.len();
    let row = Tensor::from_vec(values, columns, &Device::Cpu)?;
    Ok(QTensor::quantize(&row, candle_type(ggml_type)?)?.data()?.to_vec())
}

/// As candle calls it.
fn candle_type(ggml_type: GgmlType) -> Result<GgmlDType> {
    Ok(match ggml_type {
        GgmlType::Q4_0 => GgmlDType::Q4_0,
        GgmlType::Q4_1 => GgmlDType::Q4_1,
        GgmlType::Q5_0 => GgmlDType::Q5_0,
        GgmlType::Q5_1 => GgmlDType::Q5_1,
        GgmlType::Q8_0 => GgmlDType::Q8_0,
        other => bail!("nothing is quantized to {other}"),
    })
}

/// `rows` slices of `bytes` each, which may be none.
fn chunks(plane: &mut [u8], bytes: usize, rows: usize) -> impl IndexedParallelIterator<Item = &mut [u8]> {
    let mut slices: Vec<&mut [u8]> = Vec::with_capacity(rows);
    match bytes {
        0 => slices.resize_with(rows, Default::default),
        bytes => slices.extend(plane.chunks_mut(bytes)),
    }
    slices.into_par_iter()
}

/// A row of blocks as planes.
fn lay_out(ggml_type: GgmlType, format: Format, bytes: &[u8], planes: [&mut [u8]; 4]) {
    let sizes = format.plane_bytes();
    let [low, high, scales, supers] = planes;
    let chunks = ggml_type.block_length() / GROUP_COLUMNS;
    for (index, block) in bytes.chunks_exact(ggml_type.block_bytes()).enumerate() {
        for chunk in 0..chunks {
            let at = index * chunks + chunk;
            let q = split(ggml_type, block, chunk, &mut scales[at * sizes.scales..][..sizes.scales]);
            let high = if sizes.high == 0 { &mut [][..] } else { &mut high[at * sizes.high..][..sizes.high] };
            pack(&q, &mut low[at * sizes.low..][..sizes.low], high);
        }
        if sizes.supers > 0 {
            let supers = &mut supers[index * sizes.supers..][..sizes.supers];
            match ggml_type {
                GgmlType::Q2K => supers.copy_from_slice(&block[80..84]),
                GgmlType::Q3K => supers[..2].copy_from_slice(&block[108..110]),
                GgmlType::Q6K => supers[..2].copy_from_slice(&block[208..210]),
                _ => supers.copy_from_slice(&block[..4]),
            }
        }
    }
}

/// A row of floats as 8 bits each and the scale that its largest magnitude asks for.
fn scale_row(format: Format, values: &[f32], planes: [&mut [u8]; 4]) {
    let [low, _, scales, _] = planes;
    let most = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let scale = if format == Format::Int8 { most / 127.0 } else { most / E4M3_MAX };
    for (q, value) in low.iter_mut().zip(values) {
        let value = if scale > 0.0 { value / scale } else { 0.0 };
        *q = match format {
            Format::Int8 => value.round_ties_even() as i8 as u8,
            _ => F8E4M3::from_f32(value).to_bits(),
        };
    }
    scales.copy_from_slice(&scale.to_le_bytes());
}

/// Elements of a float dtype as f32.
pub fn read_floats(dtype: Dtype, bytes: &[u8], values: &mut [f32]) -> Result<()> {
    let ggml_type = match dtype {
        Dtype::F32 => GgmlType::F32,
        Dtype::F16 => GgmlType::F16,
        Dtype::BF16 => GgmlType::Bf16,
        Dtype::F8_E4M3 if bytes.len() == values.len() => {
            values.iter_mut().zip(bytes).for_each(|(value, byte)| *value = F8E4M3::from_bits(*byte).to_f32());
            return Ok(());
        }
        other => bail!("{other} are no floats"),
    };
    ggml_type.dequantize(bytes, values).context("a row of floats")
}
