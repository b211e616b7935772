//! The state that the threads of a download share: one [`Job`] per blob, with the ranges of the blob to fetch.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::partial::Partial;
use crate::hub::cache::RepoDir;
use crate::hub::hash;
use crate::hub::progress::Progress;
use crate::hub::remote::Remote;
use crate::hub::remote::listing::RemoteFile;
use crate::text::quote;

/// A file to fetch, with its size and etag.
pub(in crate::hub) struct WantedFile {
    pub name: String,
    pub bytes: u64,
    /// The name of the blob: the etag from the hub if it is a hash, otherwise a [`hash::weak_etag`].
    pub etag: String,
}

impl WantedFile {
    /// Converts a file from the listing. Asks the hub for the size and the etag if the listing does not have both.
    /// Fails if the hub does not send both.
    pub fn new(remote: &Remote, commit: &str, file: RemoteFile) -> Result<Self> {
        let complete = if file.has_size_and_etag() { file } else { remote.head(commit, &file.name)? };
        let (Some(bytes), Some(etag)) = (complete.bytes, complete.etag) else {
            bail!("cannot get the size and the etag of {}: the hub does not send both", quote(&complete.name));
        };
        // Several files, or several versions of one file, may have the same etag if it is not a hash.
        // Give each of them its own blob name.
        let etag = if hash::is_hash(&etag) {
            etag
        } else {
            hash::weak_etag(&[commit, &complete.name, &bytes.to_string(), &etag])
        };
        Ok(Self { name: complete.name, bytes, etag })
    }

    /// Returns how many bytes of the file are in the cache, in the blob or in an unfinished file.
    pub fn present_bytes(&self, repo: &RepoDir) -> u64 {
        let blob = repo.blob(&self.etag);
        if is_complete(&blob, self.bytes) { self.bytes } else { Partial::find(&blob, self.bytes).done_bytes() }
    }
}

/// Returns whether a blob is on disk with the expected size.
pub(in crate::hub) fn is_complete(blob: &Path, bytes: u64) -> bool {
    fs::metadata(blob).is_ok_and(|data| data.is_file() && data.len() == bytes)
}

/// A running download, shared by all its threads.
pub(in crate::hub) struct Download<'a> {
    pub remote: &'a Remote<'a>,
    pub commit: &'a str,
    pub repo: &'a RepoDir,
    pub progress: &'a dyn Progress,
    pub state: Mutex<DownloadState<'a>>,
    /// Notified after each task and failure, because a waiting thread may then find a new task or must stop.
    pub changed: Condvar,
}

pub(in crate::hub) struct DownloadState<'a> {
    pub jobs: Vec<Job<'a>>,
    /// The indices of the jobs that are not finished.
    pub unfinished: BTreeSet<usize>,
    pub failure: Option<anyhow::Error>,
}

/// One blob to fetch.
pub(in crate::hub) struct Job<'a> {
    pub etag: &'a str,
    pub bytes: u64,
    /// The files in the snapshot that link to this blob.
    pub names: Vec<&'a str>,
    pub partial: Partial,
    pub phase: Phase,
    /// The ranges of the blob that no thread has started to fetch.
    pub ranges: VecDeque<Range<u64>>,
    /// The number of tasks of this job that threads are running.
    pub in_flight: usize,
    /// The number of times that all fetched bytes of the blob were discarded. Transfers of earlier generations stop.
    pub generation: u32,
    /// Whether inferno no longer splits the blob into ranges, because the server ignored range requests.
    pub is_whole_only: bool,
    /// The number of times that a server has sent the whole blob instead of a range.
    pub whole_responses: u32,
    /// Whether the blob has had a wrong hash or a changed etag. If this happens again, the download fails.
    pub was_bad: bool,
    pub last_save: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::hub) enum Phase {
    New,
    Fetching,
    Verifying,
    Done,
}

/// The next piece of work for a thread. `job` is an index into [`DownloadState::jobs`].
pub(in crate::hub) enum Task {
    FetchRange { job: usize, range: Range<u64>, generation: u32 },
    Verify { job: usize },
}

