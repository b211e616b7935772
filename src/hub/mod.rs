//! Models by name: found on this machine, or fetched from a Hugging Face hub.
//!
//! A model becomes a [`Snapshot`], a directory of files at one commit. Two caches are looked at, inferno's own and the
//! one shared with Python's tools; only the first is written to. A plain directory works wherever a name does.

mod cache;
pub mod demo;
mod disk;
mod download;
mod fetch;
mod find;
mod hash;
mod limits;
mod lock;
mod names;
mod partial;
mod peek;
mod remote;
mod remove;
mod retry;
mod select;
mod settings;
mod transfer;
mod used;
mod verify;

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::error::Error;
use crate::snapshot::gguf;
use cache::Cache;
pub use limits::Limits;
pub use peek::{Header, Peek};
pub use remote::Reached;
use remote::Remote;
pub use remove::{Pruned, Removed};
pub use select::Pick;
pub use settings::Settings;
pub use verify::{Checked, State};

/// The revision meant when none is given.
const MAIN: &str = "main";

/// A model's files on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// `org/name`, or the directory as it was given.
    pub name: String,
    /// The commit; none for a plain directory.
    pub revision: Option<String>,
    /// The directory that holds the files, or the GGUF file that is all of the model (of several parts the first).
    pub path: PathBuf,
    pub source: Source,
}

impl Snapshot {
    /// The models in it, by the names that they are found by: itself, or each of its GGUF files.
    pub fn models(&self) -> Vec<Self> {
        let named = gguf::named_models(&self.name, &self.path);
        if named.is_empty() {
            return vec![self.clone()];
        }
        named.into_iter().map(|(name, file)| Self { name, path: file.path, ..self.clone() }).collect()
    }
}

/// Where a snapshot comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// inferno's own cache.
    Inferno,
    /// The cache shared with Python's tools.
    HuggingFace,
    /// A directory that a person named.
    Directory,
    /// The demo model inside the binary.
    BuiltIn,
}

/// Hears how a download goes. Every method does nothing unless overridden; `&()` is a listener that never listens.
pub trait Progress: Sync {
    /// Nothing is fetched: all that was asked for lies in this snapshot.
    fn already_there(&self, _snapshot: &Snapshot) {}
    /// All files of the snapshot with their sizes in bytes, in the order of fetching, whether on disk or not.
    fn start(&self, _files: &[(String, u64)]) {}
    /// `done_bytes` of `name` are on disk. May go back, when a server cannot resume. Equal to the size: finished. Of
    /// each file the first call, before anything is fetched, tells what an earlier attempt has left.
    fn file(&self, _name: &str, _done_bytes: u64) {}
    /// All of `name` is there and is read again, to see whether it came as it should.
    fn verifying(&self, _name: &str) {}
    /// Something went wrong with `name`, which is asked for again after `wait`.
    fn retrying(&self, _name: &str, _cause: &str, _wait: Duration) {}
    /// Another process is at work on this repository and must finish first.
    fn waiting(&self, _repo: &str) {}
}

impl Progress for () {}

/// The caches on this machine and the hub they are filled from.
pub struct Hub {
    settings: Settings,
    /// Delete where locks do not work, too.
    force: bool,
}

impl Hub {
    /// As the environment says: INFERNO_CACHE, HF_HOME and its kin, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
    pub fn from_env() -> Result<Self> {
        Ok(Self::new(Settings::from_env()?))
    }

    pub fn new(settings: Settings) -> Self {
        Self { settings, force: false }
    }

    /// Lets [`remove`](Self::remove) and [`prune`](Self::prune) delete on disks where locks do not work, too.
    pub fn forced(self, force: bool) -> Self {
        Self { force, ..self }
    }

    /// inferno's own cache, where downloads go. Need not exist yet.
    pub fn cache_dir(&self) -> &Path {
        &self.settings.cache
    }

