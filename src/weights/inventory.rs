//! Which tensors a checkpoint has, as headers tell: enough to know what a model takes before a byte of it is here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;
use candle_core::DType;
use serde::Serialize;

use super::gguf::GgufCheckpoint;
use super::quantized::QuantizationTarget;
use super::{Checkpoint, header};
use crate::snapshot::safetensors::{self, ShardIndex};

/// One tensor as its header tells of it.
#[derive(Clone, Debug)]
pub struct Entry {
    pub name: String,
    /// In lower case, as safetensors names it: `bf16`, `u8`, `f8_e4m3`.
    pub dtype: String,
    pub elements: u64,
    /// As stored.
    pub bytes: u64,
    pub kept: Kept,
}

/// What a tensor is once it is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Floats of the compute dtype.
    Floats,
    /// f32, whatever is computed in: norms, biases, sinks, routers.
    F32,
    /// So many bytes: what is packed or quantized. Nothing of what no model asks for.
    Bytes(u64),
}

/// The tensors of a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    entries: Vec<Entry>,
}

/// What a list of models tells of one.
pub struct Summary {
    pub parameters: u64,
    /// The dtype that most bytes are in, in lower case; of a GGUF file what it calls itself, such as `Q4_K_M`.
    pub main_dtype: Option<String>,
    /// Whether this holds only if config.json can be read: words of codes are taken for four each.
    pub packed: bool,
}

/// Tensors that do one kind of work.
#[derive(Clone, Debug, Serialize, PartialEq)]
pub struct Group {
    pub name: &'static str,
    pub tensors: usize,
    pub parameters: u64,
    pub bytes: u64,
    pub dtypes: BTreeSet<String>,
}

/// In the order in which a token passes through.
const GROUPS: [&str; 7] = ["embedding", "attention", "mlp", "experts", "norms", "head", "other"];

/// In names of what is in files and of no use: tables and masks that are computed, scales of inputs, of which the number alone
/// is kept, and the half of a multimodal model that sees.
const NEVER_LOADED: [&str; 7] = [
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".input_scale",
    ".weight_shape",
    "vision_tower.",
    "multi_modal_projector.",
];

impl Summary {
    pub fn from_gguf(file: &GgufCheckpoint) -> Self {
        Self { parameters: file.parameters(), main_dtype: file.quantization(), packed: false }
    }

    /// Of a snapshot. Reads headers and nothing else: a model that is listed may yet turn out to be broken.
    pub fn from_safetensors(dir: &Path) -> Result<Self> {
        let (mut parameters, mut bytes, mut packed) = (0u64, BytesByDtype::default(), false);
        for file in safetensors::files(dir, ShardIndex::read(dir)?.as_ref())? {
            let (json, data_bytes) = header::of_file(&file)?;
            header::read(&file.display().to_string(), &json, Some(data_bytes), |tensor| {
                let count = self::parameters(&tensor.name, tensor.dtype == "U8", tensor.elements);
                parameters = parameters.saturating_add(count);
                bytes.add(&tensor.dtype, tensor.bytes);
                packed |= tensor.packed;
            })?;
        }
        Ok(Self { parameters, main_dtype: bytes.main(), packed })
    }
}

impl Inventory {
    /// Of a checkpoint as it will be loaded, where matrices of floats may become quantized.
    pub fn from_checkpoint(checkpoint: &Checkpoint, quantize: Option<QuantizationTarget>) -> Self {
        let entry = |(name, info): (&str, &super::TensorInfo)| {
            let kept = match Kept::of_floats(name, info.shape.len()) {
                Kept::Floats if !name.contains("wpe") => checkpoint.kept_bytes(name, info),
                _ if name.ends_with("_scale") => checkpoint.kept_bytes(name, info),
                _ => None,
            };
            Entry {
                name: name.to_string(),
                dtype: checkpoint.stored_as(name, info),
                elements: info.elements() as u64,
                bytes: info.bytes() as u64,
                kept: kept.map_or(Kept::of_floats(name, info.shape.len()), Kept::Bytes),
            }
        };
        let mut inventory = Self { entries: checkpoint.tensors().map(entry).collect() };
        let has_head = inventory.entries.iter().any(|entry| entry.group() == "head");
        let is_matrix = |entry: &&mut Entry| entry.kept == Kept::Floats && !entry.name.ends_with("_bias");
        for entry in inventory.entries.iter_mut().filter(is_matrix) {
            let becomes = match entry.group() {
                "attention" | "mlp" | "head" => true,
                // gpt-oss's, which have biases, stay floats.
                "experts" => checkpoint.info(&format!("{}_bias", entry.name)).is_none(),
                "embedding" => !has_head && !entry.name.contains("wpe"),
                _ => false,
            };
            let shape = checkpoint.matrix_shape(&entry.name).filter(|_| becomes);
            let format = |(_, columns)| quantize.and_then(|quantize| quantize.format(columns));
            if let (Some((rows, columns)), Some(format)) = (shape, shape.and_then(format)) {
                entry.kept = Kept::Bytes(format.bytes(rows as u64, columns as u64));
            }
        }
        inventory
    }