impl<'a> Job<'a> {
    pub fn new(repo: &RepoDir, file: &'a WantedFile) -> Self {
        let blob = repo.blob(&file.etag);
        Self {
            etag: &file.etag,
            bytes: file.bytes,
            names: vec![&file.name],
            partial: Partial::find(&blob, file.bytes),
            phase: if is_complete(&blob, file.bytes) { Phase::Verifying } else { Phase::New },
            ranges: VecDeque::new(),
            in_flight: 0,
            generation: 0,
            is_whole_only: false,
            whole_responses: 0,
            was_bad: false,
            last_save: Instant::now(),
        }
    }

    /// Reports the number of bytes of the blob on disk, for each file that links to the blob.
    pub fn report(&self, progress: &dyn Progress) {
        let done_bytes = match self.phase {
            Phase::Done => self.bytes,
            // Report at most the full size minus 1, because the full size means that the file is finished.
            _ => self.partial.done_bytes().min(self.bytes.saturating_sub(1)),
        };
        self.names.iter().for_each(|name| progress.file(name, done_bytes));
    }

    /// Divides the missing bytes of the blob into ranges of at most `range_bytes` bytes.
    /// If `is_whole_only` is set, each gap in the bytes on disk becomes one range of any size.
    fn split_into_ranges(&mut self, range_bytes: u64) {
        self.ranges.clear();
        for gap in self.partial.gaps() {
            let mut start = gap.start;
            while start < gap.end {
                let end =
                    if self.is_whole_only { gap.end } else { start.saturating_add(range_bytes.max(1)).min(gap.end) };
                self.ranges.push_back(start..end);
                start = end;
            }
        }
    }

    /// Discards all fetched bytes, so that the blob is fetched from the start.
    pub fn restart(&mut self) -> Result<()> {
        self.generation += 1;
        self.partial.clear();
        self.ranges.clear();
        self.partial.delete()
    }
}

impl<'a> Download<'a> {
    pub fn state(&self) -> MutexGuard<'_, DownloadState<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the next task, in the order of the jobs.
    /// If no task is ready, waits as long as running tasks can still create tasks.
    ///
    /// Returns `None` if no task is left, or if the download has failed.
    pub fn next_task(&self) -> Option<Task> {
        let mut state = self.state();
        loop {
            if state.failure.is_some() {
                return None;
            }
            match self.find_task(&mut state) {
                Search::Found(task) => return Some(task),
                Search::Finished => return None,
                Search::Busy => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    fn find_task(&self, state: &mut DownloadState) -> Search {
        let mut is_busy = false;
        for &index in &state.unfinished {
            let job = &mut state.jobs[index];
            match job.phase {
                Phase::Done => continue,
                Phase::Verifying if job.in_flight > 0 => {
                    is_busy = true;
                    continue;
                }
                Phase::Verifying => {
                    job.in_flight += 1;
                    return Search::Found(Task::Verify { job: index });
                }
                Phase::New => {
                    job.phase = Phase::Fetching;
                    if let Err(error) = job.partial.create(&self.repo.blob(job.etag)) {
                        state.failure = Some(error);
                        self.changed.notify_all();
                        return Search::Finished;
                    }
                }
                Phase::Fetching => {}
            }
            if job.ranges.is_empty() && job.in_flight == 0 {
                job.split_into_ranges(self.remote.limits().range_bytes);
            }
            if let Some(range) = job.ranges.pop_front() {
                job.in_flight += 1;
                return Search::Found(Task::FetchRange { job: index, range, generation: job.generation });
            }
            if job.in_flight == 0 {
                job.phase = Phase::Verifying;
                job.in_flight += 1;
                return Search::Found(Task::Verify { job: index });
            }
            is_busy = true;
        }
        if is_busy { Search::Busy } else { Search::Finished }
    }

    /// Sleeps for `wait`, or until the download fails. Returns false if the download has failed.
    pub fn sleep(&self, wait: Duration) -> bool {
        let end = Instant::now() + wait;
        let mut state = self.state();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if state.failure.is_some() || left.is_zero() {
                return state.failure.is_none();
            }
            (state, _) = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The result of [`Download::find_task`].
enum Search {
    Found(Task),
    /// There is no task now, but running tasks can still create new tasks.
    Busy,
    Finished,
}
