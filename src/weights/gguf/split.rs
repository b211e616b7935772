//! Models in several files: `name-00001-of-00003.gguf` and so on, each of which says its number in `split.no` (from 0),
//! how many there are in `split.count`, and how many tensors all of them hold in `split.tensors.count`.

use std::path::Path;

use anyhow::{Context, Result, bail};

use super::metadata::Metadata;
use super::{Files, Part};
use crate::snapshot::gguf::{MAX_PARTS, PartName};

/// The file, or all parts in their order if it is one of several.
pub fn open_parts(path: &Path, files: &dyn Files) -> Result<Vec<Part>> {
    let named = files.open(path)?;
    let said = Said::of(&named)?;
    if said.count == 1 {
        return Ok(vec![named]);
    }
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some(name) = PartName::parse(file) else {
        bail!("{} is one of {} parts, but not called like one (…-00001-of-00003.gguf)", path.display(), said.count);
    };
    if (name.number, name.count) != (said.number + 1, said.count) {
        bail!("{} is part {} of {} by its contents: was it renamed?", path.display(), said.number + 1, said.count);
    }
    let mut parts = Vec::new();
    let mut named = Some(named);
    for number in 1..=name.count {
        let path = path.with_file_name(name.with_number(number));
        if !files.has(&path) {
            bail!("part {number} of {} is missing: {} (download the model again)", name.count, path.display());
        }
        let part = match named.take_if(|_| number == said.number + 1) {
            Some(part) => part,
            None => files.open(&path)?,
        };
        check_part(&part, &Said { number: number - 1, ..said })?;
        parts.push(part);
    }
    let tensors: usize = parts.iter().map(|part| part.header.tensors.len()).sum();
    if said.tensors.is_some_and(|said| said as usize != tensors) {
        let said = said.tensors.unwrap_or_default();
        bail!("the parts of {} hold {tensors} tensors, they say {said}: are they of one model?", name.prefix);
    }
    Ok(parts)
}

/// What a part says of itself and the others.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Said {
    /// From 0.
    number: u32,
    count: u32,
    tensors: Option<u32>,
}

impl Said {
    fn of(part: &Part) -> Result<Self> {
        let read = |metadata: Metadata| {
            let count = metadata.u32("split.count")?.unwrap_or(1).max(1);
            if count > MAX_PARTS {
                bail!("metadata key split.count: {count} parts are more than the {MAX_PARTS} that are opened");
            }
            let number = if count == 1 { 0 } else { metadata.required("split.no", Metadata::u32)? };
            if number >= count {
                bail!("metadata key split.no: part {number} of {count}, counted from 0");
            }
            Ok(Self { number, count, tensors: metadata.u32("split.tensors.count")? })
        };
        read(part.metadata()).with_context(|| format!("broken GGUF file {}", part.path.display()))
    }
}

fn check_part(part: &Part, expected: &Said) -> Result<()> {
    let said = Said::of(part)?;
    if said != *expected {
        let path = part.path.display();
        bail!(
            "{path} is not of the same model as the other parts: it says to be part {} of {} with {} tensors, expected \
             part {} of {} with {}",
            said.number + 1,
            said.count,
            said.tensors.map_or("unknown".into(), |tensors| tensors.to_string()),
            expected.number + 1,
            expected.count,
            expected.tensors.map_or("unknown".into(), |tensors| tensors.to_string()),
        );
    }
    Ok(())
}
