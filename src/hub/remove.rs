//! Removes models from inferno's own cache, and deletes (prunes) files that no model uses.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::cache::RepoDir;
use super::client::Hub;
use super::disk::{self, entries, files_below};
use super::download::partial::SUFFIXES;
use super::lock::Lock;
use super::progress::Progress;
use super::{demo, names};
use crate::error::Error;
use crate::files;
use crate::snapshot::{gguf, is_weights_file};

/// The result of removing a model.
#[derive(Debug, PartialEq, Eq)]
pub struct RemovedModel {
    /// The name of the removed model: `demo`, `org/name` or `org/name:Q4_K_M`.
    pub name: String,
    /// The commits whose snapshots lost files. Empty for the demo.
    pub changed_commits: Vec<String>,
    pub freed_bytes: u64,
    /// The size in bytes of the files that were kept because other snapshots use them.
    pub shared_bytes: u64,
}

/// The result of pruning one repository or the demo.
#[derive(Debug, PartialEq, Eq)]
pub struct PrunedRepo {
    pub name: String,
    /// The number of deleted files: unused blobs, and files that interrupted processes left behind.
    pub files: usize,
    pub freed_bytes: u64,
    /// Whether pruning was skipped because another process holds the lock.
    pub is_busy: bool,
}

/// The snapshots and files to remove from a repository.
#[derive(Default)]
struct Selection {
    /// The commits whose snapshots lose files, including the commits in `whole_commits`.
    changed_commits: Vec<String>,
    /// The commits whose whole snapshot is removed.
    whole_commits: Vec<String>,
    /// The files to remove from snapshots that are kept.
    files: Vec<PathBuf>,
}

impl Hub {
    /// Completes a partial name of a model in inferno's own cache.
    /// Returns `None` for a full name, with or without its organization, or if no model or several models match.
    ///
    /// `inferno remove` asks the user to confirm the model, because a partial name may match a model by accident.
    pub fn resolve_partial_name(&self, model: &str) -> Option<String> {
        let (name, _) = names::split_revision(model, None).ok()?;
        let (part, _) = gguf::split_tag(name);
        let own_names = self.own_cache().names().into_iter().collect();
        match names::matching(part, &own_names)[..] {
            [name] if !names::is_same_name(name, part) => Some(model.replacen(part, name, 1)),
            _ => None,
        }
    }

    /// Removes one revision or all revisions of a model from inferno's own cache.
    /// With a tag such as `:Q4_K_M`, removes only the GGUF models that match the tag.
    ///
    /// Keeps files that other snapshots use. Waits while another process changes the repository.
    pub fn remove(&self, model: &str, revision: Option<&str>, progress: &dyn Progress) -> Result<RemovedModel> {
        let (name, revision) = names::split_revision(model, revision)?;
        if demo::is_demo(name, revision)? {
            self.forget_use(name);
            let freed_bytes = demo::remove(&self.config.cache)?;
            return Ok(RemovedModel { name: name.into(), changed_commits: Vec::new(), freed_bytes, shared_bytes: 0 });
        }
        self.check_own_cache()?;
        let (part, tag) = gguf::split_tag(name);
        let own_names = self.own_cache().names().into_iter().collect();
        let matching = names::matching(part, &own_names);
        // For a model in the shared cache, inferno's own cache can have a ref but no snapshot.
        if matching.iter().all(|name| self.own_cache().repo(name).commits().is_empty()) {
            self.check_is_not_elsewhere(part)?;
        }
        self.check_is_one_model(part, matching.iter().copied())?;
        let name = matching[0];
        let repo = self.own_cache().repo(name);
        let lock = repo.lock(|| progress.waiting(name))?;
        self.check_lock(&lock, &repo.path)?;
        let commits = match revision {
            None => read_commits(&repo)?,
            Some(revision) => repo.commit(revision).into_iter().collect(),
        };
        if let (Some(revision), true) = (revision, commits.is_empty()) {
            return Err(Error::RevisionNotFound { repo: name.clone(), revision: revision.to_string() }.into());
        }
        let full_name = tag.map_or(name.clone(), |tag| format!("{name}:{tag}"));
        let selection = select(&repo, commits, tag)?;
        if tag.is_some() && selection.changed_commits.is_empty() {
            let hint = "list the models on this machine: inferno list".to_string();
            return Err(Error::ModelNotFound { model: full_name, hint }.into());
        }
        let removed = delete_selection(&repo, full_name, selection)?;
        self.forget_use(&removed.name);
        Ok(removed)
    }

