//! What a caller can observe of a download.

use std::time::Duration;

use super::snapshot::Snapshot;

/// Observes a download. Every method does nothing unless overridden; `&()` ignores all events.
pub trait Progress: Sync {
    /// Nothing is fetched, because this snapshot is complete.
    fn already_present(&self, _snapshot: &Snapshot) {}
    /// All files of the snapshot with their sizes in bytes, in download order, present ones included.
    fn start(&self, _files: &[(String, u64)]) {}
    /// `done_bytes` of the file `name` are on disk. Equal to the file's size: the file is finished.
    ///
    /// Each file is first reported with the bytes that an earlier attempt left. The count goes down if a server cannot
    /// resume.
    fn file(&self, _name: &str, _done_bytes: u64) {}
    /// The file `name` is complete, and its hash is being computed.
    fn verifying(&self, _name: &str) {}
    /// A request for `name` failed. It is sent again after `wait`.
    fn retrying(&self, _name: &str, _cause: &str, _wait: Duration) {}
    /// Another process holds the lock of this repository and must finish first.
    fn waiting(&self, _repo: &str) {}
}

impl Progress for () {}
