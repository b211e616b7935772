//! Lists the tensors of a checkpoint from the headers of its files.
//! The headers are enough to plan the memory of a model before loading, and to describe a model on the hub without
//! downloading its weights (`inferno show --remote`).
//!
//! - `tensor`: one tensor, with its sizes in the file and in memory
//! - `division`: how ranks divide the tensors
//! - `summary`: the number of parameters and the main dtype, for `inferno list`

mod division;
mod summary;
mod tensor;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use anyhow::Result;
use candle_core::DType;
pub use division::{RankShare, SHARE_COLUMNS, kv_head_unit};
use serde::Serialize;
use summary::BytesByDtype;
pub use summary::WeightsSummary;
use tensor::{InventoryTensor, MemoryFormat};

use crate::weights::checkpoint::Checkpoint;
use crate::weights::quantized::{QuantizationTarget, QuantizedShape};
use crate::weights::safetensors::header;
use crate::weights::tensor_info::MatrixShape;
use crate::weights::tensor_kind::TensorKind;
use crate::weights::tensor_table::{Form, Group, TensorTable};

/// The tensors of a checkpoint. Computes the memory size of a whole model or of each rank's part.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    table: TensorTable,
    tensors: Vec<InventoryTensor>,
}

/// The sizes in memory of the layers and the other tensors of a model, in bytes.
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

impl Inventory {
    /// Creates an empty inventory of a model whose tensors have the roles in `table`.
    pub fn new(table: TensorTable) -> Self {
        Self { table, tensors: Vec::new() }
    }

    /// Lists the tensors of a checkpoint and the formats that they will have in memory.
    /// `target` is the format to which loading quantizes float matrices, if any.
    pub fn from_checkpoint(checkpoint: &Checkpoint, table: TensorTable, target: Option<QuantizationTarget>) -> Self {
        let tensors = checkpoint
            .tensors()
            .map(|(name, info)| InventoryTensor::from_checkpoint(checkpoint, table.role(name), name, info, target));
        let mut inventory = Self { table, tensors: tensors.collect() };
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
            if let Some(MatrixShape { rows, columns }) = shape
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
            let role = self.table.role(&tensor.name);
            self.tensors.push(InventoryTensor::from_header(tensor, role));
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
        let mut sizes = ModelBytes { layers: vec![0; layers], ..ModelBytes::default() };
        for tensor in &self.tensors {
            let size = match tensor.layer().and_then(|layer| sizes.layers.get_mut(layer)) {
                Some(layer) => layer,
                None if tensor.role.group == Group::Head => &mut sizes.head,
                None => &mut sizes.other,
            };
            *size = size.saturating_add(tensor.loaded_bytes(dtype));
        }
        sizes
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

/// Returns the sum of `numbers`. Saturates on overflow, because a remote header may declare any size.
fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::tensor_table::{Division, TensorRow, tensor};

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
