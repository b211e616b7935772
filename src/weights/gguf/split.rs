//! Models that are split into several GGUF files (parts), such as `name-00001-of-00003.gguf`.
//!
//! Each part stores its number, counted from 0, in `split.no`, and the number of parts in `split.count`.
//! It can also store the total number of tensors in all parts, in `split.tensors.count`.

use std::path::Path;

use anyhow::{Context, Result, bail};

use super::limits::{MAX_SPLIT_HEADER_BYTES, MAX_SPLIT_TENSORS};
use super::metadata::GgufMetadata;
use super::part::{GgufPart, PartOpener};
use crate::snapshot::gguf::{MAX_PARTS, PartName};
use crate::text::{counted, size};

/// Opens all parts of a split model, given the path of any part. Returns the parts in order.
/// A model that is not split has a single part.
/// Fails if a part is missing, has the wrong name or belongs to another model.
/// Also fails if the number of tensors differs from the metadata, or if the parts together exceed a limit.
pub fn open_parts(path: &Path, opener: &dyn PartOpener) -> Result<Vec<GgufPart>> {
    let first = opener.open(path)?;
    let split = SplitInfo::read(&first)?;
    if split.count == 1 {
        return Ok(vec![first]);
    }
    let name = part_name(path, &split)?;
    let (mut parts, mut head_bytes, mut found) = (Vec::new(), 0, 0);
    let mut opened = Some(first);
    for number in 1..=name.count {
        let path = path.with_file_name(name.with_number(number));
        if !opener.exists(&path) {
            bail!(
                "cannot open the model: part {number} of {} is missing: {}\n  download the model again",
                name.count,
                path.display()
            );
        }
        let part = match opened.take_if(|_| number == split.number + 1) {
            Some(part) => part,
            None => opener.open(&path)?,
        };
        check_part(&part, &SplitInfo { number: number - 1, ..split })?;
        head_bytes += part.head.len() as u64;
        if head_bytes > MAX_SPLIT_HEADER_BYTES {
            bail!(
                "cannot open {}: the headers of its parts exceed {} in total",
                name.prefix,
                size(MAX_SPLIT_HEADER_BYTES)
            );
        }
        found += part.header.tensors.len();
        if found > MAX_SPLIT_TENSORS {
            bail!("cannot open {}: its parts together hold more than {MAX_SPLIT_TENSORS} tensors", name.prefix);
        }
        parts.push(part);
    }
    if let Some(expected) = split.tensors.filter(|expected| *expected as usize != found) {
        bail!(
            "the parts of {} hold {}, but their metadata says {expected}; are they parts of the same model?",
            name.prefix,
            counted(found, "tensor")
        );
    }
    Ok(parts)
}

/// Parses the file name of a part. Fails if the name does not agree with `split`, the metadata in the file.
fn part_name<'p>(path: &'p Path, split: &SplitInfo) -> Result<PartName<'p>> {
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some(name) = PartName::parse(file) else {
        bail!(
            "cannot open {}: it is one of {} parts, but its name has no part number such as -00001-of-00003.gguf",
            path.display(),
            split.count
        );
    };
    if (name.number, name.count) != (split.number + 1, split.count) {
        bail!(
            "cannot open {}: its metadata says part {} of {}; was the file renamed?",
            path.display(),
            split.number + 1,
            split.count
        );
    }
    Ok(name)
}

/// The split metadata of one part.
#[derive(Clone, Copy, PartialEq, Eq)]
struct SplitInfo {
    /// The number of the part, counted from 0.
    number: u32,
    count: u32,
    tensors: Option<u32>,
}

impl SplitInfo {
    fn read(part: &GgufPart) -> Result<Self> {
        let read = |metadata: GgufMetadata| {
            let count = metadata.u32("split.count")?.unwrap_or(1).max(1);
            if count > MAX_PARTS {
                bail!("metadata key split.count: {count} parts exceed the limit of {MAX_PARTS}");
            }
            let number = if count == 1 { 0 } else { metadata.required("split.no", GgufMetadata::u32)? };
            if number >= count {
                bail!("metadata key split.no: {number} is not less than split.count {count}");
            }
            Ok(Self { number, count, tensors: metadata.u32("split.tensors.count")? })
        };
        read(part.metadata()).with_context(|| format!("cannot read the split metadata of {}", part.path.display()))
    }
}

fn check_part(part: &GgufPart, expected: &SplitInfo) -> Result<()> {
    let found = SplitInfo::read(part)?;
    if found != *expected {
        let is_same_model = (found.count, found.tensors) == (expected.count, expected.tensors);
        let cause = if is_same_model { "has the wrong name" } else { "belongs to another model" };
        let tensors = |split: &SplitInfo| split.tensors.map_or("unknown".into(), |tensors| tensors.to_string());
        bail!(
            "{} {cause}: it is part {} of {} (tensors: {}), expected part {} of {} (tensors: {})",
            part.path.display(),
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
