//! Files from the hub into the cache, several at once and in parts.
//!
//! What has come of a file is a [`Partial`]; it takes the blob's name when it is whole and its hash is right. So an
//! interrupted download goes on where it stopped, and what has its name is whole.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::cache::RepoDir;
use super::partial::Partial;
use super::remote::Remote;
use super::retry::Retry;
use super::select::RemoteFile;
use super::transfer::{Stop, Transfer};
use super::{Progress, hash};
use crate::error::Error;
use crate::snapshot::is_weights_file;

/// A file whose size is known and that has a name for its contents, ready to fetch.
pub(super) struct Wanted {
    pub name: String,
    pub bytes: u64,
    /// The hash of its contents where the hub tells it, and else a word that no other file has.
    pub etag: String,
}

impl Wanted {
    /// Completes what the listing told, by a request if need be.
    pub fn new(remote: &Remote, commit: &str, file: RemoteFile) -> Result<Self> {
        let told = match file {
            RemoteFile { bytes: Some(_), etag: Some(_), .. } => file,
            file => remote.head(commit, &file.name)?,
        };
        let (Some(bytes), Some(etag)) = (told.bytes, told.etag) else {
            bail!("the hub does not say how long {} is", told.name);
        };
        // Two files may have the same word, and so may the next commit's contents of this one.
        let etag = match hash::is_hash(&etag) {
            true => etag,
            false => hash::word(&[commit, &told.name, &bytes.to_string(), &etag]),
        };
        Ok(Self { name: told.name, bytes, etag })
    }

    /// How many of its bytes are in the cache.
    pub fn present_bytes(&self, repo: &RepoDir) -> u64 {
        let blob = repo.blob(&self.etag);
        if whole(&blob, self.bytes) { self.bytes } else { Partial::find(&blob, self.bytes).done_bytes() }
    }
}

/// Brings files into the blobs of `repo` and links them into the snapshot: weights last, when all others are there, as
/// they are what makes a folder count as a model. The first failure ends it all; what has come by then is kept.
pub(super) fn fetch(
    remote: &Remote,
    commit: &str,
    repo: &RepoDir,
    files: &[Wanted],
    progress: &dyn Progress,
) -> Result<()> {
    let mut jobs: Vec<Job> = Vec::new();
    for file in files {
        // Several names may stand for the same contents.
        match jobs.iter_mut().find(|job| job.etag == file.etag) {
            Some(job) => job.names.push(&file.name),
            None => jobs.push(Job::new(repo, file)),
        }
    }
    for job in &jobs {
        job.tell(progress);
    }
    let board = Mutex::new(Board { jobs, failure: None });
    let fetch = Fetch { remote, commit, repo, progress, board, changed: Condvar::new() };
    std::thread::scope(|scope| {
        for _ in 0..remote.limits().connections.clamp(1, 64) {
            scope.spawn(|| fetch.work());
        }
    });
    let board = fetch.board.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    for job in board.jobs.iter().filter(|job| matches!(job.phase, Phase::Fetching | Phase::Verifying)) {
        // On a full disk the note of a second ago must do.
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

/// A download under way, as its threads see it.
pub(super) struct Fetch<'a> {
    pub(super) remote: &'a Remote<'a>,
    pub(super) commit: &'a str,
    pub(super) repo: &'a RepoDir,
    pub(super) progress: &'a dyn Progress,
    pub(super) board: Mutex<Board<'a>>,
    /// There may be work again, or none any more.
    pub(super) changed: Condvar,
}

pub(super) struct Board<'a> {
    pub(super) jobs: Vec<Job<'a>>,
    pub(super) failure: Option<anyhow::Error>,
}

/// One blob to be fetched.
pub(super) struct Job<'a> {
    pub(super) etag: &'a str,
    pub(super) bytes: u64,
    pub(super) names: Vec<&'a str>,
    pub(super) partial: Partial,
    pub(super) phase: Phase,
    /// Parts that nobody fetches yet.
    pub(super) parts: VecDeque<Range<u64>>,
    /// Parts that somebody fetches.
    pub(super) in_flight: usize,
    /// Grows when all that was fetched is void; whoever fetches for an earlier one stops.
    pub(super) generation: u32,
    /// The server sends files from their beginning only.
    pub(super) in_one: bool,
    /// How often a server has sent all of it in place of a part.
    pub(super) sent_whole: u32,
    /// It was whole and had the wrong hash.
    pub(super) was_bad: bool,
    pub(super) last_save: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    New,
    Fetching,
    Verifying,
    Done,
}

