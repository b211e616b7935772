//! The progress events of a download.

use std::time::Duration;

use super::snapshot::Snapshot;

/// Receives the progress events of a download. By default, every method does nothing. `&()` ignores all events.
pub trait Progress: Sync {
    /// The snapshot is already complete, so nothing is fetched.
    fn already_present(&self, _snapshot: &Snapshot) {}
    /// The hub does not list the sizes of some files, so one request is sent for each of these files.
    /// `files` is the number of files without a listed size.
    fn asking_for_sizes(&self, _files: usize) {}
    /// The download is starting. `files` lists the name and size in bytes of every file, including files on disk.
    fn start(&self, _files: &[(String, u64)]) {}
    /// `done_bytes` bytes of the file `name` are on disk. The file is finished once `done_bytes` equals its size.
    ///
    /// The first report for a file includes bytes from an earlier, interrupted download.
    /// `done_bytes` decreases if the file is fetched again from the beginning.
    fn file(&self, _name: &str, _done_bytes: u64) {}
    /// The file `name` is complete, and its hash is being computed.
    fn verifying(&self, _name: &str) {}
    /// A request for `name` failed and will be sent again after `wait`.
    fn retrying(&self, _name: &str, _cause: &str, _wait: Duration) {}
    /// Another process holds the lock on this repository, so the download is waiting.
    fn waiting(&self, _repo: &str) {}
}

impl Progress for () {}
