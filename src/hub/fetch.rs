//! One file from the hub into the cache.
//!
//! A file grows as `blobs/<etag>.incomplete` and takes its name when it is whole, so an interrupted download goes on
//! where it stopped, and what has its name is whole. Verification by hash and parallel parts belong here.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ureq::http::{Response, StatusCode, header};
use ureq::{Body, http::HeaderMap};

use super::cache::{RepoDir, create_dir};
use super::remote::Remote;
use super::select::RemoteFile;
use crate::Error;

/// Failures in a row, without a byte gained, before a file is given up.
const MAX_FAILURES: u32 = 4;

/// A file whose size and hash are known, ready to fetch.
pub(super) struct Wanted {
    pub name: String,
    pub bytes: u64,
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
        Ok(Self { name: told.name, bytes, etag })
    }

    /// How many of its bytes are in the cache.
    pub fn present_bytes(&self, repo: &RepoDir) -> u64 {
        let length = |path: PathBuf| fs::metadata(path).map_or(0, |data| data.len());
        let blob = length(repo.blob(&self.etag));
        if blob == self.bytes { blob } else { length(incomplete(&repo.blob(&self.etag))).min(self.bytes) }
    }
}

/// Brings a file into the blobs of `repo`, going on from what an earlier attempt left. `progress` hears how many bytes
/// are there.
pub(super) fn fetch(
    remote: &Remote,
    commit: &str,
    repo: &RepoDir,
    file: &Wanted,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let blob = repo.blob(&file.etag);
    if whole(&blob, file.bytes) {
        progress(file.bytes);
        return Ok(());
    }
    create_dir(blob.parent().unwrap_or(&blob))?;
    let path = incomplete(&blob);
    let output = OpenOptions::new().append(true).create(true).open(&path);
    let mut output = output.with_context(|| format!("cannot write {}", path.display()))?;
    let _lock = lock(&output);
    // Another process may have finished it while this one waited for the lock.
    if whole(&blob, file.bytes) {
        progress(file.bytes);
        return Ok(());
    }

    // Attempts since the file last grew past all earlier ones: a server that cannot resume may break anywhere.
    let (mut failures, mut most) = (0, 0);
    loop {
        let start = output.seek(SeekFrom::End(0)).with_context(|| format!("cannot read {}", path.display()))?;
        if start == file.bytes {
            break;
        }
        match transfer(remote, commit, file, &mut output, &path, start, progress) {
            Ok(()) => {}
            Err(Stop::Final(error)) => return Err(error),
            Err(Stop::Broken(cause)) => {
                let done = output.metadata().map_or(start, |data| data.len());
                failures = if done > most.max(start) { 1 } else { failures + 1 };
                most = most.max(done);
                if failures > MAX_FAILURES {
                    let cause = format!(
                        "{} stopped at {done} of {} bytes: {cause} (what is here is kept; the same command goes on)",
                        file.name, file.bytes
                    );
                    return Err(remote.unreachable(cause));
                }
                std::thread::sleep(Duration::from_millis(200 << failures));
            }
        }
    }
    // On disk before it has its name: a power cut must not leave a whole-looking file of zeros.
    output.sync_data().map_err(|error| write_error(error, &path, 0))?;
    fs::rename(&path, &blob).with_context(|| format!("cannot rename {}", path.display()))?;
    progress(file.bytes);
    Ok(())
}

/// Why a transfer ended early.
enum Stop {
    /// The connection; the next attempt may fare better.
    Broken(String),
    /// Anything that another attempt would only repeat.
    Final(anyhow::Error),
}

/// One request: appends to `output` until the file is whole.
fn transfer(
    remote: &Remote,
    commit: &str,
    file: &Wanted,
    output: &mut File,
    path: &Path,
    mut start: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<(), Stop> {
    let cut = |output: &mut File| output.set_len(0).map_err(|error| Stop::Final(write_error(error, path, 0)));
    if start > file.bytes {
        // Left by something else under this name.
        cut(output)?;
        start = 0;
    }
    let response = remote.get(commit, &file.name, start).map_err(|error| Stop::Broken(root(&error)))?;
    match response.status() {
        StatusCode::PARTIAL_CONTENT if range_start(response.headers()) == Some(start) => {}
        StatusCode::OK => {
            // The server does not do ranges and sends the file from its beginning.
            if start > 0 {
                cut(output)?;
            }
            start = 0;
        }
        StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
            cut(output)?;
            return Err(Stop::Broken("the server sent another part than the one asked for".to_string()));
        }
        status if status.is_server_error() => return Err(Stop::Broken(format!("HTTP {status}"))),
        _ => return Err(Stop::Final(remote.refusal(response, Some(&file.name)))),
    }
    progress(start);
    copy(response, file, output, path, start, progress)
}

