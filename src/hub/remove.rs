//! Models leave inferno's cache, and what no model needs is cleared away.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::cache::{self, RepoDir, entries, files_below};
use super::partial::ENDINGS;
use super::{Hub, Progress, demo, gguf, names};
use crate::Error;

/// What was taken away.
#[derive(Debug, PartialEq, Eq)]
pub struct Removed {
    /// `org/name`, or `org/name:Q4_K_M`
    pub name: String,
    /// The commits, none of them for the demo.
    pub revisions: Vec<String>,
    pub freed_bytes: u64,
    /// Of its files those that other revisions have too, which stay.
    pub kept_bytes: u64,
}

/// What was cleared away of one repository.
#[derive(Debug, PartialEq, Eq)]
pub struct Pruned {
    pub name: String,
    pub files: usize,
    pub freed_bytes: u64,
    /// Another process is at work on it, so it was left alone.
    pub busy: bool,
}

impl Hub {
    /// Removes a model from inferno's cache, at one revision or all of it; with `:Q4_K_M` one of its GGUF files. Files that
    /// other revisions share stay. Whoever works on it is waited for.
    pub fn remove(&self, model: &str, revision: Option<&str>, progress: &dyn Progress) -> Result<Removed> {
        let (name, revision) = names::split_revision(model, revision)?;
        if name == demo::NAME {
            self.forget_use(name);
            let freed_bytes = demo::remove(&self.settings.cache)?;
            return Ok(Removed { name: name.into(), revisions: Vec::new(), freed_bytes, kept_bytes: 0 });
        }
        let (part, tag) = gguf::split_tag(name);
        let own = self.own().names().into_iter().collect();
        let found = names::meant(part, &own);
        if found.is_empty() {
            self.check_not_elsewhere(part)?;
        }
        self.check_meant(part, found.iter().copied())?;
        let name = found[0];
        let repo = self.own().repo(name);
        let _lock = repo.lock(|| progress.waiting(name))?;
        let commits = match revision {
            None => repo.commits(),
            Some(revision) => repo.commit(revision).into_iter().collect(),
        };
        if let (Some(revision), true) = (revision, commits.is_empty()) {
            return Err(Error::RevisionNotFound { repo: name.clone(), revision: revision.to_string() }.into());
        }

        // Of several GGUF models one; what is left of the repository may be nothing worth keeping.
        let (mut whole, mut files): (Vec<String>, Vec<PathBuf>) = (Vec::new(), Vec::new());
        let mut revisions = Vec::new();
        for commit in commits {
            let models = gguf::in_directory(&repo.snapshot(&commit));
            let meant = |path: &Path| tag.is_none_or(|tag| gguf::is_named(&path.to_string_lossy(), tag));
            let ours: Vec<_> = models.iter().filter(|model| meant(&model.path)).collect();
            match tag {
                Some(_) if ours.is_empty() => continue,
                Some(_) if ours.len() < models.len() => {
                    let parts = |model: &&gguf::GgufFile| {
                        let first = model.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                        gguf::parts(&first).into_iter().map(|part| model.path.with_file_name(part)).collect::<Vec<_>>()
                    };
                    files.extend(ours.iter().flat_map(parts));
                }
                _ => whole.push(commit.clone()),
            }
            revisions.push(commit);
        }
        let called = tag.map_or(name.clone(), |tag| format!("{name}:{tag}"));
        if let (Some(_), true) = (tag, revisions.is_empty()) {
            let hint = "`inferno list` shows what is here".to_string();
            return Err(Error::ModelNotFound { model: called, hint }.into());
        }

        // Refs first, then links, then what they led to: at no time does a name stand for a half.
        let before = bytes_below(&repo.path);
        let gone = linked(&repo, &whole, &files);
        for (path, _) in repo.refs().into_iter().filter(|(_, commit)| whole.contains(commit)) {
            remove_file(&path)?;
        }
        for file in files.iter().filter(|file| file.symlink_metadata().is_ok()) {
            remove_file(file)?;
        }
        for commit in &whole {
            remove_dir(&repo.snapshot(commit))?;
        }
        let kept = linked(&repo, &repo.commits(), &[]);
        for etag in gone.difference(&kept) {
            let blob = repo.blob(etag);
            if blob.exists() {
                remove_file(&blob)?;
            }
        }
        if repo.commits().is_empty() {
            remove_dir(&repo.path)?;
        }
        self.forget_use(&called);
        let size = |etag: &String| fs::metadata(repo.blob(etag)).map_or(0, |data| data.len());
        Ok(Removed {
            name: called,
            revisions,
            freed_bytes: before.saturating_sub(bytes_below(&repo.path)),
            kept_bytes: gone.intersection(&kept).map(size).sum(),
        })
    }

