//! A model's tensors under their Hugging Face names, in any container.

use std::path::Path;

use anyhow::{Result, bail};
use candle_core::DType;
use safetensors::tensor::Dtype;

use super::gguf::{GgufCheckpoint, GgufModel};
use super::read_ahead::Extent;
use super::safetensors::{SafetensorsCheckpoint, TensorView};
use super::tensor_info::{TensorInfo, parameter_count};
use crate::snapshot;

/// The opened weights of a model: which tensors there are, and where their data lies.
pub enum Checkpoint {
    Safetensors(SafetensorsCheckpoint),
    Gguf(Box<GgufModel>),
}

impl Checkpoint {
    /// Maps the files and reads their headers; tensor data is not read.
    ///
    /// `path` is a GGUF file, or a directory with safetensors files or with one GGUF model.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(match snapshot::gguf::find(path)? {
            Some(file) => Self::from_gguf(GgufCheckpoint::open(&file)?)?,
            None => Self::Safetensors(SafetensorsCheckpoint::open(path)?),
        })
    }

    /// Makes a checkpoint from an opened GGUF file. The header is not parsed again.
    pub fn from_gguf(file: GgufCheckpoint) -> Result<Self> {
        Ok(Self::Gguf(Box::new(GgufModel::new(file)?)))
    }

    /// Returns the opened GGUF file, which also holds the config,
    /// the vocabulary, the chat template and the sampling defaults.
    /// `None` for safetensors.
    pub fn gguf(&self) -> Option<&GgufCheckpoint> {
        match self {
            Self::Safetensors(_) => None,
            Self::Gguf(model) => Some(model.file()),
        }
    }

    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        match self {
            Self::Safetensors(checkpoint) => checkpoint.info(name),
            Self::Gguf(model) => model.info(name),
        }
    }

    /// Returns all tensors, sorted by name.
    pub fn tensors(&self) -> Box<dyn Iterator<Item = (&str, &TensorInfo)> + '_> {
        match self {
            Self::Safetensors(checkpoint) => Box::new(checkpoint.tensors()),
            Self::Gguf(model) => Box::new(model.tensors()),
        }
    }

    /// Returns the total size of all tensors in the files, in bytes.
    pub fn bytes(&self) -> u64 {
        self.tensors().map(|(_, info)| info.bytes() as u64).sum()
    }

    /// Returns the number of parameters.
    pub fn parameters(&self) -> u64 {
        let count =
            |(name, info): (&str, &TensorInfo)| parameter_count(name, info.dtype == Dtype::U8, info.elements() as u64);
        self.tensors().map(count).sum()
    }

    /// Returns the element type of a tensor in the file, in lower case: `bf16`, `q4_k`.
    pub fn stored_as(&self, name: &str, info: &TensorInfo) -> String {
        let stored = match self {
            // Packed experts are bytes in either container.
            Self::Gguf(model) if info.dtype != Dtype::U8 => {
                model.stored_type(name).map(|stored| stored.name().to_string())
            }
            _ => None,
        };
        stored.unwrap_or(info.dtype.to_string()).to_lowercase()
    }

    /// Returns the bytes that a tensor takes in memory if it stays packed or quantized.
    /// `None` for a tensor that becomes floats.
    pub(super) fn packed_bytes(&self, name: &str, info: &TensorInfo) -> Option<u64> {
        match self {
            Self::Gguf(model) if info.dtype != Dtype::U8 => model.packed_bytes(name),
            Self::Gguf(_) => Some(info.bytes() as u64),
            Self::Safetensors(checkpoint) => checkpoint.packed_bytes(name, info),
        }
    }

    /// Returns the rows and columns of a matrix [out, in] that can be quantized while it loads.
    /// Stacked matrices count as one with all their rows.
    pub(super) fn matrix_shape(&self, name: &str) -> Option<(usize, usize)> {
        match self {
            Self::Gguf(model) => model.matrix_shape(name).ok()?,
            // GPT-2 stores its matrices transposed.
            Self::Safetensors(_) if name.contains(".c_") => None,
            Self::Safetensors(checkpoint) => match checkpoint.info(name)?.shape.as_slice() {
                [rows @ .., columns] if !rows.is_empty() => Some((rows.iter().product(), *columns)),
                _ => None,
            },
        }
    }

    /// Returns the tensors that can be read ahead for a model of this compute dtype.
    /// None of a GGUF file, because the host transforms its tensors.
    pub fn extents(&self, dtype: DType) -> Vec<Extent> {
        match self {
            Self::Safetensors(checkpoint) => checkpoint.extents(dtype),
            Self::Gguf(_) => Vec::new(),
        }
    }

    /// Returns a tensor's bytes. Fails for a GGUF file, which stores tensors in a form of its own.
    pub fn view(&self, name: &str) -> Result<TensorView<'_>> {
        match self {
            Self::Safetensors(checkpoint) => checkpoint.view(name),
            Self::Gguf(_) => bail!("cannot view tensor {name}: a GGUF file stores it in another form"),
        }
    }

    /// Returns a tensor that must exist.
    pub(super) fn required(&self, name: &str) -> Result<&TensorInfo> {
        match self {
            Self::Safetensors(checkpoint) => Ok(checkpoint.view(name)?.info),
            Self::Gguf(model) => Ok(&model.required(name)?.info),
        }
    }

    /// Describes a tensor for an error message: its dtype, its shape, and its file.
    pub(super) fn describe(&self, name: &str) -> String {
        match self {
            Self::Safetensors(checkpoint) => checkpoint.view(name).map_or_else(
                |error| error.to_string(),
                |view| format!("{} {:?} in {}", view.info.dtype, view.info.shape, view.file.display()),
            ),
            Self::Gguf(model) => model.describe(name),
        }
    }
}
