//! GGUF files on a hub. Only the beginning of each file, with its header, and the RoPE factors are fetched.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::shard::{GgufShard, ShardOpener, TensorData, read_header};
use crate::text::counted;
use crate::weights::gguf::tensor_names::ROPE_FACTOR_TENSORS;

/// The maximum size of a RoPE factor tensor to fetch, in bytes.
/// For comparison: the F32 factors of a model with 128 rotated elements per head take 256 bytes.
const MAX_TENSOR_BYTES: usize = 64 << 10;

/// A function that fetches a byte range of the named file. If the file ends within the range, the result is shorter.
pub type ReadRange<'r> = dyn Fn(&str, Range<u64>) -> Result<Vec<u8>> + 'r;

/// Opens the shards of a GGUF model on a hub.
pub struct RemoteShards<'r> {
    /// The name of each file, and its size in bytes.
    pub files: &'r [(String, u64)],
    pub read: &'r ReadRange<'r>,
}

impl RemoteShards<'_> {
    fn find(&self, path: &Path) -> Option<&(String, u64)> {
        self.files.iter().find(|(name, _)| Path::new(name) == path)
    }

    fn read(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let bytes = (self.read)(name, range.clone())?;
        if bytes.len() as u64 != range.end - range.start {
            let received = counted(bytes.len(), "byte");
            bail!("{name} ends early: received {received} for the range {}..{}", range.start, range.end);
        }
        Ok(bytes)
    }
}

impl ShardOpener for RemoteShards<'_> {
    fn exists(&self, path: &Path) -> bool {
        self.find(path).is_some()
    }

    fn open(&self, path: &Path) -> Result<GgufShard> {
        let (name, file_bytes) = self.find(path).with_context(|| format!("cannot find {}", path.display()))?;
        let (header, head) = read_header(name, *file_bytes, &|range| self.read(name, range))?;
        let mut tensors = BTreeMap::new();
        for info in ROPE_FACTOR_TENSORS.iter().filter_map(|name| header.tensors.get(*name)) {
            let Range { start, end } = info.range();
            if end > head.len() && (1..=MAX_TENSOR_BYTES).contains(&info.bytes) {
                tensors.insert(start, self.read(name, start as u64..end as u64)?);
            }
        }
        Ok(GgufShard { path: path.to_path_buf(), header, head, data: TensorData::Remote(tensors) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::cursor::NeedsMoreBytes;
    use super::super::header::GgufHeader;

    #[test]
    fn every_prefix_parses_or_reports_how_many_bytes_are_needed() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/gguf/tiny.gguf");
        let file = std::fs::read(path).unwrap();
        let whole = GgufHeader::parse(&file).unwrap();
        let mut needed = 0;
        for length in 0..file.len() {
            match GgufHeader::parse_head(&file[..length], file.len() as u64) {
                Ok(header) => {
                    assert!(length as u64 >= needed, "{length}");
                    assert_eq!(format!("{:?}", header.tensors), format!("{:?}", whole.tensors), "{length}");
                }
                Err(error) => {
                    let Some(NeedsMoreBytes(bytes)) = error.downcast_ref() else { panic!("{length}: {error:#}") };
                    assert!(*bytes > length as u64 && *bytes <= file.len() as u64, "{length}");
                    needed = *bytes;
                }
            }
        }
        assert!(needed > 500, "{needed}");
    }
}