    /// Clears away what interrupted downloads have left, and blobs that no revision has. A model under way is left alone.
    pub fn prune(&self) -> Result<Vec<Pruned>> {
        let mut pruned = Vec::new();
        for name in self.own().names() {
            let repo = self.own().repo(&name);
            let Some(_lock) = repo.try_lock()? else {
                pruned.push(Pruned { name, files: 0, freed_bytes: 0, busy: true });
                continue;
            };
            let stale: Vec<PathBuf> = files_below(&repo.path).into_iter().filter(|path| is_left_over(path)).collect();
            let mut freed = Vec::new();
            for path in stale {
                freed.push(bytes(&path));
                remove_file(&path)?;
            }
            let linked = linked(&repo, &repo.commits(), &[]);
            for blob in files_below(&repo.path.join("blobs")) {
                if !blob.file_name().and_then(|name| name.to_str()).is_some_and(|name| linked.contains(name)) {
                    freed.push(bytes(&blob));
                    remove_file(&blob)?;
                }
            }
            if files_below(&repo.path.join("snapshots")).is_empty() {
                remove_dir(&repo.path)?;
            }
            if !freed.is_empty() {
                pruned.push(Pruned { name, files: freed.len(), freed_bytes: freed.iter().sum(), busy: false });
            }
        }
        Ok(pruned)
    }

    /// Fails for what is here, but not in inferno's cache.
    fn check_not_elsewhere(&self, model: &str) -> Result<()> {
        let [_, (shared, _)] = self.caches();
        let names = shared.names().into_iter().collect();
        match names::meant(model, &names)[..] {
            [] if Path::new(model).exists() => {
                Err(Error::Usage(format!("{model} is no model of inferno's cache: remove it as any other file")).into())
            }
            [] => Ok(()),
            [name, ..] => {
                let problem = format!(
                    "'{name}' lies in the cache of Python's tools, which inferno does not change\n  hf cache rm model/{name}"
                );
                Err(Error::Usage(problem).into())
            }
        }
    }
}

/// The blobs that snapshots link to, or that these links of theirs do.
fn linked(repo: &RepoDir, commits: &[String], links: &[PathBuf]) -> BTreeSet<String> {
    let of_commits = commits.iter().flat_map(|commit| repo.linked(commit)).filter_map(|(_, _, etag)| etag);
    let of_links = links.iter().filter_map(|link| {
        let target = fs::read_link(link).ok()?;
        Some(target.file_name()?.to_str()?.to_string())
    });
    of_commits.chain(of_links).collect()
}

/// What an interrupted process leaves: the beginnings of blobs, and what it wrote aside.
fn is_left_over(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let in_blobs = path.parent().is_some_and(|dir| dir.ends_with("blobs"));
    in_blobs && ENDINGS.iter().any(|ending| name.ends_with(ending)) || cache::is_aside(&name)
}

fn bytes_below(dir: &Path) -> u64 {
    files_below(dir).iter().map(|path| bytes(path)).sum()
}

/// Of a link nothing, since what it leads to is counted where it lies.
fn bytes(path: &Path) -> u64 {
    path.symlink_metadata().ok().filter(|data| data.is_file()).map_or(0, |data| data.len())
}

fn remove_file(path: &Path) -> Result<()> {
    fs::remove_file(path).with_context(|| format!("cannot delete {}", path.display()))
}

fn remove_dir(dir: &Path) -> Result<()> {
    // A folder that is gone already is no failure.
    match fs::remove_dir_all(dir) {
        Err(_) if entries(dir).next().is_none() && !dir.exists() => Ok(()),
        result => result.with_context(|| format!("cannot delete {}", dir.display())),
    }
}
