//! Lists the tensors of a checkpoint from the headers of its files.
//! The headers are enough to plan the memory of a model before loading, and to describe a model on the hub without
//! downloading its weights (`inferno show --remote`).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use ::safetensors::tensor::Dtype;
use anyhow::{Result, ensure};
use candle_core::DType;
use serde::Serialize;

use super::checkpoint::Checkpoint;
use super::gguf::GgufCheckpoint;
use super::quantized::{QuantizationTarget, QuantizedShape};
use super::safetensors::header::{self, HeaderTensor, MAX_HEADER_BYTES};
use super::tensor_info::{StoredDtype, TensorInfo};
use super::tensor_kind::TensorKind;
use super::tensor_table::{Form, Group, TensorRole, TensorTable};
use crate::kernels::moe::mxfp4::MXFP4_BLOCK;
use crate::kernels::quantized::GROUP_COLUMNS;
use crate::snapshot::safetensors::{self, ShardIndex};

/// One tensor of a checkpoint.
#[derive(Clone, Debug)]
pub(super) struct InventoryTensor {
    pub name: String,
    pub role: TensorRole,
    pub kind: TensorKind,
    dtype: StoredDtype,
    elements: u64,
    /// The size of the tensor in the file, in bytes.
    bytes: u64,
    format: MemoryFormat,
    /// The format and the dimensions of a matrix that is quantized in memory.
    /// `None` for packed MXFP4 and all other tensors, and for all tensors added by [`Inventory::add_header`].
    pub quantized: Option<QuantizedShape>,
    /// How ranks can divide the columns of a matrix. `None` for a vector or scalar.
    pub columns: Option<ColumnUnits>,
    /// The length of the tensor's first dimension. `None` for a scalar.
    pub rows: Option<usize>,
}

/// The number of columns of a matrix. Ranks divide the columns only at multiples of `unit`.
#[derive(Clone, Copy, Debug)]
pub(super) struct ColumnUnits {
    pub columns: usize,
    pub unit: usize,
}

/// The format of a loaded tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemoryFormat {
    /// Floats in the compute dtype.
    ComputeDtype,
    /// F32, regardless of the compute dtype: vectors (such as norms, sinks, and biases outside the experts),
    /// routers, and weight scales that [`Inventory::add_header`] adds.
    F32,
    /// A packed, quantized or integer format. Holds the size in bytes, which is 0 for tensors that are never loaded.
    /// In [`Inventory::from_checkpoint`], the size of a matrix includes its weight scales, so their own size is 0.
    Bytes(u64),
}

/// The tensors of a checkpoint. Computes the memory size of a whole model or of each rank's part.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    table: TensorTable,
    pub(super) tensors: Vec<InventoryTensor>,
}

/// The information about a model's weights that `inferno list` needs.
pub struct WeightsSummary {
    pub parameters: u64,
    /// The dtype with the most bytes, in lower case. For a GGUF file, the quantization of the file, such as `Q4_K_M`.
    pub main_dtype: Option<String>,
    /// Whether `parameters` counts four parameters per packed I32 word, which is correct only for 8-bit quantization.
    pub is_packed: bool,
}

/// The sizes in memory of the parts of a model, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelBytes {
    /// The size of each decoder layer.
    pub layers: Vec<u64>,
    /// The size of the output head. 0 if the checkpoint has no tensor for the output head.
    pub head: u64,
    /// The size of all other tensors, such as embeddings, the final norm, and layers beyond the model's layer count.
    pub other: u64,
}

/// The totals for one group of tensors, such as attention or norms.
#[derive(Clone, Debug, Serialize, PartialEq)]
pub struct TensorGroup {
    pub name: &'static str,
    pub tensors: usize,
    pub parameters: u64,
    pub bytes: u64,
    pub dtypes: BTreeSet<String>,
}

impl WeightsSummary {
    /// Summarizes the weights in a GGUF file.
    pub fn from_gguf(file: &GgufCheckpoint) -> Self {
        Self { parameters: file.parameters(), main_dtype: file.quantization(), is_packed: false }
    }

