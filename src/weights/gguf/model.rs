//! A GGUF file as a checkpoint: tensors by their Hugging Face names, each made from what the file has.
//!
//! Matrices stay in their blocks ([`GgufModel::quantized`]); what else there is becomes floats ([`GgufModel::float`]).

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::tensor::Dtype;

use super::experts::Experts;
use super::names::{InLayer, Layout, Role};
use super::{GgufCheckpoint, View};
use crate::weights::TensorInfo;
use crate::weights::ggml::GgmlType;
use crate::weights::quantized::{self, QuantizationTarget};

/// A GGUF file and what the model's tensors are made of.
pub struct GgufModel {
    file: GgufCheckpoint,
    tensors: BTreeMap<String, Entry>,
}

/// One tensor of the model.
pub struct Entry {
    pub info: TensorInfo,
    /// The file's tensors that it is made of, which are alike.
    pub(super) sources: Vec<String>,
    pub(super) rows: Rows,
    pub(super) change: Change,
}

/// Which row of which source is a row of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// The same of the only source.
    Same,
    /// Of heads of this many rows, whose halves alternate in the file.
    Halves(usize),
    /// So many of each source in turn.
    Turns(usize),
}

/// What else is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Nothing,
    /// To a vector, whose elements are then its rows.
    Vector,
    MinusOne,
    /// Matrices, of which there may be several, are turned round.
    Transposed,
    /// The nibbles of MXFP4.
    Blocks,
    /// The scales of MXFP4.
    Scales,
}

impl GgufModel {
    pub fn open(path: &Path) -> Result<Self> {
        Self::new(GgufCheckpoint::open(path)?)
    }

    pub fn new(file: GgufCheckpoint) -> Result<Self> {
        let tensors = entries(&file).with_context(|| format!("cannot use {}", file.path().display()))?;
        Ok(Self { file, tensors })
    }

