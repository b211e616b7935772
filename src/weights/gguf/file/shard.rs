//! One file of a GGUF model. A model consists of one file or several shards.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};

use super::cursor::NeedsMoreBytes;
use super::header::{GgufHeader, GgufTensorInfo};
use super::metadata::GgufMetadata;
use crate::weights::gguf::limits::MAX_HEADER_BYTES;
use crate::weights::reading::{ByteRange, StoredBytes, WeightsFile};

/// The sizes in bytes of the file beginnings that [`read_header`] tries to parse, smallest first.
/// [`read_header`] skips sizes that are known to be too small, and stops when the whole header has been read.
const READ_SIZES: [u64; 4] = [1 << 20, 4 << 20, 16 << 20, MAX_HEADER_BYTES];

/// One file of a GGUF model, with its parsed header.
pub struct GgufShard {
    pub path: PathBuf,
    pub header: GgufHeader,
    /// The beginning of the file, which contains the header.
    pub head: Vec<u8>,
    pub data: TensorData,
}

/// The location of the tensor data of a GGUF file.
pub enum TensorData {
    Local(Arc<WeightsFile>),
    /// The fetched RoPE factors of a remote file, keyed by file offset. RoPE factors in `head` are not included.
    Remote(BTreeMap<usize, Vec<u8>>),
}

impl GgufShard {
    /// Opens a GGUF file and parses its header.
    pub fn open(path: PathBuf) -> Result<Self> {
        let source = WeightsFile::open(&path)?;
        let read = |range: Range<u64>| source.read_to_vec(range.start, (range.end - range.start) as usize);
        let (header, mut head) = read_header(&path.display().to_string(), source.bytes(), &read)?;
        // Discard the tensor data that was read together with the header.
        let data = header.tensors.values().map(|info| info.range().start).min();
        head.truncate(data.unwrap_or(head.len()));
        head.shrink_to_fit();
        Ok(Self { path, header, head, data: TensorData::Local(Arc::new(source)) })
    }

    pub fn metadata(&self) -> GgufMetadata<'_> {
        self.header.metadata(&self.head)
    }

    /// Returns the location of a tensor's bytes, or `None` if the file is remote and the tensor was not fetched.
    pub fn tensor(&self, info: &GgufTensorInfo) -> Option<StoredBytes<'_>> {
        let range = info.range();
        match &self.data {
            TensorData::Local(source) => {
                let (source, start) = (source.clone(), range.start as u64);
                Some(StoredBytes::File(ByteRange { source, start, bytes: info.bytes }))
            }
            TensorData::Remote(tensors) => {
                let fetched = self.head.get(range.clone());
                fetched.or_else(|| tensors.get(&range.start)?.get(..range.len())).map(StoredBytes::Memory)
            }
        }
    }
}

/// Reads and parses the header of a file with `file_bytes` bytes. Returns the header and all bytes that were read.
///
/// `read` returns a range of the file. This function calls `read` up to four times, until the header is complete.
/// Fails if the header is invalid or larger than [`MAX_HEADER_BYTES`].
pub fn read_header(
    name: &str,
    file_bytes: u64,
    read: &dyn Fn(Range<u64>) -> Result<Vec<u8>>,
) -> Result<(GgufHeader, Vec<u8>)> {
    let (mut head, mut needed) = (Vec::new(), 0);
    for size in READ_SIZES {
        if size < needed {
            continue;
        }
        head.extend(read(head.len() as u64..size.min(file_bytes))?);
        match GgufHeader::parse_head(&head, file_bytes) {
            Ok(header) => return Ok((header, head)),
            Err(error) => match error.downcast_ref() {
                Some(NeedsMoreBytes(bytes)) => needed = *bytes,
                None => return Err(error).with_context(|| format!("cannot read the GGUF header of {name}")),
            },
        }
    }
    bail!("cannot read {name}: its header is larger than {} MiB", MAX_HEADER_BYTES >> 20)
}

/// Finds and opens the shards of a GGUF model, on the local disk or on a hub.
pub trait ShardOpener {
    fn exists(&self, path: &Path) -> bool;
    fn open(&self, path: &Path) -> Result<GgufShard>;
}

/// Opens the shards of a GGUF model on the local disk.
pub struct LocalShards;

impl ShardOpener for LocalShards {
    fn exists(&self, path: &Path) -> bool {
        path.exists()
    }

    fn open(&self, path: &Path) -> Result<GgufShard> {
        GgufShard::open(path.to_path_buf())
    }
}
