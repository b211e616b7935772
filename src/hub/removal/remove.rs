//! Removes models from inferno's own cache.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::deletion::{bytes_below, linked_blobs, read_dir, remove_dir, remove_file, walk};
use crate::error::Error;
use crate::files;
use crate::hub::cache::RepoDir;
use crate::hub::client::Hub;
use crate::hub::find::list_hint;
use crate::hub::progress::Progress;
use crate::hub::{demo, names};
use crate::snapshot::{gguf, is_weights_file};

/// The result of removing a model.
#[derive(Debug, PartialEq, Eq)]
pub struct RemovedModel {
    /// The name of the removed model: `demo`, `org/name` or `org/name:Q4_K_M`.
    pub name: String,
    /// The commits whose snapshots lost files. Empty for the demo.
    pub changed_commits: Vec<String>,
    pub freed_bytes: u64,
    /// The size in bytes of the removed files' blobs that were kept, because remaining files also link to them.
    pub shared_bytes: u64,
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
    ///
    /// Returns `None` for the demo model and for a full name, with or without its organization.
    /// Also returns `None` if no model or several models match, or if the revision is invalid.
    ///
    /// `inferno remove` asks the user to confirm the completed name, because a partial name may match the wrong model.
    pub fn resolve_partial_name(&self, model: &str) -> Option<String> {
        let (name, revision) = names::split_revision(model, None).ok()?;
        if demo::is_demo(name, revision).ok()? {
            return None;
        }
        let (part, _) = gguf::split_tag(name);
        let own_names = self.own_cache().names().into_iter().collect();
        match names::matching(part, &own_names)[..] {
            [name] if !names::is_same_name(name, part) => Some(model.replacen(part, name, 1)),
            _ => None,
        }
    }

    /// Removes one revision or all revisions of a model from inferno's own cache, or all versions of the demo.
    /// With a tag such as `:Q4_K_M`, removes only the GGUF models that match the tag.
    ///
    /// Keeps blobs to which remaining files link. Waits while another process changes the repository.
    ///
    /// Fails if no model or several models in inferno's own cache match, or if the model lacks the revision or the tag.
    /// Without `--force`, also fails if the filesystem does not support file locking, except for the demo.
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
        // If there is no snapshot to remove, report a model that is only elsewhere. A matching name is not enough:
        // for a model in the shared cache, inferno's own cache can have a ref without a snapshot.
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
            return Err(
                Error::ModelNotFound { model: format!("{name} at revision {revision}"), hint: list_hint() }.into()
            );
        }
        let full_name = tag.map_or(name.clone(), |tag| format!("{name}:{tag}"));
        let selection = select(&repo, commits, tag)?;
        if tag.is_some() && selection.changed_commits.is_empty() {
            return Err(Error::ModelNotFound { model: full_name, hint: list_hint() }.into());
        }
        let removed = delete_selection(&repo, full_name, selection)?;
        self.forget_use(&removed.name);
        Ok(removed)
    }

    /// Fails if `model` is an existing path or matches a model in the shared cache, because inferno removes neither.
    fn check_is_not_elsewhere(&self, model: &str) -> Result<()> {
        let [_, (shared, _)] = self.caches();
        let shared_names = shared.names().into_iter().collect();
        match names::matching(model, &shared_names)[..] {
            [] if Path::new(model).exists() => Err(Error::usage(format!(
                "cannot remove {model}: it is not in inferno's cache\n  delete it like any other file"
            ))),
            [] => Ok(()),
            [name, ..] => Err(Error::NotInOwnCache(format!(
                "cannot remove '{name}': it is in the shared Hugging Face cache, which inferno does not change\n  \
                 to delete it: hf cache rm model/{name}"
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
        let shards: Vec<PathBuf> = selected
            .flat_map(|model| {
                let first = model.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                gguf::shard_names(&first).into_iter().map(move |shard| model.path.with_file_name(shard))
            })
            .collect();
        if shards.is_empty() {
            continue;
        }
        let has_other_weights = walk(&dir)?.iter().any(|path| is_weights_file(path) && !shards.contains(path));
        if has_other_weights {
            selection.files.extend(shards);
        } else {
            selection.whole_commits.push(commit.clone());
        }
        selection.changed_commits.push(commit);
    }
    Ok(selection)
}

/// Deletes the selected snapshots and files, the refs to these snapshots, and the blobs to which only the deleted
/// files linked. If no file remains in any snapshot, deletes the directory of the repository.
///
/// If a snapshot directory cannot be read, deletes nothing, because its files may link to blobs that would be deleted.
fn delete_selection(repo: &RepoDir, name: String, selection: Selection) -> Result<RemovedModel> {
    let Selection { changed_commits, whole_commits, files } = selection;
    let bytes_before = bytes_below(&repo.path);
    let dirs: Vec<PathBuf> = whole_commits.iter().map(|commit| repo.snapshot(commit)).collect();
    let (removed, remaining): (Vec<PathBuf>, Vec<PathBuf>) = walk(&repo.path.join("snapshots"))?
        .into_iter()
        .partition(|path| files.contains(path) || dirs.iter().any(|dir| path.starts_with(dir)));
    let removed_blobs = linked_blobs(&removed)?;
    let remaining_blobs = linked_blobs(&remaining)?;
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

/// Returns the commits that have a snapshot directory. Fails if the directory `snapshots` exists but cannot be read.
fn read_commits(repo: &RepoDir) -> Result<Vec<String>> {
    let entries = read_dir(&repo.path.join("snapshots"))?;
    let names = entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names.filter(|name| names::is_commit(name)).collect())
}

/// Returns the path and the commit of each ref. Fails if a ref cannot be read.
fn read_refs(repo: &RepoDir) -> Result<Vec<(PathBuf, String)>> {
    let commit = |path: PathBuf| {
        let commit = files::read_text(&path, files::MAX_SINGLE_VALUE_BYTES)?.trim().to_string();
        Ok((path, commit))
    };
    walk(&repo.path.join("refs"))?.into_iter().map(commit).collect()
}
