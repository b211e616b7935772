//! Models whose tensors are in several GGUF files (shards), such as `name-00001-of-00003.gguf`.
//!
//! Each shard stores its number, counted from 0, in `split.no`, and the number of shards in `split.count`.
//! It can also store the total number of tensors in all shards, in `split.tensors.count`.

use std::path::Path;

use anyhow::{Context, Result, bail};

use super::metadata::GgufMetadata;
use super::shard::{GgufShard, ShardOpener};
use crate::snapshot::gguf::{MAX_SHARDS, ShardName};
use crate::text::{counted, size};
use crate::weights::gguf::limits::{MAX_TOTAL_HEADER_BYTES, MAX_TOTAL_TENSORS};

/// Opens all shards of a sharded model, given the path of any shard. Returns the shards in order.
/// An unsharded model has a single shard.
/// Fails if a shard is missing, has the wrong name or belongs to another model.
/// Also fails if the number of tensors differs from the metadata, or if the shards together exceed a limit.
pub fn open_shards(path: &Path, opener: &dyn ShardOpener) -> Result<Vec<GgufShard>> {
    let given = opener.open(path)?;
    let info = ShardInfo::read(&given)?;
    if info.count == 1 {
        return Ok(vec![given]);
    }
    let name = shard_name(path, &info)?;
    let mut shards = Vec::new();
    let mut head_bytes = 0;
    let mut tensors = 0;
    let mut given = Some(given);
    for number in 1..=name.count {
        let path = path.with_file_name(name.with_number(number));
        if !opener.exists(&path) {
            bail!(
                "cannot open the model: shard {number} of {} is missing: {}\n  download the model again",
                name.count,
                path.display()
            );
        }
        let shard = match given.take_if(|_| number == info.number + 1) {
            Some(shard) => shard,
            None => opener.open(&path)?,
        };
        check_shard(&shard, &ShardInfo { number: number - 1, ..info })?;
        head_bytes += shard.head.len() as u64;
        if head_bytes > MAX_TOTAL_HEADER_BYTES {
            bail!(
                "cannot open {}: the headers of its shards exceed {} in total",
                name.prefix,
                size(MAX_TOTAL_HEADER_BYTES)
            );
        }
        tensors += shard.header.tensors.len();
        if tensors > MAX_TOTAL_TENSORS {
            bail!("cannot open {}: its shards together hold more than {MAX_TOTAL_TENSORS} tensors", name.prefix);
        }
        shards.push(shard);
    }
    if let Some(expected) = info.tensors.filter(|expected| *expected as usize != tensors) {
        bail!(
            "the shards of {} hold {}, but their metadata says {expected}; are they shards of the same model?",
            name.prefix,
            counted(tensors, "tensor")
        );
    }
    Ok(shards)
}

/// Parses the file name of a shard. Fails if the name does not agree with `info`, the metadata in the file.
fn shard_name<'p>(path: &'p Path, info: &ShardInfo) -> Result<ShardName<'p>> {
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some(name) = ShardName::parse(file) else {
        bail!(
            "cannot open {}: it is one of {} shards, but its name has no shard number such as -00001-of-00003.gguf",
            path.display(),
            info.count
        );
    };
    if (name.number, name.count) != (info.number + 1, info.count) {
        bail!(
            "cannot open {}: its metadata says shard {} of {}; was the file renamed?",
            path.display(),
            info.number + 1,
            info.count
        );
    }
    Ok(name)
}

/// What the metadata of one shard says about the shards of its model.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ShardInfo {
    /// The number of the shard, counted from 0.
    number: u32,
    count: u32,
    /// The number of tensors in all shards. `None` if the metadata does not say it.
    tensors: Option<u32>,
}

impl ShardInfo {
    fn read(shard: &GgufShard) -> Result<Self> {
        let read = |metadata: GgufMetadata| {
            let count = metadata.u32("split.count")?.unwrap_or(1).max(1);
            if count > MAX_SHARDS {
                bail!("metadata key split.count: {count} shards exceed the limit of {MAX_SHARDS}");
            }
            let number = if count == 1 { 0 } else { metadata.required("split.no", GgufMetadata::u32)? };
            if number >= count {
                bail!("metadata key split.no: {number} is not less than split.count {count}");
            }
            Ok(Self { number, count, tensors: metadata.u32("split.tensors.count")? })
        };
        read(shard.metadata()).with_context(|| format!("cannot read the split metadata of {}", shard.path.display()))
    }
}

fn check_shard(shard: &GgufShard, expected: &ShardInfo) -> Result<()> {
    let found = ShardInfo::read(shard)?;
    if found != *expected {
        let is_same_model = (found.count, found.tensors) == (expected.count, expected.tensors);
        let cause = if is_same_model { "has the wrong name" } else { "belongs to another model" };
        let tensors = |info: &ShardInfo| info.tensors.map_or("unknown".into(), |tensors| tensors.to_string());
        bail!(
            "{} {cause}: it is shard {} of {} (tensors: {}), expected shard {} of {} (tensors: {})",
            shard.path.display(),
            found.number + 1,
            found.count,
            tensors(&found),
            expected.number + 1,
            expected.count,
            tensors(expected),
        );
    }
    Ok(())
}
