//! Fetches files from the hub into the cache, several ranges at a time.
//!
//! An unfinished file is stored as a [`Partial`](super::partial::Partial), so that an interrupted download can resume.
//! A complete file gets its blob name only after its hash, if known, has been verified.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::mem;
use std::ops::Range;
use std::path::Path;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};

use super::jobs::{Download, DownloadState, Job, Phase, Task, WantedFile, is_complete};
use super::transfer::{Stop, Transfer};
use crate::error::Error;
use crate::hub::cache::RepoDir;
use crate::hub::hash;
use crate::hub::limits::{Limits, MAX_CONNECTIONS};
use crate::hub::progress::Progress;
use crate::hub::remote::Remote;
use crate::hub::remote::retry::Retry;
use crate::snapshot::is_weights_file;
use crate::text::{counted, quote};

/// Fetches files as blobs of `repo`, and links them into the snapshot of `commit`.
///
/// Links the weights last, so that an incomplete snapshot does not count as a model.
/// Retries temporary failures. Stops the whole download as soon as one file fails permanently or its retries run out.
/// The fetched bytes then stay on disk for a later attempt, except the bytes of a file that proved corrupt or outdated.
pub(in crate::hub) fn fetch(
    remote: &Remote,
    commit: &str,
    repo: &RepoDir,
    files: &[WantedFile],
    progress: &dyn Progress,
) -> Result<()> {
    let mut jobs: Vec<Job> = Vec::new();
    let mut by_etag: HashMap<&str, usize> = HashMap::new();
    for file in files {
        // Files with equal contents share one job.
        match by_etag.entry(&file.etag) {
            Entry::Occupied(index) => jobs[*index.get()].names.push(&file.name),
            Entry::Vacant(entry) => {
                entry.insert(jobs.len());
                jobs.push(Job::new(repo, file));
            }
        }
    }
    for job in &jobs {
        job.report(progress);
    }
    let unfinished = (0..jobs.len()).collect();
    let state = Mutex::new(DownloadState { jobs, unfinished, failure: None });
    let download = Download { remote, commit, repo, progress, state, changed: Condvar::new() };
    thread::scope(|scope| {
        for _ in 0..remote.limits().connections.clamp(1, MAX_CONNECTIONS) {
            scope.spawn(|| download.run_thread());
        }
    });
    let state = download.state.into_inner().unwrap_or_else(PoisonError::into_inner);
    for job in state.jobs.iter().filter(|job| matches!(job.phase, Phase::Fetching | Phase::Verifying)) {
        // Ignore errors, such as a full disk, because a record that was saved earlier is still valid.
        let _ = job.partial.save();
    }
    if let Some(error) = state.failure {
        return Err(error);
    }
    for job in &state.jobs {
        for name in job.names.iter().filter(|name| is_weights_file(Path::new(name))) {
            repo.link(commit, name, job.etag)?;
        }
    }
    Ok(())
}

