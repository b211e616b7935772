//! Describes a model on the hub without downloading its weights.
//!
//! Reads small text files and the headers of safetensors files.
//! A GGUF file does not state the length of its header, so the GGUF parser reads one range after another with
//! [`Hub::read_range`].

use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, bail};
use ureq::Body;
use ureq::http::{Response, StatusCode};

use super::client::Hub;
use super::demo;
use super::download::jobs::WantedFile;
use super::download::transfer::content_range;
use super::filter::choose_gguf;
use super::names::{self, MAIN};
use super::parallel::try_map;
use super::remote::Remote;
use super::remote::listing::{Listing, RemoteFile};
use crate::error::Error;
use crate::files;
use crate::snapshot::gguf;
use crate::snapshot::safetensors::{INDEX, SINGLE_FILE, ShardIndex};
use crate::text::{counted, quote};

/// A description of a model on the hub: its list of files, its text files and the headers of its safetensors files.
#[derive(Debug)]
pub struct HubModel {
    /// The model name: `org/name`, or `org/name:Q4_K_M`.
    pub name: String,
    pub commit: String,
    /// The name of each file in the repository, and the size in bytes if the hub lists the size.
    pub files: Vec<(String, Option<u64>)>,
    /// The text files that the repository has, by file name: config.json, tokenizer_config.json, and the first
    /// `README_BYTES` bytes of README.md. For a GGUF model, at most README.md.
    pub texts: BTreeMap<String, Vec<u8>>,
    /// The headers of the safetensors files that inferno would load. Empty for a GGUF model.
    pub headers: Vec<SafetensorsHeader>,
    /// The name and the size in bytes of each file of the GGUF model. Empty for other models.
    pub gguf: Vec<(String, u64)>,
}

/// The header of a safetensors file.
#[derive(Debug)]
pub struct SafetensorsHeader {
    pub file: String,
    /// The JSON text of the header, without the 8-byte length prefix.
    pub json: Vec<u8>,
    /// The number of bytes after the header. `None` if the hub does not list the file size.
    pub data_bytes: Option<u64>,
}

/// The text files to read, each with the maximum number of bytes to read.
const TEXTS: [(&str, u64); 3] = [
    ("config.json", files::MAX_CONFIG_BYTES),
    ("tokenizer_config.json", files::MAX_TOKENIZER_CONFIG_BYTES),
    ("README.md", README_BYTES),
];

/// The most bytes of README.md to read. inferno needs only the YAML front matter, which is usually shorter.
const README_BYTES: u64 = 16 << 10;

/// The maximum total size of a model's safetensors headers, in bytes.
/// The `safetensors` crate has the same limit for each header.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The maximum number of shards. Limits how many requests a malicious shard index can cause.
const MAX_SHARDS: usize = 2048;

/// The number of bytes that the first request for a header asks for. Most headers are shorter.
const FIRST_REQUEST_BYTES: u64 = 128 << 10;

/// The most bytes before a range that `read_range` discards if a server sends the whole file instead of the range.
const MAX_SKIPPED_BYTES: u64 = 64 << 20;

/// The maximum number of headers to read in parallel.
const THREADS: usize = 8;

impl Hub {
    /// Describes a model on the hub. Writes no files.
    /// Fails for the demo, which is not on the hub, and if HF_HUB_OFFLINE is set.
    ///
    /// `org/name:Q4_K_M` selects one of several GGUF models.
    /// For a GGUF model, the caller reads the headers with [`read_range`](Self::read_range).
    pub fn inspect(&self, model: &str, revision: Option<&str>) -> Result<HubModel> {
        let (name, revision) = names::split_revision(model, revision)?;
        if demo::is_demo(name, revision)? {
            return Err(Error::usage(
                "the demo is built into inferno and is not on the hub; to show it: inferno show demo",
            ));
        }
        let (name, tag) = gguf::split_tag(name);
        let name = &self.full_name(name);
        names::check_repo(name)?;
        self.check_online(|| format!("cannot look up '{name}' on the hub: HF_HUB_OFFLINE is set"))?;
        let remote = Remote::new(&self.config, name, revision.unwrap_or(MAIN), &());
        let listing = remote.listing()?;
        Inspection { remote: &remote, listing: &listing }.run(tag)
    }