    /// Summarizes the weights in the safetensors files of a directory. Reads and validates only the headers.
    pub fn from_safetensors(dir: &Path) -> Result<Self> {
        let (mut parameters, mut bytes, mut is_packed) = (0u64, BytesByDtype::default(), false);
        let mut header_bytes = 0;
        for file in safetensors::files(dir, ShardIndex::read(dir)?.as_ref())? {
            let (json, data_bytes) = header::read_file(&file)?;
            header_bytes += json.len() as u64;
            ensure!(
                header_bytes <= MAX_HEADER_BYTES,
                "cannot read the model: the headers of its shards have more than {MAX_HEADER_BYTES} bytes in total"
            );
            header::read(&file.display().to_string(), &json, Some(data_bytes), |tensor| {
                let kind = TensorKind::new(&tensor.name, &StoredDtype::from_header(&tensor.dtype));
                parameters = parameters.saturating_add(kind.parameters(tensor.elements));
                bytes.add(&tensor.dtype, tensor.bytes);
                is_packed |= tensor.is_packed;
            })?;
        }
        Ok(Self { parameters, main_dtype: bytes.main(), is_packed })
    }
}

impl Inventory {
    /// Creates an empty inventory of a model whose tensors have the roles in `table`.
    pub fn new(table: TensorTable) -> Self {
        Self { table, tensors: Vec::new() }
    }

    /// Lists the tensors of a checkpoint and the formats that they will have in memory.
    /// `target` is the format to which loading quantizes float matrices, if any.
    pub fn from_checkpoint(checkpoint: &Checkpoint, table: TensorTable, target: Option<QuantizationTarget>) -> Self {
        let tensor = |(name, info): (&str, &TensorInfo)| {
            let (role, dtype) = (table.role(name), checkpoint.stored_dtype(name, info));
            let kind = TensorKind::new(name, &dtype);
            let format = MemoryFormat::for_floats(kind, role, info.shape.len());
            let packed_bytes = match format {
                MemoryFormat::ComputeDtype if role.form != Form::ComputeDtype => checkpoint.packed_bytes(name, info),
                _ if kind == TensorKind::WeightScale => checkpoint.packed_bytes(name, info),
                _ => None,
            };
            let mut tensor = InventoryTensor {
                name: name.to_string(),
                role,
                kind,
                dtype,
                elements: info.elements() as u64,
                bytes: info.bytes() as u64,
                format: packed_bytes.map_or(format, MemoryFormat::Bytes),
                quantized: packed_bytes.and_then(|_| checkpoint.quantized_shape(name, info)),
                columns: None,
                rows: info.shape.first().copied(),
            };
            tensor.columns = tensor
                .column_count(&info.shape)
                .map(|columns| ColumnUnits { columns, unit: checkpoint.column_unit(name, columns, target) });
            tensor
        };
        let mut inventory = Self { table, tensors: checkpoint.tensors().map(tensor).collect() };
        if let Some(target) = target {
            inventory.quantize(checkpoint, target);
        }
        inventory
    }

    /// Sets the formats of the matrices that loading quantizes to `target`.
    fn quantize(&mut self, checkpoint: &Checkpoint, target: QuantizationTarget) {
        let has_head = self.tensors.iter().any(|tensor| tensor.role.group == Group::Head);
        let is_quantized = |tensor: &&mut InventoryTensor| {
            let can_quantize = match tensor.role.group {
                Group::Attention | Group::Mlp | Group::Experts | Group::Head => true,
                Group::Embedding => !has_head,
                Group::Norms | Group::Other => false,
            };
            let is_matrix = matches!(tensor.role.form, Form::Matrix | Form::Transposed);
            let is_bias = tensor.kind == TensorKind::Bias;
            tensor.format == MemoryFormat::ComputeDtype && is_matrix && can_quantize && !is_bias
        };
        for tensor in self.tensors.iter_mut().filter(is_quantized) {
            let is_transposed = tensor.role.form == Form::Transposed;
            let shape = checkpoint.matrix_shape(&tensor.name, is_transposed);
            if let Some((rows, columns)) = shape
                && let Some(format) = target.weight_format(columns)
            {
                tensor.format = MemoryFormat::Bytes(format.bytes(rows as u64, columns as u64));
                tensor.quantized = Some(QuantizedShape { format, rows, columns });
            }
        }
    }

