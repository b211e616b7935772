//! Opens the safetensors files of a model: a single `model.safetensors`, or the shards that the shard index lists.
//!
//! The `safetensors` crate validates each header: it checks the tensor sizes and rejects gaps and overlaps.
//! This module checks that the tensors fill the file, and that every tensor in the index is in the shard listed there.
//! The `snapshot` module checks the names of the shards.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use candle_core::DType;
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::header::{MAX_HEADER_BYTES, MAX_HEADER_VALUES};
use crate::files;
use crate::snapshot::{self, safetensors::ShardIndex};
use crate::text::{counted, excerpt};
use crate::weights::compressed::{CompressedConfig, Scheme};
use crate::weights::reading::{ByteRange, ReadRequest, Residency, StoredBytes, WeightsFile};
use crate::weights::tensor_info::TensorInfo;

/// The open safetensors files of a model.
pub struct SafetensorsCheckpoint {
    files: Vec<Arc<WeightsFile>>,
    tensors: BTreeMap<String, StoredTensor>,
    /// The `quantization_config` of config.json. `None` for a model that is unquantized or uses MXFP4.
    compressed: Option<CompressedConfig>,
}

/// The metadata of a tensor and the location of its bytes.
struct StoredTensor {
    info: TensorInfo,
    /// The index of the tensor's file in `SafetensorsCheckpoint::files`.
    file: usize,
    /// The offset of the tensor in its file, in bytes.
    start: usize,
}

/// The metadata of one tensor and the location of its bytes.
pub struct TensorView<'c> {
    pub info: &'c TensorInfo,
    pub file: &'c Path,
    pub bytes: StoredBytes<'static>,
}

impl SafetensorsCheckpoint {
    /// Opens the safetensors files of a directory and reads their headers, the shard index and config.json.
    /// Does not read tensors, except the shapes of packed weights.
    pub fn open(dir: &Path) -> Result<Self> {
        let index = ShardIndex::read(dir)?;
        let checkpoint = Self::from_files(snapshot::safetensors::files(dir, index.as_ref())?)?;
        for (tensor, shard) in index.iter().flat_map(|index| &index.weight_map) {
            let found = checkpoint.tensors.get(tensor).map(|stored| &checkpoint.files[stored.file].path);
            match found {
                Some(path) if path.file_name().is_some_and(|name| name == shard.as_str()) => {}
                Some(path) => {
                    let tensor = excerpt(tensor);
                    bail!(
                        "tensor {tensor} is in {}, but the index lists it in shard {}",
                        path.display(),
                        excerpt(shard)
                    )
                }
                None => {
                    let (tensor, shard) = (excerpt(tensor), excerpt(shard));
                    bail!("tensor {tensor} is missing from shard {shard}, where the index lists it")
                }
            }
        }
        checkpoint.with_config(dir)
    }

    /// Reads `quantization_config` if config.json has this section. Then lists packed weights as I8 matrices.
    fn with_config(mut self, dir: &Path) -> Result<Self> {
        // Ignore a broken config.json here. inferno reports the error when it reads the model's config.
        if let Ok(json) = files::read_json(&dir.join("config.json"), files::MAX_CONFIG_BYTES) {
            self.compressed = CompressedConfig::read(&json)?;
        }
        self.list_packed_as_weights()?;
        Ok(self)
    }