    /// Deletes the leftovers of interrupted processes, the blobs to which no snapshot links,
    /// and repositories without snapshot files.
    ///
    /// Skips repositories that another process is changing at the moment.
    pub fn prune(&self) -> Result<Vec<PrunedRepo>> {
        self.check_own_cache()?;
        let mut pruned = Vec::new();
        for name in self.own_cache().names() {
            let repo = self.own_cache().repo(&name);
            let Some(lock) = repo.try_lock()? else {
                pruned.push(PrunedRepo { name, files: 0, freed_bytes: 0, is_busy: true });
                continue;
            };
            self.check_lock(&lock, &repo.path)?;
            let freed = prune_repo(&repo)?;
            if !freed.is_empty() {
                pruned.push(PrunedRepo { name, files: freed.len(), freed_bytes: freed.iter().sum(), is_busy: false });
            }
        }
        pruned.extend(self.prune_demo()?);
        Ok(pruned)
    }

    /// Deletes the demo's temporary files and directories. Returns `None` if the demo had no temporary files.
    fn prune_demo(&self) -> Result<Option<PrunedRepo>> {
        let cache = &self.config.cache;
        let name = demo::NAME.to_string();
        if demo::leftovers(cache).is_empty() {
            return Ok(None);
        }
        let Some(lock) = demo::try_lock(cache)? else {
            return Ok(Some(PrunedRepo { name, files: 0, freed_bytes: 0, is_busy: true }));
        };
        self.check_lock(&lock, &cache.join(demo::NAME))?;
        let (mut files, mut freed_bytes) = (0, 0);
        // List the temporary files again: another process may have renamed some of them before it released the lock.
        for path in demo::leftovers(cache) {
            if path.symlink_metadata().is_ok_and(|data| data.is_dir()) {
                files += files_below(&path).len();
                freed_bytes += bytes_below(&path);
                remove_dir(&path)?;
            } else {
                files += 1;
                freed_bytes += file_bytes(&path);
                remove_file(&path)?;
            }
        }
        Ok((files > 0).then_some(PrunedRepo { name, files, freed_bytes, is_busy: false }))
    }

    /// Fails if the filesystem does not support file locking, because another process may be using the files.
    ///
    /// With `--force`, a missing lock is not an error.
    fn check_lock(&self, lock: &Lock, dir: &Path) -> Result<()> {
        if !lock.is_effective() && !self.force {
            bail!(
                "cannot delete safely: the filesystem of {} does not support file locking, so another inferno process may be using the files\n  to delete anyway: --force",
                dir.display()
            );
        }
        Ok(())
    }

    /// Fails if `model` is a path or matches a model in the shared cache, because inferno removes neither.
    fn check_is_not_elsewhere(&self, model: &str) -> Result<()> {
        let [_, (shared, _)] = self.caches();
        let shared_names = shared.names().into_iter().collect();
        match names::matching(model, &shared_names)[..] {
            [] if Path::new(model).exists() => {
                Err(Error::usage(format!("{model} is not in inferno's cache\n  delete it like any other file")))
            }
            [] => Ok(()),
            [name, ..] => Err(Error::NotInOwnCache(format!(
                "'{name}' is in the shared Hugging Face cache, which inferno does not change\n  to delete it: hf cache rm model/{name}"
            ))
            .into()),
        }
    }
}