    pub fn file(&self) -> &GgufCheckpoint {
        &self.file
    }

    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|entry| &entry.info)
    }

    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), &entry.info))
    }

    pub fn entry(&self, name: &str) -> Result<&Entry> {
        self.tensors.get(name).with_context(|| {
            let files: Vec<_> = self.file.files().map(|file| file.display().to_string()).collect();
            format!("tensor {name} is missing from {}", files.join(", "))
        })
    }

    /// The bytes that a tensor's blocks lie in and their type, if its rows are the file's and nothing was done to them.
    fn stored(&self, name: &str) -> Result<Option<View<'_>>> {
        let entry = self.entry(name)?;
        let plain = entry.rows == Rows::Same && entry.change == Change::Nothing;
        if plain { self.file.view(&entry.sources[0]).map(Some) } else { Ok(None) }
    }

    /// What a tensor's elements are in the file.
    pub fn stored_type(&self, name: &str) -> Option<GgmlType> {
        self.file.info(self.tensors.get(name)?.sources.first()?).map(|info| info.ggml_type)
    }

    /// For messages: the file's names, types and shapes.
    pub fn describe(&self, name: &str) -> String {
        let Ok(entry) = self.entry(name) else { return "nothing".into() };
        let source = |name: &String| match self.file.view(name) {
            Ok(view) => format!("{name} {} {:?} in {}", view.info.ggml_type, view.info.shape, view.file.display()),
            Err(error) => error.to_string(),
        };
        let sources: Vec<_> = entry.sources.iter().take(2).map(source).collect();
        format!("{:?}, made of {}", entry.info.shape, sources.join(" and "))
    }

    /// The rows of a matrix whose blocks can be kept as they are.
    pub fn quantized(&self, name: &str) -> Result<Option<quantized::MatrixRows<'_>>> {
        let Some((rows, columns)) = self.matrix_shape(name)? else { return Ok(None) };
        let source = self.rows(self.entry(name)?)?;
        let (ggml_type, ..) = source.sources[0];
        Ok(quantized::MatrixRows::from_blocks(ggml_type, rows, columns, move |row| source.get(row).1))
    }

    /// The rows of a matrix of floats, to be quantized.
    pub fn to_quantize(&self, name: &str, quantize: QuantizationTarget) -> Result<Option<quantized::MatrixRows<'_>>> {
        let Some((rows, columns)) = self.matrix_shape(name)? else { return Ok(None) };
        let source = self.rows(self.entry(name)?)?;
        let row = move |row: usize, values: &mut [f32]| {
            let (ggml_type, bytes) = source.get(row);
            ggml_type.dequantize(bytes, values)
        };
        Ok(quantized::MatrixRows::from_floats(quantize, rows, columns, row))
    }

    /// Bytes of a matrix whose blocks are kept.
    pub fn kept_bytes(&self, name: &str) -> Option<u64> {
        let format = quantized::format(self.stored_type(name)?)?;
        let (rows, columns) = self.matrix_shape(name).ok()??;
        Some(format.bytes(rows as u64, columns as u64))
    }

    /// Rows and columns of a matrix as products take it, or of several of one type, one below the other.
    pub fn matrix_shape(&self, name: &str) -> Result<Option<(usize, usize)>> {
        let entry = self.entry(name)?;
        let mut types = entry.sources.iter().map(|source| self.file.info(source).map(|info| info.ggml_type));
        let first = types.next().flatten();
        if types.any(|other| other != first) {
            return Ok(None);
        }
        let shape = match entry.change {
            Change::Nothing => &entry.info.shape,
            // The file has it the way that products take it.
            Change::Transposed => match (entry.sources.as_slice(), self.file.info(&entry.sources[0])) {
                ([_], Some(info)) if info.shape.len() == 2 => &info.shape,
                _ => return Ok(None),
            },
            _ => return Ok(None),
        };
        Ok(match shape.as_slice() {
            [rows @ .., columns] if !rows.is_empty() => Some((rows.iter().product(), *columns)),
            _ => None,
        })
    }

    /// A float tensor in a dtype, on the host. The whole machine takes part; nothing is allocated but the result.
    pub fn float(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let make = || match (self.stored(name)?, dtype) {
            (Some(view), _) if float_dtype(view.info.ggml_type) == Some(dtype) => {
                Ok(Tensor::from_raw_buffer(view.bytes, dtype, &view.info.shape, &Device::Cpu)?)
            }
            (_, DType::F32) => self.make::<f32>(name, |value| value),
            (_, DType::F16) => self.make(name, f16::from_f32),
            (_, DType::BF16) => self.make(name, bf16::from_f32),
            _ => bail!("{dtype:?} is no dtype that weights are dequantized to"),
        };
        make().with_context(|| format!("tensor {name}"))
    }

    fn make<T: WithDType>(&self, name: &str, convert: impl Fn(f32) -> T + Sync) -> Result<Tensor> {
        let entry = self.entry(name)?;
        let rows = self.rows(entry)?;
        let shift = if entry.change == Change::MinusOne { -1.0 } else { 0.0 };
        let mut values = vec![T::zero(); entry.info.elements()];
        let row = |buffer: &mut Vec<f32>, (row, values): (usize, &mut [T])| {
            let (ggml_type, bytes) = rows.get(row);
            ggml_type.dequantize(bytes, buffer)?;
            values.iter_mut().zip(buffer.iter()).for_each(|(value, read)| *value = convert(read + shift));
            anyhow::Ok(())
        };
        // A tensor without rows may say that they are as long as it likes.
        let columns = rows.columns.min(values.len()).max(1);
        let buffer = || vec![0.0; columns];
        values
            .par_chunks_mut(columns)
            .with_min_len(16)
            .enumerate()
            .map_init(buffer, |b, r| row(b, r))
            .collect::<Result<()>>()?;
        let shape = &entry.info.shape;
        if entry.change != Change::Transposed {
            return Ok(Tensor::from_vec(values, shape.as_slice(), &Device::Cpu)?);
        }
        let (mut stored, rank) = (shape.clone(), shape.len());
        stored.swap(rank - 2, rank - 1);
        Ok(Tensor::from_vec(values, stored, &Device::Cpu)?.transpose(rank - 2, rank - 1)?.contiguous()?)
    }

    /// A tensor of packed bytes in the layout of safetensors files, on the host.
    pub fn packed(&self, name: &str) -> Result<Tensor> {
        let entry = self.entry(name)?;
        let rows = self.rows(entry)?;
        let per_block = match entry.change {
            Change::Blocks => 16,
            Change::Scales => 1,
            _ => bail!("tensor {name} is not packed"),
        };
        let mut bytes = vec![0u8; entry.info.elements()];
        let row_bytes = (rows.columns / GgmlType::Mxfp4.block_length() * per_block).max(1);
        bytes.par_chunks_mut(row_bytes).with_min_len(16).enumerate().for_each(|(row, out)| {
            let blocks = rows.get(row).1.chunks_exact(GgmlType::Mxfp4.block_bytes());
            for (block, out) in blocks.zip(out.chunks_exact_mut(per_block)) {
                match out {
                    [scale] => *scale = block[0],
                    nibbles => pair_neighbors(&block[1..], nibbles),
                }
            }
        });
        Ok(Tensor::from_vec(bytes, entry.info.shape.as_slice(), &Device::Cpu)?)
    }

    fn rows(&self, entry: &Entry) -> Result<SourceRows<'_>> {
        let sources = entry.sources.iter().map(|name| self.file.view(name)).collect::<Result<Vec<_>>>()?;
        let columns = match entry.change {
            Change::Vector => 1,
            _ => sources[0].info.shape.last().copied().unwrap_or(1),
        };
        let bytes = |view: &View| view.info.ggml_type.bytes(columns as u64, 1);
        let sources = sources.into_iter().map(|view| {
            let row_bytes = bytes(&view).with_context(|| format!("rows of {columns} are no whole blocks"))?;
            Ok((view.info.ggml_type, view.bytes, row_bytes as usize))
        });
        Ok(SourceRows { sources: sources.collect::<Result<_>>()?, columns, order: entry.rows })
    }
}

/// The file's rows in the order of the tensor.
struct SourceRows<'c> {
    /// Type, bytes, and bytes of a row.
    sources: Vec<(GgmlType, &'c [u8], usize)>,
    columns: usize,
    order: Rows,
}

