//! Gives access to the tensors of safetensors and GGUF files by their Hugging Face names.

use std::path::Path;

use anyhow::{Result, bail};
use candle_core::DType;

use super::gguf::{GgufCheckpoint, GgufModel};
use super::quantized::{self, QuantizationTarget, QuantizedShape};
use super::reading::ReadRequest;
use super::safetensors::{SafetensorsCheckpoint, TensorView, module};
use super::tensor_info::{MatrixShape, StoredDtype, TensorInfo};
use super::tensor_kind::TensorKind;
use crate::kernels::quantized::WeightFormat;
use crate::snapshot;

/// The open weights files of a model, with the list of tensors and the locations of their data.
pub enum Checkpoint {
    Safetensors(SafetensorsCheckpoint),
    Gguf(Box<GgufModel>),
}

impl Checkpoint {
    /// Opens the weights files of a model and reads their headers.
    ///
    /// `path` is a GGUF file or a directory. The directory must contain safetensors files, which take precedence,
    /// or exactly one GGUF model.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(match snapshot::gguf::find(path)? {
            Some(file) => Self::from_gguf(GgufCheckpoint::open(&file)?)?,
            None => Self::Safetensors(SafetensorsCheckpoint::open(path)?),
        })
    }

    /// Creates a checkpoint from an open GGUF file without parsing its header again.
    pub fn from_gguf(file: GgufCheckpoint) -> Result<Self> {
        Ok(Self::Gguf(Box::new(GgufModel::new(file)?)))
    }

    /// Returns the open GGUF file, or `None` for safetensors files.
    /// A GGUF file can also contain the config, the vocabulary, the chat template and the sampling defaults.
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

    /// Returns the total size in the files of all [`tensors`](Self::tensors), in bytes.
    pub fn bytes(&self) -> u64 {
        self.tensors().map(|(_, info)| info.bytes() as u64).sum()
    }

    /// Returns the number of parameters. A byte of packed MXFP4 blocks counts as two parameters.
    /// MXFP4 scales and the `weight_shape` tensors of compressed-tensors do not count.
    pub fn parameters(&self) -> u64 {
        let count = |(name, info): (&str, &TensorInfo)| {
            TensorKind::new(name, &self.stored_dtype(name, info)).parameters(info.elements() as u64)
        };
        self.tensors().map(count).sum()
    }

    pub fn stored_dtype(&self, name: &str, info: &TensorInfo) -> StoredDtype {
        let ggml_type = match self {
            Self::Gguf(model) if !info.is_packed() => model.stored_type(name),
            _ => None,
        };
        ggml_type.map_or(StoredDtype::Safetensors(info.dtype), StoredDtype::Ggml)
    }

    /// Returns the size in memory of a tensor that stays packed, quantized or integer when it is loaded, in bytes.
    /// The size of a compressed-tensors matrix includes its weight scales, so their own size is 0.
    /// Returns `None` for a tensor that is loaded as floats or quantized only during loading.
    pub(super) fn packed_bytes(&self, name: &str, info: &TensorInfo) -> Option<u64> {
        match self {
            Self::Gguf(model) if !info.is_packed() => model.packed_bytes(name),
            Self::Gguf(_) => Some(info.bytes() as u64),
            Self::Safetensors(checkpoint) => checkpoint.packed_bytes(name, info),
        }
    }

    /// Returns the column unit of a matrix: ranks divide the columns only at multiples of this number.
    /// `columns` is the number of columns of the undivided matrix.
    ///
    /// A matrix that is quantized in the file, other than as MXFP4, has the unit of its format.
    /// All other matrices have the unit of the format to which `target` quantizes rows of `columns` values, or 1.
    /// This includes matrices that loading never quantizes, such as the transposed matrices of safetensors files,
    /// although 1 would suffice for them.
    pub(super) fn column_unit(&self, name: &str, columns: usize, target: Option<QuantizationTarget>) -> usize {
        let stored = match self {
            Self::Gguf(model) => model.stored_type(name).and_then(quantized::weight_format),
            Self::Safetensors(checkpoint) if checkpoint.info(&format!("{name}_scale")).is_some() => {
                return unit_of(checkpoint.scheme(module(name)).map(|scheme| scheme.code_type.weight_format()));
            }
            Self::Safetensors(_) => None,
        };
        unit_of(stored.or_else(|| target?.weight_format(columns)))
    }

    /// Returns the memory format and the shape of a matrix that is quantized in the file and stays quantized in memory.
    /// Returns `None` for other tensors.
    pub(super) fn quantized_shape(&self, name: &str, info: &TensorInfo) -> Option<QuantizedShape> {
        match (self, info.shape.as_slice()) {
            (Self::Gguf(model), _) => {
                let format = quantized::weight_format(model.stored_type(name)?)?;
                let MatrixShape { rows, columns } = model.matrix_shape(name).ok()??;
                Some(QuantizedShape { format, rows, columns })
            }
            (Self::Safetensors(checkpoint), &[rows, columns]) => {
                checkpoint.info(&format!("{name}_scale"))?;
                let format = checkpoint.scheme(module(name))?.code_type.weight_format();
                Some(QuantizedShape { format, rows, columns })
            }
            _ => None,
        }
    }

    /// Returns the shape of a matrix that can be quantized during loading.
    /// Returns `None` if there is no such tensor, if it is not a matrix, or if a safetensors file stores it transposed.
    /// For GGUF files, `GgufModel::matrix_shape` lists more tensors for which the result is `None`.
    pub(super) fn matrix_shape(&self, name: &str, is_transposed: bool) -> Option<MatrixShape> {
        match self {
            Self::Gguf(model) => model.matrix_shape(name).ok()?,
            // Only safetensors files store transposed matrices. GGUF files store all matrices as `[out, in]`.
            Self::Safetensors(_) if is_transposed => None,
            Self::Safetensors(checkpoint) => MatrixShape::of(&checkpoint.info(name)?.shape),
        }
    }

    /// Returns requests for the tensors that a background reader can read ahead. `dtype` is the compute dtype.
    /// The list is empty for a GGUF file, because most of its tensors are converted on the host.
    pub fn read_requests(&self, dtype: DType) -> Vec<ReadRequest> {
        match self {
            Self::Safetensors(checkpoint) => checkpoint.read_requests(dtype),
            Self::Gguf(_) => Vec::new(),
        }
    }

    /// Returns the metadata of a tensor and the location of its bytes.
    /// Fails if the tensor is missing. Always fails for a GGUF file, because a tensor of the model may be built from
    /// several GGUF tensors, or from reordered rows.
    pub fn view(&self, name: &str) -> Result<TensorView<'_>> {
        match self {
            Self::Safetensors(checkpoint) => checkpoint.view(name),
            Self::Gguf(_) => bail!("cannot view tensor {name}: GGUF files store tensors in another layout"),
        }
    }

    /// Returns the metadata of a tensor. Fails if the tensor is missing.
    pub(super) fn required(&self, name: &str) -> Result<&TensorInfo> {
        match self {
            Self::Safetensors(checkpoint) => Ok(checkpoint.view(name)?.info),
            Self::Gguf(model) => Ok(&model.required(name)?.info),
        }
    }

    /// Describes a tensor for an error message: its dtype, shape and file, or the GGUF tensors that it is built from.
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

/// Returns [`WeightFormat::column_unit`], or 1 for floats (`None`), whose columns can be divided anywhere.
fn unit_of(format: Option<WeightFormat>) -> usize {
    format.map_or(1, WeightFormat::column_unit)
}