    /// Reads a byte range of a file of `model`. Returns fewer bytes if the file ends within the range.
    /// Fails if the server sends the whole file and more than `MAX_SKIPPED_BYTES` bytes precede the range.
    pub fn read_range(&self, model: &HubModel, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let (name, _) = gguf::split_tag(&model.name);
        let remote = Remote::new(&self.config, name, &model.commit, &());
        let (mut body, is_partial) = request(&remote, &model.commit, file, range.clone())?;
        if !is_partial && range.start > 0 {
            if range.start > MAX_SKIPPED_BYTES {
                bail!(
                    "cannot read {}: the server does not support range requests, which inferno needs for long headers",
                    quote(file)
                );
            }
            remote.skip_body(&mut body, range.start)?;
        }
        remote.read_body(&mut body, range.end.saturating_sub(range.start))
    }
}

/// Reads the metadata of one model on the hub.
struct Inspection<'a> {
    remote: &'a Remote<'a>,
    listing: &'a Listing,
}

impl Inspection<'_> {
    fn run(&self, tag: Option<&str>) -> Result<HubModel> {
        let gguf = self.gguf_files(tag)?;
        let is_gguf = !gguf.is_empty();
        let headers = if is_gguf { Vec::new() } else { self.headers(&self.shards()?)? };
        let name = self.remote.repo();
        Ok(HubModel {
            name: tag.map_or(name.to_string(), |tag| format!("{name}:{tag}")),
            commit: self.listing.commit.clone(),
            files: self.listing.files.iter().map(|file| (file.name.clone(), file.bytes)).collect(),
            texts: self.texts(is_gguf)?,
            headers,
            gguf,
        })
    }

    /// Returns the name and the size in bytes of each file of the GGUF model that `tag` selects.
    /// Without a tag, selects the only GGUF model, and returns an empty list if the repository has safetensors weights
    /// or no GGUF model.
    /// Fails if several GGUF models match, if no GGUF model matches the tag, or if a shard of the model is missing.
    fn gguf_files(&self, tag: Option<&str>) -> Result<Vec<(String, u64)>> {
        let Listing { commit, files } = self.listing;
        let has_safetensors = self.listing.file(INDEX).or(self.listing.file(SINGLE_FILE)).is_some();
        if tag.is_none() && has_safetensors {
            return Ok(Vec::new());
        }
        let shards = choose_gguf(self.remote.repo(), files, tag)?.unwrap_or_default();
        let with_size = |file| WantedFile::new(self.remote, commit, file).map(|file| (file.name, file.bytes));
        shards.into_iter().map(with_size).collect()
    }

    /// Reads the files in [`TEXTS`] that the repository has. For a GGUF model, reads only README.md, because the GGUF
    /// file contains the config. Fails if config.json or tokenizer_config.json reaches its size limit.
    fn texts(&self, is_gguf: bool) -> Result<BTreeMap<String, Vec<u8>>> {
        let is_wanted = |name: &str| self.listing.file(name).is_some() && (!is_gguf || name == "README.md");
        let mut texts = BTreeMap::new();
        for (name, limit) in TEXTS.into_iter().filter(|(name, _)| is_wanted(name)) {
            let text = self.beginning(name, limit)?;
            if text.len() as u64 == limit && limit != README_BYTES {
                bail!("cannot read {name}: it is too large (at least {limit} bytes)");
            }
            texts.insert(name.to_string(), text);
        }
        Ok(texts)
    }

    /// Returns the safetensors files that inferno would load. Fails if the shard index is invalid, lists more than
    /// [`MAX_SHARDS`] shards, or lists a shard that the repository lacks.
    fn shards(&self) -> Result<Vec<&RemoteFile>> {
        if self.listing.file(INDEX).is_none() {
            return Ok(self.listing.file(SINGLE_FILE).into_iter().collect());
        }
        let index = ShardIndex::parse(&self.beginning(INDEX, files::MAX_SHARD_INDEX_BYTES)?)?;
        let shards = index.shards();
        if shards.len() > MAX_SHARDS {
            bail!("cannot read {INDEX}: it lists {} shards, but the limit is {MAX_SHARDS}", shards.len());
        }
        let shard = |name: &str| match self.listing.file(name) {
            Some(file) => Ok(file),
            None => bail!("cannot describe the model: the repository lacks {}, which {INDEX} lists", quote(name)),
        };
        shards.into_iter().map(shard).collect()
    }

    /// Reads the headers of safetensors files in parallel.
    fn headers(&self, files: &[&RemoteFile]) -> Result<Vec<SafetensorsHeader>> {
        let total_bytes = AtomicU64::new(0);
        try_map(files, THREADS, |file| self.header(file, &total_bytes))
    }

    /// Reads the header of a safetensors file, and adds the length of its JSON text to `total_bytes`.
    /// Fails if the header is incomplete or longer than the file, or if `total_bytes` exceeds [`MAX_HEADER_BYTES`].
    fn header(&self, file: &RemoteFile, total_bytes: &AtomicU64) -> Result<SafetensorsHeader> {
        let (remote, name) = (self.remote, &file.name);
        let shown = quote(name);
        let (mut body, is_partial) = request(remote, &self.listing.commit, name, 0..FIRST_REQUEST_BYTES)?;
        let truncated = |bytes: usize| {
            format!(
                "cannot read {shown}: the safetensors file is incomplete and ends in its header, after {}",
                counted(bytes, "byte")
            )
        };
        let start = remote.read_body(&mut body, 8)?;
        let Ok(length) = <[u8; 8]>::try_from(start.as_slice()) else { bail!("{}", truncated(start.len())) };
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER_BYTES {
            bail!("cannot read {shown}: it claims a header of {length} bytes, but the limit is {MAX_HEADER_BYTES}");
        }
        if total_bytes.fetch_add(length, Ordering::Relaxed) + length > MAX_HEADER_BYTES {
            bail!("cannot read {shown}: the headers of all files exceed {MAX_HEADER_BYTES} bytes in total");
        }
        let data_bytes = match file.bytes.map(|bytes| bytes.checked_sub(8 + length)) {
            Some(None) => {
                bail!(
                    "cannot read {shown}: it claims a header of {length} bytes, but the file has only {}",
                    counted(file.bytes.unwrap_or(0), "byte")
                )
            }
            data_bytes => data_bytes.flatten(),
        };
        let mut json = remote.read_body(&mut body, length)?;
        let received = 8 + json.len() as u64;
        if is_partial && received == FIRST_REQUEST_BYTES && received < 8 + length {
            let (mut body, is_partial) = request(remote, &self.listing.commit, name, received..8 + length)?;
            if !is_partial {
                bail!("cannot read {shown}: the server honored only the first range request");
            }
            json.extend(remote.read_body(&mut body, 8 + length - received)?);
        }
        if (json.len() as u64) < length {
            bail!("{}", truncated(8 + json.len()));
        }
        Ok(SafetensorsHeader { file: name.clone(), json, data_bytes })
    }

    /// Reads the first `limit` bytes of a file, or the whole file if it is shorter.
    fn beginning(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        let (mut body, _) = request(self.remote, &self.listing.commit, name, 0..limit)?;
        self.remote.read_body(&mut body, limit)
    }
}

/// Requests a range of a file. Returns the response body, and whether the server honored the range.
///
/// If the server ignored the range, the body is the whole file.
/// To skip the rest of a body, drop it, which closes the connection.
fn request(remote: &Remote, commit: &str, name: &str, range: Range<u64>) -> Result<(impl Read + use<>, bool)> {
    let first = range.start;
    let response: Response<Body> = remote.get_range(commit, name, range)?;
    let is_partial = match response.status() {
        StatusCode::PARTIAL_CONTENT if starts_at(&response, first) => true,
        StatusCode::OK => false,
        StatusCode::PARTIAL_CONTENT => {
            bail!("cannot read {}: the server sent a range other than the requested one", quote(name))
        }
        // A range that starts at byte 0 is outside the file only if the file is empty.
        StatusCode::RANGE_NOT_SATISFIABLE if first == 0 => return Ok((Body::builder().data("").into_reader(), true)),
        _ => return Err(remote.refusal(response, Some(name))),
    };
    Ok((response.into_body().into_reader(), is_partial))
}

fn starts_at(response: &Response<Body>, first: u64) -> bool {
    content_range(response.headers()).is_some_and(|range| range.first == first)
}
