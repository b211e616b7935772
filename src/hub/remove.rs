//! Models leave inferno's cache, and what no model needs is cleared away.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::cache::{self, RepoDir, entries, files_below};
use super::lock::Lock;
use super::partial::ENDINGS;
use super::{Hub, Progress, demo, names};
use crate::error::Error;
use crate::snapshot::{gguf, is_weights_file};

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
    /// The whole name of the model that `model` is only a part of: whoever says it twice might mean another one then.
    pub fn only_part(&self, model: &str) -> Option<String> {
        let (name, _) = names::split_revision(model, None).ok()?;
        let (part, _) = gguf::split_tag(name);
        let own = self.own().names().into_iter().collect();
        match names::meant(part, &own)[..] {
            [name] if !names::is_called(name, part) => Some(model.replacen(part, name, 1)),
            _ => None,
        }
    }

    /// Removes a model from inferno's cache, at one revision or all of it; with `:Q4_K_M` one of its GGUF files. Files that
    /// other revisions share stay. Whoever works on it is waited for.
    pub fn remove(&self, model: &str, revision: Option<&str>, progress: &dyn Progress) -> Result<Removed> {
        let (name, revision) = names::split_revision(model, revision)?;
        if name == demo::NAME {
            self.forget_use(name);
            let freed_bytes = demo::remove(&self.settings.cache)?;
            return Ok(Removed { name: name.into(), revisions: Vec::new(), freed_bytes, kept_bytes: 0 });
        }
        self.check_own_cache()?;
        let (part, tag) = gguf::split_tag(name);
        let own = self.own().names().into_iter().collect();
        let found = names::meant(part, &own);
        // Of a model of the shared cache no more than a ref may be here.
        if found.iter().all(|name| self.own().repo(name).commits().is_empty()) {
            self.check_not_elsewhere(part)?;
        }
        self.check_meant(part, found.iter().copied())?;
        let name = found[0];
        let repo = self.own().repo(name);
        let lock = repo.lock(|| progress.waiting(name))?;
        self.check_lock(&lock, &repo)?;
        let commits = match revision {
            None => commits(&repo)?,
            Some(revision) => repo.commit(revision).into_iter().collect(),
        };
        if let (Some(revision), true) = (revision, commits.is_empty()) {
            return Err(Error::RevisionNotFound { repo: name.clone(), revision: revision.to_string() }.into());
        }

        // Of several GGUF models one; the snapshot goes with the last of its weights.
        let (mut whole, mut files): (Vec<String>, Vec<PathBuf>) = (Vec::new(), Vec::new());
        let mut revisions = Vec::new();
        for commit in commits {
            let models = gguf::models_in(&repo.snapshot(&commit));
            let Some(tag) = tag else {
                whole.push(commit.clone());
                revisions.push(commit);
                continue;
            };
            let ours: Vec<_> =
                models.iter().filter(|model| gguf::matches_tag(&model.path.to_string_lossy(), tag)).collect();
            let parts = |model: &&gguf::GgufFile| {
                let first = model.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                gguf::part_names(&first).into_iter().map(|part| model.path.with_file_name(part)).collect::<Vec<_>>()
            };
            let ours: Vec<PathBuf> = ours.iter().flat_map(parts).collect();
            if ours.is_empty() {
                continue;
            }
            if walk(&repo.snapshot(&commit))?.iter().any(|path| is_weights_file(path) && !ours.contains(path)) {
                files.extend(ours);
            } else {
                whole.push(commit.clone());
            }
            revisions.push(commit);
        }
        let called = tag.map_or(name.clone(), |tag| format!("{name}:{tag}"));
        if let (Some(_), true) = (tag, revisions.is_empty()) {
            let hint = "`inferno list` shows what is here".to_string();
            return Err(Error::ModelNotFound { model: called, hint }.into());
        }

        // All is looked at before anything goes: what cannot be read must not count as nothing.
        let before = bytes_below(&repo.path);
        let dirs: Vec<PathBuf> = whole.iter().map(|commit| repo.snapshot(commit)).collect();
        let (going, staying): (Vec<PathBuf>, Vec<PathBuf>) = walk(&repo.path.join("snapshots"))?
            .into_iter()
            .partition(|path| files.contains(path) || dirs.iter().any(|dir| path.starts_with(dir)));
        let (gone, kept) = (linked(&going)?, linked(&staying)?);
        let refs = refs(&repo)?;

        // Refs first, then links, then what they led to: at no time does a name stand for a half.
        for (path, _) in refs.into_iter().filter(|(_, commit)| whole.contains(commit)) {
            remove_file(&path)?;
        }
        for file in files.iter().filter(|file| file.symlink_metadata().is_ok()) {
            remove_file(file)?;
        }
        for dir in &dirs {
            remove_dir(dir)?;
        }
        for etag in gone.difference(&kept) {
            let blob = repo.blob(etag);
            if blob.exists() {
                remove_file(&blob)?;
            }
        }
        if staying.is_empty() {
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
        self.check_own_cache()?;
        let mut pruned = Vec::new();
        for name in self.own().names() {
            let repo = self.own().repo(&name);
            let Some(lock) = repo.try_lock()? else {
                pruned.push(Pruned { name, files: 0, freed_bytes: 0, busy: true });
                continue;
            };
            self.check_lock(&lock, &repo)?;
            // All is looked at before anything goes: what cannot be read must not count as nothing.
            let snapshots: Vec<PathBuf> =
                walk(&repo.path.join("snapshots"))?.into_iter().filter(|path| !is_left_over(path)).collect();
            let linked = linked(&snapshots)?;
            let needed = |blob: &Path| {
                let name = blob.file_name().and_then(|name| name.to_str());
                !blob.starts_with(repo.path.join("blobs")) || name.is_some_and(|name| linked.contains(name))
            };
            let stale = walk(&repo.path)?.into_iter().filter(|path| is_left_over(path) || !needed(path));
            let mut freed = Vec::new();
            for path in stale {
                freed.push(bytes(&path));
                remove_file(&path)?;
            }
            if snapshots.is_empty() {
                remove_dir(&repo.path)?;
            }
            if !freed.is_empty() {
                pruned.push(Pruned { name, files: freed.len(), freed_bytes: freed.iter().sum(), busy: false });
            }
        }
        Ok(pruned)
    }

    /// Fails where nothing would tell of another process at work on the same folder.
    fn check_lock(&self, lock: &Lock, repo: &RepoDir) -> Result<()> {
        if !lock.works() && !self.force {
            bail!(
                "locks do not work on the disk of {}: another inferno at work there would not be noticed\n  --force deletes all the same",
                repo.path.display()
            );
        }
        Ok(())
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
                Err(Error::NotOurs(problem).into())
            }
        }
    }
}

