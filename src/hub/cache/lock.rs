//! File locks. A process holds the lock of a repository while it changes the repository's directory.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result};
#[cfg(unix)]
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};

use super::disk::create_dir;

/// A file lock that is held until this value is dropped or the process ends.
#[cfg(unix)]
pub(in crate::hub) struct Lock(Option<Flock<File>>);

#[cfg(not(unix))]
pub(in crate::hub) struct Lock;

impl Lock {
    /// Returns false if locking failed, usually because the filesystem does not support locks.
    /// The lock then has no effect.
    #[cfg(unix)]
    pub fn is_effective(&self) -> bool {
        self.0.is_some()
    }

    #[cfg(not(unix))]
    pub fn is_effective(&self) -> bool {
        false
    }
}

/// Acquires the lock at `path`. If another process holds the lock, calls `on_wait`, then waits for the lock.
///
/// On some network filesystems and outside Unix, the lock has no effect. See [`Lock::is_effective`].
pub(in crate::hub) fn acquire(path: &Path, on_wait: impl FnOnce()) -> Result<Lock> {
    if let Some(lock) = try_acquire(path)? {
        return Ok(lock);
    }
    on_wait();
    wait(open(path)?)
}

/// Acquires the lock at `path` without waiting. Returns `None` if another process holds the lock.
#[cfg(unix)]
pub(in crate::hub) fn try_acquire(path: &Path) -> Result<Option<Lock>> {
    match Flock::lock(open(path)?, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(Lock(Some(lock)))),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err(_) => Ok(Some(Lock(None))),
    }
}

#[cfg(unix)]
fn wait(mut file: File) -> Result<Lock> {
    loop {
        file = match Flock::lock(file, FlockArg::LockExclusive) {
            Ok(lock) => return Ok(Lock(Some(lock))),
            Err((file, Errno::EINTR)) => file,
            Err(_) => return Ok(Lock(None)),
        };
    }
}

#[cfg(not(unix))]
pub(in crate::hub) fn try_acquire(path: &Path) -> Result<Option<Lock>> {
    open(path).map(|_| Some(Lock))
}

#[cfg(not(unix))]
fn wait(_file: File) -> Result<Lock> {
    Ok(Lock)
}

fn open(path: &Path) -> Result<File> {
    create_dir(path.parent().unwrap_or(path))?;
    // The lock file must never be deleted, because all processes must lock the same file.
    let file = File::options().append(true).create(true).open(path);
    file.with_context(|| format!("cannot write {}", path.display()))
}
