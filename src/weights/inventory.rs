//! Lists the tensors of a checkpoint from the headers of its files.
//! inferno computes the size of a model from the headers before downloading the model.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;

use anyhow::{Result, ensure};
use candle_core::DType;
use serde::Serialize;

use super::checkpoint::Checkpoint;
use super::gguf::GgufCheckpoint;
use super::quantized::QuantizationTarget;
use super::safetensors::header::{self, HeaderTensor, MAX_HEADER_BYTES};
use super::tensor_info::{TensorInfo, parameter_count};
use crate::kernels::quantized::{GROUP_COLUMNS, WeightFormat};
use crate::snapshot::safetensors::{self, ShardIndex};

/// One tensor of a checkpoint.
#[derive(Clone, Debug)]
pub(super) struct InventoryTensor {
    pub name: String,
    /// The dtype in the file, in lower case, such as `bf16`, `f8_e4m3` or `q4_k`.
    dtype: String,
    elements: u64,
    /// The size of the tensor in the file, in bytes.
    bytes: u64,
    format: MemoryFormat,
    /// The format, rows and columns of a matrix that is quantized in memory.
    /// `None` for all other tensors, and for all tensors added by [`Inventory::add_header`].
    pub quantized: Option<(WeightFormat, usize, usize)>,
    /// How ranks can divide the columns of a matrix. `None` for a vector.
    pub columns: Option<ColumnUnits>,
    /// The length of the tensor's first dimension. `None` for a scalar.
    pub rows: Option<usize>,
    /// Whether the tensor is a stack of matrices that the file stores transposed. `columns` already accounts for this.
    is_transposed: bool,
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
    /// F32, regardless of the compute dtype: vectors (such as norms, biases and sinks), routers and weight scales.
    F32,
    /// A packed or quantized format. Holds the size in bytes, which is 0 for tensors that no model loads.
    /// The size is also 0 for the weight scales of an open checkpoint, because the size of their matrix includes them.
    Bytes(u64),
}

/// The tensors of a checkpoint. Computes the memory size of a whole model or of each rank's part.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    pub(super) tensors: Vec<InventoryTensor>,
}

/// The information about a model's weights that `inferno list` shows.
pub struct WeightsSummary {
    pub parameters: u64,
    /// The dtype with the most bytes, in lower case. For a GGUF file, the quantization of the file, such as `Q4_K_M`.
    pub main_dtype: Option<String>,
    /// Whether `parameters` counts each packed word as four parameters, which is correct only for 8-bit quantization.
    pub packed: bool,
}

/// The sizes in memory of the parts of a model, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelBytes {
    /// The size of each decoder layer in memory, in bytes.
    pub layers: Vec<u64>,
    /// The size of the output head, in bytes. 0 if the checkpoint has no tensor for the output head.
    pub head: u64,
    /// The size of all other tensors, such as the embeddings, the final norm,
    /// and layers beyond the model's layer count, in bytes.
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

/// The names of the tensor groups, in the order in which they are displayed.
const GROUPS: [&str; 7] = ["embedding", "attention", "mlp", "experts", "norms", "head", "other"];

/// Name fragments of tensors that no model loads.
/// The fragments match RoPE frequencies, attention masks, input scales, shapes of packed weights, and vision modules.
/// Input scales count as not loaded, because inferno reads each one as a single number, not as a tensor.
const NEVER_LOADED: [&str; 7] = [
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".input_scale",
    ".weight_shape",
    "vision_tower.",
    "multi_modal_projector.",
];

impl WeightsSummary {
    /// Summarizes the weights in a GGUF file.
    pub fn from_gguf(file: &GgufCheckpoint) -> Self {
        Self { parameters: file.parameters(), main_dtype: file.quantization(), packed: false }
    }

    /// Summarizes the weights in the safetensors files of a directory. Reads and validates only the headers.
    pub fn from_safetensors(dir: &Path) -> Result<Self> {
        let (mut parameters, mut bytes, mut packed) = (0u64, BytesByDtype::default(), false);
        let mut header_bytes = 0;
        for file in safetensors::files(dir, ShardIndex::read(dir)?.as_ref())? {
            let (json, data_bytes) = header::read_file(&file)?;
            header_bytes += json.len() as u64;
            ensure!(
                header_bytes <= MAX_HEADER_BYTES,
                "the headers of all shards have more than {MAX_HEADER_BYTES} bytes in total"
            );
            header::read(&file.display().to_string(), &json, Some(data_bytes), |tensor| {
                let count = parameter_count(&tensor.name, tensor.dtype == "U8", tensor.elements);
                parameters = parameters.saturating_add(count);
                bytes.add(&tensor.dtype, tensor.bytes);
                packed |= tensor.packed;
            })?;
        }
        Ok(Self { parameters, main_dtype: bytes.main(), packed })
    }
}