    /// Lists the `weight_packed` of each packed layer as `weight`, with the dtype I8 instead of I32.
    /// Each I32 holds four 8-bit codes. Fails if `weight_shape` is missing or is not the shape of the unpacked matrix,
    /// or if the layer also has an unpacked `weight`.
    fn list_packed_as_weights(&mut self) -> Result<()> {
        let packed = |name: &String| {
            let module = name.strip_suffix(".weight_packed")?.to_string();
            self.scheme(&module)?.is_packed.then_some(module)
        };
        for module in self.tensors.keys().filter_map(packed).collect::<Vec<_>>() {
            let name = format!("{module}.weight_packed");
            let shape = self.view(&format!("{module}.weight_shape"))?;
            if shape.info.bytes() != 16 {
                bail!(
                    "tensor {module}.weight_shape: expected 16 bytes (two I64 values), found {} bytes (shape {:?})",
                    shape.info.bytes(),
                    shape.info.shape
                );
            }
            let shape = shape.bytes.read()?;
            let unpacked_shape: Vec<u64> =
                shape.chunks_exact(8).map(|size| u64::from_le_bytes(size.try_into().unwrap_or_default())).collect();
            let Some(mut stored) = self.tensors.remove(&name) else { continue };
            let &[rows, words] = stored.info.shape.as_slice() else {
                bail!("tensor {name}: expected two dimensions, found shape {:?}", stored.info.shape)
            };
            let columns = words.saturating_mul(4);
            if stored.info.dtype != Dtype::I32 || unpacked_shape != [rows as u64, columns as u64] {
                bail!(
                    "tensor {name}: expected I32 words that unpack to shape {unpacked_shape:?}, \
                     found {:?} words of shape {:?}",
                    stored.info.dtype,
                    stored.info.shape
                );
            }
            stored.info = TensorInfo::new(Dtype::I8, vec![rows, columns], stored.info.bytes());
            self.tensors.remove(&format!("{module}.weight_shape"));
            if self.tensors.insert(format!("{module}.weight"), stored).is_some() {
                bail!("tensor {module}.weight is stored twice, packed and unpacked");
            }
        }
        Ok(())
    }

    /// Returns the quantization scheme of a linear layer, or `None` if the layer is unquantized.
    pub fn scheme(&self, module: &str) -> Option<Scheme> {
        self.compressed.as_ref()?.scheme(module)
    }

    /// Returns the size in memory of a tensor that stays packed, quantized or integer when it is loaded, in bytes.
    /// Returns `None` for a tensor that is loaded as floats or quantized only during loading.
    /// The size of a quantized matrix includes its scales, so a scale tensor counts as 0 bytes.
    pub fn packed_bytes(&self, name: &str, info: &TensorInfo) -> Option<u64> {
        let quantized = |name: &str| {
            let scheme = self.scheme(module(name))?;
            self.info(&format!("{name}_scale")).map(|_| scheme.code_type.weight_format())
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
        let mut header_bytes = 0;
        for path in paths {
            let source = WeightsFile::open(&path)?;
            let (data, metadata) =
                read_header(&source).with_context(|| format!("{} is not a valid safetensors file", path.display()))?;
            header_bytes += data as u64;
            ensure!(
                header_bytes <= MAX_HEADER_BYTES,
                "cannot open the model: the headers of its shards have more than {MAX_HEADER_BYTES} bytes in total"
            );
            for (name, info) in metadata.tensors() {
                let (start, end) = (data + info.data_offsets.0, data + info.data_offsets.1);
                let info = TensorInfo::new(info.dtype, info.shape.clone(), end - start);
                if tensors.insert(name.clone(), StoredTensor { info, file: files.len(), start }).is_some() {
                    bail!("tensor {} is in two shards; the second is {}", excerpt(&name), path.display());
                }
            }
            files.push(Arc::new(source));
        }
        Ok(Self { files, tensors, compressed: None })
    }

    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|stored| &stored.info)
    }

    /// Returns all tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, stored)| (name.as_str(), &stored.info))
    }

    /// Returns requests for all F32, F16, BF16 and U8 tensors that are not empty, roughly in loading order.
    /// `dtype` is the compute dtype.
    ///
    /// The q, k and v projections of a layer form one request if all three have the compute dtype.
    /// Reading q, k and v separately and concatenating them on the device would temporarily take twice their memory.
    pub fn read_requests(&self, dtype: DType) -> Vec<ReadRequest> {
        let mut usable: Vec<_> = self.tensors.iter().filter(|(_, stored)| stored.info.bytes() > 0).collect();
        usable.sort_by_key(|(name, _)| loading_order(name));
        let request = |(name, stored): (&String, &StoredTensor)| {
            let stored_dtype = stored.info.candle_dtype()?;
            let is_final = stored_dtype == dtype || stored_dtype == DType::U8;
            let residency = if is_final { Residency::Permanent } else { Residency::Temporary };
            match self.stack(name, dtype) {
                Some(names) if names[0] != *name => None,
                Some(names) => {
                    let ranges = names.iter().map(|name| self.range(&self.tensors[name])).collect();
                    Some(ReadRequest { name: stacked_name(&names), ranges, residency })
                }
                None => Some(ReadRequest { name: name.clone(), ranges: vec![self.range(stored)], residency }),
            }
        };
        usable.into_iter().filter_map(request).collect()
    }

    /// For a q, k or v projection, returns the names of the q, k and v projections of its layer.
    /// Returns `None` for other tensors, or if a projection is missing, empty or not in the compute dtype.
    fn stack(&self, name: &str, dtype: DType) -> Option<Vec<String>> {
        let prefix = STACKED.iter().find_map(|part| name.strip_suffix(part))?;
        let names: Vec<String> = STACKED.iter().map(|part| format!("{prefix}{part}")).collect();
        let is_usable = |stored: &StoredTensor| stored.info.candle_dtype() == Some(dtype) && stored.info.bytes() > 0;
        names.iter().all(|name| self.tensors.get(name).is_some_and(is_usable)).then_some(names)
    }

    fn range(&self, stored: &StoredTensor) -> ByteRange {
        let source = self.files[stored.file].clone();
        ByteRange { source, start: stored.start as u64, bytes: stored.info.bytes() }
    }

    /// Finds the metadata of a tensor and the location of its bytes, without reading them.
    /// Fails if the tensor is missing.
    pub fn view(&self, name: &str) -> Result<TensorView<'_>> {
        let Some(stored) = self.tensors.get(name) else {
            let files: Vec<_> = self.files.iter().map(|file| file.path.display().to_string()).collect();
            bail!("tensor {name} is missing from {}", files.join(", "));
        };
        let bytes = StoredBytes::File(self.range(stored));
        Ok(TensorView { info: &stored.info, file: &self.files[stored.file].path, bytes })
    }
}

