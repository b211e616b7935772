//! Model caches on disk: inferno's own cache and the shared Hugging Face cache, which have the same layout.
//!
//! The `huggingface_hub` docs describe the layout in "Understand caching".
//! Each repository has a directory `models--org--name/`, which contains:
//!
//! - `blobs/<etag>`: the contents of a file, named by its etag
//! - `snapshots/<commit>/<file> -> ../../blobs/<etag>`: the files of a commit, as symlinks to blobs
//! - `refs/<revision>`: the commit hash of a branch or tag
//!
//! The `hf-hub` crate provides the names of the repository and snapshot directories.
//! This module reads and writes the files in the cache without `hf-hub`, for two reasons:
//!
//! - `hf-hub` joins etags and revisions to paths without validating them.
//! - `hf-hub` writes refs in place, so a crash can leave a truncated ref.

pub(in crate::hub) mod disk;
pub(in crate::hub) mod lock;

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{MAIN_SEPARATOR, Path, PathBuf};
use std::time::SystemTime;

use anyhow::Result;
use hf_hub::{Cache as HuggingFaceCache, Repo};

use crate::files;
use crate::hub::names;
use disk::{create_dir, entries, files_below, sync_dir, temporary_path, with_suffix, write_error};
use lock::Lock;

/// A directory that caches model repositories.
pub(super) struct Cache {
    pub root: PathBuf,
}

impl Cache {
    /// Returns the directory of a repository, which may not exist. `name` must be a valid repository name.
    pub fn repo(&self, name: &str) -> RepoDir {
        let repo = Repo::model(name.to_string());
        let path = self.root.join(repo.folder_name());
        RepoDir { path, layout: HuggingFaceCache::new(self.root.clone()).repo(repo) }
    }

    /// Returns the sorted names of all repositories in the cache, including incomplete ones.
    pub fn names(&self) -> Vec<String> {
        let name = |entry: fs::DirEntry| {
            let name = entry.file_name().to_str()?.strip_prefix("models--")?.replace("--", "/");
            names::is_repo(&name).then_some(name)
        };
        let mut names: Vec<String> = entries(&self.root).filter_map(name).collect();
        names.sort();
        names
    }
}

/// The directory of one repository in a cache.
pub(super) struct RepoDir {
    pub path: PathBuf,
    layout: hf_hub::CacheRepo,
}

/// A file in a snapshot.
pub struct SnapshotFile {
    /// The path of the file in the repository, such as `config.json`.
    pub name: String,
    pub path: PathBuf,
    /// The etag of the blob to which the file links. `None` if the file is not a symlink.
    pub etag: Option<String>,
}

impl RepoDir {
    /// Acquires the lock that guards changes to the directory of the repository.
    /// If another process holds the lock, calls `on_wait`, then waits for the lock.
    pub fn lock(&self, on_wait: impl FnOnce()) -> Result<Lock> {
        lock::acquire(&self.lock_path(), on_wait)
    }

    /// Acquires the lock of the repository without waiting. Returns `None` if another process holds the lock.
    pub fn try_lock(&self) -> Result<Option<Lock>> {
        lock::try_acquire(&self.lock_path())
    }

    /// Returns the path of the lock file, `.locks/models--org--name.lock` in the cache.
    fn lock_path(&self) -> PathBuf {
        let name = self.path.file_name().unwrap_or_default();
        let cache = self.path.parent().unwrap_or(&self.path);
        with_suffix(&cache.join(".locks").join(name), ".lock")
    }