    /// Adds what the header of a safetensors file says, its JSON without the length before it. `data_bytes` is what
    /// follows the header in the file. Any dtype will do: this is about knowing a model, not about loading it.
    pub fn add_header(&mut self, file: &str, header: &[u8], data_bytes: Option<u64>) -> Result<()> {
        header::read(file, header, data_bytes, |header::Tensor { name, dtype, rank, elements, bytes, .. }| {
            let (name, dtype) = (name.into_owned(), dtype.to_lowercase());
            let kept = match Kept::of_floats(&name, rank) {
                Kept::Floats if !is_float(&dtype) => Kept::Bytes(bytes),
                kept => kept,
            };
            self.entries.push(Entry { name, dtype, elements, bytes, kept });
        })
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// As stored.
    pub fn bytes(&self) -> u64 {
        sum(self.entries.iter().map(|entry| entry.bytes))
    }

    pub fn parameters(&self) -> u64 {
        sum(self.entries.iter().map(Entry::parameters))
    }

    /// Those that one token meets, where it takes `chosen` of `experts`.
    pub fn active_parameters(&self, chosen: u64, experts: u64) -> u64 {
        let of_experts = sum(self.entries.iter().filter(|entry| entry.is_expert()).map(Entry::parameters));
        let active = u128::from(of_experts) * u128::from(chosen) / u128::from(experts.max(1));
        self.parameters() - of_experts + u64::try_from(active).unwrap_or(of_experts).min(of_experts)
    }

    /// Bytes of the weights once loaded. Exact, but for a head in the files of a model whose embedding is its head: that is
    /// counted and not loaded.
    pub fn loaded_bytes(&self, dtype: DType) -> u64 {
        sum(self.entries.iter().map(|entry| entry.loaded_bytes(dtype)))
    }

    /// Bytes of the experts of the layer that has most of them, once loaded: they are laid out anew or stacked, one layer at
    /// a time.
    pub fn largest_expert_layer(&self, dtype: DType) -> u64 {
        let mut layers: BTreeMap<&str, u64> = BTreeMap::new();
        for entry in &self.entries {
            let expert = entry.name.split_once(".experts.").map(|(layer, _)| layer);
            if entry.dtype == "u8" || expert.is_some() {
                let sum = layers.entry(expert.unwrap_or(&entry.name)).or_default();
                *sum = sum.saturating_add(entry.loaded_bytes(dtype));
            }
        }
        layers.into_values().max().unwrap_or(0)
    }

    /// Bytes of the quantized experts of one layer as floats: what a GPU multiplies many tokens with, a layer at a time.
    pub fn unpacked_expert_layer(&self, dtype: DType) -> u64 {
        let mut layers: BTreeMap<&str, u64> = BTreeMap::new();
        for entry in self.entries.iter().filter(|entry| matches!(entry.kept, Kept::Bytes(1..)) && entry.dtype != "u8") {
            if let Some((layer, _)) = entry.name.split_once(".experts.") {
                let sum = layers.entry(layer).or_default();
                *sum = sum.saturating_add(entry.elements.saturating_mul(dtype.size_in_bytes() as u64));
            }
        }
        layers.into_values().max().unwrap_or(0)
    }

    /// The dtype that most bytes are in.
    pub fn main_dtype(&self) -> Option<String> {
        let mut bytes = BytesByDtype::default();
        self.entries.iter().for_each(|entry| bytes.add(&entry.dtype, entry.bytes));
        bytes.main()
    }

    /// What kind of work the tensors do, by their names; kinds without a tensor are left out.
    pub fn groups(&self) -> Vec<Group> {
        let group = |name| {
            let entries = || self.entries.iter().filter(move |entry| entry.group() == name);
            let dtype = |entry: &Entry| match entry.is_packed_mxfp4() {
                true => "mxfp4".to_string(),
                false => entry.dtype.clone(),
            };
            Group {
                name,
                tensors: entries().count(),
                parameters: sum(entries().map(Entry::parameters)),
                bytes: sum(entries().map(|entry| entry.bytes)),
                dtypes: entries().map(dtype).collect(),
            }
        };
        GROUPS.into_iter().map(group).filter(|group| group.tensors > 0).collect()
    }
}

impl Kept {
    /// What becomes of floats of so many dimensions that are not quantized.
    fn of_floats(name: &str, rank: usize) -> Self {
        let is_router = ["mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight"];
        if NEVER_LOADED.iter().any(|part| name.contains(part)) {
            Self::Bytes(0)
        } else if rank < 2 || name.ends_with("_scale") || is_router.iter().any(|router| name.ends_with(router)) {
            Self::F32
        } else {
            Self::Floats
        }
    }
}

impl Entry {
    fn parameters(&self) -> u64 {
        parameters(&self.name, self.dtype == "u8", self.elements)
    }