impl<'c> SourceRows<'c> {
    fn get(&self, row: usize) -> (GgmlType, &'c [u8]) {
        let (source, row) = match self.order {
            Rows::Same => (0, row),
            Rows::Halves(head) => {
                let (start, within) = (row - row % head, row % head);
                (0, start + within % (head / 2) * 2 + within / (head / 2))
            }
            Rows::Turns(rows) => {
                let (turn, within) = (row / rows, row % rows);
                (turn % self.sources.len(), turn / self.sources.len() * rows + within)
            }
        };
        let (ggml_type, bytes, row_bytes) = self.sources[source];
        // Entries are made only of sources whose rows come to the tensor's.
        (ggml_type, &bytes[row * row_bytes..][..row_bytes])
    }
}

/// ggml keeps the first half of 32 values in the low nibbles, safetensors files of gpt-oss the even ones.
fn pair_neighbors(from: &[u8], to: &mut [u8]) {
    for i in 0..8 {
        let (a, b) = (from[2 * i], from[2 * i + 1]);
        to[i] = a & 15 | b << 4;
        to[8 + i] = a >> 4 | b & 0xf0;
    }
}

fn float_dtype(ggml_type: GgmlType) -> Option<DType> {
    match ggml_type {
        GgmlType::F32 => Some(DType::F32),
        GgmlType::F16 => Some(DType::F16),
        GgmlType::Bf16 => Some(DType::BF16),
        _ => None,
    }
}

/// The model's tensors. Every tensor of the file must have its place.
fn entries(file: &GgufCheckpoint) -> Result<BTreeMap<String, Entry>> {
    let layout = Layout::find(file.architecture()?)?;
    let layers = file.block_count()?;
    let mut entries = BTreeMap::new();
    for (name, info) in file.tensors() {
        if let Some(InLayer { layer, .. }) = InLayer::parse(name)
            && layer >= layers
        {
            bail!("tensor {name} is of layer {layer}, but {}.block_count is {layers}", layout.name);
        }
        match layout.role(name) {
            Some(Role::Tensor(ours)) => {
                let entry = single(file, layout, name).with_context(|| format!("tensor {name}"))?;
                entries.insert(ours, entry);
            }
            Some(Role::Expert | Role::Beside) => {}
            None => bail!("tensor {name} {:?} has no place in {} as inferno knows it", info.shape, layout.name),
        }
    }
    for layer in 0..layers {
        let experts = Experts { file, layout, layer };
        experts.add(&mut entries)?;
    }
    Ok(entries)
}

/// What is one tensor in the file too.
fn single(file: &GgufCheckpoint, layout: &Layout, name: &str) -> Result<Entry> {
    let info = file.required(name)?;
    let part = InLayer::parse(name).map(|in_layer| in_layer.part);
    let (mut rows, mut change, mut shape) = (Rows::Same, Change::Nothing, info.shape.clone());
    if layout.permuted && matches!(part, Some("attn_q" | "attn_k")) {
        let heads = file.head_counts()?;
        let heads = if part == Some("attn_q") { heads.0 } else { heads.1 };
        let length = shape.first().copied().unwrap_or(0);
        if heads == 0 || !length.is_multiple_of(2 * heads) {
            bail!("{length} rows cannot be {heads} heads, as attention.head_count or attention.head_count_kv says");
        }
        rows = Rows::Halves(length / heads);
        if shape.len() == 1 {
            change = Change::Vector;
        }
    } else if layout.norms_plus_one && name.ends_with("norm.weight") {
        change = Change::MinusOne;
    } else if layout.transposed && part.is_some() && shape.len() == 2 {
        change = Change::Transposed;
        shape.swap(0, 1);
    }
    Ok(Entry {
        info: TensorInfo::new(dtype(info.ggml_type), shape, info.bytes),
        sources: vec![name.into()],
        rows,
        change,
    })
}

/// What a tensor's values are handed out as, unless another dtype is asked for.
pub fn dtype(ggml_type: GgmlType) -> Dtype {
    match ggml_type {
        GgmlType::F16 => Dtype::F16,
        GgmlType::Bf16 => Dtype::BF16,
        _ => Dtype::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibbles_are_paired_anew() {
        // Element i is i mod 16 in ggml's order.
        let from: Vec<u8> = (0..16).map(|i| i | i << 4).collect();
        let mut to = [0; 16];
        pair_neighbors(&from, &mut to);
        let elements: Vec<u8> = to.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect();
        assert_eq!(elements, (0..32).map(|i| i % 16).collect::<Vec<u8>>());
    }

    #[test]
    fn halves_of_heads_alternate_in_the_file() {
        let bytes: Vec<u8> = (0..12).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let rows = SourceRows { sources: vec![(GgmlType::F32, &bytes, 4)], columns: 1, order: Rows::Halves(6) };
        let read: Vec<f32> = (0..12).map(|row| f32::from_le_bytes(rows.get(row).1.try_into().unwrap())).collect();
        assert_eq!(read, [0., 2., 4., 1., 3., 5., 6., 8., 10., 7., 9., 11.]);
    }
}
