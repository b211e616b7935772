//! Gives access to the metadata, the tensor table and the tensor data of an open GGUF model.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::header::GgufTensorInfo;
use super::metadata::GgufMetadata;
use super::remote::{ReadRange, RemoteShards};
use super::shard::{GgufShard, LocalShards};
use super::shards;
use crate::text::excerpt;
use crate::weights::ggml::GgmlType;
use crate::weights::gguf::limits::MAX_BLOCKS;
use crate::weights::gguf::tensor_names::ROPE_FACTOR_TENSORS;
use crate::weights::reading::{ReadRequest, Residency, StoredBytes};

/// The names of `general.file_type` values, numbered as in `llama_ftype` of llama.cpp.
const FILE_TYPES: &[(u32, &str)] = &[
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (21, "Q2_K_S"),
    (32, "BF16"),
    (38, "MXFP4"),
];

/// An open GGUF model: its shards, and one tensor table for all shards.
pub struct GgufCheckpoint {
    shards: Vec<GgufShard>,
    tensors: BTreeMap<String, GgufTensorInfo>,
}

/// The entry of one tensor in the tensor table, and the location of its bytes.
pub struct GgufTensorView<'c> {
    pub info: &'c GgufTensorInfo,
    pub file: &'c Path,
    pub bytes: StoredBytes<'c>,
}

/// The numbers of attention heads in each layer.
pub struct HeadCounts {
    pub query: usize,
    pub kv: usize,
}

impl GgufCheckpoint {
    /// Opens a GGUF file and parses its header.
    /// If the file is one shard of a sharded model, opens all shards.
    pub fn open(path: &Path) -> Result<Self> {
        Self::from_shards(shards::open_shards(path, &LocalShards)?)
    }

    /// Opens a model on a hub. Fetches only the RoPE factors, and the beginning of each file with at least its header.
    /// A header includes the vocabulary, so it can be more than 10 MB long.
    ///
    /// `files` lists the names of the shards and their sizes in bytes. `read` fetches a range of a file.
    /// The returned checkpoint lists all tensors. Reading a tensor that was not fetched fails.
    pub fn open_remote(files: &[(String, u64)], read: &ReadRange) -> Result<Self> {
        let (first, _) = files.first().context("cannot open a GGUF model: the list of files is empty")?;
        Self::from_shards(shards::open_shards(Path::new(first), &RemoteShards { files, read })?)
    }

    fn from_shards(mut shards: Vec<GgufShard>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (number, shard) in shards.iter_mut().enumerate() {
            for (name, info) in std::mem::take(&mut shard.header.tensors) {
                let info = GgufTensorInfo { shard: number, ..info };
                if tensors.contains_key(&name) {
                    bail!("tensor {} is in two shards; the second is {}", excerpt(&name), shard.path.display());
                }
                tensors.insert(name, info);
            }
        }
        Ok(Self { shards, tensors })
    }

