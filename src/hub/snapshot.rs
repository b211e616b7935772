//! A model's files on this machine, and the state of each file.

use std::path::PathBuf;

use crate::snapshot::gguf;

/// A model's files on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// `org/name`, `org/name:Q4_K_M`, `demo`, or a path as the user typed it.
    pub name: String,
    /// The commit, or a hash of the demo's files. `None` if the user named a path.
    pub revision: Option<String>,
    /// The directory with the files, or the model's GGUF file (the first part of a split file).
    pub path: PathBuf,
    pub source: Source,
}

impl Snapshot {
    /// Returns whether this is the demo model, which is built into the binary.
    pub fn is_demo(&self) -> bool {
        self.source == Source::BuiltIn
    }

    /// Returns one snapshot for each complete GGUF model, or the snapshot itself if it has no GGUF models.
    pub fn models(&self) -> Vec<Self> {
        let named = gguf::named_models(&self.name, &self.path);
        if named.is_empty() {
            return vec![self.clone()];
        }
        named.into_iter().map(|(name, file)| Self { name, path: file.path, ..self.clone() }).collect()
    }
}

/// Where a snapshot comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The snapshot is in inferno's own cache.
    Inferno,
    /// The snapshot is in the Hugging Face cache that Python tools share.
    HuggingFace,
    /// The user named a directory or file by its path.
    Directory,
    /// The model is the demo, which is built into the binary.
    BuiltIn,
}

/// The result of verifying a snapshot.
#[derive(Debug)]
pub struct VerifiedSnapshot {
    pub name: String,
    pub revision: String,
    pub source: Source,
    /// The name and state of every file, sorted by name.
    pub files: Vec<(String, FileState)>,
}

impl VerifiedSnapshot {
    /// Returns the files that are corrupt or missing.
    pub fn damaged_files(&self) -> impl Iterator<Item = &(String, FileState)> {
        self.files.iter().filter(|(_, state)| matches!(state, FileState::Corrupt | FileState::Missing))
    }
}

/// The result of verifying one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileState {
    Good,
    /// The hash of the contents does not match.
    Corrupt,
    /// The model needs the file, but it is not on disk.
    Missing,
    /// The expected hash is unknown: the file came from a mirror, or the filesystem does not support symlinks.
    Unknown,
}