/// What a thread does next.
enum Task {
    Part { job: usize, part: Range<u64>, generation: u32 },
    Verify { job: usize },
}

impl<'a> Job<'a> {
    fn new(repo: &RepoDir, file: &'a Wanted) -> Self {
        let blob = repo.blob(&file.etag);
        Self {
            etag: &file.etag,
            bytes: file.bytes,
            names: vec![&file.name],
            partial: Partial::find(&blob, file.bytes),
            phase: if whole(&blob, file.bytes) { Phase::Verifying } else { Phase::New },
            parts: VecDeque::new(),
            in_flight: 0,
            generation: 0,
            in_one: false,
            sent_whole: 0,
            was_bad: false,
            last_save: Instant::now(),
        }
    }

    pub(super) fn tell(&self, progress: &dyn Progress) {
        let done_bytes = match self.phase {
            Phase::Done => self.bytes,
            // Equal to the size would mean that it is finished.
            _ => self.partial.done_bytes().min(self.bytes.saturating_sub(1)),
        };
        self.names.iter().for_each(|name| progress.file(name, done_bytes));
    }

    /// Cuts what is missing into parts.
    fn cut(&mut self, part_bytes: u64) {
        self.parts.clear();
        for gap in self.partial.gaps() {
            let mut start = gap.start;
            while start < gap.end {
                let end = if self.in_one { gap.end } else { start.saturating_add(part_bytes.max(1)).min(gap.end) };
                self.parts.push_back(start..end);
                start = end;
            }
        }
    }

    /// All that was fetched is void: from the beginning.
    pub(super) fn start_anew(&mut self) -> Result<()> {
        self.generation += 1;
        self.partial.clear();
        self.parts.clear();
        self.partial.delete()
    }
}

impl<'a> Fetch<'a> {
    /// One thread: parts, until there are no more.
    fn work(&self) {
        while let Some(task) = self.next() {
            let result = match task {
                Task::Part { job, part, generation } => self.part(job, part, generation),
                Task::Verify { job } => self.verify(job),
            };
            if let Err(error) = result {
                self.board().failure.get_or_insert(error);
            }
            self.changed.notify_all();
        }
    }