    /// Returns the metadata of the first shard, which applies to the whole model.
    pub fn metadata(&self) -> GgufMetadata<'_> {
        self.shards[0].metadata()
    }

    /// Returns the architecture of the model, such as `llama`. Keys such as `llama.block_count` start with this name.
    pub fn architecture(&self) -> Result<&str> {
        self.metadata().required("general.architecture", GgufMetadata::string)
    }

    /// Returns the number of layers. Fails if the number is missing or exceeds [`MAX_BLOCKS`].
    pub fn block_count(&self) -> Result<usize> {
        let key = format!("{}.block_count", self.architecture()?);
        let blocks = self.metadata().required(&key, GgufMetadata::u32)?;
        if blocks > MAX_BLOCKS {
            bail!("metadata key {}: {blocks} layers exceed the limit of {MAX_BLOCKS}", excerpt(&key));
        }
        Ok(blocks as usize)
    }

    /// Returns the numbers of heads. The number of KV heads defaults to the number of query heads.
    /// Fails if the number of query heads is missing, or if one of the numbers is 0.
    pub fn head_counts(&self) -> Result<HeadCounts> {
        let architecture = self.architecture()?;
        let metadata = self.metadata();
        let heads = metadata.required(&format!("{architecture}.attention.head_count"), GgufMetadata::u32)?;
        let kv_heads = metadata.u32(&format!("{architecture}.attention.head_count_kv"))?.unwrap_or(heads);
        if heads == 0 || kv_heads == 0 {
            let key = format!("{}.attention.head_count", excerpt(architecture));
            bail!("metadata keys {key} ({heads}) and head_count_kv ({kv_heads}) must not be 0");
        }
        Ok(HeadCounts { query: heads as usize, kv: kv_heads as usize })
    }

    /// Returns the quantization of the model, such as `Q4_K_M`.
    /// If the metadata does not specify a known quantization, returns the tensor type with the most bytes,
    /// or `None` if the model has no tensors.
    pub fn quantization(&self) -> Option<String> {
        let file_type = self.metadata().u32("general.file_type").ok().flatten();
        if let Some((_, name)) = file_type.and_then(|id| FILE_TYPES.iter().find(|(known, _)| *known == id)) {
            return Some(name.to_string());
        }
        let mut bytes: BTreeMap<GgmlType, usize> = BTreeMap::new();
        for info in self.tensors.values() {
            *bytes.entry(info.ggml_type).or_default() += info.bytes;
        }
        bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(ggml_type, _)| ggml_type.to_string())
    }

    pub fn info(&self, name: &str) -> Option<&GgufTensorInfo> {
        self.tensors.get(name)
    }

    /// Returns all tensors of the GGUF model, sorted by GGUF name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &GgufTensorInfo)> {
        self.tensors.iter().map(|(name, info)| (name.as_str(), info))
    }

    /// Returns the path of the first shard, which names the whole model in messages.
    pub fn path(&self) -> &Path {
        &self.shards[0].path
    }

    /// Returns the paths of the shards, in order.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    /// Returns the size of all tensors of all shards, without headers and padding, in bytes.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|info| info.bytes as u64).sum()
    }

    /// Returns the number of parameters without RoPE factors, which Hugging Face models keep in config.json.
    pub fn parameters(&self) -> u64 {
        let tensors = self.tensors.iter().filter(|(name, _)| !ROPE_FACTOR_TENSORS.contains(&name.as_str()));
        tensors.map(|(_, info)| info.elements() as u64).sum()
    }

    /// Returns a read request for a tensor, or `None` if the tensor is missing, empty or remote.
    pub fn read_request(&self, name: &str, residency: Residency) -> Option<ReadRequest> {
        let info = self.tensors.get(name).filter(|info| info.bytes > 0)?;
        let Some(StoredBytes::File(range)) = self.shards[info.shard].tensor(info) else { return None };
        Some(ReadRequest { name: name.to_string(), ranges: vec![range], residency })
    }

    /// Returns the entry of a tensor in the tensor table. Fails if the tensor is missing.
    pub(in crate::weights::gguf) fn required(&self, name: &str) -> Result<&GgufTensorInfo> {
        self.tensors.get(name).with_context(|| {
            let files: Vec<_> = self.files().map(|file| file.display().to_string()).collect();
            format!("tensor {} is missing from {}", excerpt(name), files.join(", "))
        })
    }

    /// Finds the table entry of a tensor and the location of its bytes, without reading them.
    /// Fails if the tensor is missing, or if it is remote and was not fetched.
    pub fn view(&self, name: &str) -> Result<GgufTensorView<'_>> {
        let info = self.required(name)?;
        let shard = &self.shards[info.shard];
        let bytes = shard.tensor(info).with_context(|| {
            format!("cannot read tensor {name}: the tensor was not fetched from {}", shard.path.display())
        })?;
        Ok(GgufTensorView { info, file: &shard.path, bytes })
    }

    /// Reads a tensor and converts its values to f32.
    pub fn values(&self, name: &str) -> Result<Vec<f32>> {
        let view = self.view(name)?;
        let bytes = view.bytes.read().with_context(|| format!("cannot load tensor {name}"))?;
        let mut values = vec![0.0; view.info.elements()];
        let dequantized = view.info.ggml_type.dequantize(&bytes, &mut values);
        dequantized.with_context(|| format!("tensor {name} in {}", view.file.display()))?;
        Ok(values)
    }
}