    /// What the hub knows of a model: its files, its configuration and the headers of its weights, but not the weights.
    /// Of several GGUF models `org/name:Q4_K_M` means one; their headers are left to [`read_part`](Self::read_part).
    /// Writes nothing.
    pub fn peek(&self, model: &str, revision: Option<&str>) -> Result<Peek> {
        let (name, revision) = names::split_revision(model, revision)?;
        let (name, wanted) = gguf::split_tag(name);
        let name = &self.full_name(name);
        check_repo(name)?;
        if self.settings.offline {
            let what = format!("the hub cannot be asked about '{name}' (HF_HUB_OFFLINE is set)");
            return Err(Error::Offline { what }.into());
        }
        peek::peek(&Remote::new(&self.settings, name, revision.unwrap_or(MAIN), &()), name, wanted)
    }

    /// Some bytes of a file of what was peeked at; fewer where it ends. Nothing else of it is fetched.
    pub fn read_part(&self, peek: &Peek, file: &str, bytes: Range<u64>) -> Result<Vec<u8>> {
        let (name, _) = gguf::split_tag(&peek.name);
        peek::read_part(&Remote::new(&self.settings, name, &peek.commit, &()), &peek.commit, file, bytes)
    }

    /// Asks the hub for a sign of life, and whether it knows the token; waits a few seconds at most.
    pub fn reach(&self) -> Result<Reached> {
        if self.settings.offline {
            return Err(Error::Offline { what: "the hub cannot be asked (HF_HUB_OFFLINE is set)".into() }.into());
        }
        remote::reach(&self.settings)
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Bytes that may still be written to the disk of inferno's cache; none where that cannot be told.
    pub fn free_bytes(&self) -> Option<u64> {
        disk::free_bytes(&self.settings.cache)
    }

    /// Whether inferno's cache can be written to: makes it, and a file in it that is gone again.
    pub fn try_cache(&self) -> Result<()> {
        cache::create_dir(&self.settings.cache)?;
        let probe = cache::aside(&self.settings.cache.join("probe"));
        let written = fs::write(&probe, b"inferno").and_then(|()| fs::remove_file(&probe));
        written.with_context(|| format!("cannot write {}", probe.display()))
    }

    /// Fails where inferno's cache is the one shared with Python's tools, which is not to be written to.
    fn check_own_cache(&self) -> Result<()> {
        let Settings { cache, shared_cache, .. } = &self.settings;
        if cache != shared_cache && cache::real(cache) != cache::real(shared_cache) {
            return Ok(());
        }
        let problem = format!(
            "{} is the cache of Python's tools, which inferno does not change\n  set INFERNO_CACHE to a folder of its own",
            cache.display()
        );
        Err(Error::Usage(problem).into())
    }

    fn own(&self) -> Cache {
        Cache { root: self.settings.cache.clone() }
    }

    /// Both caches, in the order they are looked at.
    fn caches(&self) -> [(Cache, Source); 2] {
        let shared = Cache { root: self.settings.shared_cache.clone() };
        [(self.own(), Source::Inferno), (shared, Source::HuggingFace)]
    }
}

/// Whether this could be a repository on a hub, with or without `:Q4_K_M` and `@revision`.
pub fn is_repository(model: &str) -> bool {
    names::split_revision(model, None).is_ok_and(|(name, _)| names::is_repo(gguf::split_tag(name).0))
}

/// What to download for a model's name: the repository, the revision, and of several GGUF files the one that is meant.
pub fn to_download(model: &str, revision: Option<&str>) -> Result<(String, Option<String>, Pick)> {
    let (name, revision) = names::split_revision(model, revision)?;
    let (name, wanted) = gguf::split_tag(name);
    let include = wanted.map(|wanted| format!("*{wanted}*")).into_iter().collect();
    Ok((name.to_string(), revision.map(str::to_string), Pick { include, ..Pick::default() }))
}

fn check_repo(name: &str) -> Result<()> {
    if names::is_repo(name) {
        return Ok(());
    }
    let problem = format!("{name:?} is not the name of a repository: write org/name, as in openai/gpt-oss-20b");
    Err(Error::Usage(problem).into())
}
