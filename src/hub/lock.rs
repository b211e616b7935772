//! One process at a time changes a repository's folder; others wait.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result};
#[cfg(unix)]
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};

use super::cache::create_dir;

/// Held until it is dropped, or until the process ends in whatever way.
#[cfg(unix)]
pub(super) struct Lock(Option<Flock<File>>);

#[cfg(not(unix))]
pub(super) struct Lock;

impl Lock {
    /// Whether it keeps anybody out.
    #[cfg(unix)]
    pub fn works(&self) -> bool {
        self.0.is_some()
    }

    #[cfg(not(unix))]
    pub fn works(&self) -> bool {
        false
    }
}

/// Takes the lock at `path`, at once or when whoever has it lets go; then `waiting` is called first. Without effect
/// where locks do not work, as on some network disks.
pub(super) fn hold(path: &Path, waiting: impl FnOnce()) -> Result<Lock> {
    if let Some(lock) = try_hold(path)? {
        return Ok(lock);
    }
    waiting();
    wait(open(path)?)
}

/// The same without waiting: none while somebody has it.
#[cfg(unix)]
pub(super) fn try_hold(path: &Path) -> Result<Option<Lock>> {
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
pub(super) fn try_hold(path: &Path) -> Result<Option<Lock>> {
    open(path).map(|_| Some(Lock))
}

#[cfg(not(unix))]
fn wait(_file: File) -> Result<Lock> {
    Ok(Lock)
}

fn open(path: &Path) -> Result<File> {
    create_dir(path.parent().unwrap_or(path))?;
    // Never truncated, never deleted: who waits must wait for the same file.
    let file = File::options().append(true).create(true).open(path);
    file.with_context(|| format!("cannot write {}", path.display()))
}