    pub(super) fn board(&self) -> MutexGuard<'_, Board<'a>> {
        self.board.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The first thing that nobody does yet, in the order of the files; waits while there may be one later. None at the
    /// end.
    fn next(&self) -> Option<Task> {
        let mut board = self.board();
        loop {
            if board.failure.is_some() {
                return None;
            }
            let mut busy = false;
            for (index, job) in board.jobs.iter_mut().enumerate() {
                match job.phase {
                    Phase::Done => continue,
                    Phase::Verifying if job.in_flight > 0 => {
                        busy = true;
                        continue;
                    }
                    Phase::Verifying => {
                        job.in_flight += 1;
                        return Some(Task::Verify { job: index });
                    }
                    Phase::New => {
                        job.phase = Phase::Fetching;
                        if let Err(error) = job.partial.create(&self.repo.blob(job.etag)) {
                            board.failure = Some(error);
                            self.changed.notify_all();
                            return None;
                        }
                    }
                    Phase::Fetching => {}
                }
                if job.parts.is_empty() && job.in_flight == 0 {
                    job.cut(self.remote.limits().part_bytes);
                }
                if let Some(part) = job.parts.pop_front() {
                    job.in_flight += 1;
                    return Some(Task::Part { job: index, part, generation: job.generation });
                }
                if job.in_flight == 0 {
                    job.phase = Phase::Verifying;
                    job.in_flight += 1;
                    return Some(Task::Verify { job: index });
                }
                busy = true;
            }
            if !busy {
                return None;
            }
            board = self.changed.wait(board).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Fetches a part, again and again if need be.
    fn part(&self, job: usize, part: Range<u64>, generation: u32) -> Result<()> {
        let mut transfer = Transfer { fetch: self, job, part: part.clone(), at: part.start, generation };
        let limits = self.remote.limits();
        let mut retry = Retry::new(limits, limits.tries);
        // The furthest that any attempt has come: a server that cannot resume may break anywhere.
        let mut most = part.start;
        let result = loop {
            let (cause, asked_for) = match transfer.run() {
                Ok(()) | Err(Stop::Void) => break Ok(()),
                Err(Stop::Final(error)) => break Err(error),
                Err(Stop::Broken(cause, asked_for)) => (cause, asked_for),
            };
            if transfer.at > most {
                most = transfer.at;
                retry.reset();
            }
            let Some(wait) = retry.after_failure(asked_for) else {
                break Err(self.gave_up(job, &cause, asked_for));
            };
            let (name, failed) = {
                let board = self.board();
                (board.jobs[job].names[0], board.failure.is_some())
            };
            if !failed {
                self.remote.retrying(name, &cause, wait);
            }
            if !self.sleep(wait) {
                break Ok(());
            }
        };
        self.board().jobs[job].in_flight -= 1;
        result
    }

    fn gave_up(&self, job: usize, cause: &str, asked_for: Option<Duration>) -> anyhow::Error {
        let board = self.board();
        let job = &board.jobs[job];
        let again = asked_for.map(|wait| format!(", and asks to wait {} s", wait.as_secs())).unwrap_or_default();
        self.remote.unreachable(format!(
            "{} stopped at {} of {} bytes: {cause}{again} (what is here is kept; the same command goes on)",
            job.names[0],
            job.partial.done_bytes(),
            job.bytes
        ))
    }

    /// Whether it is still worth going on after that time.
    fn sleep(&self, wait: Duration) -> bool {
        let end = Instant::now() + wait;
        let mut board = self.board();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if board.failure.is_some() || left.is_zero() {
                return board.failure.is_none();
            }
            board = match self.changed.wait_timeout(board, left) {
                Ok((board, _)) => board,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// Judges a file that is all there. A bad one is deleted and fetched once more.
    fn verify(&self, index: usize) -> Result<()> {
        let (etag, bytes, name, note) = {
            let board = self.board();
            let job = &board.jobs[index];
            (job.etag, job.bytes, job.names[0], job.partial.note())
        };
        let path = note.path();
        let blob = self.repo.blob(etag);
        // What has its name already was judged when it came.
        let good = whole(&blob, bytes) || {
            self.progress.verifying(name);
            let mut unless_failed = |_| if self.board().failure.is_some() { bail!("stopped") } else { Ok(()) };
            hash::matches(path, etag, &mut unless_failed)?
        };
        if good {
            // Here, where others need not wait for it.
            note.sync()?;
        }
        let mut board = self.board();
        if let Err(error) = self.conclude(&mut board.jobs[index], good) {
            // Noted while nobody else can look for work.
            board.failure.get_or_insert(error);
        }
        Ok(())
    }

    /// Gives a good file its names, but for weights, which get them at the end; starts anew with a bad one.
    fn conclude(&self, job: &mut Job, good: bool) -> Result<()> {
        job.in_flight -= 1;
        if good {
            let blob = self.repo.blob(job.etag);
            if !whole(&blob, job.bytes) {
                job.partial.finish(&blob)?;
            }
            for name in job.names.iter().filter(|name| !is_weights_file(Path::new(name))) {
                self.repo.link(self.commit, name, job.etag)?;
            }
            job.phase = Phase::Done;
            job.tell(self.progress);
            return Ok(());
        }
        job.start_anew()?;
        let name = job.names[0];
        if std::mem::replace(&mut job.was_bad, true) {
            let what = format!("{name} of '{}' has come twice with contents not its own", self.remote.repo());
            let hint = "a proxy or a mirror may be spoiling it: try again, or set HF_ENDPOINT to another hub";
            return Err(Error::Verification { what, hint: hint.to_string() }.into());
        }
        job.phase = Phase::New;
        job.tell(self.progress);
        self.remote.retrying(name, "its contents are not what the hub says they are", Duration::ZERO);
        Ok(())
    }
}

fn whole(blob: &Path, bytes: u64) -> bool {
    std::fs::metadata(blob).is_ok_and(|data| data.is_file() && data.len() == bytes)
}