    /// Adds the tensors of a safetensors header.
    ///
    /// `header` is the JSON text without the length prefix.
    /// `data_bytes` is the size of the data after the header, if known.
    /// Unknown dtypes are allowed, because the model is only described, not loaded.
    pub fn add_header(&mut self, file: &str, header: &[u8], data_bytes: Option<u64>) -> Result<()> {
        header::read(file, header, data_bytes, |tensor| {
            let HeaderTensor { name, dtype, shape, elements, bytes, .. } = tensor;
            let shape: Vec<usize> = shape.into_iter().map(|size| usize::try_from(size).unwrap_or(usize::MAX)).collect();
            let (name, dtype, role) = (name.to_string(), StoredDtype::from_header(&dtype), self.table.role(&name));
            let kind = TensorKind::new(&name, &dtype);
            let is_float = matches!(dtype, StoredDtype::Safetensors(Dtype::F32 | Dtype::F16 | Dtype::BF16));
            let format = match MemoryFormat::for_floats(kind, role, shape.len()) {
                MemoryFormat::ComputeDtype if !is_float => MemoryFormat::Bytes(bytes),
                format => format,
            };
            let has_codes = matches!(dtype, StoredDtype::Safetensors(Dtype::I8 | Dtype::F8_E4M3));
            let unit = if has_codes { GROUP_COLUMNS } else { 1 };
            let mut tensor = InventoryTensor {
                name,
                role,
                kind,
                dtype,
                elements,
                bytes,
                format,
                quantized: None,
                columns: None,
                rows: shape.first().copied(),
            };
            tensor.columns = tensor.column_count(&shape).map(|columns| ColumnUnits { columns, unit });
            self.tensors.push(tensor);
        })
    }

    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Returns the total size of all tensors in the files, in bytes.
    pub fn bytes(&self) -> u64 {
        sum(self.tensors.iter().map(|tensor| tensor.bytes))
    }

    /// Returns the size in the files, in bytes, of the tensors that belong to the layers `layers` or to no layer.
    /// A rank that holds these layers whole loads these tensors, except those that no rank loads.
    pub fn stage_bytes(&self, layers: &Range<usize>) -> u64 {
        let is_loaded = |tensor: &&InventoryTensor| tensor.layer().is_none_or(|layer| layers.contains(&layer));
        sum(self.tensors.iter().filter(is_loaded).map(|tensor| tensor.bytes))
    }

    /// Returns the number of parameters. A byte of packed MXFP4 blocks counts as two.
    /// MXFP4 scales and the `weight_shape` tensors of compressed-tensors do not count.
    pub fn parameters(&self) -> u64 {
        sum(self.tensors.iter().map(InventoryTensor::parameters))
    }

    /// Returns the number of parameters that one token uses.
    /// The router of each layer chooses `experts_per_token` of `experts` experts.
    pub fn active_parameters(&self, experts_per_token: u64, experts: u64) -> u64 {
        let in_experts = sum(self.tensors.iter().filter(|tensor| tensor.is_expert()).map(InventoryTensor::parameters));
        let active = u128::from(in_experts) * u128::from(experts_per_token) / u128::from(experts.max(1));
        self.parameters() - in_experts + u64::try_from(active).unwrap_or(in_experts).min(in_experts)
    }

    /// Returns an estimate of the size of the loaded weights in memory, in bytes.
    /// The estimate also counts some tensors that are not loaded, such as MTP layers (multi-token prediction),
    /// or an output head in the files of a model with tied embeddings.
    /// From headers alone, the estimate of compressed-tensors weights can be too low:
    /// it omits padding, and the row scales that loading creates from a single scale per matrix.
    pub fn loaded_bytes(&self, dtype: DType) -> u64 {
        sum(self.tensors.iter().map(|tensor| tensor.loaded_bytes(dtype)))
    }

    /// Returns the sizes in memory of the layers, the head and the other tensors of a model with `layers` layers.
    pub fn model_bytes(&self, layers: usize, dtype: DType) -> ModelBytes {
        let mut parts = ModelBytes { layers: vec![0; layers], ..ModelBytes::default() };
        for tensor in &self.tensors {
            let part = match tensor.layer().and_then(|layer| parts.layers.get_mut(layer)) {
                Some(layer) => layer,
                None if tensor.role.group == Group::Head => &mut parts.head,
                None => &mut parts.other,
            };
            *part = part.saturating_add(tensor.loaded_bytes(dtype));
        }
        parts
    }

