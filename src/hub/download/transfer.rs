//! [`Transfer`]: requests one range of a file, checks the response, and writes its body to disk.
//!
//! A transfer rejects a response with the wrong range or file size, and never writes outside its range.
//! If the server keeps ignoring range requests, the range becomes the whole file.

use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::mem;
use std::ops::Range;
use std::time::{Duration, Instant};

use ureq::http::{HeaderMap, Response, StatusCode, header};
use ureq::{Body, BodyReader};

use super::jobs::{Download, Phase};
use crate::error::Error;
use crate::hub::cache::disk::write_error;
use crate::hub::hash;
use crate::hub::remote::retry::{is_temporary, retry_after};
use crate::text::{counted, library_error, quote};

/// The maximum number of whole-file responses to range requests that are rejected per file to keep the bytes on disk.
/// The next such response is accepted, and the bytes on disk are discarded.
const MAX_WHOLE_RESPONSES: u32 = 3;
/// A transfer fails, and is retried, if it receives fewer than this number of bytes in twice the stall timeout.
const MIN_PROGRESS_BYTES: u64 = 64 << 10;

/// The reason why a transfer ended before its range of the file was complete.
pub(in crate::hub) enum Stop {
    /// The transfer failed, but another attempt may succeed. Holds the cause and the wait from Retry-After, if any.
    Temporary(String, Option<Duration>),
    /// The transfer failed, and another attempt would fail too.
    Permanent(anyhow::Error),
    /// The range is no longer needed, because the file is fetched again from the start or the download has failed.
    Obsolete,
}

/// The transfer of one range of a file, on one thread.
pub(in crate::hub) struct Transfer<'a, 'b> {
    pub download: &'b Download<'a>,
    /// The index of the job in [`DownloadState::jobs`](super::jobs::DownloadState).
    pub job: usize,
    pub range: Range<u64>,
    /// The file offset of the next byte to write.
    pub position: u64,
    pub generation: u32,
}

