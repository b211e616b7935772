//! What a repository says about its model, without the weights: a few small files, and of each safetensors file the
//! header alone. A server that does no ranges is hung up on after that much. Of GGUF files, whose heads do not say how
//! long they are, whoever parses them reads what it needs ([`read_part`]).

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Result, bail};
use ureq::http::StatusCode;
use ureq::{Body, http::Response};

use super::fetch::Wanted;
use super::remote::Remote;
use super::select::{RemoteFile, gguf_to_show};
use super::transfer::content_range;
use crate::snapshot::safetensors::{INDEX, SINGLE_FILE, ShardIndex};

/// A repository as it is on the hub.
#[derive(Debug)]
pub struct Peek {
    /// `org/name`, or `org/name:Q4_K_M`
    pub name: String,
    pub commit: String,
    /// Every file with its size in bytes, where the hub tells it.
    pub files: Vec<(String, Option<u64>)>,
    /// Of config.json and its like what there is, by name; of README.md its beginning.
    pub texts: BTreeMap<String, Vec<u8>>,
    /// One for each safetensors file that inferno would load.
    pub headers: Vec<Header>,
    /// The parts of the GGUF model, if it is one, with their lengths.
    pub gguf: Vec<(String, u64)>,
}

/// The header of a safetensors file.
#[derive(Debug)]
pub struct Header {
    pub file: String,
    /// The JSON, without the length before it.
    pub json: Vec<u8>,
    /// What follows the header in the file.
    pub data_bytes: Option<u64>,
}

/// Small files, each with the most that is read of it.
const TEXTS: [(&str, u64); 3] =
    [("config.json", 4 << 20), ("tokenizer_config.json", 32 << 20), ("README.md", README_BYTES)];

/// The front matter of a README lies in here.
const README_BYTES: u64 = 16 << 10;

/// An index of a hundred thousand tensors is smaller.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// What the safetensors library itself accepts; the largest real ones are below 1 MB.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Asked for first: nearly every header is shorter, so that one request a file will do.
const FIRST_BYTES: u64 = 128 << 10;

/// Of a server that does no ranges no more is read past than this.
const MAX_SKIPPED_BYTES: u64 = 64 << 20;

/// Requests at the same time.
const THREADS: usize = 8;

/// `wanted` tells one of several GGUF models from the others.
pub(super) fn peek(remote: &Remote, name: &str, wanted: Option<&str>) -> Result<Peek> {
    let listing = remote.listing()?;
    let commit = &listing.commit;
    let file = |name: &str| listing.files.iter().find(|file| file.name == name);
    let gguf = match wanted.is_none() && (file(INDEX).is_some() || file(SINGLE_FILE).is_some()) {
        true => None,
        false => gguf_to_show(name, &listing.files, wanted)?,
    };
    let length = |file: RemoteFile| Wanted::new(remote, commit, file).map(|file| (file.name, file.bytes));
    let gguf = gguf.unwrap_or_default().into_iter().map(length).collect::<Result<Vec<_>>>()?;
    let mut texts = BTreeMap::new();
    // A GGUF file speaks for itself; who may use it is said better by the repository.
    let read = |name: &str| file(name).is_some() && (gguf.is_empty() || name == "README.md");
    for (name, most) in TEXTS.into_iter().filter(|(name, _)| read(name)) {
        let text = beginning(remote, commit, name, most)?;
        if text.len() as u64 == most && most != README_BYTES {
            bail!("{name} is longer than {most} bytes; refused");
        }
        texts.insert(name.to_string(), text);
    }
    let shards = match file(INDEX) {
        _ if !gguf.is_empty() => Vec::new(),
        Some(_) => {
            let index = ShardIndex::parse(&beginning(remote, commit, INDEX, MAX_INDEX_BYTES)?)?;
            index.shards().into_iter().map(str::to_string).collect()
        }
        None => file(SINGLE_FILE).map(|file| file.name.clone()).into_iter().collect(),
    };
    let mut weights = Vec::with_capacity(shards.len());
    for name in shards {
        match file(&name) {
            Some(file) => weights.push(file),
            None => bail!("the repository lacks {name}, which {INDEX} names"),
        }
    }
    let headers = headers(remote, commit, &weights)?;
    let files = listing.files.iter().map(|file| (file.name.clone(), file.bytes)).collect();
    let name = wanted.map_or(name.to_string(), |wanted| format!("{name}:{wanted}"));
    Ok(Peek { name, commit: listing.commit.clone(), files, texts, headers, gguf })
}

