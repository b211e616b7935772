//! The demo model: a small gpt-oss model inside the inferno binary. inferno writes it to the cache on first use.
//!
//! A lock usually lets only one process write the demo at a time, but two processes can also safely write at once:
//! each file is written under a temporary name and then renamed, so other processes never see a partial file.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::cache::disk::{self, entries};
use super::cache::lock::{self, Lock};
use super::snapshot::{FileState, Snapshot, SnapshotSource, VerifiedSnapshot};
use crate::error::Error;
use crate::files;

/// The name of the demo model on the command line.
pub const NAME: &str = "demo";

/// A hash of the demo's files. Names the demo's directory in the cache, so each version has its own directory.
const REVISION: &str = env!("INFERNO_DEMO_REVISION");

/// The maximum time to wait for another process that holds the lock on the demo.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// The name and the contents of each file of the demo. `build.rs` writes this list.
const FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/demo_files.rs"));

/// Returns one line about what the demo model can do in a conversation, or `None` for other models.
pub fn play_notice(snapshot: &Snapshot) -> Option<&'static str> {
    snapshot.is_demo().then_some("demo model: answers questions about inferno only")
}

/// Like [`play_notice`], but for `inferno serve`, where a request can offer tools to the model.
pub fn serve_notice(snapshot: &Snapshot) -> Option<&'static str> {
    snapshot.is_demo().then_some("demo model: answers only questions about inferno, and calls simple tools")
}

/// Returns whether `model` is the demo. Fails if `model` is the demo and `revision` is set.
pub(super) fn is_demo(model: &str, revision: Option<&str>) -> Result<bool> {
    match revision.filter(|_| model == NAME) {
        Some(revision) => Err(Error::NoRevisions {
            model: NAME.to_string(),
            revision: revision.to_string(),
            why: "the demo model has no revisions",
        }
        .into()),
        None => Ok(model == NAME),
    }
}

/// Returns the demo's snapshot in `cache`. First writes the demo's files that are missing or have the wrong size.
pub fn materialize(cache: &Path) -> Result<Snapshot> {
    let path = directory(cache);
    if !FILES.iter().all(|(name, bytes)| has_size(&path.join(name), bytes)) {
        write_files(cache, has_size)?;
    }
    Ok(Snapshot { name: NAME.to_string(), revision: Some(REVISION.to_string()), path, source: SnapshotSource::BuiltIn })
}

fn directory(cache: &Path) -> PathBuf {
    cache.join(NAME).join(REVISION)
}

fn has_size(path: &Path, bytes: &[u8]) -> bool {
    fs::metadata(path).is_ok_and(|data| data.is_file() && data.len() == bytes.len() as u64)
}

fn has_contents(path: &Path, bytes: &[u8]) -> bool {
    files::read(path, bytes.len() as u64).is_ok_and(|found| found == bytes)
}

/// Writes the files of the demo for which `is_good` returns false.
fn write_files(cache: &Path, is_good: fn(&Path, &[u8]) -> bool) -> Result<()> {
    let path = directory(cache);
    let write = || -> io::Result<()> {
        // Hold the lock while writing, so that other processes wait for the files instead of writing them too.
        let _lock = wait_for_lock(cache);
        create_directory(&cache.join(NAME))?;
        create_directory(&path)?;
        for (name, bytes) in FILES {
            let file = path.join(name);
            if !is_good(&file, bytes) {
                // Ignore the error if another process has written the file meanwhile.
                write_file(&file, bytes).or_else(|error| if is_good(&file, bytes) { Ok(()) } else { Err(error) })?;
            }
        }
        disk::sync_dir(&path);
        Ok(())
    };
    write().with_context(|| format!("cannot write the demo model to {}", path.display()))
}

