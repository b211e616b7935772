//! Files from the hub into the cache, several at once and in parts.
//!
//! What has come of a file is a [`Partial`]; it takes the blob's name when it is whole and its hash is right. So an
//! interrupted download goes on where it stopped, and what has its name is whole.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ureq::http::{HeaderMap, Response, StatusCode, header};
use ureq::{Body, BodyReader};

use super::cache::{RepoDir, is_weights};
use super::disk::write_error;
use super::partial::Partial;
use super::remote::Remote;
use super::retry::{Retry, is_passing, retry_after};
use super::select::RemoteFile;
use super::{Progress, hash};
use crate::Error;

/// So often a server may ignore a range before what is here is given up.
const WHOLE_SLIPS: u32 = 3;
/// A transfer that gains less in twice the stall limit is as good as stalled.
const SLOWEST_BYTES: u64 = 64 << 10;

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
        for name in job.names.iter().filter(|name| is_weights(Path::new(name))) {
            repo.link(commit, name, job.etag)?;
        }
    }
    Ok(())
}

/// A download under way, as its threads see it.
struct Fetch<'a> {
    remote: &'a Remote<'a>,
    commit: &'a str,
    repo: &'a RepoDir,
    progress: &'a dyn Progress,
    board: Mutex<Board<'a>>,
    /// There may be work again, or none any more.
    changed: Condvar,
}

struct Board<'a> {
    jobs: Vec<Job<'a>>,
    failure: Option<anyhow::Error>,
}

/// One blob to be fetched.
struct Job<'a> {
    etag: &'a str,
    bytes: u64,
    names: Vec<&'a str>,
    partial: Partial,
    phase: Phase,
    /// Parts that nobody fetches yet.
    parts: VecDeque<Range<u64>>,
    /// Parts that somebody fetches.
    in_flight: usize,
    /// Grows when all that was fetched is void; whoever fetches for an earlier one stops.
    generation: u32,
    /// The server sends files from their beginning only.
    in_one: bool,
    /// How often a server has sent all of it in place of a part.
    sent_whole: u32,
    /// It was whole and had the wrong hash.
    was_bad: bool,
    last_save: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
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

/// Why a transfer ended early.
enum Stop {
    /// The connection; the next attempt may fare better, after so long.
    Broken(String, Option<Duration>),
    /// Anything that another attempt would only repeat.
    Final(anyhow::Error),
    /// Nobody needs it any more.
    Void,
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

