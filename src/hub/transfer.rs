//! One part of a file: asked for, looked at, and written to its place. Whatever a server sends, nothing but the part that
//! was asked for, of the file that was meant, gets there.

use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::time::{Duration, Instant};

use ureq::http::{HeaderMap, Response, StatusCode, header};
use ureq::{Body, BodyReader};

use super::disk::write_error;
use super::fetch::{Fetch, Phase};
use super::hash;
use super::retry::{is_passing, retry_after};
use crate::error::Error;

/// So often a server may ignore a range before what is here is given up.
const WHOLE_SLIPS: u32 = 3;
/// A transfer that gains less in twice the stall limit is as good as stalled.
const SLOWEST_BYTES: u64 = 64 << 10;

/// Why a transfer ended early.
pub(super) enum Stop {
    /// The connection; the next attempt may fare better, after so long.
    Broken(String, Option<Duration>),
    /// Anything that another attempt would only repeat.
    Final(anyhow::Error),
    /// Nobody needs it any more.
    Void,
}

/// A part that one thread fetches.
pub(super) struct Transfer<'a, 'b> {
    pub(super) fetch: &'b Fetch<'a>,
    pub(super) job: usize,
    pub(super) part: Range<u64>,
    /// What of the part is there ends here.
    pub(super) at: u64,
    pub(super) generation: u32,
}

impl Transfer<'_, '_> {
    /// One request: writes until the part is whole.
    pub fn run(&mut self) -> Result<(), Stop> {
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
        let Some(etag) = headers.get(header::ETAG).and_then(|etag| etag.to_str().ok()).map(hash::bare) else {
            return Ok(());
        };
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
