//! Deletes (prunes) files in inferno's own cache that no model uses.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::deletion::{bytes_below, file_bytes, linked_blobs, remove_dir, remove_file, walk};
use crate::hub::cache::RepoDir;
use crate::hub::cache::disk::{self, files_below};
use crate::hub::client::Hub;
use crate::hub::demo;
use crate::hub::download::partial::SUFFIXES;

/// The result of pruning one repository or the demo.
#[derive(Debug, PartialEq, Eq)]
pub struct PrunedRepo {
    pub name: String,
    /// The number of deleted files: unused blobs, and files that unfinished downloads or killed processes left behind.
    pub files: usize,
    pub freed_bytes: u64,
    /// Whether pruning was skipped because another process holds the lock.
    pub is_busy: bool,
}

impl Hub {
    /// Deletes the leftovers of unfinished downloads and killed processes, the blobs to which no snapshot links,
    /// and repositories without snapshot files.
    ///
    /// Skips a repository, or the demo, if another process holds its lock, and reports it as busy.
    /// Without `--force`, fails if the filesystem does not support file locking.
    pub fn prune(&self) -> Result<Vec<PrunedRepo>> {
        self.check_own_cache()?;
        let mut pruned = Vec::new();
        for name in self.own_cache().names() {
            let repo = self.own_cache().repo(&name);
            let Some(lock) = repo.try_lock()? else {
                pruned.push(PrunedRepo { name, files: 0, freed_bytes: 0, is_busy: true });
                continue;
            };
            self.check_lock(&lock, &repo.path)?;
            let freed = prune_repo(&repo)?;
            if !freed.is_empty() {
                pruned.push(PrunedRepo { name, files: freed.len(), freed_bytes: freed.iter().sum(), is_busy: false });
            }
        }
        pruned.extend(self.prune_demo()?);
        Ok(pruned)
    }

    /// Deletes the demo's temporary files and directories. Returns `None` if there are no temporary files.
    fn prune_demo(&self) -> Result<Option<PrunedRepo>> {
        let cache = &self.config.cache;
        let name = demo::NAME.to_string();
        if demo::leftovers(cache).is_empty() {
            return Ok(None);
        }
        let Some(lock) = demo::try_lock(cache)? else {
            return Ok(Some(PrunedRepo { name, files: 0, freed_bytes: 0, is_busy: true }));
        };
        self.check_lock(&lock, &cache.join(demo::NAME))?;
        let (mut files, mut freed_bytes) = (0, 0);
        // List the temporary files again: another process may have renamed some of them before it released the lock.
        for path in demo::leftovers(cache) {
            if path.symlink_metadata().is_ok_and(|data| data.is_dir()) {
                files += files_below(&path).len();
                freed_bytes += bytes_below(&path);
                remove_dir(&path)?;
            } else {
                files += 1;
                freed_bytes += file_bytes(&path);
                remove_file(&path)?;
            }
        }
        Ok((files > 0).then_some(PrunedRepo { name, files, freed_bytes, is_busy: false }))
    }
}

/// Deletes the leftovers and unused blobs in a repository, or the whole repository if it has no snapshot files.
/// Returns the size of each deleted leftover or blob, in bytes.
fn prune_repo(repo: &RepoDir) -> Result<Vec<u64>> {
    // Read all snapshots first, and delete nothing if a snapshot cannot be read: its blobs would seem unused.
    let snapshot_files: Vec<PathBuf> =
        walk(&repo.path.join("snapshots"))?.into_iter().filter(|path| !is_leftover(path)).collect();
    let linked = linked_blobs(&snapshot_files)?;
    let is_unused_blob = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str());
        path.starts_with(repo.path.join("blobs")) && !name.is_some_and(|name| linked.contains(name))
    };
    let mut freed = Vec::new();
    for path in walk(&repo.path)?.into_iter().filter(|path| is_leftover(path) || is_unused_blob(path)) {
        freed.push(file_bytes(&path));
        remove_file(&path)?;
    }
    if snapshot_files.is_empty() {
        remove_dir(&repo.path)?;
    }
    Ok(freed)
}

/// Returns whether a file is a partially downloaded blob or its record, a corrupt blob that a repair set aside, or a
/// temporary file. Unfinished downloads and killed processes leave such files behind.
fn is_leftover(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_in_blobs = path.parent().is_some_and(|dir| dir.ends_with("blobs"));
    is_in_blobs && SUFFIXES.iter().any(|suffix| name.ends_with(suffix)) || disk::is_temporary(&name)
}
