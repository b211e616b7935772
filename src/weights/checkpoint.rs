//! A model's tensors by their Hugging Face names, whatever container they came in.

use std::path::Path;

use anyhow::{Result, bail};
use candle_core::DType;
use safetensors::tensor::Dtype;

use super::gguf::{GgufCheckpoint, GgufModel};
use super::inventory;
use super::read_ahead::Extent;
use super::safetensors::{SafetensorsCheckpoint, View};
use crate::snapshot;

/// The checkpoint of a snapshot: which tensors there are, and what they hold.
pub enum Checkpoint {
    Safetensors(SafetensorsCheckpoint),
    Gguf(Box<GgufModel>),
}

/// What is known of one tensor before it is read.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// As it is handed out; for what is quantized in a GGUF file F32, which it becomes.
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    bytes: usize,
}

impl TensorInfo {
    /// `bytes` are those in the file.
    pub(super) fn new(dtype: Dtype, shape: Vec<usize>, bytes: usize) -> Self {
        Self { dtype, shape, bytes }
    }

    /// In the file.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether elements are numbers, unless something scales them.
    pub fn is_float(&self) -> bool {
        matches!(self.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8_E4M3)
    }

    /// The candle dtype, for those that a model is stored in.
    pub fn candle_dtype(&self) -> Option<DType> {
        match self.dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::F16 => Some(DType::F16),
            Dtype::BF16 => Some(DType::BF16),
            Dtype::U8 => Some(DType::U8),
            _ => None,
        }
    }
}

impl Checkpoint {
    /// Maps the files and reads their headers; no tensor is touched. `path` is a GGUF file, or a directory with
    /// safetensors or else one GGUF model.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(match snapshot::gguf::find(path)? {
            Some(file) => Self::from_gguf(GgufCheckpoint::open(&file)?)?,
            None => Self::Safetensors(SafetensorsCheckpoint::open(path)?),
        })
    }

    /// Makes a checkpoint of an opened GGUF file, whose header is not parsed again.
    pub fn from_gguf(file: GgufCheckpoint) -> Result<Self> {
        Ok(Self::Gguf(Box::new(GgufModel::new(file)?)))
    }

    /// Returns the opened GGUF file, for its config, vocabulary, chat template and sampling defaults. `None` for
    /// safetensors, whose configs are files of their own.
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

    /// All tensors by name.
    pub fn tensors(&self) -> Box<dyn Iterator<Item = (&str, &TensorInfo)> + '_> {
        match self {
            Self::Safetensors(checkpoint) => Box::new(checkpoint.tensors()),
            Self::Gguf(model) => Box::new(model.tensors()),
        }
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors().map(|(_, info)| info.bytes() as u64).sum()
    }

    /// Number of parameters: elements, two for each byte of packed MXFP4 blocks, none for its scales.
    pub fn parameters(&self) -> u64 {
        let count = |(name, info): (&str, &TensorInfo)| {
            inventory::parameters(name, info.dtype == Dtype::U8, info.elements() as u64)
        };
        self.tensors().map(count).sum()
    }

    /// What a tensor's elements are in the file, in lower case: `bf16`, `q4_k`.
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

    /// Bytes of a tensor that stays as it is stored, or nearly so, once it is loaded; none for what becomes floats.
    pub(super) fn kept_bytes(&self, name: &str, info: &TensorInfo) -> Option<u64> {
        match self {
            Self::Gguf(model) if info.dtype != Dtype::U8 => model.kept_bytes(name),
            Self::Gguf(_) => Some(info.bytes() as u64),
            Self::Safetensors(checkpoint) => checkpoint.kept_bytes(name, info),
        }
    }

    /// Rows and columns of a matrix that can be quantized while it is loaded, or of several, one below the other.
    pub(super) fn matrix_shape(&self, name: &str) -> Option<(usize, usize)> {
        match self {
            Self::Gguf(model) => model.matrix_shape(name).ok()?,
            // GPT-2's lie the other way round.
            Self::Safetensors(_) if name.contains(".c_") => None,
            Self::Safetensors(checkpoint) => match checkpoint.info(name)?.shape.as_slice() {
                [rows @ .., columns] if !rows.is_empty() => Some((rows.iter().product(), *columns)),
                _ => None,
            },
        }
    }

    /// What can be read ahead for a model of this compute dtype. Nothing of a GGUF file: its tensors are made on the host.
    pub fn extents(&self, dtype: DType) -> Vec<Extent> {
        match self {
            Self::Safetensors(checkpoint) => checkpoint.extents(dtype),
            Self::Gguf(_) => Vec::new(),
        }
    }

    /// A tensor's bytes where they lie. Fails for those of a GGUF file, which may lie there in another form.
    pub fn view(&self, name: &str) -> Result<View<'_>> {
        match self {
            Self::Safetensors(checkpoint) => checkpoint.view(name),
            Self::Gguf(_) => bail!("tensor {name} is of a GGUF file, which has none by that name"),
        }
    }

    /// A tensor that must be there.
    pub(super) fn required(&self, name: &str) -> Result<&TensorInfo> {
        match self {
            Self::Safetensors(checkpoint) => Ok(checkpoint.view(name)?.info),
            Self::Gguf(model) => Ok(&model.entry(name)?.info),
        }
    }

    /// For messages: what a tensor is and where it lies.
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