    /// Returns the size in memory of all experts of a layer, in bytes. If layers differ, returns the largest size.
    /// Loading may temporarily need extra memory of this size, to repack or stack the experts of one layer at a time.
    /// A U8 tensor outside the experts counts as a layer of its own.
    pub fn largest_expert_layer(&self, dtype: DType) -> u64 {
        let mut layers: BTreeMap<(Option<usize>, &str), u64> = BTreeMap::new();
        for tensor in &self.tensors {
            if tensor.is_expert() || tensor.dtype.is_u8() {
                let name = if tensor.is_expert() { "" } else { &tensor.name };
                let sum = layers.entry((tensor.layer(), name)).or_default();
                *sum = sum.saturating_add(tensor.loaded_bytes(dtype));
            }
        }
        layers.into_values().max().unwrap_or(0)
    }

    /// Returns the dequantized size of all quantized experts of a layer, in bytes. Packed MXFP4 experts do not count.
    /// If layers differ, returns the largest size.
    /// This is an upper bound on the memory for dequantized experts in a forward pass over many tokens, in which a GPU
    /// dequantizes one stacked matrix at a time.
    pub fn unpacked_expert_layer(&self, dtype: DType) -> u64 {
        let mut layers: BTreeMap<Option<usize>, u64> = BTreeMap::new();
        for tensor in self.tensors.iter().filter(|tensor| tensor.is_expert() && !tensor.dtype.is_u8()) {
            if matches!(tensor.format, MemoryFormat::Bytes(1..)) {
                let sum = layers.entry(tensor.layer()).or_default();
                *sum = sum.saturating_add(tensor.elements.saturating_mul(dtype.size_in_bytes() as u64));
            }
        }
        layers.into_values().max().unwrap_or(0)
    }

    /// Returns the dtype that accounts for the most bytes of the checkpoint.
    pub fn main_dtype(&self) -> Option<String> {
        let mut bytes = BytesByDtype::default();
        self.tensors.iter().for_each(|tensor| bytes.add(&tensor.dtype.to_string(), tensor.bytes));
        bytes.main()
    }

    /// Returns the totals of each tensor group that is not empty.
    pub fn groups(&self) -> Vec<TensorGroup> {
        let group = |group: Group| {
            let tensors = || self.tensors.iter().filter(move |tensor| tensor.role.group == group);
            let dtype = |tensor: &InventoryTensor| {
                if tensor.kind.is_mxfp4() { "mxfp4".to_string() } else { tensor.dtype.to_string() }
            };
            TensorGroup {
                name: group.name(),
                tensors: tensors().count(),
                parameters: sum(tensors().map(InventoryTensor::parameters)),
                bytes: sum(tensors().map(|tensor| tensor.bytes)),
                dtypes: tensors().map(dtype).collect(),
            }
        };
        Group::ALL.into_iter().map(group).filter(|group| group.tensors > 0).collect()
    }
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
    fn parameters(&self) -> u64 {
        self.kind.parameters(self.elements)
    }

    /// Returns the index of the tensor's layer: the first number in its name. `None` if its name has no number.
    pub(super) fn layer(&self) -> Option<usize> {
        self.name.split('.').find_map(|part| part.parse().ok())
    }

    /// Returns the number of columns of a matrix, or `None` for a vector or scalar. `shape` is the shape in the file.
    fn column_count(&self, shape: &[usize]) -> Option<usize> {
        match shape {
            // The third dimension counts MXFP4 blocks of 32 columns, each of which has one scale.
            [_, _, blocks, ..] if self.kind.is_mxfp4() => Some(blocks * MXFP4_BLOCK),
            [.., columns, _] if self.role.form == Form::Transposed => Some(*columns),
            [_, .., columns] => Some(*columns),
            _ => None,
        }
    }

    pub(super) fn loaded_bytes(&self, dtype: DType) -> u64 {
        match self.format {
            MemoryFormat::ComputeDtype => self.elements.saturating_mul(dtype.size_in_bytes() as u64),
            MemoryFormat::F32 => self.elements.saturating_mul(size_of::<f32>() as u64),
            MemoryFormat::Bytes(bytes) => bytes,
        }
    }

