//! The Hugging Face cache layout on disk: what is there, whether it is whole, and how a file comes into it.
//!
//! `models--org--name/{blobs/<etag>, snapshots/<commit>/<file> -> ../../blobs/<etag>, refs/<revision>}`, as
//! `huggingface_hub` writes it (docs, "Understand caching"). The same code reads the shared cache and writes our own.

use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use anyhow::Result;

use super::disk::{sync_dir, write_error};
use super::lock::{self, Lock};
use super::names;
use super::partial::with_ending;

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
        let mut names: Vec<String> = entries(&self.root).filter_map(name).collect();
        names.sort();
        names
    }
}

/// One repository's folder in a cache.
pub(super) struct RepoDir {
    pub path: PathBuf,
}

impl RepoDir {
    /// Held by whoever changes this folder. Beside it, where Python's tools have their locks.
    pub fn lock(&self, waiting: impl FnOnce()) -> Result<Lock> {
        lock::hold(&self.lock_path(), waiting)
    }

    /// The same, unless somebody has it.
    pub fn try_lock(&self) -> Result<Option<Lock>> {
        lock::try_hold(&self.lock_path())
    }

    fn lock_path(&self) -> PathBuf {
        let name = self.path.file_name().unwrap_or_default();
        let cache = self.path.parent().unwrap_or(&self.path);
        with_ending(&cache.join(".locks").join(name), ".lock")
    }

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
        self.refs().into_iter().map(|(_, commit)| commit).collect()
    }

    /// Each ref's file and the commit that it points to.
    pub fn refs(&self) -> Vec<(PathBuf, String)> {
        let commit = |path: PathBuf| {
            let commit = fs::read_to_string(&path).ok()?.trim().to_string();
            names::is_commit(&commit).then_some((path, commit))
        };
        files_below(&self.path.join("refs")).into_iter().filter_map(commit).collect()
    }

    /// The files of a snapshot: the name of each, its path, and the etag of its blob where it is a link to one.
    pub fn linked(&self, commit: &str) -> Vec<(String, PathBuf, Option<String>)> {
        let dir = self.snapshot(commit);
        let file = |path: PathBuf| {
            let name = path.strip_prefix(&dir).ok()?.to_str()?.replace(std::path::MAIN_SEPARATOR, "/");
            let target = fs::read_link(&path).ok();
            let etag = target.and_then(|target| Some(target.file_name()?.to_str()?.to_string()));
            Some((name, path, etag))
        };
        files_below(&dir).into_iter().filter_map(file).collect()
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
        // Made aside and renamed, so that at no time nothing or a half is there.
        let (temporary, made) = loop {
            let temporary = aside(&pointer);
            let made = match symlink(&target, &temporary) {
                Err(error) if is_unsupported(&error) => {
                    fs::hard_link(&blob, &temporary).or_else(|_| copy(&blob, &temporary))
                }
                made => made,
            };
            // What is left of an earlier process with the same number stays, for `prune`.
            if !made.as_ref().is_err_and(|error| error.kind() == ErrorKind::AlreadyExists) {
                break (temporary, made);
            }
        };
        let renamed = made.and_then(|()| fs::rename(&temporary, &pointer));
        // Still there if it failed, or if both were names of the same file.
        let _ = fs::remove_file(&temporary);
        renamed.map_err(|error| write_error(error, &pointer, 0))
    }

    /// Whether `revision` is known to mean `commit`.
    pub fn has_ref(&self, revision: &str, commit: &str) -> bool {
        revision == commit || fs::read_to_string(self.path.join("refs").join(revision)).is_ok_and(|c| c == commit)
    }

    /// Notes that `revision` now means `commit`. Done last, so that a ref never leads to a half-made snapshot.
    pub fn write_ref(&self, revision: &str, commit: &str) -> Result<()> {
        if self.has_ref(revision, commit) {
            return Ok(());
        }
        let path = self.path.join("refs").join(revision);
        create_dir(path.parent().unwrap_or(&path))?;
        // What it leads to is on the disk before it is.
        let files = files_below(&self.snapshot(commit));
        let mut dirs: BTreeSet<&Path> = files.iter().filter_map(|file| file.parent()).collect();
        let (blobs, snapshots) = (self.path.join("blobs"), self.path.join("snapshots"));
        dirs.extend([&*blobs, &*snapshots, &*self.path]);
        dirs.into_iter().for_each(sync_dir);
        let write = || -> std::io::Result<()> {
            let (temporary, mut file) = create_aside(&path)?;
            file.write_all(commit.as_bytes())?;
            file.sync_data()?;
            fs::rename(&temporary, &path)
        };
        write().map_err(|error| write_error(error, &path, 0))?;
        sync_dir(path.parent().unwrap_or(&path));
        Ok(())
    }
}

/// A name beside `path` that no other process or thread uses: for what is written first and then renamed.
pub(super) fn aside(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut name = path.as_os_str().to_os_string();
    name.push(format!(".{}-{}.tmp", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    name.into()
}

/// Makes a new file beside `path`; what is left of an earlier process with the same number is not touched.
pub(super) fn create_aside(path: &Path) -> std::io::Result<(PathBuf, fs::File)> {
    loop {
        let temporary = aside(path);
        match fs::File::options().write(true).create_new(true).open(&temporary) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            file => return file.map(|file| (temporary, file)),
        }
    }
}

/// Whether a name was made by [`aside`], by a process that did not live to rename it.
pub(super) fn is_aside(name: &str) -> bool {
    let numbers = name.strip_suffix(".tmp").and_then(|name| name.rsplit_once('.')?.1.split_once('-'));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(process, count)| is_number(process) && is_number(count))
}

pub(super) fn create_dir(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).map_err(|error| match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => write_error(error, dir, 0),
        _ => anyhow::Error::new(error)
            .context(format!("cannot create {}\n  INFERNO_CACHE sets another place for models", dir.display())),
    })
}

/// Every file below a directory, sorted; links count as files.
pub(super) fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in entries(dir) {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            files.extend(files_below(&entry.path()));
        } else {
            files.push(entry.path());
        }
    }
    files.sort();
    files
}

/// A directory's entries; none if it cannot be read, since a cache that is not there is an empty one.
pub(super) fn entries(dir: &Path) -> impl Iterator<Item = fs::DirEntry> {
    fs::read_dir(dir).into_iter().flatten().flatten()
}

/// Where a path leads, also if its end is not there yet.
pub(super) fn real(path: &Path) -> PathBuf {
    let found = |dir: &Path| Some(fs::canonicalize(dir).ok()?.join(path.strip_prefix(dir).ok()?));
    path.ancestors().find_map(found).unwrap_or_else(|| path.to_path_buf())
}

/// Whether a file system without symbolic links (or a system that keeps them from people) says so.
fn is_unsupported(error: &std::io::Error) -> bool {
    cfg!(not(unix)) || matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::PermissionDenied)
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    let mut file = fs::File::options().write(true).create_new(true).open(to)?;
    std::io::copy(&mut fs::File::open(from)?, &mut file)?;
    file.sync_data()
}

#[cfg(unix)]
fn symlink(target: &Path, pointer: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, pointer)
}

#[cfg(not(unix))]
fn symlink(target: &Path, pointer: &Path) -> std::io::Result<()> {
    std::os::windows::fs::symlink_file(target, pointer)
}