    /// Returns the directory of a snapshot. `commit` must be a commit hash.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.layout.pointer_path(commit)
    }

    /// Returns the path of a blob. `etag` must be a valid etag.
    pub fn blob(&self, etag: &str) -> PathBuf {
        self.path.join("blobs").join(etag)
    }

    /// Resolves a branch, a tag, a commit or a unique commit prefix of at least 7 characters to a commit.
    /// Returns `None` if the cache has no unique match, or if the matching ref does not contain a commit hash.
    pub fn commit(&self, revision: &str) -> Option<String> {
        if let Ok(commit) = read_ref(&self.path.join("refs").join(revision)) {
            let commit = commit.trim();
            return names::is_commit(commit).then(|| commit.to_string());
        }
        // No readable ref has this name, so `revision` may be a commit or a commit prefix.
        let mut found = self.commits().into_iter().filter(|commit| commit.starts_with(revision));
        match (found.next(), found.next()) {
            (Some(commit), None) if revision.len() >= 7 => Some(commit),
            _ => None,
        }
    }

    /// Returns the commits that have a snapshot directory, most recently modified first.
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

    /// Returns the commits that refs point to. Skips invalid refs.
    pub fn referenced_commits(&self) -> BTreeSet<String> {
        let commit = |path: PathBuf| {
            let commit = read_ref(&path).ok()?.trim().to_string();
            names::is_commit(&commit).then_some(commit)
        };
        files_below(&self.path.join("refs")).into_iter().filter_map(commit).collect()
    }

    /// Returns the files in a snapshot.
    pub fn snapshot_files(&self, commit: &str) -> Vec<SnapshotFile> {
        let dir = self.snapshot(commit);
        let file = |path: PathBuf| {
            let name = path.strip_prefix(&dir).ok()?.to_str()?.replace(MAIN_SEPARATOR, "/");
            let target = fs::read_link(&path).ok();
            let etag = target.and_then(|target| Some(target.file_name()?.to_str()?.to_string()));
            Some(SnapshotFile { name, path, etag })
        };
        files_below(&dir).into_iter().filter_map(file).collect()
    }

    /// Links a blob into a snapshot as `name`. If symlinks are not supported, creates a hard link or a copy.
    pub fn link(&self, commit: &str, name: &str, etag: &str) -> Result<()> {
        let pointer = self.snapshot(commit).join(name);
        create_dir(pointer.parent().unwrap_or(&pointer))?;
        let blob = self.blob(etag);
        // The directory `snapshots/<commit>` is two levels below the repository's directory.
        // Each `/` in `name` adds a level.
        let target = PathBuf::from("../".repeat(2 + name.matches('/').count())).join("blobs").join(etag);
        if fs::read_link(&pointer).is_ok_and(|present| present == target) {
            return Ok(());
        }
        // Rename the finished link into place, so that other processes never see a missing or partial file.
        let (temporary, created) = loop {
            let temporary = temporary_path(&pointer);
            let created = match symlink(&target, &temporary) {
                Err(error) if is_unsupported(&error) => {
                    fs::hard_link(&blob, &temporary).or_else(|_| copy(&blob, &temporary))
                }
                created => created,
            };
            // If an earlier process with the same process id left a file with this name, try the next name.
            if !created.as_ref().is_err_and(|error| error.kind() == ErrorKind::AlreadyExists) {
                break (temporary, created);
            }
        };
        let renamed = created.and_then(|()| fs::rename(&temporary, &pointer));
        // The temporary file can still exist if copying or renaming failed. It also still exists if `temporary` and
        // `pointer` are hard links to the same file, because `rename` then does nothing.
        let _ = fs::remove_file(&temporary);
        renamed.map_err(|error| write_error(error, &pointer))
    }

    /// Returns whether `revision` is `commit` itself, or a ref in this directory that points to `commit`.
    pub fn has_ref(&self, revision: &str, commit: &str) -> bool {
        revision == commit || read_ref(&self.path.join("refs").join(revision)).is_ok_and(|c| c == commit)
    }

    /// Makes the ref `revision` point to `commit`. Does nothing if `revision` is `commit` itself.
    /// Before the call, all files that the user selected must be present in inferno's own cache or in the shared cache.
    pub fn write_ref(&self, revision: &str, commit: &str) -> Result<()> {
        if self.has_ref(revision, commit) {
            return Ok(());
        }
        let path = self.path.join("refs").join(revision);
        create_dir(path.parent().unwrap_or(&path))?;
        // Flush the directories of the snapshot and of the blobs first.
        // Otherwise, after a power failure, the ref could point to a snapshot with missing files.
        let files = files_below(&self.snapshot(commit));
        let mut dirs: BTreeSet<&Path> = files.iter().filter_map(|file| file.parent()).collect();
        let (blobs, snapshots) = (self.path.join("blobs"), self.path.join("snapshots"));
        dirs.extend([&*blobs, &*snapshots, &*self.path]);
        dirs.into_iter().for_each(sync_dir);
        disk::replace(&path, commit.as_bytes()).map_err(|error| write_error(error, &path))?;
        sync_dir(path.parent().unwrap_or(&path));
        Ok(())
    }
}

/// Returns whether an error from creating a symlink means that symlinks are not supported.
/// On systems other than Unix, returns true for every error, because Windows requires a privilege to create symlinks.
fn is_unsupported(error: &io::Error) -> bool {
    cfg!(not(unix)) || matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::PermissionDenied)
}

/// Reads a ref. Does not check that its contents are a commit hash.
fn read_ref(path: &Path) -> Result<String> {
    files::read_text(path, files::MAX_SINGLE_VALUE_BYTES)
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let mut file = fs::File::options().write(true).create_new(true).open(to)?;
    io::copy(&mut files::open(from).map_err(io::Error::other)?, &mut file)?;
    file.sync_data()
}

#[cfg(unix)]
fn symlink(target: &Path, pointer: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, pointer)
}

#[cfg(not(unix))]
fn symlink(target: &Path, pointer: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target, pointer)
}