    fn is_expert(&self) -> bool {
        self.role.group == Group::Experts
    }
}

/// The total size of the tensors of each dtype, in bytes.
#[derive(Default)]
struct BytesByDtype(BTreeMap<String, u64>);

impl BytesByDtype {
    fn add(&mut self, dtype: &str, bytes: u64) {
        match self.0.get_mut(dtype) {
            Some(sum) => *sum = sum.saturating_add(bytes),
            None => drop(self.0.insert(dtype.to_string(), bytes)),
        }
    }

    /// Returns the dtype with the most bytes, in lower case.
    fn main(self) -> Option<String> {
        self.0.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(dtype, _)| dtype.to_lowercase())
    }
}

/// Returns the sum of `numbers`. Saturates on overflow, because a remote header may declare any size.
fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::super::tensor_table::{Division, TensorRow, tensor};
    use super::*;

    const HEADER: &str = r#"{"__metadata__":{"format":"pt"},
        "model.embed_tokens.weight":{"dtype":"BF16","shape":[10,4],"data_offsets":[0,80]},
        "model.layers.0.self_attn.q_proj.weight":{"dtype":"F32","shape":[4,4],"data_offsets":[80,144]},
        "model.layers.0.input_layernorm.weight":{"dtype":"F8_NEW","shape":[4],"data_offsets":[144,148]},
        "model.layers.0.mlp.router.weight":{"dtype":"BF16","shape":[2,4],"data_offsets":[148,164]},
        "model.layers.0.mlp.experts.down_proj_blocks":{"dtype":"U8","shape":[2,4,1,16],"data_offsets":[164,292]},
        "model.layers.0.mlp.experts.down_proj_scales":{"dtype":"U8","shape":[2,4,1],"data_offsets":[292,300]}}"#;

    #[test]
    fn header_is_counted() {
        const ROUTER: TensorRow = tensor("mlp.router", Group::Mlp, Form::F32, Division::Whole);
        let mut inventory = Inventory::new(TensorTable(&[&[ROUTER]]));
        inventory.add_header("a.safetensors", HEADER.as_bytes(), Some(300)).unwrap();
        assert_eq!(inventory.bytes(), 300);
        assert_eq!(inventory.parameters(), 40 + 16 + 4 + 8 + 256);
        assert_eq!(inventory.active_parameters(1, 2), 40 + 16 + 4 + 8 + 128);
        // Norms and routers are f32 in memory, and the other float tensors are bf16.
        assert_eq!(inventory.loaded_bytes(DType::BF16), 80 + 32 + 4 * 4 + 2 * 16 + 136, "wrong size in memory");
        assert_eq!(inventory.largest_expert_layer(DType::BF16), 136);
        assert_eq!(inventory.main_dtype().as_deref(), Some("u8"));
        let groups = inventory.groups();
        let names: Vec<&str> = groups.iter().map(|group| group.name).collect();
        assert_eq!(names, ["embedding", "attention", "mlp", "experts", "norms"]);
        assert_eq!((groups[3].tensors, groups[3].parameters, groups[3].bytes), (2, 256, 136));
        assert_eq!(groups[3].dtypes, BTreeSet::from(["mxfp4".to_string()]));
    }

    #[test]
    fn inconsistent_headers_are_errors() {
        let assert_error = |header: &str, data_bytes| {
            let error = Inventory::default().add_header("a.safetensors", header.as_bytes(), data_bytes).unwrap_err();
            assert!(format!("{error:#}").contains("a.safetensors"), "{error:#}");
        };
        assert_error(HEADER, Some(299));
        assert_error(HEADER, Some(301));
        // The first header below lists tensor `a` twice. The second header has a gap before its only tensor.
        let two = r#""a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}"#;
        assert_error(&format!("{{{two},{two}}}"), Some(2));
        assert_error(r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#, Some(4));
        assert_error("{", None);
        assert_error("[]", None);
        assert_error(r#"{"a":{"dtype":"F32"}}"#, None);
        assert_error(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#, None);
        assert_error(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, None);
        assert_error(r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, None);
        assert_error(r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}"#, None);
    }
}
