//! One tensor of an inventory: its sizes in the file and in memory, and how ranks can divide it.

use ::safetensors::tensor::Dtype;
use candle_core::DType;

use crate::kernels::moe::mxfp4::MXFP4_BLOCK;
use crate::kernels::quantized::GROUP_COLUMNS;
use crate::weights::checkpoint::Checkpoint;
use crate::weights::quantized::{QuantizationTarget, QuantizedShape};
use crate::weights::safetensors::header::HeaderTensor;
use crate::weights::tensor_info::{StoredDtype, TensorInfo};
use crate::weights::tensor_kind::TensorKind;
use crate::weights::tensor_table::{Form, Group, TensorRole};

/// One tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct InventoryTensor {
    pub name: String,
    pub role: TensorRole,
    pub kind: TensorKind,
    pub dtype: StoredDtype,
    pub elements: u64,
    /// The size of the tensor in the file, in bytes.
    pub bytes: u64,
    pub format: MemoryFormat,
    /// The format and the dimensions of a matrix that is quantized in memory.
    /// `None` for packed MXFP4 and all other tensors, and for all tensors added by `Inventory::add_header`.
    pub quantized: Option<QuantizedShape>,
    /// How ranks can divide the columns of a matrix. `None` for a vector or scalar.
    pub columns: Option<ColumnUnits>,
    /// The length of the tensor's first dimension. `None` for a scalar.
    pub rows: Option<usize>,
}

/// The number of columns of a matrix. Ranks divide the columns only at multiples of `unit`.
#[derive(Clone, Copy, Debug)]
pub struct ColumnUnits {
    pub columns: usize,
    pub unit: usize,
}

/// The format of a loaded tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryFormat {
    /// Floats in the compute dtype.
    ComputeDtype,
    /// F32, regardless of the compute dtype: vectors (such as norms, sinks, and biases outside the experts),
    /// routers, and weight scales that `Inventory::add_header` adds.
    F32,
    /// A packed, quantized or integer format. Holds the size in bytes, which is 0 for tensors that are never loaded.
    /// In `Inventory::from_checkpoint`, the size of a matrix includes its weight scales, so their own size is 0.
    Bytes(u64),
}

impl MemoryFormat {
    /// Returns the format that a tensor has in memory if it is loaded as floats. For a tensor that is never loaded,
    /// returns `Bytes(0)`.
    /// `dims` is the number of dimensions of the tensor.
    fn for_floats(kind: TensorKind, role: TensorRole, dims: usize) -> Self {
        match (role.form, kind) {
            (Form::Unloaded, _) | (_, TensorKind::PackedShape | TensorKind::NeverLoaded) => Self::Bytes(0),
            (Form::F32, _) | (_, TensorKind::WeightScale) => Self::F32,
            _ if dims < 2 => Self::F32,
            _ => Self::ComputeDtype,
        }
    }
}

impl InventoryTensor {
    /// Describes the tensor `name` of a checkpoint. `target` is the format to which loading quantizes float matrices,
    /// if any. It determines the column units. `Inventory::quantize` then sets the formats of the quantized matrices.
    pub fn from_checkpoint(
        checkpoint: &Checkpoint,
        role: TensorRole,
        name: &str,
        info: &TensorInfo,
        target: Option<QuantizationTarget>,
    ) -> Self {
        let dtype = checkpoint.stored_dtype(name, info);
        let kind = TensorKind::new(name, &dtype);
        let format = MemoryFormat::for_floats(kind, role, info.shape.len());
        let packed_bytes = match format {
            MemoryFormat::ComputeDtype if role.form != Form::ComputeDtype => checkpoint.packed_bytes(name, info),
            _ if kind == TensorKind::WeightScale => checkpoint.packed_bytes(name, info),
            _ => None,
        };
        let columns = column_count(&info.shape, role, kind);
        Self {
            name: name.to_string(),
            role,
            kind,
            dtype,
            elements: info.elements() as u64,
            bytes: info.bytes() as u64,
            format: packed_bytes.map_or(format, MemoryFormat::Bytes),
            quantized: packed_bytes.and_then(|_| checkpoint.quantized_shape(name, info)),
            columns: columns
                .map(|columns| ColumnUnits { columns, unit: checkpoint.column_unit(name, columns, target) }),
            rows: info.shape.first().copied(),
        }
    }

    /// Describes a tensor in a safetensors header, without its file.
    pub fn from_header(tensor: HeaderTensor, role: TensorRole) -> Self {
        let HeaderTensor { name, dtype, shape, elements, bytes, .. } = tensor;
        let shape: Vec<usize> = shape.into_iter().map(|size| usize::try_from(size).unwrap_or(usize::MAX)).collect();
        let dtype = StoredDtype::from_header(&dtype);
        let kind = TensorKind::new(&name, &dtype);
        let is_float = matches!(dtype, StoredDtype::Safetensors(Dtype::F32 | Dtype::F16 | Dtype::BF16));
        let format = match MemoryFormat::for_floats(kind, role, shape.len()) {
            MemoryFormat::ComputeDtype if !is_float => MemoryFormat::Bytes(bytes),
            format => format,
        };
        let has_codes = matches!(dtype, StoredDtype::Safetensors(Dtype::I8 | Dtype::F8_E4M3));
        let unit = if has_codes { GROUP_COLUMNS } else { 1 };
        Self {
            name: name.to_string(),
            role,
            kind,
            dtype,
            elements,
            bytes,
            format,
            quantized: None,
            columns: column_count(&shape, role, kind).map(|columns| ColumnUnits { columns, unit }),
            rows: shape.first().copied(),
        }
    }

    pub fn parameters(&self) -> u64 {
        self.kind.parameters(self.elements)
    }

    /// Returns the index of the tensor's layer: the first number in its name. `None` if its name has no number.
    pub fn layer(&self) -> Option<usize> {
        self.name.split('.').find_map(|part| part.parse().ok())
    }

    /// Returns the size of the tensor in memory if the compute dtype is `dtype`, in bytes.
    pub fn loaded_bytes(&self, dtype: DType) -> u64 {
        match self.format {
            MemoryFormat::ComputeDtype => self.elements.saturating_mul(dtype.size_in_bytes() as u64),
            MemoryFormat::F32 => self.elements.saturating_mul(size_of::<f32>() as u64),
            MemoryFormat::Bytes(bytes) => bytes,
        }
    }

    pub fn is_expert(&self) -> bool {
        self.role.group == Group::Experts
    }
}

/// Returns the number of columns of a matrix, or `None` for a vector or scalar. `shape` is the shape in the file.
fn column_count(shape: &[usize], role: TensorRole, kind: TensorKind) -> Option<usize> {
    match shape {
        // The third dimension counts MXFP4 blocks of 32 columns, each of which has one scale.
        [_, _, blocks, ..] if kind.is_mxfp4() => Some(blocks * MXFP4_BLOCK),
        [.., columns, _] if role.form == Form::Transposed => Some(*columns),
        [_, .., columns] => Some(*columns),
        _ => None,
    }
}
