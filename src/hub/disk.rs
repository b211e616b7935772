//! Room on the disk, and what is to survive a power cut.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::Result;

use super::cache::create_dir;
use crate::error::Error;

/// Fails early if the disk cannot take `needed_bytes` more.
pub(super) fn check_space(dir: &Path, needed_bytes: u64) -> Result<()> {
    // Where the folder cannot even be made, that is what is wrong.
    create_dir(dir)?;
    match free_bytes(dir) {
        Some(free_bytes) if free_bytes < needed_bytes => {
            Err(Error::DiskFull { path: dir.to_path_buf(), needed_bytes, free_bytes }.into())
        }
        _ => Ok(()),
    }
}

/// What a person without privileges may still write to the disk of `dir`, which need not exist yet.
#[cfg(unix)]
pub(super) fn free_bytes(dir: &Path) -> Option<u64> {
    let present = dir.ancestors().find(|dir| dir.exists())?;
    let disk = nix::sys::statvfs::statvfs(present).ok()?;
    // The types differ between systems.
    #[allow(clippy::unnecessary_cast)]
    Some((disk.blocks_available() as u64).saturating_mul(disk.fragment_size() as u64))
}

#[cfg(not(unix))]
pub(super) fn free_bytes(_dir: &Path) -> Option<u64> {
    None
}

/// The error for a write of `needed_bytes` more that failed.
pub(super) fn write_error(error: std::io::Error, path: &Path, needed_bytes: u64) -> anyhow::Error {
    // The last is a limit on the size of files, set by `ulimit -f` or by the file system.
    if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge) {
        let free_bytes = free_bytes(path).unwrap_or(0);
        let full = Error::DiskFull { path: path.to_path_buf(), needed_bytes, free_bytes };
        return anyhow::Error::from(full).context(format!("{error} (what is here is kept; the same command goes on)"));
    }
    anyhow::Error::new(error).context(format!("cannot write {}", path.display()))
}

/// Makes the names in a directory survive a power cut. Where a system cannot, nothing is lost but that.
pub(super) fn sync_dir(dir: &Path) {
    let _ = File::open(dir).and_then(|dir| dir.sync_all());
}
