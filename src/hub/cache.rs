//! The Hugging Face cache layout on disk: what is there, whether it is whole, and how a file comes into it.
//!
//! `models--org--name/{blobs/<etag>, snapshots/<commit>/<file> -> ../../blobs/<etag>, refs/<revision>}`, as
//! `huggingface_hub` writes it (docs, "Understand caching"). The same code reads the shared cache and writes our own.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use super::{gguf, names};

/// The file that names the shards of a large checkpoint.
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// A checkpoint in one file.
pub(super) const SINGLE: &str = "model.safetensors";

/// What a snapshot must hold to count as whole.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// config.json and tokenizer.json: enough to count or render tokens.
    Text,
    /// The weights too: every shard that the index names, or the single file.
    Weights,
}

/// A directory of repositories: inferno's own, or the one shared with Python.
pub(super) struct Cache {
    pub root: PathBuf,
}

impl Cache {
    pub fn repo(&self, repo: &str) -> RepoDir {
        RepoDir { path: self.root.join(format!("models--{}", repo.replace('/', "--"))) }
    }

    /// Every repository that has a folder here, whole or not.
    pub fn names(&self) -> Vec<String> {
        let name = |entry: fs::DirEntry| {
            let name = entry.file_name().to_str()?.strip_prefix("models--")?.replace("--", "/");
            names::is_repo(&name).then_some(name)
        };
        entries(&self.root).filter_map(name).collect()
    }
}

/// One repository's folder in a cache.
pub(super) struct RepoDir {
    pub path: PathBuf,
}

impl RepoDir {
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.path.join("snapshots").join(commit)
    }

    pub fn blob(&self, etag: &str) -> PathBuf {
        self.path.join("blobs").join(etag)
    }

    /// The commit that a branch, tag or commit stands for, as far as this cache knows.
    pub fn commit(&self, revision: &str) -> Option<String> {
        if let Ok(commit) = fs::read_to_string(self.path.join("refs").join(revision)) {
            let commit = commit.trim();
            return names::is_commit(commit).then(|| commit.to_string());
        }
        // A commit itself, or enough of one to be the only match.
        let mut found = self.commits().into_iter().filter(|commit| commit.starts_with(revision));
        match (found.next(), found.next()) {
            (Some(commit), None) if revision.len() >= 7 => Some(commit),
            _ => None,
        }
    }

    /// Commits with a snapshot folder, the most recently changed first.
    pub fn commits(&self) -> Vec<String> {
        let mut commits: Vec<(SystemTime, String)> = entries(&self.path.join("snapshots"))
            .filter_map(|entry| {
                let commit = entry.file_name().into_string().ok().filter(|name| names::is_commit(name))?;
                Some((entry.metadata().and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH), commit))
            })
            .collect();
        commits.sort_by(|a, b| b.cmp(a));
        commits.into_iter().map(|(_, commit)| commit).collect()
    }

    /// The commits that refs point to.
    pub fn referenced(&self) -> BTreeSet<String> {
        fn walk(dir: &Path, commits: &mut BTreeSet<String>) {
            for entry in entries(dir) {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    walk(&entry.path(), commits);
                } else if let Ok(commit) = fs::read_to_string(entry.path()) {
                    commits.extend(Some(commit.trim().to_string()).filter(|commit| names::is_commit(commit)));
                }
            }
        }
        let mut commits = BTreeSet::new();
        walk(&self.path.join("refs"), &mut commits);
        commits
    }

    /// Makes a blob appear as `name` in a snapshot.
    pub fn link(&self, commit: &str, name: &str, etag: &str) -> Result<()> {
        let pointer = self.snapshot(commit).join(name);
        create_dir(pointer.parent().unwrap_or(&pointer))?;
        let blob = self.blob(etag);
        // snapshots/<commit>/ is two levels below the repository; each folder in the name is one more.
        let target = PathBuf::from("../".repeat(2 + name.matches('/').count())).join("blobs").join(etag);
        if fs::read_link(&pointer).is_ok_and(|present| present == target) {
            return Ok(());
        }
        match fs::remove_file(&pointer) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot replace {}", pointer.display()));
            }
            _ => {}
        }
        match symlink(&target, &pointer) {
            // Another process made the same link just now.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            // A file system without symbolic links: the snapshot gets the file itself, as in Python.
            Err(_) => fs::rename(&blob, &pointer),
            Ok(()) => Ok(()),
        }
        .with_context(|| format!("cannot create {}", pointer.display()))
    }

    /// Notes that `revision` now means `commit`. Done last, so that a ref never leads to a half-made snapshot.
    pub fn write_ref(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit || fs::read_to_string(self.path.join("refs").join(revision)).is_ok_and(|c| c == commit) {
            return Ok(());
        }
        let path = self.path.join("refs").join(revision);
        create_dir(path.parent().unwrap_or(&path))?;
        let temporary = aside(&path);
        fs::write(&temporary, commit)
            .and_then(|()| fs::rename(&temporary, &path))
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

/// A name beside `path` that no other process or thread uses: for what is written first and then renamed.
pub(super) fn aside(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut name = path.as_os_str().to_os_string();
    name.push(format!(".{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    name.into()
}

/// The first thing that a snapshot folder lacks, or nothing if it is whole.
pub(super) fn missing(dir: &Path, need: Need) -> Option<String> {
    let absent = |name: &str| !dir.join(name).is_file();
    // A GGUF file is a model without any other.
    let files = if gguf::has_safetensors(dir) { Vec::new() } else { gguf::in_directory(dir) };
    if let Some(first) = files.first() {
        let whole = files.iter().any(|file| file.missing.is_none());
        return if whole { None } else { first.missing.clone() };
    }
    if let Some(name) = ["config.json", "tokenizer.json"].into_iter().find(|name| absent(name)) {
        return Some(name.to_string());
    }
    if need == Need::Text || !absent(SINGLE) {
        return None;
    }
    if absent(INDEX) {
        return Some(SINGLE.to_string());
    }
    match fs::read(dir.join(INDEX)).map_err(Into::into).and_then(|index| shards(&index)) {
        Ok(shards) => shards.into_iter().find(|name| absent(name)),
        Err(_) => Some(format!("a readable {INDEX}")),
    }
}

/// The shard files that an index names, in order. Refuses a name that leaves the snapshot.
pub(super) fn shards(index: &[u8]) -> Result<Vec<String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(index).with_context(|| format!("{INDEX} is not a shard index"))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    if let Some(name) = shards.iter().find(|name| !names::is_safe_path(name)) {
        bail!("{INDEX} names the shard {name:?}, which is outside the repository; refused");
    }
    if shards.is_empty() {
        bail!("{INDEX} names no shards");
    }
    Ok(shards.into_iter().collect())
}

pub(super) fn create_dir(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)
        .with_context(|| format!("cannot create {}\n  INFERNO_CACHE sets another place for models", dir.display()))
}

/// A directory's entries; none if it cannot be read, since a cache that is not there is an empty one.
fn entries(dir: &Path) -> impl Iterator<Item = fs::DirEntry> {
    fs::read_dir(dir).into_iter().flatten().flatten()
}

#[cfg(unix)]
fn symlink(target: &Path, pointer: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, pointer)
}

#[cfg(not(unix))]
fn symlink(target: &Path, pointer: &Path) -> std::io::Result<()> {
    std::os::windows::fs::symlink_file(target, pointer)
}