/// Commits with a snapshot folder.
fn commits(repo: &RepoDir) -> Result<Vec<String>> {
    let names =
        read(&repo.path.join("snapshots"))?.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names.filter(|name| names::is_commit(name)).collect())
}

/// Each ref's file and the commit that it points to.
fn refs(repo: &RepoDir) -> Result<Vec<(PathBuf, String)>> {
    let commit = |path: PathBuf| {
        let commit = fs::read_to_string(&path).with_context(|| cannot_read(&path))?.trim().to_string();
        Ok((path, commit))
    };
    walk(&repo.path.join("refs"))?.into_iter().map(commit).collect()
}

/// The blobs that these files of snapshots link to.
fn linked(files: &[PathBuf]) -> Result<BTreeSet<String>> {
    let mut etags = BTreeSet::new();
    for path in files {
        if path.symlink_metadata().with_context(|| cannot_read(path))?.is_symlink() {
            let target = fs::read_link(path).with_context(|| cannot_read(path))?;
            etags.extend(target.file_name().and_then(|name| name.to_str()).map(str::to_string));
        }
    }
    Ok(etags)
}

/// Every file below a directory, sorted; links count as files. Unlike [`files_below`] it fails where something cannot
/// be read.
fn walk(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in read(dir)? {
        let path = entry.path();
        let kind = entry.file_type().with_context(|| cannot_read(&path))?;
        if kind.is_dir() {
            files.extend(walk(&path)?);
        } else if kind.is_symlink() && path.is_dir() {
            // Somebody keeps a part of the cache elsewhere: neither is the link a file, nor is what is there ours to count.
            bail!("{} leads to another folder, so nothing was deleted there", path.display());
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// A directory's entries; none only if it is not there.
fn read(dir: &Path) -> Result<Vec<fs::DirEntry>> {
    match fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        found => found.and_then(Iterator::collect).with_context(|| cannot_read(dir)),
    }
}

fn cannot_read(path: &Path) -> String {
    format!("cannot read {}, so nothing was deleted there", path.display())
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
