//! File operations for the cache: directories, temporary files, free space, and writes that survive a power failure.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;

use crate::error::{Error, is_disk_full};
use crate::text::size;

/// Creates a directory and its parents. The error message suggests another cache directory.
pub(in crate::hub) fn create_dir(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).map_err(|error| match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => write_error(error, dir),
        _ => anyhow::Error::new(error)
            .context(format!("cannot create {}\n  set INFERNO_CACHE to another directory", dir.display())),
    })
}

/// Creates `dir` if it does not exist. Fails if the disk of `dir` is known to have less than `needed_bytes` free.
pub(in crate::hub) fn check_space(dir: &Path, needed_bytes: u64) -> Result<()> {
    // Create the directory first, because an error about the directory is more useful than one about free space.
    create_dir(dir)?;
    match free_bytes(dir) {
        Some(free_bytes) if free_bytes < needed_bytes => {
            let reason = format!("the download needs {}, but only {} is free", size(needed_bytes), size(free_bytes));
            Err(Error::DiskFull { path: dir.to_path_buf(), reason }.into())
        }
        _ => Ok(()),
    }
}

/// Returns the free disk space at `dir` for unprivileged users, in bytes, or `None` if it is unknown.
/// The directory `dir` need not exist yet.
#[cfg(unix)]
pub(in crate::hub) fn free_bytes(dir: &Path) -> Option<u64> {
    let existing = dir.ancestors().find(|dir| dir.exists())?;
    let disk = nix::sys::statvfs::statvfs(existing).ok()?;
    // The field types differ between operating systems. Where they are `u64`, Clippy reports the casts as unnecessary.
    #[allow(clippy::unnecessary_cast)]
    Some((disk.blocks_available() as u64).saturating_mul(disk.fragment_size() as u64))
}

#[cfg(not(unix))]
pub(in crate::hub) fn free_bytes(_dir: &Path) -> Option<u64> {
    None
}

/// Returns the error for a failed write: [`Error::DiskFull`] if the disk is full or the write exceeds a quota or a
/// file size limit, otherwise an error that names the path.
pub(in crate::hub) fn write_error(error: io::Error, path: &Path) -> anyhow::Error {
    if is_disk_full(&error) {
        let reason = format!("{error} (downloaded bytes are kept; run the same command to resume)");
        return Error::DiskFull { path: path.to_path_buf(), reason }.into();
    }
    anyhow::Error::new(error).context(format!("cannot write {}", path.display()))
}

/// Flushes a directory, so that its entries survive a power failure.
/// Ignores errors, because some systems cannot flush directories.
pub(in crate::hub) fn sync_dir(dir: &Path) {
    let _ = File::open(dir).and_then(|dir| dir.sync_all());
}

/// Returns a temporary path in the same directory as `path`. No other call in this process returns the same path.
/// A rename within a directory is atomic, so a caller can write the temporary file and then rename it to `path`.
pub(in crate::hub) fn temporary_path(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    with_suffix(path, &format!(".{}-{}.tmp", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)))
}

/// Creates a file with a temporary name next to `path`. Never opens an existing file.
fn create_temporary(path: &Path) -> io::Result<(PathBuf, File)> {
    loop {
        let temporary = temporary_path(path);
        match File::options().write(true).create_new(true).open(&temporary) {
            // Another process with the same id, an earlier one or one in another container, has created this file.
            // Try the next name.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            file => return file.map(|file| (temporary, file)),
        }
    }
}

/// Creates or replaces the file `path` with the contents `bytes`, and flushes the data to disk.
///
/// Other processes see either the old file or the complete new file. After an error, the old file is unchanged.
pub(in crate::hub) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let (temporary, mut file) = create_temporary(path)?;
    // Flush before renaming. Otherwise, a power failure could leave a file of the right size that contains zeros.
    let replaced = file.write_all(bytes).and_then(|()| file.sync_data()).and_then(|()| fs::rename(&temporary, path));
    if replaced.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    replaced
}

/// Returns whether a file name has the form of a name from [`temporary_path`], such as `config.json.123-0.tmp`.
pub(in crate::hub) fn is_temporary(name: &str) -> bool {
    let numbers = name.strip_suffix(".tmp").and_then(|name| name.rsplit_once('.')?.1.split_once('-'));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(process, count)| is_number(process) && is_number(count))
}

/// Appends `suffix` to the file name of a path.
pub(in crate::hub) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut path = path.as_os_str().to_os_string();
    path.push(suffix);
    path.into()
}

/// Returns the sorted paths of all files below a directory.
/// Symlinks count as files. Directories that cannot be read count as empty.
pub(in crate::hub) fn files_below(dir: &Path) -> Vec<PathBuf> {
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

/// Returns the entries of a directory, or no entries if the directory is missing or cannot be read.
pub(in crate::hub) fn entries(dir: &Path) -> impl Iterator<Item = fs::DirEntry> {
    fs::read_dir(dir).into_iter().flatten().flatten()
}

/// Resolves the symlinks in the existing part of a path.
pub(in crate::hub) fn resolve(path: &Path) -> PathBuf {
    let resolve = |dir: &Path| Some(fs::canonicalize(dir).ok()?.join(path.strip_prefix(dir).ok()?));
    path.ancestors().find_map(resolve).unwrap_or_else(|| path.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_disk_is_an_error_that_states_the_reason_once() {
        let dir = tempfile::tempdir().unwrap();
        let error = check_space(dir.path(), u64::MAX).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("cannot write to {}: the download needs ", dir.path().display())),
            "{error}"
        );
        let error = format!("{:#}", write_error(ErrorKind::StorageFull.into(), Path::new("/x")));
        let expected =
            "cannot write to /x: no storage space (downloaded bytes are kept; run the same command to resume)";
        assert_eq!(error.lines().next(), Some(expected));
    }

    #[test]
    fn a_failed_replacement_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for bytes in [&b"old"[..], b"new"] {
            replace(&path, bytes).unwrap();
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
        // `replace` fails for a directory, because renaming cannot replace a directory with a file.
        let folder = dir.path().join("folder");
        fs::create_dir(&folder).unwrap();
        replace(&folder, b"new").unwrap_err();
        let mut names: Vec<_> = entries(dir.path()).map(|entry| entry.file_name()).collect();
        names.sort();
        assert_eq!(names, ["file", "folder"]);
    }
}