impl Inventory {
    /// Lists the tensors of a checkpoint and the formats that they will have in memory.
    /// `target` is the format to which loading quantizes float matrices, if any.
    pub fn from_checkpoint(checkpoint: &Checkpoint, target: Option<QuantizationTarget>) -> Self {
        let tensor = |(name, info): (&str, &TensorInfo)| {
            let packed_bytes = match MemoryFormat::for_floats(name, info.shape.len()) {
                MemoryFormat::ComputeDtype if !name.contains("wpe") => checkpoint.packed_bytes(name, info),
                _ if name.ends_with("_scale") => checkpoint.packed_bytes(name, info),
                _ => None,
            };
            let has_bias = checkpoint.info(&format!("{name}_bias")).is_some();
            let mut tensor = InventoryTensor {
                name: name.to_string(),
                dtype: checkpoint.stored_as(name, info),
                elements: info.elements() as u64,
                bytes: info.bytes() as u64,
                format: packed_bytes.map_or(MemoryFormat::for_floats(name, info.shape.len()), MemoryFormat::Bytes),
                quantized: packed_bytes.and_then(|_| checkpoint.quantized_shape(name, info)),
                columns: None,
                rows: info.shape.first().copied(),
                is_transposed: has_bias,
            };
            let units = tensor.column_units(&info.shape, 1, has_bias);
            tensor.columns = units.map(|ColumnUnits { columns, .. }| ColumnUnits {
                columns,
                unit: checkpoint.column_unit(name, columns, target),
            });
            tensor
        };
        let mut inventory = Self { tensors: checkpoint.tensors().map(tensor).collect() };
        let has_head = inventory.tensors.iter().any(|tensor| tensor.group() == "head");
        let is_matrix = |tensor: &&mut InventoryTensor| {
            tensor.format == MemoryFormat::ComputeDtype && !tensor.name.ends_with("_bias")
        };
        for tensor in inventory.tensors.iter_mut().filter(is_matrix) {
            let is_quantized = match tensor.group() {
                "attention" | "mlp" | "head" => true,
                // Loading does not quantize experts with biases. Only gpt-oss has such experts.
                "experts" => checkpoint.info(&format!("{}_bias", tensor.name)).is_none(),
                "embedding" => !has_head && !tensor.name.contains("wpe"),
                _ => false,
            };
            let shape = checkpoint.matrix_shape(&tensor.name).filter(|_| is_quantized);
            let format = |(_, columns)| target.and_then(|target| target.format(columns));
            if let (Some((rows, columns)), Some(format)) = (shape, shape.and_then(format)) {
                tensor.format = MemoryFormat::Bytes(format.bytes(rows as u64, columns as u64));
                tensor.quantized = Some((format, rows, columns));
            }
        }
        inventory
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
            let (name, dtype) = (name.into_owned(), dtype.to_lowercase());
            let format = match MemoryFormat::for_floats(&name, shape.len()) {
                MemoryFormat::ComputeDtype if !is_float(&dtype) => MemoryFormat::Bytes(bytes),
                format => format,
            };
            let rows = shape.first().copied();
            let (quantized, columns) = (None, None);
            let is_transposed = false;
            let mut tensor =
                InventoryTensor { name, dtype, elements, bytes, format, quantized, columns, rows, is_transposed };
            let unit = if ["i8", "f8_e4m3"].contains(&tensor.dtype.as_str()) { GROUP_COLUMNS } else { 1 };
            tensor.columns = tensor.column_units(&shape, unit, false);
            self.tensors.push(tensor);
        })?;
        // Unpacked stacked experts with biases are stored transposed, as `[experts, columns, rows]`.
        // The biases may be in another shard than the matrices, so all tensors are searched.
        let biases: HashSet<String> = self.tensors.iter().filter_map(InventoryTensor::biased_experts).collect();
        for tensor in self.tensors.iter_mut().filter(|tensor| biases.contains(&tensor.name)) {
            let (Some(columns), Some(experts)) = (&mut tensor.columns, tensor.rows) else { continue };
            if !tensor.is_transposed {
                let matrix = tensor.elements / (experts as u64).max(1);
                columns.columns = usize::try_from(matrix).unwrap_or(usize::MAX) / columns.columns.max(1);
                tensor.is_transposed = true;
            }
        }
        Ok(())
    }

    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Returns the total size of all tensors in the files, in bytes.
    pub fn bytes(&self) -> u64 {
        sum(self.tensors.iter().map(|tensor| tensor.bytes))
    }

    /// Returns the number of parameters. A byte of packed MXFP4 blocks counts as two, and MXFP4 scales do not count.
    pub fn parameters(&self) -> u64 {
        sum(self.tensors.iter().map(InventoryTensor::parameters))
    }

    /// Returns the number of parameters that one token uses if the router chooses `chosen` of `experts` experts.
    pub fn active_parameters(&self, chosen: u64, experts: u64) -> u64 {
        let in_experts = sum(self.tensors.iter().filter(|tensor| tensor.is_expert()).map(InventoryTensor::parameters));
        let active = u128::from(in_experts) * u128::from(chosen) / u128::from(experts.max(1));
        self.parameters() - in_experts + u64::try_from(active).unwrap_or(in_experts).min(in_experts)
    }

    /// Returns an upper bound on the size of the loaded weights in memory, in bytes.
    /// The bound also counts two kinds of weights that are not loaded: MTP layers (multi-token prediction),
    /// and an output head if the embeddings are tied.
    pub fn loaded_bytes(&self, dtype: DType) -> u64 {
        sum(self.tensors.iter().map(|tensor| tensor.loaded_bytes(dtype)))
    }

    /// Returns the sizes in memory of the layers, the head and the other tensors of a model with `layers` layers.
    pub fn model_bytes(&self, layers: usize, dtype: DType) -> ModelBytes {
        let mut parts = ModelBytes { layers: vec![0; layers], ..ModelBytes::default() };
        for tensor in &self.tensors {
            let part = match tensor.layer().and_then(|layer| parts.layers.get_mut(layer)) {
                Some(layer) => layer,
                None if tensor.group() == "head" => &mut parts.head,
                None => &mut parts.other,
            };
            *part = part.saturating_add(tensor.loaded_bytes(dtype));
        }
        parts
    }

    /// Returns the size in memory of all experts of a layer, in bytes. If layers differ, returns the largest size.
    /// Loading repacks or stacks the experts of one layer at a time, which temporarily needs extra memory of this size.
    pub fn largest_expert_layer(&self, dtype: DType) -> u64 {
        let mut layers: BTreeMap<&str, u64> = BTreeMap::new();
        for tensor in &self.tensors {
            let expert = tensor.name.split_once(".experts.").map(|(layer, _)| layer);
            if tensor.dtype == "u8" || expert.is_some() {
                let sum = layers.entry(expert.unwrap_or(&tensor.name)).or_default();
                *sum = sum.saturating_add(tensor.loaded_bytes(dtype));
            }
        }
        layers.into_values().max().unwrap_or(0)
    }

    /// Returns the dequantized size of all quantized experts of a layer, in bytes.
    /// If layers differ, returns the largest size.
    /// In a forward pass over many tokens, a GPU dequantizes the experts of one layer at a time.
    /// Packed MXFP4 experts are not counted in the dequantized size.
    pub fn unpacked_expert_layer(&self, dtype: DType) -> u64 {
        let mut layers: BTreeMap<&str, u64> = BTreeMap::new();
        for tensor in self
            .tensors
            .iter()
            .filter(|tensor| matches!(tensor.format, MemoryFormat::Bytes(1..)) && tensor.dtype != "u8")
        {
            if let Some((layer, _)) = tensor.name.split_once(".experts.") {
                let sum = layers.entry(layer).or_default();
                *sum = sum.saturating_add(tensor.elements.saturating_mul(dtype.size_in_bytes() as u64));
            }
        }
        layers.into_values().max().unwrap_or(0)
    }

    /// Returns the dtype that accounts for the most bytes of the checkpoint.
    pub fn main_dtype(&self) -> Option<String> {
        let mut bytes = BytesByDtype::default();
        self.tensors.iter().for_each(|tensor| bytes.add(&tensor.dtype, tensor.bytes));
        bytes.main()
    }

    /// Returns the totals of each tensor group that is not empty. The name of a tensor determines its group.
    pub fn groups(&self) -> Vec<TensorGroup> {
        let group = |name| {
            let tensors = || self.tensors.iter().filter(move |tensor| tensor.group() == name);
            let dtype = |tensor: &InventoryTensor| {
                if tensor.is_packed_mxfp4() { "mxfp4".to_string() } else { tensor.dtype.clone() }
            };
            TensorGroup {
                name,
                tensors: tensors().count(),
                parameters: sum(tensors().map(InventoryTensor::parameters)),
                bytes: sum(tensors().map(|tensor| tensor.bytes)),
                dtypes: tensors().map(dtype).collect(),
            }
        };
        GROUPS.into_iter().map(group).filter(|group| group.tensors > 0).collect()
    }
}