/// Appends a body to `output`, and not a byte more than the file has.
fn copy(
    response: Response<Body>,
    file: &Wanted,
    output: &mut File,
    path: &Path,
    start: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<(), Stop> {
    let mut body = response.into_body().into_reader();
    let mut buffer = vec![0; 256 << 10];
    let mut done = start;
    loop {
        let count = match body.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(Stop::Broken(error.to_string())),
        };
        let count_bytes = count as u64;
        if count_bytes > file.bytes - done {
            let _ = output.set_len(0);
            let error = anyhow::anyhow!("the hub sent more of {} than its {} bytes; refused", file.name, file.bytes);
            return Err(Stop::Final(error));
        }
        let written = output.write_all(&buffer[..count]);
        written.map_err(|error| Stop::Final(write_error(error, path, file.bytes - done)))?;
        done += count_bytes;
        progress(done);
    }
    if done < file.bytes {
        return Err(Stop::Broken("the connection was closed".to_string()));
    }
    Ok(())
}

/// Fails early if the disk cannot take `needed_bytes` more.
pub(super) fn check_space(dir: &Path, needed_bytes: u64) -> Result<()> {
    // Where the folder cannot even be made, that is what is wrong.
    create_dir(dir)?;
    match free_bytes(dir) {
        Some(free_bytes) if free_bytes < needed_bytes => {
            Err(Error::DiskFull { path: dir.to_path_buf(), needed_bytes, free_bytes }.into())
        }
        _ => Ok(()),
    }
}

/// What a person without privileges may still write to the disk of `dir`, which need not exist yet.
#[cfg(unix)]
pub(super) fn free_bytes(dir: &Path) -> Option<u64> {
    let present = dir.ancestors().find(|dir| dir.exists())?;
    let disk = nix::sys::statvfs::statvfs(present).ok()?;
    // The types differ between systems.
    #[allow(clippy::unnecessary_cast)]
    Some((disk.blocks_available() as u64).saturating_mul(disk.fragment_size() as u64))
}

#[cfg(not(unix))]
pub(super) fn free_bytes(_dir: &Path) -> Option<u64> {
    None
}

fn write_error(error: std::io::Error, path: &Path, needed_bytes: u64) -> anyhow::Error {
    if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) {
        let free_bytes = free_bytes(path).unwrap_or(0);
        return Error::DiskFull { path: path.to_path_buf(), needed_bytes, free_bytes }.into();
    }
    anyhow::Error::new(error).context(format!("cannot write {}", path.display()))
}

fn incomplete(blob: &Path) -> PathBuf {
    let mut path = blob.to_path_buf().into_os_string();
    path.push(".incomplete");
    path.into()
}

fn whole(blob: &Path, bytes: u64) -> bool {
    fs::metadata(blob).is_ok_and(|data| data.is_file() && data.len() == bytes)
}

/// Waits until no other process holds `file`, and holds it until the result is dropped. Without effect where locks do
/// not work, as on some network disks.
#[cfg(unix)]
fn lock(file: &File) -> Option<impl Sized + use<>> {
    nix::fcntl::Flock::lock(file.try_clone().ok()?, nix::fcntl::FlockArg::LockExclusive).ok()
}

#[cfg(not(unix))]
fn lock(_file: &File) -> Option<()> {
    None
}

/// The first byte of a partial answer: `bytes 100-199/200` is 100.
pub(super) fn range_start(headers: &HeaderMap) -> Option<u64> {
    let range = headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split_once('-')?.0.trim().parse().ok()
}

/// The cause inside a network error, without the advice around it.
fn root(error: &anyhow::Error) -> String {
    match error.downcast_ref::<Error>() {
        Some(Error::Network { cause, .. }) => cause.clone(),
        _ => format!("{error:#}"),
    }
}
