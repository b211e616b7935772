//! Presents a GGUF file as a checkpoint whose tensors have their Hugging Face names.
//!
//! There are four ways to load a tensor:
//! - [`GgufModel::quantized`]: keeps a quantized matrix quantized, unless it is an MXFP4 matrix or
//!   [`GgufModel::matrix_shape`] excludes it
//! - [`GgufModel::packed`]: keeps the MXFP4 experts of gpt-oss packed
//! - [`GgufModel::rows_to_quantize`]: quantizes a matrix during loading
//! - [`GgufModel::float`]: converts a tensor to floats
//!
//! The modules:
//! - `mapping`, `experts`: determine which GGUF tensors each tensor of the model is built from
//! - `model_tensor`: the result of this mapping
//! - `source_rows`: reads the rows of a tensor

mod experts;
mod mapping;
mod model_tensor;
mod source_rows;

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};
use mapping::map_tensors;
use model_tensor::{ModelTensor, RowMapping, Transform};
use source_rows::SourceRows;

use crate::weights::ggml::GgmlType;
use crate::weights::gguf::file::{GgufCheckpoint, GgufTensorView};
use crate::weights::quantized::{self, MatrixRows, QuantizationTarget};
use crate::weights::reading::{RowBuffer, RowsToConvert, SharedReads, Slice, StoredBytes, convert_all};
use crate::weights::tensor_info::{MatrixShape, TensorInfo};

/// An open GGUF file and the tensors of its model.
pub struct GgufModel {
    file: GgufCheckpoint,
    tensors: BTreeMap<String, ModelTensor>,
}

impl GgufModel {
    /// Maps the tensors of the file to tensors of the model.
    /// Fails if the architecture is not supported, or if a tensor is unknown or invalid.
    pub fn new(file: GgufCheckpoint) -> Result<Self> {
        let tensors = map_tensors(&file).with_context(|| format!("cannot use {}", file.path().display()))?;
        let model = Self { file, tensors };
        for (name, tensor) in model.tensors.iter().filter(|(_, tensor)| tensor.transform == Transform::Vector) {
            // `Transform::Vector` reads single elements, which is impossible for a block-quantized type.
            let types = tensor.sources.iter().filter_map(|source| model.file.info(source)).map(|info| info.ggml_type);
            if let Some(quantized) = types.into_iter().find(|ggml_type| ggml_type.block_length() != 1) {
                bail!("tensor {name}: expected type F32, F16 or BF16, found {quantized}");
            }
        }
        Ok(model)
    }

