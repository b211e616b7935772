//! Models by name: found on this machine, or fetched from a Hugging Face hub.
//!
//! A model becomes a [`Snapshot`], a directory of files at one commit. Two caches are looked at, inferno's own and the
//! one shared with Python's tools; only the first is written to. A plain directory works wherever a name does.

mod cache;
pub mod demo;
mod disk;
mod download;
mod fetch;
pub mod gguf;
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
mod used;
mod verify;

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::Error;
use cache::{Cache, Need, RepoDir};
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
        let named = gguf::named(&self.name, &self.path);
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

    /// Finds a model that is here in full: a directory, a GGUF file, or `org/name` (also `org/name@revision`, or a part of
    /// the name that only one model has) in either cache. Of several GGUF files `org/name:Q4_K_M` means one. Never uses the network.
    pub fn find(&self, model: &str, revision: Option<&str>) -> Result<Snapshot> {
        self.find_needing(model, revision, Need::Weights)
    }

    /// As [`find`](Self::find), for work on text alone: tokenizer.json will do in a directory, weights may be absent.
    pub fn find_tokenizer(&self, model: &str, revision: Option<&str>) -> Result<Snapshot> {
        self.find_needing(model, revision, Need::Text)
    }

    fn find_needing(&self, model: &str, revision: Option<&str>, need: Need) -> Result<Snapshot> {
        let not_found = |hint: String| anyhow::Error::from(Error::ModelNotFound { model: model.to_string(), hint });
        let dir = Path::new(model);
        // A file, or a directory with one: what is in it is all of the model.
        if let Some(path) = gguf_at(model)? {
            if let Some(revision) = revision {
                bail!("{model} is on this disk, where it has no revision '{revision}'");
            }
            return Ok(Snapshot { name: model.to_string(), revision: None, path, source: Source::Directory });
        }
        let enough = if need == Need::Text { "tokenizer.json" } else { "config.json" };
        if !model.is_empty() && dir.join(enough).is_file() {
            if let Some(revision) = revision {
                bail!("{model} is a directory, which has no revision '{revision}'");
            }
            let path = dir.to_path_buf();
            return Ok(Snapshot { name: model.to_string(), revision: None, path, source: Source::Directory });
        }
        if model == demo::NAME {
            return demo::materialise(&self.settings.cache);
        }
        let (name, revision) = names::split_revision(model, revision)?;
        let (name, wanted) = gguf::split_tag(name);
        if !names::is_repo(name) {
            return Err(not_found(match dir.is_dir() {
                true => format!("the directory {model} holds no {enough}"),
                false => {
                    "write org/name as on huggingface.co, or a directory; `inferno list` shows what is here".into()
                }
            }));
        }
        if let Some(snapshot) = self.look_up(name, revision, need) {
            return one_model(snapshot, wanted);
        }

        // Another spelling of one model's name is enough, or a part of it.
        let whole = |other: &String| self.look_up(other, revision, need).is_some();
        let on_disk: BTreeSet<String> =
            self.caches().iter().flat_map(|(cache, _)| cache.names()).filter(whole).collect();
        let alike = names::meant(name, &on_disk).into_iter();
        let alike: Vec<Snapshot> = alike.filter_map(|other| self.look_up(other, revision, need)).collect();
        match &alike[..] {
            [one] => return one_model(one.clone(), wanted),
            [] => {}
            several => {
                let names: Vec<&str> = several.iter().map(|snapshot| snapshot.name.as_str()).collect();
                return Err(not_found(format!("several models have that name: {}", names.join(", "))));
            }
        }
        Err(not_found(self.hint(name, wanted, revision, need)))
    }

    /// What to do about a model that is not here.
    fn hint(&self, name: &str, wanted: Option<&str>, revision: Option<&str>, need: Need) -> String {
        let at = revision.map(|revision| format!(" --revision {revision}")).unwrap_or_default();
        let at = wanted.map_or(at.clone(), |wanted| format!("{at} --include '*{wanted}*'"));
        let download = format!("inferno download {name}{at}");
        let lacking = self.caches().iter().find_map(|(cache, _)| {
            let repo = cache.repo(name);
            let commit = repo.commit(revision.unwrap_or(MAIN)).or_else(|| repo.commits().into_iter().next())?;
            cache::missing(&repo.snapshot(&commit), need)
        });
        if let Some(file) = lacking {
            return format!("only a part of it is here ({file} is missing); to fetch the rest: {download}");
        }
        let whole: BTreeSet<String> = self.list().into_iter().flatten().map(|snapshot| snapshot.name).collect();
        let whole: Vec<String> = whole.into_iter().collect();
        let near = names::nearest(name, &whole).filter(|near| *near != name);
        let near = near.map(|near| format!("\n  or is it '{near}', which is here?")).unwrap_or_default();
        match name.contains('/') {
            true => format!("{download}{near}"),
            false => format!("inferno download ORG/{name}{at}, with the organisation it belongs to{near}"),
        }
    }

    /// Every whole model in both caches, sorted by name: of each, the snapshot that [`find`](Self::find) gives, and
    /// those that other refs lead to. What is only partly downloaded is left out.
    pub fn list(&self) -> Result<Vec<Snapshot>> {
        let names: BTreeSet<String> = self.caches().iter().flat_map(|(cache, _)| cache.names()).collect();
        let mut found = Vec::new();
        for name in &names {
            let first = self.look_up(name, None, Need::Weights);
            let mut commits: BTreeSet<String> =
                self.caches().iter().flat_map(|(cache, _)| cache.repo(name).referenced()).collect();
            if let Some(commit) = first.as_ref().and_then(|snapshot| snapshot.revision.as_ref()) {
                commits.remove(commit);
            }
            let others = commits.iter().filter_map(|commit| self.at_commit(name, commit, Need::Weights));
            found.extend(first.into_iter().chain(others).flat_map(|snapshot| snapshot.models()));
        }
        Ok(found)
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

    /// Models of which only a part is here, each with the first thing that it lacks. Of the shared cache, where much lies
    /// that was never meant for inferno, those that lack weights alone.
    pub fn incomplete(&self) -> Vec<(String, String)> {
        let names: BTreeSet<String> = self.caches().iter().flat_map(|(cache, _)| cache.names()).collect();
        let lacking = |name: &String| {
            if self.look_up(name, None, Need::Weights).is_some() {
                return None;
            }
            self.caches().iter().find_map(|(cache, source)| {
                let repo = cache.repo(name);
                let commit = repo.commit(MAIN).or_else(|| repo.commits().into_iter().next())?;
                let path = repo.snapshot(&commit);
                let ours = *source == Source::Inferno || cache::missing(&path, Need::Text).is_none();
                cache::missing(&path, Need::Weights).filter(|_| ours).map(|missing| (name.clone(), missing))
            })
        };
        names.iter().filter_map(lacking).collect()
    }

    /// The name to ask the hub for: of a model that is here, or half of it, the organisation may be left out. A mere part
    /// of the name will not do: `gpt2` is a model, of whichever others it is a part.
    fn full_name(&self, name: &str) -> String {
        let here: BTreeSet<String> = self.caches().iter().flat_map(|(cache, _)| cache.names()).collect();
        match &here.iter().filter(|other| names::is_called(other, name)).collect::<Vec<_>>()[..] {
            [one] if !name.contains('/') => one.to_string(),
            _ => name.to_string(),
        }
    }

    /// A repository's snapshot at a revision. Without one: at main, else the newest that is whole.
    fn look_up(&self, name: &str, revision: Option<&str>, need: Need) -> Option<Snapshot> {
        let repos: Vec<RepoDir> = self.caches().iter().map(|(cache, _)| cache.repo(name)).collect();
        let known = repos.iter().filter_map(|repo| repo.commit(revision.unwrap_or(MAIN)));
        let others = repos.iter().flat_map(|repo| repo.commits()).filter(|_| revision.is_none());
        known.chain(others).find_map(|commit| self.at_commit(name, &commit, need))
    }

    fn at_commit(&self, name: &str, commit: &str, need: Need) -> Option<Snapshot> {
        self.caches().into_iter().find_map(|(cache, source)| {
            let path = cache.repo(name).snapshot(commit);
            let whole = cache::missing(&path, need).is_none();
            whole.then(|| Snapshot { name: name.to_string(), revision: Some(commit.to_string()), path, source })
        })
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

/// The GGUF file that `model` names on this disk: a file, a directory with one model, or `directory:Q4_K_M`.
fn gguf_at(model: &str) -> Result<Option<PathBuf>> {
    let path = Path::new(model);
    if path.is_file() {
        return gguf::find(path);
    }
    let (dir, wanted) = if path.is_dir() { (model, None) } else { gguf::split_tag(model) };
    if Path::new(dir).is_dir() { gguf::choose(dir, Path::new(dir), wanted) } else { Ok(None) }
}

/// The model that is meant of a snapshot, which may hold several GGUF files.
fn one_model(snapshot: Snapshot, wanted: Option<&str>) -> Result<Snapshot> {
    let Some(path) = gguf::choose(&snapshot.name, &snapshot.path, wanted)? else { return Ok(snapshot) };
    let name = wanted.map_or(snapshot.name.clone(), |wanted| format!("{}:{wanted}", snapshot.name));
    Ok(Snapshot { name, path, ..snapshot })
}