/// Bytes of a file; fewer where it ends.
pub(super) fn read_part(remote: &Remote, commit: &str, name: &str, range: Range<u64>) -> Result<Vec<u8>> {
    let (mut body, in_parts) = part(remote, commit, name, range.start, range.end)?;
    if !in_parts && range.start > 0 {
        if range.start > MAX_SKIPPED_BYTES {
            bail!("the server sends no parts of files, and what is needed of {name} lies too far in it");
        }
        let skipped = io::copy(&mut body.by_ref().take(range.start), &mut io::sink());
        skipped.map_err(|error| remote.unreachable(error.to_string()))?;
    }
    read(remote, &mut body, range.end.saturating_sub(range.start))
}

/// The headers of all files, several at a time, in their order.
fn headers(remote: &Remote, commit: &str, files: &[&RemoteFile]) -> Result<Vec<Header>> {
    let next = AtomicUsize::new(0);
    let read = Mutex::new(Vec::with_capacity(files.len()));
    std::thread::scope(|scope| {
        for _ in 0..THREADS.min(files.len()) {
            scope.spawn(|| {
                while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let header = header(remote, commit, file);
                    if header.is_err() {
                        // Nobody needs the rest.
                        next.store(files.len(), Ordering::Relaxed);
                    }
                    read.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(header);
                }
            });
        }
    });
    let read = read.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut headers = read.into_iter().collect::<Result<Vec<Header>>>()?;
    headers.sort_by(|a, b| a.file.cmp(&b.file));
    Ok(headers)
}

fn header(remote: &Remote, commit: &str, file: &RemoteFile) -> Result<Header> {
    let name = &file.name;
    let (mut body, in_parts) = part(remote, commit, name, 0, FIRST_BYTES)?;
    let cut = |bytes| format!("{name} ends within its header, after {bytes} bytes: it is no whole safetensors file");
    let start = read(remote, &mut body, 8)?;
    let Ok(length) = <[u8; 8]>::try_from(start.as_slice()) else { bail!("{}", cut(start.len())) };
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        bail!(
            "{name} claims a header of {length} bytes, more than the {MAX_HEADER_BYTES} of any safetensors file; refused"
        );
    }
    let data_bytes = match file.bytes.map(|bytes| bytes.checked_sub(8 + length)) {
        Some(None) => bail!("{name} claims a header of {length} bytes and has {} in all", file.bytes.unwrap_or(0)),
        data_bytes => data_bytes.flatten(),
    };
    let mut json = read(remote, &mut body, length)?;
    let have = 8 + json.len() as u64;
    if in_parts && have == FIRST_BYTES && have < 8 + length {
        let (mut body, in_parts) = part(remote, commit, name, have, 8 + length)?;
        if !in_parts {
            bail!("the server did send a part of {name}, and then sends all of it; refused");
        }
        json.extend(read(remote, &mut body, 8 + length - have)?);
    }
    if (json.len() as u64) < length {
        bail!("{}", cut(8 + json.len()));
    }
    Ok(Header { file: name.clone(), json, data_bytes })
}

/// The first `most` bytes of a file, or all of it.
fn beginning(remote: &Remote, commit: &str, name: &str, most: u64) -> Result<Vec<u8>> {
    let (mut body, _) = part(remote, commit, name, 0, most)?;
    read(remote, &mut body, most)
}

/// The bytes from `first` on, of which no more than up to `end` are to be read; and whether the server sends that part
/// alone. Dropping the reader early hangs up.
fn part(remote: &Remote, commit: &str, name: &str, first: u64, end: u64) -> Result<(impl Read + use<>, bool)> {
    let response: Response<Body> = remote.get_part(commit, name, first, end)?;
    let in_parts = match response.status() {
        StatusCode::PARTIAL_CONTENT if starts_at(&response, first) => true,
        StatusCode::OK => false,
        StatusCode::PARTIAL_CONTENT => bail!("the server sent another part of {name} than the one asked for; refused"),
        // An empty file has no first byte.
        StatusCode::RANGE_NOT_SATISFIABLE if first == 0 => return Ok((Body::builder().data("").into_reader(), true)),
        _ => return Err(remote.refusal(response, Some(name))),
    };
    Ok((response.into_body().into_reader(), in_parts))
}

fn starts_at(response: &Response<Body>, first: u64) -> bool {
    content_range(response.headers()).is_some_and(|range| range.first == first)
}

/// Up to `most` bytes. Nothing is reserved for what a server only claims.
fn read(remote: &Remote, body: &mut impl Read, most: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match body.take(most).read_to_end(&mut bytes) {
        Ok(_) => Ok(bytes),
        Err(error) => Err(remote.unreachable(error.to_string())),
    }
}