impl MemoryFormat {
    /// Returns the format of an unquantized float tensor. `dims` is the number of dimensions of the tensor.
    fn for_floats(name: &str, dims: usize) -> Self {
        let is_router = ["mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight"];
        if NEVER_LOADED.iter().any(|part| name.contains(part)) {
            Self::Bytes(0)
        } else if dims < 2 || name.ends_with("_scale") || is_router.iter().any(|router| name.ends_with(router)) {
            Self::F32
        } else {
            Self::ComputeDtype
        }
    }
}

impl InventoryTensor {
    fn parameters(&self) -> u64 {
        parameter_count(&self.name, self.dtype == "u8", self.elements)
    }

    pub(super) fn loaded_bytes(&self, dtype: DType) -> u64 {
        match self.format {
            MemoryFormat::ComputeDtype => self.elements.saturating_mul(dtype.size_in_bytes() as u64),
            MemoryFormat::F32 => self.elements.saturating_mul(size_of::<f32>() as u64),
            MemoryFormat::Bytes(bytes) => bytes,
        }
    }

    /// For a bias of stacked experts, returns the name of the expert matrices. Otherwise, returns `None`.
    fn biased_experts(&self) -> Option<String> {
        self.name.strip_suffix("_bias").filter(|_| self.is_expert()).map(str::to_string)
    }

