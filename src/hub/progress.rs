//! [`Progress`]: a trait for receiving the events of a download, a verification or a removal.

use std::time::Duration;

use super::snapshot::Snapshot;

/// Receives the events of a download, a verification or a removal.
/// All methods do nothing by default, so `()` ignores all events.
pub trait Progress: Sync {
    /// The snapshot has all selected files, so nothing is fetched.
    fn already_present(&self, _snapshot: &Snapshot) {}
    /// The hub's listing lacks the size or the etag of `files` files, so inferno sends one request for each of them.
    /// Not called for fewer than `MANY_REQUESTS` files (`download/mod.rs`).
    fn asking_for_sizes(&self, _files: usize) {}
    /// The download or verification starts.
    /// `files` has the name and the size in bytes of every file to download or verify.
    /// In a download, `files` includes the files that are already on disk.
    fn start(&self, _files: &[(String, u64)]) {}
    /// `done_bytes` bytes of the file `name` are on disk, or have been read for verification.
    /// The file is finished when `done_bytes` equals the file size.
    ///
    /// In a download, the first report for a file includes the bytes of earlier attempts.
    /// `done_bytes` decreases if the file is fetched again from the start.
    fn file(&self, _name: &str, _done_bytes: u64) {}
    /// All bytes of the downloaded file `name` are on disk, and its hash, if known, is being verified.
    fn verifying(&self, _name: &str) {}
    /// A request for `name` has failed or returned wrong contents, and will be sent again after `wait`.
    /// `name` is a file or a repository.
    fn retrying(&self, _name: &str, _cause: &str, _wait: Duration) {}
    /// Another process holds the lock on this repository, so this process waits.
    fn waiting(&self, _repo: &str) {}
}

impl Progress for () {}
