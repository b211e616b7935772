//! Deletes files of a cache, and finds the files and links that a deletion affects.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::hub::cache::disk::{entries, files_below};
use crate::hub::cache::lock::Lock;
use crate::hub::client::Hub;

impl Hub {
    /// Without `--force`, fails if the filesystem does not support file locking, because another process may then be
    /// using the files.
    pub(super) fn check_lock(&self, lock: &Lock, dir: &Path) -> Result<()> {
        if !lock.is_effective() && !self.force {
            bail!(
                "cannot delete safely: the filesystem of {} does not support file locking, so another inferno process may be using the files\n  to delete anyway: --force",
                dir.display()
            );
        }
        Ok(())
    }
}

/// Returns the names of the blobs to which the symlinks among `files` point. Fails if a file cannot be read.
pub(super) fn linked_blobs(files: &[PathBuf]) -> Result<BTreeSet<String>> {
    let mut etags = BTreeSet::new();
    for path in files {
        if path.symlink_metadata().with_context(|| cannot_read(path))?.is_symlink() {
            let target = fs::read_link(path).with_context(|| cannot_read(path))?;
            etags.extend(target.file_name().and_then(|name| name.to_str()).map(str::to_string));
        }
    }
    Ok(etags)
}

/// Returns the sorted paths of all files and symlinks below a directory.
///
/// Unlike [`files_below`], fails if a directory cannot be read, or if a symlink points to a directory.
pub(super) fn walk(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in read_dir(dir)? {
        let path = entry.path();
        let kind = entry.file_type().with_context(|| cannot_read(&path))?;
        if kind.is_dir() {
            files.extend(walk(&path)?);
        } else if kind.is_symlink() && path.is_dir() {
            // Do not delete files behind a symlink. The user may have moved a part of the cache to another place.
            bail!(
                "cannot delete files: {} is a symlink to another directory, and inferno does not delete through \
                 symlinks; nothing was deleted from this model\n  replace the symlink with the directory, or \
                 delete the model by hand",
                path.display()
            );
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the entries of a directory, or no entries if it does not exist. Fails if the directory cannot be read.
pub(super) fn read_dir(dir: &Path) -> Result<Vec<fs::DirEntry>> {
    match fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        found => found.and_then(Iterator::collect).with_context(|| cannot_read(dir)),
    }
}

fn cannot_read(path: &Path) -> String {
    format!("nothing was deleted from this model: cannot read {}", path.display())
}

pub(super) fn bytes_below(dir: &Path) -> u64 {
    files_below(dir).iter().map(|path| file_bytes(path)).sum()
}

/// Returns the size of a file in bytes, or 0 for a symlink, because deleting it does not free its target.
pub(super) fn file_bytes(path: &Path) -> u64 {
    path.symlink_metadata().ok().filter(|data| data.is_file()).map_or(0, |data| data.len())
}

pub(super) fn remove_file(path: &Path) -> Result<()> {
    fs::remove_file(path).with_context(|| format!("cannot delete {}", path.display()))
}

pub(super) fn remove_dir(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        // The directory does not exist, so there is nothing to delete.
        Err(_) if entries(dir).next().is_none() && !dir.exists() => Ok(()),
        result => result.with_context(|| format!("cannot delete {}", dir.display())),
    }
}