    fn is_packed_mxfp4(&self) -> bool {
        self.dtype == "u8" && (self.name.ends_with("_blocks") || self.name.ends_with("_scales"))
    }

    fn is_expert(&self) -> bool {
        self.name.contains(".experts.")
    }

    /// Returns the name of the tensor's group, one of [`GROUPS`].
    pub(super) fn group(&self) -> &'static str {
        let parts: Vec<&str> = self.name.split('.').collect();
        let any = |is: &dyn Fn(&str) -> bool| parts.iter().any(|part| is(part));
        if self.is_expert() {
            "experts"
        } else if any(&|part| part.contains("norm") || part.starts_with("ln_") || part == "ln") {
            "norms"
        } else if any(&|part| part == "lm_head" || part == "embed_out") || self.name == "output.weight" {
            "head"
        } else if any(&|part| part.contains("embed") || part == "wte" || part == "wpe") {
            "embedding"
        } else if any(&|part| part.contains("attn") || part.contains("attention")) {
            "attention"
        } else if any(&|part| part == "mlp" || part.contains("feed_forward") || part.contains("moe")) {
            "mlp"
        } else {
            "other"
        }
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

fn is_float(dtype: &str) -> bool {
    matches!(dtype, "f32" | "f16" | "bf16")
}

/// Returns the sum of `numbers`. Saturates on overflow, because a remote header may declare any size.
fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
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
        let mut inventory = Inventory::default();
        inventory.add_header("a.safetensors", HEADER.as_bytes(), Some(300)).unwrap();
        assert_eq!(inventory.bytes(), 300);
        assert_eq!(inventory.parameters(), 40 + 16 + 4 + 8 + 256);
        assert_eq!(inventory.active_parameters(1, 2), 40 + 16 + 4 + 8 + 128);
        assert_eq!(inventory.loaded_bytes(DType::BF16), 80 + 32 + 4 * 4 + 2 * 16 + 136, "norms and routers use f32");
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

    #[test]
    fn names_determine_the_group() {
        for (name, group) in [
            ("transformer.wte.weight", "embedding"),
            ("transformer.h.0.attn.c_attn.weight", "attention"),
            ("transformer.h.0.ln_1.weight", "norms"),
            ("transformer.h.0.mlp.c_fc.weight", "mlp"),
            ("model.layers.0.block_sparse_moe.experts.3.w1.weight", "experts"),
            ("model.layers.0.block_sparse_moe.gate.weight", "mlp"),
            ("model.layers.0.post_attention_layernorm.weight", "norms"),
            ("lm_head.weight", "head"),
            ("backbone.layers.0.mixer.A_log", "other"),
        ] {
            let format = MemoryFormat::ComputeDtype;
            let tensor = InventoryTensor {
                name: name.into(),
                dtype: "bf16".into(),
                elements: 1,
                bytes: 2,
                format,
                quantized: None,
                columns: None,
                rows: None,
                is_transposed: false,
            };
            assert_eq!(tensor.group(), group, "{name}");
        }
    }
}
