//! GGUF files, versions 2 and 3, little-endian: metadata and tensors in one file or in the parts of a split one,
//! mapped into memory.
//!
//! Source: the format's definition (ggml-org/ggml, `docs/gguf.md`). A parser of our own, since candle's panics on an
//! alignment of 0 and believes what a file says of its counts. Here nothing is believed before it is checked against the
//! file's size, so a hostile file is an error; strings and arrays stay in the map until they are asked for. What is built
//! of a head is bounded by the limits below: some 60 bytes for a key, 200 for a tensor.

mod bytes;
mod config;
mod experts;
mod head;
mod header;
mod metadata;
mod model;
mod names;
mod split;
mod vocabulary;

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use memmap2::Mmap;

use super::ggml::GgmlType;
use super::read_ahead::{self, Extent, Retention, Source};

use config::SAID_BY_TENSORS;
pub use head::MAX_HEAD_BYTES;
pub use header::{Header, TensorInfo};
pub use metadata::{Array, Metadata, Value, ValueType};
pub use model::GgufModel;
pub use vocabulary::{chat_template, vocabulary};

/// Metadata keys that are read; real files have some fifty.
pub const MAX_KEYS: u64 = 1 << 16;
/// Tensors of a file that are read; the largest models, one tensor for each expert, have some 50,000.
pub const MAX_TENSORS: u64 = 1 << 17;
/// By the format's definition.
pub const MAX_KEY_BYTES: usize = (1 << 16) - 1;
/// By the format's definition.
pub const MAX_NAME_BYTES: usize = 64;
/// By the format's definition.
pub const MAX_DIMENSIONS: u32 = 4;
/// Layers that a model may say it has; the deepest have some 130.
pub const MAX_BLOCKS: u32 = 1024;

/// `general.file_type`, by llama.cpp's numbers (`llama_ftype`).
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

/// The checkpoint of a GGUF model: its metadata, which tensors there are, and their bytes.
pub struct GgufCheckpoint {
    parts: Vec<Part>,
    tensors: BTreeMap<String, TensorInfo>,
}

struct Part {
    path: PathBuf,
    header: Header,
    contents: Contents,
}

/// What there is of a file.
enum Contents {
    /// All of it.
    Mapped { source: Arc<Source>, map: Mmap },
    /// Of one that lies elsewhere its head, and some small tensors by where they begin.
    Head { head: Vec<u8>, tensors: BTreeMap<usize, Vec<u8>> },
}

/// One tensor's bytes where they lie.
pub struct View<'c> {
    pub info: &'c TensorInfo,
    pub file: &'c Path,
    pub bytes: &'c [u8],
}

impl Part {
    fn open(path: PathBuf) -> Result<Self> {
        let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        // SAFETY: the file is only read. Another process that truncates it while it is mapped ends this one, as with
        // every mapped file; what it says is checked again wherever it is read again.
        let map = unsafe { Mmap::map(&file) }.with_context(|| format!("cannot map {}", path.display()))?;
        tracing::info!(path = %path.display(), bytes = map.len(), "opened");
        let header = Header::parse(&map).with_context(|| format!("broken GGUF file {}", path.display()))?;
        let source = Arc::new(Source { path: path.clone(), file });
        Ok(Self { path, header, contents: Contents::Mapped { source, map } })
    }

    fn metadata(&self) -> Metadata<'_> {
        match &self.contents {
            Contents::Mapped { map, .. } => self.header.metadata(map),
            Contents::Head { head, .. } => self.header.metadata(head),
        }
    }

    /// Bytes of the file, if they are here.
    fn bytes(&self, range: Range<usize>) -> Option<&[u8]> {
        match &self.contents {
            Contents::Mapped { map, .. } => map.get(range),
            Contents::Head { head, tensors } => {
                head.get(range.clone()).or_else(|| tensors.get(&range.start)?.get(..range.len()))
            }
        }
    }
}

/// Gives some bytes of the file that is named; fewer only where it ends.
pub type Read<'r> = dyn Fn(&str, Range<u64>) -> Result<Vec<u8>> + 'r;

/// Where the parts of a model are found.
trait Files {
    fn has(&self, path: &Path) -> bool;
    fn open(&self, path: &Path) -> Result<Part>;
}

/// On this machine's disk.
struct OnDisk;

impl Files for OnDisk {
    fn has(&self, path: &Path) -> bool {
        path.exists()
    }

    fn open(&self, path: &Path) -> Result<Part> {
        Part::open(path.to_path_buf())
    }
}

impl GgufCheckpoint {
    /// Maps a file, or all parts of a model if it is one of them, and reads what they say of themselves; no tensor is
    /// touched.
    pub fn open(path: &Path) -> Result<Self> {
        Self::from_parts(split::open_parts(path, &OnDisk)?)
    }

    /// The same of a model that lies elsewhere, of which `read` reads heads alone: some megabytes of the file that holds
    /// the vocabulary. `files` are its parts with their lengths. Tensors are known then, and not there to be viewed.
    pub fn open_remote(files: &[(String, u64)], read: &Read) -> Result<Self> {
        let (first, _) = files.first().context("no GGUF file is named")?;
        Self::from_parts(split::open_parts(Path::new(first), &head::Elsewhere { files, read })?)
    }

