//! safetensors files of a snapshot: one `model.safetensors`, or the shards of an index. They are mapped into memory, from
//! where a CPU takes them; for a GPU they are read ([`super::read_ahead`]).
//!
//! The safetensors crate checks the header (length, overlaps, holes, shape × dtype against offsets, end of file); here
//! the index is checked: every tensor lies in the shard that the index names. `snapshot` checks the names of the shards.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use candle_core::DType;
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use super::checkpoint::TensorInfo;
use super::compressed::{CompressedConfig, Scheme};
use super::read_ahead::{Extent, Part, Retention, Source};
use crate::snapshot::{self, safetensors::ShardIndex};

/// The safetensors files of a snapshot: which tensors there are, and their bytes.
pub struct SafetensorsCheckpoint {
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, Placed>,
    /// How config.json says that linear layers are quantized.
    compressed: Option<CompressedConfig>,
}

struct MappedFile {
    source: Arc<Source>,
    map: Mmap,
}

/// A tensor and where it lies.
struct Placed {
    info: TensorInfo,
    file: usize,
    /// In the file.
    start: usize,
}

/// One tensor's bytes where they lie.
pub struct View<'c> {
    pub info: &'c TensorInfo,
    pub file: &'c Path,
    pub bytes: &'c [u8],
}

impl SafetensorsCheckpoint {
    /// Maps the files and reads their headers; no tensor is touched.
    pub fn open(dir: &Path) -> Result<Self> {
        let index = ShardIndex::read(dir)?;
        let checkpoint = Self::from_files(snapshot::safetensors::files(dir, index.as_ref())?)?;
        for (tensor, shard) in index.iter().flat_map(|index| &index.weight_map) {
            let found = checkpoint.tensors.get(tensor).map(|placed| &checkpoint.files[placed.file].source.path);
            match found {
                Some(path) if path.file_name().is_some_and(|name| name == shard.as_str()) => {}
                Some(path) => bail!("tensor {tensor}: the index places it in {shard}, it lies in {}", path.display()),
                None => bail!("tensor {tensor}: the index places it in {shard}, it is not there"),
            }
        }
        checkpoint.with_config(dir)
    }

    /// Knows what config.json says of quantization, if the snapshot has one.
    fn with_config(mut self, dir: &Path) -> Result<Self> {
        let Ok(text) = std::fs::read(dir.join("config.json")) else { return Ok(self) };
        if let Ok(json) = serde_json::from_slice(&text) {
            self.compressed = CompressedConfig::read(&json)?;
        }
        self.unpack_names()?;
        Ok(self)
    }

    /// Words of four codes are seen as what they stand for, `weight` in I8. Bytes stay as they are.
    fn unpack_names(&mut self) -> Result<()> {
        let packed = |name: &String| {
            let module = name.strip_suffix(".weight_packed")?.to_string();
            self.scheme(&module)?.packed.then_some(module)
        };
        for module in self.tensors.keys().filter_map(packed).collect::<Vec<_>>() {
            let name = format!("{module}.weight_packed");
            let shape = self.view(&format!("{module}.weight_shape"))?;
            let said: Vec<u64> = shape
                .bytes
                .chunks_exact(8)
                .map(|size| u64::from_le_bytes(size.try_into().unwrap_or_default()))
                .collect();
            let Some(mut placed) = self.tensors.remove(&name) else { continue };
            let &[rows, words] = placed.info.shape.as_slice() else { bail!("tensor {name} has no rows") };
            let columns = words.saturating_mul(4);
            if placed.info.dtype != Dtype::I32 || said != [rows as u64, columns as u64] {
                bail!("tensor {name}: {:?} {:?} is not what packs {said:?}", placed.info.dtype, placed.info.shape);
            }
            placed.info = TensorInfo::new(Dtype::I8, vec![rows, columns], placed.info.bytes());
            self.tensors.remove(&format!("{module}.weight_shape"));
            if self.tensors.insert(format!("{module}.weight"), placed).is_some() {
                bail!("tensor {module}.weight is there twice, packed and not");
            }
        }
        Ok(())
    }

    /// How a linear layer is quantized, if it is.
    pub fn scheme(&self, module: &str) -> Option<Scheme> {
        self.compressed.as_ref()?.scheme(module)
    }

    /// Bytes of a tensor that stays as it is stored, once it is loaded: with its scales, if it has some, which are then
    /// nothing by themselves. None for what becomes floats.
    pub fn kept_bytes(&self, name: &str, info: &TensorInfo) -> Option<u64> {
        let quantized = |name: &str| {
            let scheme = self.scheme(module(name))?;
            self.info(&format!("{name}_scale")).map(|_| scheme.format.kept())
        };
        if name.strip_suffix("_scale").and_then(quantized).is_some() {
            return Some(0);
        }
        match (quantized(name), info.shape.as_slice()) {
            (Some(format), &[rows, columns]) => Some(format.bytes(rows as u64, columns as u64)),
            _ => (!info.is_float()).then_some(info.bytes() as u64),
        }
    }