impl Transfer<'_, '_> {
    /// Sends one request for the missing bytes of the range, and writes the response to disk.
    pub fn run(&mut self) -> Result<(), Stop> {
        let Download { remote, commit, .. } = self.download;
        let (name, bytes) = {
            let state = self.download.state();
            let job = &state.jobs[self.job];
            if job.generation != self.generation {
                return Err(Stop::Obsolete);
            }
            (job.names[0], job.bytes)
        };
        let range = (self.position > 0 || self.range.end < bytes).then_some(self.position..self.range.end);
        let answer = remote.get(commit, name, range.clone()).map_err(|error| match error.downcast_ref() {
            Some(Error::Network { cause, is_temporary: true, .. }) => temporary(cause),
            _ => Stop::Permanent(error),
        })?;
        let (response, is_from_other_host) = (answer.response, answer.is_from_other_host);
        match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let sent = content_range(response.headers());
                if range.is_none() || !sent.is_some_and(|sent| sent.is_range(self.position, self.range.end, bytes)) {
                    return Err(temporary("the server sent a range other than the requested one"));
                }
            }
            StatusCode::OK => {
                if let Some(problem) = wrong_file(&response, name, bytes) {
                    return Err(temporary(problem));
                }
                if range.is_some() {
                    if content_length(response.headers()) != Some(bytes) {
                        return Err(temporary(
                            "the server sent a body of unknown length instead of the requested range",
                        ));
                    }
                    self.restart_whole()?;
                }
            }
            StatusCode::RANGE_NOT_SATISFIABLE => {
                return Err(temporary("the server says that the requested range is outside the file"));
            }
            status if is_temporary(status) => {
                return Err(Stop::Temporary(format!("HTTP {status}"), retry_after(response.headers())));
            }
            // The link to the storage host may have expired. The next request to the hub returns a new link.
            status if is_from_other_host => {
                return Err(temporary(format!("the storage host responded with HTTP {status}")));
            }
            _ => return Err(Stop::Permanent(remote.refusal(response, Some(name)))),
        }
        self.check_etag(response.headers())?;
        let has_length = content_length(response.headers()).is_some();
        self.write_body(response.into_body().into_reader(), name, has_length)
    }

    /// Makes this transfer fetch the whole file, because the server ignored the range.
    /// Stops the other transfers of the file.
    ///
    /// If some bytes are on disk, fails with [`Stop::Temporary`] up to [`MAX_WHOLE_RESPONSES`] times per file instead,
    /// because the next response may come from a server that supports ranges.
    fn restart_whole(&mut self) -> Result<(), Stop> {
        let mut state = self.download.state();
        let job = &mut state.jobs[self.job];
        if job.generation != self.generation {
            return Err(Stop::Obsolete);
        }
        job.whole_responses = job.whole_responses.saturating_add(1);
        let limit = MAX_WHOLE_RESPONSES.min(self.download.remote.limits().max_failures);
        if job.whole_responses <= limit && job.partial.done_bytes() > 0 {
            return Err(temporary("the server sent the whole file instead of the requested range"));
        }
        job.generation += 1;
        job.is_whole_only = true;
        job.ranges.clear();
        job.partial.clear();
        (self.generation, self.range, self.position) = (job.generation, 0..job.bytes, 0);
        job.report(self.download.progress);
        Ok(())
    }

    /// Checks that the etag of the file is the same as in the first response. If it has changed, discards all fetched
    /// bytes and fails with [`Stop::Obsolete`], or with [`Stop::Permanent`] if this is the second change.
    ///
    /// Accepts any etag for a file whose hash is known, because its contents are verified later.
    fn check_etag(&self, headers: &HeaderMap) -> Result<(), Stop> {
        let Some(etag) = headers.get(header::ETAG).and_then(|etag| etag.to_str().ok()).map(hash::bare_etag) else {
            return Ok(());
        };
        let mut state = self.download.state();
        let job = &mut state.jobs[self.job];
        if job.generation != self.generation {
            return Err(Stop::Obsolete);
        }
        if hash::is_hash(job.etag) || job.partial.has_same_etag(etag) {
            return Ok(());
        }
        job.restart().map_err(Stop::Permanent)?;
        if mem::replace(&mut job.was_bad, true) {
            let what = format!("cannot download {}: it keeps changing on the server", quote(job.names[0]));
            let hint = "try again, or set HF_ENDPOINT to another hub".to_string();
            return Err(Stop::Permanent(Error::Verification { what, hint }.into()));
        }
        job.phase = Phase::New;
        job.report(self.download.progress);
        Err(Stop::Obsolete)
    }

    /// Writes a response body to the file, from `position` to the end of the range.
    /// Fails if the body ends early or arrives too slowly. Never writes more bytes than the request asked for.
    fn write_body(&mut self, mut body: BodyReader, name: &str, has_length: bool) -> Result<(), Stop> {
        let (mut output, path) = {
            let state = self.download.state();
            let partial = &state.jobs[self.job].partial;
            (partial.open().map_err(Stop::Permanent)?, partial.path().to_path_buf())
        };
        let cannot_write = |error| Stop::Permanent(write_error(error, &path));
        output.seek(SeekFrom::Start(self.position)).map_err(cannot_write)?;
        let mut buffer = vec![0; 256 << 10];
        let window = self.download.remote.limits().stall_timeout.saturating_mul(2);
        let (mut window_start, mut start_position) = (Instant::now(), self.position);
        while self.position < self.range.end {
            if window_start.elapsed() >= window {
                let gained = self.position - start_position;
                if gained < MIN_PROGRESS_BYTES {
                    return Err(temporary(format!(
                        "only {} arrived in {} s",
                        counted(gained, "byte"),
                        window.as_secs_f32()
                    )));
                }
                (window_start, start_position) = (Instant::now(), self.position);
            }
            let count = match body.read(&mut buffer) {
                Ok(0) => return Err(temporary("the response ended early")),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(temporary(library_error(&error))),
            };
            let left = self.range.end - self.position;
            if count as u64 > left {
                return Err(temporary(format!("the server sent more of {} than was requested", quote(name))));
            }
            output.write_all(&buffer[..count]).map_err(cannot_write)?;
            self.record_written(count as u64)?;
        }
        // Read to the end of the body, so that the connection can be reused.
        // Without a content length, reading to the end could block.
        if has_length {
            let _ = body.read(&mut buffer);
        }
        Ok(())
    }

    /// Records that `count` bytes were written. Saves the record to disk if the last save was `save_interval` ago.
    /// Fails if the range is no longer needed, or if the record cannot be saved.
    fn record_written(&mut self, count: u64) -> Result<(), Stop> {
        let record = {
            let mut state = self.download.state();
            let has_failed = state.failure.is_some();
            let job = &mut state.jobs[self.job];
            if job.generation != self.generation {
                return Err(Stop::Obsolete);
            }
            job.partial.add(self.position..self.position + count);
            self.position += count;
            job.report(self.download.progress);
            if has_failed {
                return Err(Stop::Obsolete);
            }
            let is_due = job.last_save.elapsed() >= self.download.remote.limits().save_interval;
            is_due.then(|| {
                job.last_save = Instant::now();
                job.partial.pending_record()
            })
        };
        // Save the record after the state is unlocked, because saving waits for the disk.
        record.map_or(Ok(()), |record| record.save().map_err(Stop::Permanent))
    }
}

fn temporary(cause: impl Into<String>) -> Stop {
    Stop::Temporary(cause.into(), None)
}

/// Returns why a response with status 200 cannot be the file, or `None` if it may be the file.
fn wrong_file(response: &Response<Body>, name: &str, bytes: u64) -> Option<String> {
    let text = |name: header::HeaderName| response.headers().get(name).and_then(|value| value.to_str().ok());
    let is_page = text(header::CONTENT_TYPE).is_some_and(|kind| kind.starts_with("text/html"));
    match content_length(response.headers()) {
        _ if is_page && !name.ends_with(".html") => {
            Some("the server sent a web page instead of the file (a network login page?)".into())
        }
        Some(length) if length != bytes => {
            Some(format!("the server sent {}, but the file has {bytes}", counted(length, "byte")))
        }
        _ => None,
    }
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// The values of a Content-Range header, such as `bytes 100-199/200`.
pub(in crate::hub) struct ContentRange {
    pub first: u64,
    last: u64,
    /// The size of the whole file. `None` if the server sent `*` as the size.
    total: Option<u64>,
}

impl ContentRange {
    fn is_range(&self, start: u64, end: u64, total: u64) -> bool {
        self.first == start && self.last.checked_add(1) == Some(end) && self.total.is_none_or(|sent| sent == total)
    }
}

/// Parses the Content-Range header of a response. Returns `None` if it is missing or invalid.
pub(in crate::hub) fn content_range(headers: &HeaderMap) -> Option<ContentRange> {
    let range = headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
    let (first, rest) = range.strip_prefix("bytes ")?.split_once('-')?;
    let (last, total) = rest.split_once('/')?;
    let total = total.trim();
    let total = if total == "*" { None } else { Some(total.parse().ok()?) };
    Some(ContentRange { first: first.trim().parse().ok()?, last: last.trim().parse().ok()?, total })
}