    fn tell(&self, progress: &dyn Progress) {
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
    fn start_anew(&mut self) -> Result<()> {
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

    fn board(&self) -> MutexGuard<'_, Board<'a>> {
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

    /// Gives a good file its names; starts anew with a bad one.
    fn conclude(&self, job: &mut Job, good: bool) -> Result<()> {
        job.in_flight -= 1;
        if good {
            let blob = self.repo.blob(job.etag);
            if !whole(&blob, job.bytes) {
                job.partial.finish(&blob)?;
            }
            for name in job.names.iter().filter(|name| !is_weights(Path::new(name))) {
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

/// A part that one thread fetches.
struct Transfer<'a, 'b> {
    fetch: &'b Fetch<'a>,
    job: usize,
    part: Range<u64>,
    /// What of the part is there ends here.
    at: u64,
    generation: u32,
}

impl Transfer<'_, '_> {
    /// One request: writes until the part is whole.
    fn run(&mut self) -> Result<(), Stop> {
        let Fetch { remote, commit, .. } = self.fetch;
        let (name, bytes) = {
            let board = self.fetch.board();
            let job = &board.jobs[self.job];
            if job.generation != self.generation {
                return Err(Stop::Void);
            }
            (job.names[0], job.bytes)
        };
        let range = (self.at > 0 || self.part.end < bytes).then_some(self.at..self.part.end);
        let answer = remote.get(commit, name, range.clone()).map_err(|error| match error.downcast_ref() {
            Some(Error::Network { cause, passing: true, .. }) => broken(cause),
            _ => Stop::Final(error),
        })?;
        let (response, elsewhere) = (answer.response, answer.elsewhere);
        let status = response.status();
        match status {
            StatusCode::PARTIAL_CONTENT => {
                let told = content_range(response.headers());
                if range.is_none() || !told.is_some_and(|told| told.is(self.at, self.part.end, bytes)) {
                    return Err(broken("the server sent another part than the one asked for"));
                }
            }
            StatusCode::OK => {
                if let Some(problem) = not_the_file(&response, name, bytes) {
                    return Err(broken(problem));
                }
                if range.is_some() {
                    if content_length(response.headers()) != Some(bytes) {
                        return Err(broken("the server sent something without a length in place of a part"));
                    }
                    self.start_anew()?;
                }
            }
            StatusCode::RANGE_NOT_SATISFIABLE => {
                return Err(broken("the server says that the file has no such part"));
            }
            status if is_passing(status) => {
                return Err(Stop::Broken(format!("HTTP {status}"), retry_after(response.headers())));
            }
            // A link to a storage host holds for a while only; the next request gets another.
            status if elsewhere => return Err(broken(format!("the storage answered HTTP {status}"))),
            _ => return Err(Stop::Final(remote.refusal(response, Some(name)))),
        }
        self.check_contents(response.headers())?;
        let ends = content_length(response.headers()).is_some();
        self.copy(response.into_body().into_reader(), name, ends)
    }

    /// The server does no ranges and sends the file from its beginning: this transfer takes all of it, others stop. What
    /// is here is given up only if that was no slip of one server among several.
    fn start_anew(&mut self) -> Result<(), Stop> {
        let mut board = self.fetch.board();
        let job = &mut board.jobs[self.job];
        if job.generation != self.generation {
            return Err(Stop::Void);
        }
        job.sent_whole = job.sent_whole.saturating_add(1);
        let slips = WHOLE_SLIPS.min(self.fetch.remote.limits().tries);
        if job.sent_whole <= slips && job.partial.done_bytes() > 0 {
            return Err(broken("the server sent the whole file in place of a part"));
        }
        job.generation += 1;
        job.in_one = true;
        job.parts.clear();
        job.partial.clear();
        (self.generation, self.part, self.at) = (job.generation, 0..job.bytes, 0);
        job.tell(self.fetch.progress);
        Ok(())
    }

    /// Whether the server speaks of the same contents as before, as far as their hash will not tell.
    fn check_contents(&self, headers: &HeaderMap) -> Result<(), Stop> {
        let Some(etag) = headers.get(header::ETAG).and_then(|etag| etag.to_str().ok()) else { return Ok(()) };
        let mut board = self.fetch.board();
        let job = &mut board.jobs[self.job];
        if job.generation != self.generation {
            return Err(Stop::Void);
        }
        if !hash::is_hash(job.etag) && !job.partial.is_same(etag) {
            job.start_anew().map_err(Stop::Final)?;
            if std::mem::replace(&mut job.was_bad, true) {
                let what = format!("{} changes while it is fetched", job.names[0]);
                let hint = "try again, or set HF_ENDPOINT to another hub".to_string();
                return Err(Stop::Final(Error::Verification { what, hint }.into()));
            }
            job.phase = Phase::New;
            job.tell(self.fetch.progress);
            return Err(Stop::Void);
        }
        Ok(())
    }

    /// Writes a body to its place, and not a byte more than was asked for. `ends` says whether its length is known.
    fn copy(&mut self, mut body: BodyReader, name: &str, ends: bool) -> Result<(), Stop> {
        let (mut output, path) = {
            let board = self.fetch.board();
            let partial = &board.jobs[self.job].partial;
            (partial.open().map_err(Stop::Final)?, partial.path().to_path_buf())
        };
        let cannot_write = |error, left| Stop::Final(write_error(error, &path, left));
        output.seek(SeekFrom::Start(self.at)).map_err(|error| cannot_write(error, 0))?;
        let mut buffer = vec![0; 256 << 10];
        let patience = self.fetch.remote.limits().stall.saturating_mul(2);
        let (mut since, mut from) = (Instant::now(), self.at);
        while self.at < self.part.end {
            if since.elapsed() >= patience {
                if self.at - from < SLOWEST_BYTES {
                    return Err(broken(format!("only {} bytes came in {} s", self.at - from, patience.as_secs_f32())));
                }
                (since, from) = (Instant::now(), self.at);
            }
            let count = match body.read(&mut buffer) {
                Ok(0) => return Err(broken("the connection was closed")),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(broken(error.to_string())),
            };
            let left = self.part.end - self.at;
            if count as u64 > left {
                return Err(broken(format!("the server sent more of {name} than was asked for")));
            }
            output.write_all(&buffer[..count]).map_err(|error| cannot_write(error, left))?;
            self.wrote(count as u64)?;
        }
        // A connection that was read to its end can be used again; one of unknown length could wait for it.
        if ends {
            let _ = body.read(&mut buffer);
        }
        Ok(())
    }

    /// Notes what was written, on the disk too if it is time.
    fn wrote(&mut self, count: u64) -> Result<(), Stop> {
        let note = {
            let mut board = self.fetch.board();
            let failed = board.failure.is_some();
            let job = &mut board.jobs[self.job];
            if job.generation != self.generation {
                return Err(Stop::Void);
            }
            job.partial.add(self.at..self.at + count);
            self.at += count;
            job.tell(self.fetch.progress);
            if failed {
                return Err(Stop::Void);
            }
            let due = job.last_save.elapsed() >= self.fetch.remote.limits().save_every;
            due.then(|| {
                job.last_save = Instant::now();
                job.partial.note()
            })
        };
        // Others go on meanwhile.
        note.map_or(Ok(()), |note| note.save().map_err(Stop::Final))
    }
}

fn broken(cause: impl Into<String>) -> Stop {
    Stop::Broken(cause.into(), None)
}

/// Why an answer with all of something cannot be the file: a login page, an error that calls itself a success.
fn not_the_file(response: &Response<Body>, name: &str, bytes: u64) -> Option<String> {
    let text = |name: header::HeaderName| response.headers().get(name).and_then(|value| value.to_str().ok());
    let is_page = text(header::CONTENT_TYPE).is_some_and(|kind| kind.starts_with("text/html"));
    match content_length(response.headers()) {
        _ if is_page && !name.ends_with(".html") => {
            Some("a web page came in its place (a network's login page?)".into())
        }
        Some(length) if length != bytes => Some(format!("{length} bytes came in its place")),
        _ => None,
    }
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

fn whole(blob: &Path, bytes: u64) -> bool {
    std::fs::metadata(blob).is_ok_and(|data| data.is_file() && data.len() == bytes)
}

/// `bytes 100-199/200`
pub(super) struct ContentRange {
    pub first: u64,
    last: u64,
    /// Servers may leave it out.
    total: Option<u64>,
}

impl ContentRange {
    fn is(&self, start: u64, end: u64, total: u64) -> bool {
        self.first == start && self.last.checked_add(1) == Some(end) && self.total.is_none_or(|told| told == total)
    }
}

/// Which part a partial answer says to be.
pub(super) fn content_range(headers: &HeaderMap) -> Option<ContentRange> {
    let range = headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
    let (first, rest) = range.strip_prefix("bytes ")?.split_once('-')?;
    let (last, total) = rest.split_once('/')?;
    let total = total.trim();
    let total = if total == "*" { None } else { Some(total.parse().ok()?) };
    Some(ContentRange { first: first.trim().parse().ok()?, last: last.trim().parse().ok()?, total })
}