impl Download<'_> {
    /// Runs tasks on this thread until no task is left or the download fails.
    fn run_thread(&self) {
        while let Some(task) = self.next_task() {
            let result = match task {
                Task::FetchRange { job, range, generation } => self.fetch_range(job, range, generation),
                Task::Verify { job } => self.verify(job),
            };
            if let Err(error) = result {
                self.state().failure.get_or_insert(error);
            }
            self.changed.notify_all();
        }
    }

    /// Fetches one range of a file, with retries. Returns without an error if the range is no longer needed.
    fn fetch_range(&self, job: usize, range: Range<u64>, generation: u32) -> Result<()> {
        let mut transfer = Transfer { download: self, job, range: range.clone(), position: range.start, generation };
        let limits = self.remote.limits();
        let mut retry = Retry::new(limits, limits.max_failures);
        let min_progress = Limits::min_progress(self.state().jobs[job].bytes);
        // The position at the last reset of `retry`, at first the start of the range. Only bytes after it are progress:
        // a server that ignores ranges sends the bytes before it again in each attempt.
        let mut furthest = range.start;
        let result = loop {
            let (cause, retry_after) = match transfer.run() {
                Ok(()) | Err(Stop::Obsolete) => break Ok(()),
                Err(Stop::Permanent(error)) => break Err(error),
                Err(Stop::Temporary(cause, retry_after)) => (cause, retry_after),
            };
            if transfer.position >= furthest.saturating_add(min_progress) {
                furthest = transfer.position;
                retry.reset();
            }
            let Some(wait) = retry.wait_after_failure(retry_after) else {
                break Err(self.gave_up(job, &cause, retry_after));
            };
            let (name, has_failed) = {
                let state = self.state();
                (state.jobs[job].names[0], state.failure.is_some())
            };
            if !has_failed {
                self.remote.report_retry(name, &cause, wait);
            }
            if !self.sleep(wait) {
                break Ok(());
            }
        };
        self.state().jobs[job].in_flight -= 1;
        result
    }

    /// Returns the error for a file whose retries have run out, or whose next retry would have to wait too long.
    fn gave_up(&self, job: usize, cause: &str, retry_after: Option<Duration>) -> anyhow::Error {
        let state = self.state();
        let job = &state.jobs[job];
        let wait =
            retry_after.map(|wait| format!(", and the server asks to wait {} s", wait.as_secs())).unwrap_or_default();
        self.remote.temporary_error(format!(
            "{} stopped at {} of {}: {cause}{wait} (downloaded bytes are kept; run the same command to resume)",
            quote(job.names[0]),
            job.partial.done_bytes(),
            counted(job.bytes, "byte")
        ))
    }

    /// Verifies a file whose bytes are all on disk, then finishes the file or lets it be fetched again.
    /// If the hash is wrong a second time, the download fails. A file with an unknown hash counts as good.
    fn verify(&self, index: usize) -> Result<()> {
        let state = self.state();
        let &Job { etag, bytes, .. } = &state.jobs[index];
        let name = state.jobs[index].names[0];
        let checkpoint = state.jobs[index].partial.pending_record();
        // Other threads need the state while this thread reads the file.
        drop(state);
        // Do not verify an existing blob again, because a blob gets its name only after verification.
        let is_good = is_complete(&self.repo.blob(etag), bytes) || {
            self.progress.verifying(name);
            let mut stop_on_failure = |_| if self.state().failure.is_some() { bail!("stopped") } else { Ok(()) };
            hash::matches(checkpoint.path(), etag, &mut stop_on_failure)?
        };
        if is_good {
            // Flush the file while the download state is not locked, so that other threads do not wait for the disk.
            checkpoint.sync()?;
        }
        let mut state = self.state();
        if let Err(error) = self.conclude(&mut state.jobs[index], is_good) {
            // Set the failure before the download state is unlocked, so that no thread takes another task.
            state.failure.get_or_insert(error);
        }
        if state.jobs[index].phase == Phase::Done {
            state.unfinished.remove(&index);
        }
        Ok(())
    }

    /// If `is_good`, gives the file its blob name, and links it into the snapshot. [`fetch`] links weights later.
    /// Otherwise, deletes the file, so that it is fetched again. Fails if the hash was wrong before.
    fn conclude(&self, job: &mut Job, is_good: bool) -> Result<()> {
        job.in_flight -= 1;
        if is_good {
            let blob = self.repo.blob(job.etag);
            if !is_complete(&blob, job.bytes) {
                job.partial.finish(&blob)?;
            }
            for name in job.names.iter().filter(|name| !is_weights_file(Path::new(name))) {
                self.repo.link(self.commit, name, job.etag)?;
            }
            job.phase = Phase::Done;
            job.report(self.progress);
            return Ok(());
        }
        job.restart()?;
        let name = job.names[0];
        if mem::replace(&mut job.was_bad, true) {
            let what = format!(
                "cannot download {} from '{}': the downloaded file failed hash verification twice",
                quote(name),
                self.remote.repo()
            );
            let hint = "a proxy or mirror may be changing the file: try again, or set HF_ENDPOINT to another hub";
            return Err(Error::Verification { what, hint: hint.to_string() }.into());
        }
        job.phase = Phase::New;
        job.report(self.progress);
        self.remote.report_retry(name, "the contents do not match the hash from the hub", Duration::ZERO);
        Ok(())
    }
}
