//! [`Snapshot`] and [`VerifiedSnapshot`]: the files of a model on this machine, and the result of verifying them.

use std::path::PathBuf;

use crate::snapshot::gguf;

/// The files of a model on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The model name: `org/name`, `org/name:Q4_K_M`, `demo`, or a path as the user typed it.
    pub name: String,
    /// The commit hash. For the demo, a hash of its files. `None` if the user named a path.
    pub revision: Option<String>,
    /// The model's directory, its GGUF file, or the first shard of its sharded GGUF model.
    pub path: PathBuf,
    pub source: SnapshotSource,
}

impl Snapshot {
    pub fn is_demo(&self) -> bool {
        self.source == SnapshotSource::BuiltIn
    }

    /// Returns one snapshot for each complete GGUF model in this snapshot.
    /// Returns only the snapshot itself if it has safetensors weights or no complete GGUF model.
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
pub enum SnapshotSource {
    /// The snapshot is in inferno's own cache.
    Inferno,
    /// The snapshot is in the Hugging Face cache that Python tools share.
    HuggingFace,
    /// The user named the path of a directory or file.
    Directory,
    /// The model is the demo, which is built into the binary.
    BuiltIn,
}

/// The result of verifying a snapshot.
#[derive(Debug)]
pub struct VerifiedSnapshot {
    pub name: String,
    pub revision: String,
    pub source: SnapshotSource,
    /// The name and state of each file. Except for the demo model, the files are sorted by name.
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
    /// The file has wrong contents or cannot be read.
    Corrupt,
    /// The file is not on disk, although the model needs it or the snapshot links to it.
    Missing,
    /// The expected hash is unknown: a mirror sent no hash, or the filesystem does not support symlinks.
    Unknown,
}