/// Chooses what to remove from the snapshots of `commits`: everything, or the GGUF models that match `tag`.
///
/// If the matching GGUF models are the only weights in a snapshot, chooses the whole snapshot.
fn select(repo: &RepoDir, commits: Vec<String>, tag: Option<&str>) -> Result<Selection> {
    let Some(tag) = tag else {
        return Ok(Selection { changed_commits: commits.clone(), whole_commits: commits, files: Vec::new() });
    };
    let mut selection = Selection::default();
    for commit in commits {
        let dir = repo.snapshot(&commit);
        let models = gguf::models_in(&dir).into_iter();
        let selected = models.filter(|model| gguf::matches_tag(&model.path.to_string_lossy(), tag));
        let parts: Vec<PathBuf> = selected
            .flat_map(|model| {
                let first = model.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                gguf::part_names(&first).into_iter().map(move |part| model.path.with_file_name(part))
            })
            .collect();
        if parts.is_empty() {
            continue;
        }
        let has_other_weights = walk(&dir)?.iter().any(|path| is_weights_file(path) && !parts.contains(path));
        if has_other_weights {
            selection.files.extend(parts);
        } else {
            selection.whole_commits.push(commit.clone());
        }
        selection.changed_commits.push(commit);
    }
    Ok(selection)
}

/// Deletes the selected files, and the blobs to which no other file links.
///
/// If a directory cannot be read, deletes nothing, because files in that directory may link to the blobs.
fn delete_selection(repo: &RepoDir, name: String, selection: Selection) -> Result<RemovedModel> {
    let Selection { changed_commits, whole_commits, files } = selection;
    let bytes_before = bytes_below(&repo.path);
    let dirs: Vec<PathBuf> = whole_commits.iter().map(|commit| repo.snapshot(commit)).collect();
    let (removed, remaining): (Vec<PathBuf>, Vec<PathBuf>) = walk(&repo.path.join("snapshots"))?
        .into_iter()
        .partition(|path| files.contains(path) || dirs.iter().any(|dir| path.starts_with(dir)));
    let (removed_blobs, remaining_blobs) = (linked_blobs(&removed)?, linked_blobs(&remaining)?);
    let refs = read_refs(repo)?;

    // Delete refs before links, and links before blobs, so that no ref or link points to a deleted target.
    for (path, _) in refs.into_iter().filter(|(_, commit)| whole_commits.contains(commit)) {
        remove_file(&path)?;
    }
    for file in files.iter().filter(|file| file.symlink_metadata().is_ok()) {
        remove_file(file)?;
    }
    for dir in &dirs {
        remove_dir(dir)?;
    }
    for etag in removed_blobs.difference(&remaining_blobs) {
        let blob = repo.blob(etag);
        if blob.exists() {
            remove_file(&blob)?;
        }
    }
    if remaining.is_empty() {
        remove_dir(&repo.path)?;
    }
    let size = |etag: &String| fs::metadata(repo.blob(etag)).map_or(0, |data| data.len());
    Ok(RemovedModel {
        name,
        changed_commits,
        freed_bytes: bytes_before.saturating_sub(bytes_below(&repo.path)),
        shared_bytes: removed_blobs.intersection(&remaining_blobs).map(size).sum(),
    })
}

/// Deletes the leftovers and unused blobs in a repository, or the whole repository if it has no snapshot files.
/// Returns the size of each deleted leftover or blob, in bytes.
fn prune_repo(repo: &RepoDir) -> Result<Vec<u64>> {
    // Read all snapshots before the first deletion. If a snapshot cannot be read, its blobs would seem unused.
    let snapshot_files: Vec<PathBuf> =
        walk(&repo.path.join("snapshots"))?.into_iter().filter(|path| !is_leftover(path)).collect();
    let linked = linked_blobs(&snapshot_files)?;
    let is_unused_blob = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str());
        path.starts_with(repo.path.join("blobs")) && !name.is_some_and(|name| linked.contains(name))
    };
    let mut freed = Vec::new();
    for path in walk(&repo.path)?.into_iter().filter(|path| is_leftover(path) || is_unused_blob(path)) {
        freed.push(file_bytes(&path));
        remove_file(&path)?;
    }
    if snapshot_files.is_empty() {
        remove_dir(&repo.path)?;
    }
    Ok(freed)
}

