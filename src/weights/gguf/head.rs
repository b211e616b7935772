//! Files that lie elsewhere, on a hub: of each the head is read, and what little else metadata leave to tensors.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::bytes::Short;
use super::config::SAID_BY_TENSORS;
use super::header::Header;
use super::{Contents, Files, Part, Read};

/// The longest head that is read; the longest real ones, of 260,000 tokens, have some 16 MB.
pub const MAX_HEAD_BYTES: u64 = 64 << 20;

/// How much of a file is read at first, and then if that was not all of the head.
const STEPS: [u64; 4] = [1 << 20, 4 << 20, 16 << 20, MAX_HEAD_BYTES];

/// A factor for each pair of a head's dims takes no more.
const MAX_TENSOR_BYTES: usize = 64 << 10;

/// Files by name with their lengths, and how to read them.
pub struct Elsewhere<'r> {
    pub files: &'r [(String, u64)],
    pub read: &'r Read<'r>,
}

impl Elsewhere<'_> {
    fn find(&self, path: &Path) -> Option<&(String, u64)> {
        self.files.iter().find(|(name, _)| Path::new(name) == path)
    }

    fn read(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let bytes = (self.read)(name, range.clone())?;
        if bytes.len() as u64 != range.end - range.start {
            bail!("{name} ends after {} bytes of {}..{}", bytes.len(), range.start, range.end);
        }
        Ok(bytes)
    }

    fn head(&self, name: &str, file: u64) -> Result<(Header, Vec<u8>)> {
        let (mut head, mut needed) = (Vec::new(), 0);
        for step in STEPS {
            if step < needed {
                continue;
            }
            head.extend(self.read(name, head.len() as u64..step.min(file))?);
            match Header::parse_beginning(&head, file) {
                Ok(header) => return Ok((header, head)),
                Err(error) => match error.downcast_ref() {
                    Some(Short(bytes)) => needed = *bytes,
                    None => return Err(error).with_context(|| format!("broken GGUF file {name}")),
                },
            }
        }
        bail!("{name} has a head of more than the {} MB that are read of one", MAX_HEAD_BYTES >> 20)
    }
}

impl Files for Elsewhere<'_> {
    fn has(&self, path: &Path) -> bool {
        self.find(path).is_some()
    }

    fn open(&self, path: &Path) -> Result<Part> {
        let (name, file) = self.find(path).with_context(|| format!("{} is not there", path.display()))?;
        let (header, head) = self.head(name, *file)?;
        let mut tensors = BTreeMap::new();
        for info in SAID_BY_TENSORS.iter().filter_map(|name| header.tensors.get(*name)) {
            let Range { start, end } = info.range();
            if end > head.len() && (1..=MAX_TENSOR_BYTES).contains(&info.bytes) {
                tensors.insert(start, self.read(name, start as u64..end as u64)?);
            }
        }
        Ok(Part { path: path.to_path_buf(), header, contents: Contents::Head { head, tensors } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However little of a file is there at first: what is read of it is its head, or how much more is needed.
    #[test]
    fn a_head_is_short_or_whole() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/gguf/tiny.gguf");
        let file = std::fs::read(path).unwrap();
        let whole = Header::parse(&file).unwrap();
        let mut needed = 0;
        for length in 0..file.len() {
            match Header::parse_beginning(&file[..length], file.len() as u64) {
                Ok(header) => {
                    assert!(length as u64 >= needed, "{length}");
                    assert_eq!(format!("{:?}", header.tensors), format!("{:?}", whole.tensors), "{length}");
                }
                Err(error) => {
                    let Some(Short(bytes)) = error.downcast_ref() else { panic!("{length}: {error:#}") };
                    assert!(*bytes > length as u64 && *bytes <= file.len() as u64, "{length}");
                    needed = *bytes;
                }
            }
        }
        assert!(needed > 500, "{needed}");
    }
}
