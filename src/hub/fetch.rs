//! Fetches files from the hub into the cache, several at once and in parts.
//!
//! The bytes of an unfinished file are a [`Partial`](super::partial::Partial). The file gets the name of its blob once
//! it is complete and its hash matches. So an interrupted download can resume, and every blob is complete.

use std::mem;
use std::ops::Range;
use std::path::Path;
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};

use super::cache::RepoDir;
use super::hash;
use super::jobs::{Board, Download, Job, Phase, Task, WantedFile, is_complete};
use super::progress::Progress;
use super::remote::Remote;
use super::retry::Retry;
use super::transfer::{Stop, Transfer};
use crate::error::Error;
use crate::snapshot::is_weights_file;

/// Fetches files into the blobs of `repo` and links them into the snapshot.
///
/// Weights are linked last, after all other files are present: they are what makes a folder count as a model. The first
/// failure ends the download; what was fetched until then is kept.
pub(super) fn fetch(
    remote: &Remote,
    commit: &str,
    repo: &RepoDir,
    files: &[WantedFile],
    progress: &dyn Progress,
) -> Result<()> {
    let mut jobs: Vec<Job> = Vec::new();
    for file in files {
        // Several files may have the same contents.
        match jobs.iter_mut().find(|job| job.etag == file.etag) {
            Some(job) => job.names.push(&file.name),
            None => jobs.push(Job::new(repo, file)),
        }
    }
    for job in &jobs {
        job.report(progress);
    }
    let board = Mutex::new(Board { jobs, failure: None });
    let download = Download { remote, commit, repo, progress, board, changed: Condvar::new() };
    thread::scope(|scope| {
        for _ in 0..remote.limits().connections.clamp(1, 64) {
            scope.spawn(|| download.run_thread());
        }
    });
    let board = download.board.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    for job in board.jobs.iter().filter(|job| matches!(job.phase, Phase::Fetching | Phase::Verifying)) {
        // If the disk is full, the record of a second ago remains.
        let _ = job.partial.save();
    }
    if let Some(error) = board.failure {
        return Err(error);
    }
    for job in &board.jobs {
        for name in job.names.iter().filter(|name| is_weights_file(Path::new(name))) {
            repo.link(commit, name, job.etag)?;
        }
    }
    Ok(())
}

impl Download<'_> {
    /// The main function of a thread: executes tasks until there are no more.
    fn run_thread(&self) {
        while let Some(task) = self.next_task() {
            let result = match task {
                Task::FetchPart { job, part, generation } => self.fetch_part(job, part, generation),
                Task::Verify { job } => self.verify(job),
            };
            if let Err(error) = result {
                self.board().failure.get_or_insert(error);
            }
            self.changed.notify_all();
        }
    }

    /// Fetches a part, with retries.
    fn fetch_part(&self, job: usize, part: Range<u64>, generation: u32) -> Result<()> {
        let mut transfer = Transfer { download: self, job, part: part.clone(), position: part.start, generation };
        let limits = self.remote.limits();
        let mut retry = Retry::new(limits, limits.max_failures);
        // The furthest position of any attempt. A server that cannot resume starts each attempt at the beginning.
        let mut furthest = part.start;
        let result = loop {
            let (cause, retry_after) = match transfer.run() {
                Ok(()) | Err(Stop::Obsolete) => break Ok(()),
                Err(Stop::Permanent(error)) => break Err(error),
                Err(Stop::Temporary(cause, retry_after)) => (cause, retry_after),
            };
            if transfer.position > furthest {
                furthest = transfer.position;
                retry.reset();
            }
            let Some(wait) = retry.wait_after_failure(retry_after) else {
                break Err(self.gave_up(job, &cause, retry_after));
            };
            let (name, has_failed) = {
                let board = self.board();
                (board.jobs[job].names[0], board.failure.is_some())
            };
            if !has_failed {
                self.remote.report_retry(name, &cause, wait);
            }
            if !self.sleep(wait) {
                break Ok(());
            }
        };
        self.board().jobs[job].in_flight -= 1;
        result
    }

    /// Returns the error for a file whose retries ran out.
    fn gave_up(&self, job: usize, cause: &str, retry_after: Option<Duration>) -> anyhow::Error {
        let board = self.board();
        let job = &board.jobs[job];
        let wait = retry_after.map(|wait| format!(", and asks to wait {} s", wait.as_secs())).unwrap_or_default();
        self.remote.temporary_error(format!(
            "{} stopped at {} of {} bytes: {cause}{wait} (downloaded bytes are kept; run the same command to resume)",
            job.names[0],
            job.partial.done_bytes(),
            job.bytes
        ))
    }

    /// Checks the hash of a complete file. A bad file is deleted and fetched once more.
    fn verify(&self, index: usize) -> Result<()> {
        let (etag, bytes, name, checkpoint) = {
            let board = self.board();
            let job = &board.jobs[index];
            (job.etag, job.bytes, job.names[0], job.partial.checkpoint())
        };
        let blob = self.repo.blob(etag);
        // A file that has the name of its blob was verified when it arrived.
        let is_good = is_complete(&blob, bytes) || {
            self.progress.verifying(name);
            let mut stop_on_failure = |_| if self.board().failure.is_some() { bail!("stopped") } else { Ok(()) };
            hash::matches(checkpoint.path(), etag, &mut stop_on_failure)?
        };
        if is_good {
            // Flushed here, without the lock on the board.
            checkpoint.sync()?;
        }
        let mut board = self.board();
        if let Err(error) = self.conclude(&mut board.jobs[index], is_good) {
            // Set while the lock is held, so that no thread takes another task first.
            board.failure.get_or_insert(error);
        }
        Ok(())
    }

    /// Links a good file into the snapshot, unless it is weights, which `fetch` links last. Restarts a bad one.
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
                "cannot download {name} of '{}': it arrived twice with contents that do not match its hash",
                self.remote.repo()
            );
            let hint = "a proxy or a mirror may change it: try again, or set HF_ENDPOINT to another hub";
            return Err(Error::Verification { what, hint: hint.to_string() }.into());
        }
        job.phase = Phase::New;
        job.report(self.progress);
        self.remote.report_retry(name, "its contents do not match the hub's hash", Duration::ZERO);
        Ok(())
    }
}