/// Returns the commits that have a snapshot directory. Fails if the directory `snapshots` cannot be read.
fn read_commits(repo: &RepoDir) -> Result<Vec<String>> {
    let entries = read_dir(&repo.path.join("snapshots"))?;
    let names = entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names.filter(|name| names::is_commit(name)).collect())
}

/// Returns the path and the commit of each ref. Fails if a ref cannot be read.
fn read_refs(repo: &RepoDir) -> Result<Vec<(PathBuf, String)>> {
    let commit = |path: PathBuf| {
        let commit = files::read_text(&path, files::SINGLE_VALUE)?.trim().to_string();
        Ok((path, commit))
    };
    walk(&repo.path.join("refs"))?.into_iter().map(commit).collect()
}

/// Returns the names of the blobs to which `files` link. Fails if a link cannot be read.
fn linked_blobs(files: &[PathBuf]) -> Result<BTreeSet<String>> {
    let mut etags = BTreeSet::new();
    for path in files {
        if path.symlink_metadata().with_context(|| cannot_read(path))?.is_symlink() {
            let target = fs::read_link(path).with_context(|| cannot_read(path))?;
            etags.extend(target.file_name().and_then(|name| name.to_str()).map(str::to_string));
        }
    }
    Ok(etags)
}

/// Returns the sorted paths of all files below a directory. Symlinks to files count as files.
///
/// Unlike [`files_below`], fails if a directory cannot be read, or if there is a symlink to a directory.
fn walk(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in read_dir(dir)? {
        let path = entry.path();
        let kind = entry.file_type().with_context(|| cannot_read(&path))?;
        if kind.is_dir() {
            files.extend(walk(&path)?);
        } else if kind.is_symlink() && path.is_dir() {
            // Do not delete files behind a symlink. The user may have moved a part of the cache to another place.
            bail!(
                "cannot delete files: {} is a symlink to another directory, and inferno does not delete through \
                 symlinks; nothing was deleted from this model\n  replace the symlink with the directory, or \
                 delete the model by hand",
                path.display()
            );
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the entries of a directory, or no entries if it does not exist. Fails if the directory cannot be read.
fn read_dir(dir: &Path) -> Result<Vec<fs::DirEntry>> {
    match fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        found => found.and_then(Iterator::collect).with_context(|| cannot_read(dir)),
    }
}

fn cannot_read(path: &Path) -> String {
    format!("nothing was deleted from this model: cannot read {}", path.display())
}

/// Returns whether a file is an unfinished blob or its record, a bad blob, or a temporary file.
/// Only interrupted processes leave such files behind.
fn is_leftover(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_in_blobs = path.parent().is_some_and(|dir| dir.ends_with("blobs"));
    is_in_blobs && SUFFIXES.iter().any(|suffix| name.ends_with(suffix)) || disk::is_temporary(&name)
}

fn bytes_below(dir: &Path) -> u64 {
    files_below(dir).iter().map(|path| file_bytes(path)).sum()
}

/// Returns the size of a file in bytes. Returns 0 for a symlink, because its target is counted separately.
fn file_bytes(path: &Path) -> u64 {
    path.symlink_metadata().ok().filter(|data| data.is_file()).map_or(0, |data| data.len())
}

fn remove_file(path: &Path) -> Result<()> {
    fs::remove_file(path).with_context(|| format!("cannot delete {}", path.display()))
}

fn remove_dir(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        // The directory does not exist, so there is nothing to delete.
        Err(_) if entries(dir).next().is_none() && !dir.exists() => Ok(()),
        result => result.with_context(|| format!("cannot delete {}", dir.display())),
    }
}