/// Waits for the lock on the demo, up to [`MAX_WAIT`].
///
/// Returns `None` if the lock file cannot be opened, or if another process still holds the lock at the end of the wait.
/// The callers then go on without the lock. Writing is still safe, but several processes may do the same work.
fn wait_for_lock(cache: &Path) -> Option<Lock> {
    let start = Instant::now();
    loop {
        match try_lock(cache) {
            Ok(Some(lock)) => return Some(lock),
            Ok(None) if start.elapsed() < MAX_WAIT => thread::sleep(Duration::from_millis(10)),
            Ok(None) | Err(_) => return None,
        }
    }
}

/// Acquires the lock on the demo without waiting. Returns `None` if another process holds the lock.
pub(super) fn try_lock(cache: &Path) -> Result<Option<Lock>> {
    lock::try_acquire(&cache.join(".locks").join("demo.lock"))
}

/// Creates a directory and its parents. Replaces a file at `path`, or a symlink that does not lead to a directory.
fn create_directory(path: &Path) -> io::Result<()> {
    if path.symlink_metadata().is_ok() && !path.is_dir() {
        fs::remove_file(path)?;
    }
    fs::create_dir_all(path)
}

/// Writes a file and flushes its data to disk. Replaces a file or a directory at `path`.
fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match disk::replace(path, bytes) {
        Err(error) if error.kind() == ErrorKind::IsADirectory => {
            fs::remove_dir_all(path)?;
            disk::replace(path, bytes)
        }
        written => written,
    }
}

/// Compares the demo's files in `cache` with the built-in files.
/// Returns `None` if `cache` does not have this version of the demo.
pub(super) fn verify(cache: &Path) -> Result<Option<VerifiedSnapshot>> {
    let path = directory(cache);
    if !path.exists() {
        return Ok(None);
    }
    let state = |name: &str, bytes: &[u8]| match path.join(name) {
        file if has_contents(&file, bytes) => FileState::Good,
        file if file.exists() => FileState::Corrupt,
        _ => FileState::Missing,
    };
    let files = FILES.iter().map(|(name, bytes)| (name.to_string(), state(name, bytes))).collect();
    let (name, revision) = (NAME.to_string(), REVISION.to_string());
    Ok(Some(VerifiedSnapshot { name, revision, source: SnapshotSource::BuiltIn, files }))
}

/// Writes the files of the demo that are missing or have wrong contents.
pub(super) fn repair(cache: &Path) -> Result<()> {
    write_files(cache, has_contents)
}

/// Deletes all versions of the demo from `cache`. Returns the size of the deleted files in bytes.
pub(super) fn remove(cache: &Path) -> Result<u64> {
    let dir = cache.join(NAME);
    if dir.symlink_metadata().is_err() {
        return Ok(0);
    }
    let _lock = wait_for_lock(cache);
    let bytes = disk::files_below(&dir).iter().filter_map(|path| fs::metadata(path).ok()).map(|m| m.len()).sum();
    match fs::remove_dir_all(&dir) {
        // Another process has deleted the demo meanwhile.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(bytes),
        removed => removed.map(|()| bytes).with_context(|| format!("cannot delete {}", dir.display())),
    }
}

/// Returns the sorted paths of the demo's temporary files and directories. Killed processes leave them behind,
/// but a process that is writing the demo may still use some of them.
///
/// Only old versions of inferno create temporary directories: they write the whole demo to one and then rename it.
pub(super) fn leftovers(cache: &Path) -> Vec<PathBuf> {
    let versions: Vec<PathBuf> = entries(&cache.join(NAME)).map(|entry| entry.path()).collect();
    let is_leftover = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        disk::is_temporary(&name)
    };
    let (mut found, versions): (Vec<PathBuf>, Vec<PathBuf>) = versions.into_iter().partition(is_leftover);
    found.extend(versions.iter().flat_map(|dir| entries(dir)).map(|entry| entry.path()).filter(is_leftover));
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn revision_is_a_hash_of_the_files() {
        let bytes = FILES.iter().flat_map(|(_, bytes)| bytes.iter());
        let hash =
            bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| (hash ^ byte as u64).wrapping_mul(0x0100_0000_01b3));
        assert_eq!(REVISION, format!("{hash:016x}"));
    }
}