    fn from_parts(mut parts: Vec<Part>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (number, part) in parts.iter_mut().enumerate() {
            for (name, info) in std::mem::take(&mut part.header.tensors) {
                let info = TensorInfo { part: number, ..info };
                if tensors.contains_key(&name) {
                    bail!("tensor {name} is in two parts, the second is {}", part.path.display());
                }
                tensors.insert(name, info);
            }
        }
        Ok(Self { parts, tensors })
    }

    /// Of the first part, which speaks for all.
    pub fn metadata(&self) -> Metadata<'_> {
        self.parts[0].metadata()
    }

    /// The family's name, such as `llama`: what most keys begin with.
    pub fn architecture(&self) -> Result<&str> {
        self.metadata().required("general.architecture", Metadata::string)
    }

    /// Number of layers.
    pub fn block_count(&self) -> Result<usize> {
        let key = format!("{}.block_count", self.architecture()?);
        let blocks = self.metadata().required(&key, Metadata::u32)?;
        if blocks > MAX_BLOCKS {
            bail!("metadata key {key}: {blocks} layers are more than the {MAX_BLOCKS} that are read");
        }
        Ok(blocks as usize)
    }

    /// Query heads, and key/value heads: as many if nothing else is said.
    pub fn head_counts(&self) -> Result<(usize, usize)> {
        let (architecture, metadata) = (self.architecture()?, self.metadata());
        let heads = metadata.required(&format!("{architecture}.attention.head_count"), Metadata::u32)?;
        let kv_heads = metadata.u32(&format!("{architecture}.attention.head_count_kv"))?.unwrap_or(heads);
        if heads == 0 || kv_heads == 0 {
            bail!("metadata key {architecture}.attention.head_count is {heads}, head_count_kv {kv_heads}");
        }
        Ok((heads as usize, kv_heads as usize))
    }

    /// How the file calls its quantization, such as `Q4_K_M`; else the type that most bytes are in.
    pub fn quantization(&self) -> Option<String> {
        let said = self.metadata().u32("general.file_type").ok().flatten();
        if let Some((_, name)) = said.and_then(|id| FILE_TYPES.iter().find(|(known, _)| *known == id)) {
            return Some(name.to_string());
        }
        let mut bytes: BTreeMap<GgmlType, usize> = BTreeMap::new();
        for info in self.tensors.values() {
            *bytes.entry(info.ggml_type).or_default() += info.bytes;
        }
        bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(ggml_type, _)| ggml_type.to_string())
    }

    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// All tensors by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, info)| (name.as_str(), info))
    }

    /// The first of its files.
    pub fn path(&self) -> &Path {
        &self.parts[0].path
    }

    /// The files, in the order of their parts.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().map(|part| part.path.as_path())
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|info| info.bytes as u64).sum()
    }

    /// Number of parameters. What stands in a config.json elsewhere is none.
    pub fn parameters(&self) -> u64 {
        let tensors = self.tensors.iter().filter(|(name, _)| !SAID_BY_TENSORS.contains(&name.as_str()));
        tensors.map(|(_, info)| info.elements() as u64).sum()
    }

    /// What a reader needs to know of a tensor; none if it is not there or empty, or lies elsewhere.
    pub fn extent(&self, name: &str, retention: Retention) -> Option<Extent> {
        let info = self.tensors.get(name).filter(|info| info.bytes > 0)?;
        let Contents::Mapped { source, .. } = &self.parts[info.part].contents else { return None };
        let parts = vec![read_ahead::Part { source: source.clone(), start: info.start as u64, bytes: info.bytes }];
        Some(Extent { name: name.to_string(), parts, retention })
    }

    /// A tensor that must be there.
    pub(super) fn required(&self, name: &str) -> Result<&TensorInfo> {
        self.tensors.get(name).with_context(|| {
            let files: Vec<_> = self.files().map(|file| file.display().to_string()).collect();
            format!("tensor {name} is missing from {}", files.join(", "))
        })
    }

    /// A tensor's bytes.
    pub fn view(&self, name: &str) -> Result<View<'_>> {
        let info = self.required(name)?;
        let part = &self.parts[info.part];
        // The header was checked against the file's length.
        let bytes = part.bytes(info.range());
        let bytes =
            bytes.with_context(|| format!("tensor {name}: of {} the head alone is here", part.path.display()))?;
        Ok(View { info, file: &part.path, bytes })
    }

    /// A tensor's values, whatever its type.
    pub fn values(&self, name: &str) -> Result<Vec<f32>> {
        let view = self.view(name)?;
        let mut values = vec![0.0; view.info.elements()];
        let dequantized = view.info.ggml_type.dequantize(view.bytes, &mut values);
        dequantized.with_context(|| format!("tensor {name} in {}", view.file.display()))?;
        Ok(values)
    }
}