    fn from_files(paths: Vec<PathBuf>) -> Result<Self> {
        let mut files = Vec::new();
        let mut tensors = BTreeMap::new();
        for path in paths {
            let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
            // SAFETY: the file is only read. Another process that truncates it while it is mapped ends this one, as with
            // every mapped file; snapshots are written once and renamed into place.
            let map = unsafe { Mmap::map(&file) }.with_context(|| format!("cannot map {}", path.display()))?;
            tracing::info!(path = %path.display(), bytes = map.len(), "opened");
            let (header, metadata) = SafeTensors::read_metadata(&map)
                .map_err(|error| anyhow!("{} is no valid safetensors file: {error}", path.display()))?;
            let data = header + 8;
            for (name, info) in metadata.tensors() {
                let (start, end) = (data + info.data_offsets.0, data + info.data_offsets.1);
                let info = TensorInfo::new(info.dtype, info.shape.clone(), end - start);
                if tensors.insert(name.clone(), Placed { info, file: files.len(), start }).is_some() {
                    bail!("tensor {name} is in two shards, the second is {}", path.display());
                }
            }
            files.push(MappedFile { source: Arc::new(Source { path, file }), map });
        }
        Ok(Self { files, tensors, compressed: None })
    }

    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|placed| &placed.info)
    }

    /// All tensors by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, placed)| (name.as_str(), &placed.info))
    }

    /// Every tensor that a model of this compute dtype can ask for, about in the order in which it asks. Those that layers
    /// stack are one, under a name of their own: stacked on the device they would need their memory twice.
    pub fn extents(&self, dtype: DType) -> Vec<Extent> {
        let mut usable: Vec<_> = self.tensors.iter().filter(|(_, placed)| placed.info.bytes() > 0).collect();
        usable.sort_by_key(|(name, _)| loading_order(name));
        let part = |placed: &Placed| Part {
            source: self.files[placed.file].source.clone(),
            start: placed.start as u64,
            bytes: placed.info.bytes(),
        };
        let extent = |(name, placed): (&String, &Placed)| {
            let stored = placed.info.candle_dtype()?;
            let retention =
                if stored == dtype || stored == DType::U8 { Retention::Permanent } else { Retention::Temporary };
            match self.stack(name, dtype) {
                Some(names) if names[0] != *name => None,
                Some(names) => {
                    let parts = names.iter().map(|name| part(&self.tensors[name])).collect();
                    Some(Extent { name: stacked_name(&names), parts, retention })
                }
                None => Some(Extent { name: name.clone(), parts: vec![part(placed)], retention }),
            }
        };
        usable.into_iter().filter_map(extent).collect()
    }

    /// The names of the stack that a tensor belongs to, if all of it is there, as it will be used.
    fn stack(&self, name: &str, dtype: DType) -> Option<Vec<String>> {
        let prefix = STACKED.iter().find_map(|part| name.strip_suffix(part))?;
        let names: Vec<String> = STACKED.iter().map(|part| format!("{prefix}{part}")).collect();
        let usable = |placed: &Placed| placed.info.candle_dtype() == Some(dtype) && placed.info.bytes() > 0;
        names.iter().all(|name| self.tensors.get(name).is_some_and(usable)).then_some(names)
    }

    /// A tensor's bytes.
    pub fn view(&self, name: &str) -> Result<View<'_>> {
        let Some(Placed { info, file, start }) = self.tensors.get(name) else {
            let near: Vec<_> = self.files.iter().map(|file| file.source.path.display().to_string()).collect();
            bail!("tensor {name} is missing from {}", near.join(", "));
        };
        let file = &self.files[*file];
        Ok(View { info, file: &file.source.path, bytes: &file.map[*start..start + info.bytes()] })
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Segment<'n> {
    Number(u64),
    Word(&'n str),
}

/// What attention multiplies with at once.
const STACKED: [&str; 3] = ["q_proj.weight", "k_proj.weight", "v_proj.weight"];

/// What several tensors are called as one.
pub fn stacked_name(names: &[String]) -> String {
    names.join(" + ")
}

/// The embedding, the layers by number (files have layer 10 before layer 2), the last norm, and then the head.
fn loading_order(name: &str) -> (bool, Vec<Segment<'_>>) {
    let segment = |part| str::parse(part).map_or(Segment::Word(part), Segment::Number);
    (name.starts_with("lm_head."), name.split('.').map(segment).collect())
}

/// The layer that a weight is of.
pub fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}
