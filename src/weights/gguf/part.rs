//! One file of a GGUF model. A model consists of one file or several parts.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use memmap2::Mmap;

use super::header::Header;
use super::metadata::Metadata;
use crate::weights::read_ahead::Source;

/// One file of a model, with its parsed header.
pub struct GgufPart {
    pub path: PathBuf,
    pub header: Header,
    pub contents: Contents,
}

/// The available bytes of a file.
pub enum Contents {
    /// The whole file, mapped into memory.
    Mapped { source: Arc<Source>, map: Mmap },
    /// The beginning of a remote file, and some small tensors keyed by their offset in the file.
    Remote { head: Vec<u8>, tensors: BTreeMap<usize, Vec<u8>> },
}

impl GgufPart {
    /// Maps a file into memory and parses its header.
    pub fn open(path: PathBuf) -> Result<Self> {
        let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        // SAFETY: the mapping is read-only.
        // If another process truncates the file, the OS kills this process, as with any mapped file.
        // If the file changes in place, every value is checked again on the next read.
        let map = unsafe { Mmap::map(&file) }.with_context(|| format!("cannot map {}", path.display()))?;
        tracing::info!(path = %path.display(), bytes = map.len(), "opened");
        let header = Header::parse(&map).with_context(|| format!("invalid GGUF file {}", path.display()))?;
        let source = Arc::new(Source { path: path.clone(), file });
        Ok(Self { path, header, contents: Contents::Mapped { source, map } })
    }

    pub fn metadata(&self) -> Metadata<'_> {
        match &self.contents {
            Contents::Mapped { map, .. } => self.header.metadata(map),
            Contents::Remote { head, .. } => self.header.metadata(head),
        }
    }

    /// Returns a range of the file's bytes, or `None` if the range of a remote file was not fetched.
    pub fn bytes(&self, range: Range<usize>) -> Option<&[u8]> {
        match &self.contents {
            Contents::Mapped { map, .. } => map.get(range),
            Contents::Remote { head, tensors } => {
                head.get(range.clone()).or_else(|| tensors.get(&range.start)?.get(..range.len()))
            }
        }
    }
}

/// Finds and opens the parts of a model, on the local disk or on a hub.
pub trait PartOpener {
    fn exists(&self, path: &Path) -> bool;
    fn open(&self, path: &Path) -> Result<GgufPart>;
}

/// Parts on the local disk.
pub struct LocalParts;

impl PartOpener for LocalParts {
    fn exists(&self, path: &Path) -> bool {
        path.exists()
    }

    fn open(&self, path: &Path) -> Result<GgufPart> {
        GgufPart::open(path.to_path_buf())
    }
}