    fn loaded_bytes(&self, dtype: DType) -> u64 {
        match self.kept {
            Kept::Floats => self.elements.saturating_mul(dtype.size_in_bytes() as u64),
            Kept::F32 => self.elements.saturating_mul(size_of::<f32>() as u64),
            Kept::Bytes(bytes) => bytes,
        }
    }

    fn is_packed_mxfp4(&self) -> bool {
        self.dtype == "u8" && (self.name.ends_with("_blocks") || self.name.ends_with("_scales"))
    }

    fn is_expert(&self) -> bool {
        self.name.contains(".experts.")
    }

    /// One of `GROUPS`.
    fn group(&self) -> &'static str {
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

/// How many bytes are in which dtype.
#[derive(Default)]
struct BytesByDtype(BTreeMap<String, u64>);

impl BytesByDtype {
    fn add(&mut self, dtype: &str, bytes: u64) {
        match self.0.get_mut(dtype) {
            Some(sum) => *sum = sum.saturating_add(bytes),
            None => drop(self.0.insert(dtype.to_string(), bytes)),
        }
    }

    /// The dtype that most bytes are in, in lower case.
    fn main(self) -> Option<String> {
        self.0.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(dtype, _)| dtype.to_lowercase())
    }
}

fn is_float(dtype: &str) -> bool {
    matches!(dtype, "f32" | "f16" | "bf16")
}

/// Sizes from a server may be anything.
fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

/// How many parameters a tensor holds: its elements, two for each byte of packed MXFP4 blocks, none for their scales or
/// for a shape.
pub(super) fn parameters(name: &str, is_bytes: bool, elements: u64) -> u64 {
    match is_bytes {
        true if name.ends_with("_blocks") => elements.saturating_mul(2),
        true if name.ends_with("_scales") => 0,
        false if name.ends_with(".weight_shape") => 0,
        _ => elements,
    }
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
    fn a_header_is_counted() {
        let mut inventory = Inventory::default();
        inventory.add_header("a.safetensors", HEADER.as_bytes(), Some(300)).unwrap();
        assert_eq!(inventory.bytes(), 300);
        assert_eq!(inventory.parameters(), 40 + 16 + 4 + 8 + 256);
        assert_eq!(inventory.active_parameters(1, 2), 40 + 16 + 4 + 8 + 128);
        assert_eq!(inventory.loaded_bytes(DType::BF16), 80 + 32 + 4 * 4 + 2 * 16 + 136, "norms and routers in f32");
        assert_eq!(inventory.largest_expert_layer(DType::BF16), 136);
        assert_eq!(inventory.main_dtype().as_deref(), Some("u8"));
        let groups = inventory.groups();
        let names: Vec<&str> = groups.iter().map(|group| group.name).collect();
        assert_eq!(names, ["embedding", "attention", "mlp", "experts", "norms"]);
        assert_eq!((groups[3].tensors, groups[3].parameters, groups[3].bytes), (2, 256, 136));
        assert_eq!(groups[3].dtypes, BTreeSet::from(["mxfp4".to_string()]));
    }

    #[test]
    fn headers_that_lie_are_refused() {
        let refused = |header: &str, data_bytes| {
            let error = Inventory::default().add_header("a.safetensors", header.as_bytes(), data_bytes).unwrap_err();
            assert!(format!("{error:#}").contains("a.safetensors"), "{error:#}");
        };
        refused(HEADER, Some(299));
        refused(HEADER, Some(301));
        // There twice, and a hole.
        let two = r#""a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}"#;
        refused(&format!("{{{two},{two}}}"), Some(2));
        refused(r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#, Some(4));
        refused("{", None);
        refused("[]", None);
        refused(r#"{"a":{"dtype":"F32"}}"#, None);
        refused(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#, None);
        refused(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, None);
        refused(r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, None);
        refused(r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}"#, None);
    }

    #[test]
    fn names_of_other_families_find_their_group() {
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
            let entry = Entry { name: name.into(), dtype: "bf16".into(), elements: 1, bytes: 2, kept: Kept::Floats };
            assert_eq!(entry.group(), group, "{name}");
        }
    }
}