    pub fn file(&self) -> &GgufCheckpoint {
        &self.file
    }

    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|tensor| &tensor.info)
    }

    /// Returns all tensors of the model, sorted by Hugging Face name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), &tensor.info))
    }

    /// Returns a tensor by its Hugging Face name. Fails if the tensor is missing.
    pub fn required(&self, name: &str) -> Result<&ModelTensor> {
        self.tensors.get(name).with_context(|| {
            let files: Vec<_> = self.file.files().map(|file| file.display().to_string()).collect();
            format!("no tensor in {} stores the model tensor {name}", files.join(", "))
        })
    }

    /// Returns the GGUF tensor that stores the model tensor `name` unchanged.
    /// Returns `None` if loading must combine several GGUF tensors, or reorder or transform rows.
    fn stored(&self, name: &str) -> Result<Option<GgufTensorView<'_>>> {
        let tensor = self.required(name)?;
        let is_unchanged = tensor.rows == RowMapping::Identity && tensor.transform == Transform::None;
        if is_unchanged { self.file.view(&tensor.sources[0]).map(Some) } else { Ok(None) }
    }

    /// Returns the ggml type of the first GGUF tensor that the model tensor `name` is built from.
    pub fn stored_type(&self, name: &str) -> Option<GgmlType> {
        self.file.info(self.tensors.get(name)?.sources.first()?).map(|info| info.ggml_type)
    }

    /// Describes a tensor's shape and its first two source tensors for an error message.
    pub fn describe(&self, name: &str) -> String {
        let Ok(tensor) = self.required(name) else { return "nothing".into() };
        let source = |name: &String| match self.file.view(name) {
            Ok(view) => {
                format!("{name} (type {}, shape {:?}) in {}", view.info.ggml_type, view.info.shape, view.file.display())
            }
            Err(error) => error.to_string(),
        };
        let sources: Vec<_> = tensor.sources.iter().take(2).map(source).collect();
        format!("{:?}, built from {}", tensor.info.shape, sources.join(" and "))
    }

    /// Returns the rows of a matrix that stays quantized, or `None` for any other tensor.
    pub fn quantized(&self, name: &str) -> Result<Option<MatrixRows<'_>>> {
        let Some(MatrixShape { rows, columns }) = self.matrix_shape(name)? else { return Ok(None) };
        let source = SourceRows::new(&self.file, self.required(name)?)?;
        Ok(MatrixRows::from_blocks(source.first_type(), rows, columns, source))
    }

    /// Returns the rows of a matrix that loading quantizes to `target`.
    /// Returns `None` if [`matrix_shape`](Self::matrix_shape) does, or if `target` does not support the row length.
    pub fn rows_to_quantize(&self, name: &str, target: QuantizationTarget) -> Result<Option<MatrixRows<'_>>> {
        let Some(MatrixShape { rows, columns }) = self.matrix_shape(name)? else { return Ok(None) };
        let source = SourceRows::new(&self.file, self.required(name)?)?;
        let row = move |row: usize, buffer: &mut RowBuffer, values: &mut [f32]| {
            let row = source.get(row, buffer)?;
            row.ggml_type.dequantize(row.bytes, values)
        };
        Ok(MatrixRows::from_floats(target, rows, columns, row))
    }

    /// Returns the size in bytes of a matrix that stays quantized in memory, or `None` for any other tensor.
    pub fn packed_bytes(&self, name: &str) -> Option<u64> {
        let format = quantized::weight_format(self.stored_type(name)?)?;
        let MatrixShape { rows, columns } = self.matrix_shape(name).ok()??;
        Some(format.bytes(rows as u64, columns as u64))
    }

    /// Returns the shape of a matrix that can be quantized in memory.
    /// Returns `None` for vectors, interleaved biases, packed MXFP4 tensors and stacks of transposed matrices,
    /// and for a matrix whose source tensors have different types.
    pub fn matrix_shape(&self, name: &str) -> Result<Option<MatrixShape>> {
        let tensor = self.required(name)?;
        let mut types = tensor.sources.iter().map(|source| self.file.info(source).map(|info| info.ggml_type));
        let first = types.next().flatten();
        if types.any(|other| other != first) {
            return Ok(None);
        }
        let shape = match tensor.transform {
            Transform::None => &tensor.info.shape,
            // GGUF stores a `Transposed` matrix as `[out, in]`. The Hugging Face checkpoint stores it as `[in, out]`.
            Transform::Transposed => match (tensor.sources.as_slice(), self.file.info(&tensor.sources[0])) {
                ([_], Some(info)) if info.shape.len() == 2 => &info.shape,
                _ => return Ok(None),
            },
            _ => return Ok(None),
        };
        Ok(MatrixShape::of(shape))
    }

    /// Returns a tensor as floats of `dtype` (F32, F16 or BF16) in host memory.
    /// Converts the rows on all cores, unless the file stores the tensor unchanged and in `dtype`.
    pub fn float(&self, name: &str, dtype: DType) -> Result<Tensor> {
        self.shared_float(name, dtype, None)
    }

    /// Like [`float`](Self::float). If `shared` is given, the ranks read and convert the tensor together.
    pub(in crate::weights) fn shared_float(
        &self,
        name: &str,
        dtype: DType,
        shared: Option<&SharedReads>,
    ) -> Result<Tensor> {
        let load = || match self.stored(name)? {
            Some(view) if float_dtype(view.info.ggml_type) == Some(dtype) => match (shared, &view.bytes) {
                (Some(shared), StoredBytes::File(file)) => {
                    StoredBytes::Memory(&shared.read_to_vec(name, file)?).tensor(dtype, &view.info.shape)
                }
                _ => view.bytes.tensor(dtype, &view.info.shape),
            },
            _ => self.converted(name, dtype, RowsToLoad::All(shared)),
        };
        load().with_context(|| format!("tensor {name}"))
    }

    /// Returns the rows of a matrix that `slice` selects, as floats of `dtype` in host memory.
    /// Reads and converts only these rows, without the other ranks.
    ///
    /// `shape` is the shape of the result. The matrix must not be [transposed](Self::is_transposed).
    pub(in crate::weights) fn float_rows(
        &self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        slice: &Slice,
    ) -> Result<Tensor> {
        let load = || match self.stored(name)? {
            Some(view) if float_dtype(view.info.ggml_type) == Some(dtype) => {
                slice.read(name, &view.bytes, dtype, shape, None)
            }
            _ => self.converted(name, dtype, RowsToLoad::Ranges(&slice.ranges)),
        };
        load().with_context(|| format!("tensor {name}"))
    }

    /// Returns whether the Hugging Face checkpoint stores the matrix, or each matrix of a stack, transposed.
    pub fn is_transposed(&self, name: &str) -> bool {
        self.tensors.get(name).is_some_and(|tensor| tensor.transform == Transform::Transposed)
    }

    /// Reads rows of a tensor and converts them to `dtype`, on all cores.
    fn converted(&self, name: &str, dtype: DType, rows: RowsToLoad) -> Result<Tensor> {
        match dtype {
            DType::F32 => self.converted_with::<f32>(name, rows, |value| value),
            DType::F16 => self.converted_with(name, rows, f16::from_f32),
            DType::BF16 => self.converted_with(name, rows, bf16::from_f32),
            _ => bail!("cannot dequantize to {dtype:?}"),
        }
    }

    /// Like [`converted`](Self::converted). `convert` converts a value.
    fn converted_with<T: WithDType + Default>(
        &self,
        name: &str,
        rows_to_load: RowsToLoad,
        convert: impl Fn(f32) -> T + Sync,
    ) -> Result<Tensor> {
        let tensor = self.required(name)?;
        let rows = SourceRows::new(&self.file, tensor)?;
        let shift = if tensor.transform == Transform::MinusOne { -1.0 } else { 0.0 };
        // Limit the row length, because a malicious tensor with 0 rows can declare a huge one.
        let columns = rows.columns.min(tensor.info.elements()).max(1);
        let convert_row = |row: usize, buffer: &mut RowBuffer, values: &mut [T]| {
            let mut floats = vec![0.0; columns];
            let row = rows.get(row, buffer)?;
            row.ggml_type.dequantize(row.bytes, &mut floats)?;
            values.iter_mut().zip(floats).for_each(|(value, float)| *value = convert(float + shift));
            Ok(())
        };
        let rows_to_convert = |rows: usize| RowsToConvert { name, rows, row_length: columns };
        let shared = match rows_to_load {
            RowsToLoad::All(shared) => shared,
            RowsToLoad::Ranges(ranges) => {
                let indices: Vec<usize> = ranges.iter().cloned().flatten().collect();
                let convert_selected = |index: usize, buffer: &mut RowBuffer, values: &mut [T]| {
                    convert_row(indices[index], buffer, values)
                };
                let values = convert_all(None, rows_to_convert(indices.len()), convert_selected)?;
                return Ok(Tensor::from_vec(values, (indices.len(), columns), &Device::Cpu)?);
            }
        };
        let values = convert_all(shared, rows_to_convert(tensor.info.elements() / columns), convert_row)?;
        let shape = &tensor.info.shape;
        if tensor.transform != Transform::Transposed {
            return Ok(Tensor::from_vec(values, shape.as_slice(), &Device::Cpu)?);
        }
        let (mut stored, rank) = (shape.clone(), shape.len());
        stored.swap(rank - 2, rank - 1);
        Ok(Tensor::from_vec(values, stored, &Device::Cpu)?.transpose(rank - 2, rank - 1)?.contiguous()?)
    }

    /// Returns a tensor of packed MXFP4 bytes in host memory, in the layout of gpt-oss safetensors files.
    pub fn packed(&self, name: &str) -> Result<Tensor> {
        self.shared_packed(name, None)
    }

    /// Like [`packed`](Self::packed). If `shared` is given, the ranks read and convert the tensor together.
    pub(in crate::weights) fn shared_packed(&self, name: &str, shared: Option<&SharedReads>) -> Result<Tensor> {
        let tensor = self.required(name)?;
        let rows = SourceRows::new(&self.file, tensor)?;
        let per_block = match tensor.transform {
            Transform::Mxfp4Elements => 16,
            Transform::Mxfp4Scales => 1,
            _ => bail!("cannot load tensor {name} as MXFP4: it has another format"),
        };
        let row_bytes = (rows.columns / GgmlType::Mxfp4.block_length() * per_block).max(1);
        let rows_to_convert = RowsToConvert { name, rows: tensor.info.elements() / row_bytes, row_length: row_bytes };
        let unpack = |row: usize, buffer: &mut RowBuffer, out: &mut [u8]| {
            let row = rows.get(row, buffer)?;
            let blocks = row.bytes.chunks_exact(GgmlType::Mxfp4.block_bytes());
            for (block, out) in blocks.zip(out.chunks_exact_mut(per_block)) {
                match out {
                    [scale] => *scale = block[0],
                    nibbles => pair_neighbors(&block[1..], nibbles),
                }
            }
            anyhow::Ok(())
        };
        let bytes = convert_all(shared, rows_to_convert, unpack).with_context(|| format!("tensor {name}"))?;
        Ok(Tensor::from_vec(bytes, tensor.info.shape.as_slice(), &Device::Cpu)?)
    }
}

/// The rows of a tensor to read and convert.
enum RowsToLoad<'r> {
    /// All rows. With [`SharedReads`], the ranks convert them together.
    All(Option<&'r SharedReads>),
    /// Ranges of the rows of a matrix. The ranges must be within the matrix.
    Ranges(&'r [Range<usize>]),
}

/// Reorders the nibbles of an MXFP4 block from the ggml layout to the safetensors layout of gpt-oss.
/// In ggml, the low nibbles hold the first 16 of 32 elements. In safetensors, the low nibbles hold the even elements.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibbles_are_reordered() {
        // `from` is in the ggml layout: element i of the block has the value i mod 16.
        let from: Vec<u8> = (0..16).map(|i| i | i << 4).collect();
        let mut to = [0; 16];
        pair_neighbors(&from, &mut to);
        let elements: Vec<u8> = to.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect();
        assert_eq!(elements, (0..32).map(|i| i % 16).collect::<Vec<u8>>());
    }
}