/// Reads and validates the header of a file. Returns the offset of the data section, in bytes, and the header.
fn read_header(source: &WeightsFile) -> Result<(usize, Metadata)> {
    ensure!(source.bytes() >= 8, "the file has only {}", counted(source.bytes(), "byte"));
    let mut length = [0; 8];
    source.read(&mut length, 0)?;
    let length = u64::from_le_bytes(length);
    let data_bytes = (source.bytes() - 8).checked_sub(length).filter(|_| length <= MAX_HEADER_BYTES);
    let data_bytes = data_bytes.with_context(|| {
        format!(
            "the header is too long: {length} bytes in a file of {} bytes (limit: {MAX_HEADER_BYTES} bytes)",
            source.bytes()
        )
    })?;
    let metadata: Metadata = files::parse_json_up_to(MAX_HEADER_VALUES, &source.read_to_vec(8, length as usize)?)?;
    let tensor_bytes = metadata.data_len() as u64;
    ensure!(
        tensor_bytes == data_bytes,
        "the tensors have {}, but the file has {} of data",
        counted(tensor_bytes, "byte"),
        counted(data_bytes, "byte")
    );
    Ok((8 + length as usize, metadata))
}

/// A dot-separated segment of a tensor name. Numbers sort by value and come before words.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Segment<'n> {
    Number(u64),
    Word(&'n str),
}

/// The projections that attention concatenates in this order, so that one matmul computes q, k and v.
const STACKED: [&str; 3] = ["q_proj.weight", "k_proj.weight", "v_proj.weight"];

/// Returns the name of the read request for several stacked tensors: the tensor names joined by ` + `.
pub fn stacked_name(names: &[String]) -> String {
    names.join(" + ")
}

/// Returns a key that sorts tensors roughly in loading order.
/// For Llama, the order is: embedding, layers by number, final norm, output head. Within a layer, it is alphabetical.
/// Sorting by name alone would place layer 10 before layer 2.
fn loading_order(name: &str) -> (bool, Vec<Segment<'_>>) {
    let segment = |part| str::parse(part).map_or(Segment::Word(part), Segment::Number);
    (name.starts_with("lm_head."), name.split('.').map(segment).collect())
}

/// Returns the name of the module that a weight belongs to: the weight's name without `.weight`.
pub fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}
