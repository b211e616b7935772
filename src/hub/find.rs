//! Finds models on this machine: by path, or by name in inferno's own cache and in the shared Hugging Face cache.
//! In this file, "both caches" means these two caches.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::cache::RepoDir;
use super::client::Hub;
use super::demo;
use super::names::{self, MAIN, shell_word};
use super::snapshot::{Snapshot, SnapshotSource};
use crate::error::Error;
use crate::snapshot::{Required, first_missing_file, gguf};

/// The first part of a hint of [`Error::ModelNotFound`].
const NOT_HERE: &str = "it is not on this machine";

/// Returns the hint of [`Error::ModelNotFound`] if a command for models on this machine cannot find one.
pub(super) fn list_hint() -> String {
    format!("{NOT_HERE}\n  list the models on this machine: inferno list")
}

/// Returns the hint of [`Error::ModelNotFound`] if a name matches several models.
fn similar_names(names: &[&str]) -> String {
    format!("several models have similar names; type one of them: {}", names.join(", "))
}

/// A model with missing files.
pub struct IncompleteModel {
    pub name: String,
    /// The first missing file.
    pub missing_file: String,
}

impl Hub {
    /// Finds a model on this machine, without the network. A model in a cache must be complete.
    /// For the demo, first writes the files that are missing from the cache or have the wrong size.
    ///
    /// `model` is `demo`, a path, or `org/name` with an optional tag and revision, as in `org/name:Q4_K_M@main`.
    /// A part of the name is enough if it contains no slash and only one complete model matches.
    /// Fails if no model or several models match, or if `revision` is set for the demo or a path.
    pub fn find(&self, model: &str, revision: Option<&str>) -> Result<Snapshot> {
        self.find_with(model, revision, Required::Weights)
    }

    /// Finds a model like [`find`](Self::find), but a safetensors model may lack its weights.
    pub fn find_tokenizer(&self, model: &str, revision: Option<&str>) -> Result<Snapshot> {
        self.find_with(model, revision, Required::Tokenizer)
    }

    fn find_with(&self, model: &str, revision: Option<&str>, required: Required) -> Result<Snapshot> {
        if let Some(snapshot) = find_path(model, revision, required)? {
            return Ok(snapshot);
        }
        let not_found = |hint: String| anyhow::Error::from(Error::ModelNotFound { model: model.to_string(), hint });
        let (name, revision) = names::split_revision(model, revision)?;
        if demo::is_demo(name, revision)? {
            return demo::materialize(&self.config.cache);
        }
        let (name, tag) = gguf::split_tag(name);
        if !names::is_repo(name) {
            return Err(not_found(invalid_name_hint(model, required)));
        }
        if let Some(snapshot) = self.look_up(name, revision, required) {
            return choose_model(snapshot, tag);
        }

        // No complete model has exactly this name. The user may have typed the name in another case, without its
        // organization, or only in part.
        let is_complete = |other: &String| self.look_up(other, revision, required).is_some();
        let complete: BTreeSet<String> =
            self.caches().iter().flat_map(|(cache, _)| cache.names()).filter(is_complete).collect();
        let matching = names::matching(name, &complete).into_iter();
        let matching: Vec<Snapshot> = matching.filter_map(|other| self.look_up(other, revision, required)).collect();
        match &matching[..] {
            [snapshot] => choose_model(snapshot.clone(), tag),
            [] => Err(not_found(self.download_hint(name, tag, revision, required))),
            several => {
                let names: Vec<&str> = several.iter().map(|snapshot| snapshot.name.as_str()).collect();
                Err(not_found(similar_names(&names)))
            }
        }
    }

    /// Returns the hint for a model that is missing or incomplete: the command that downloads the model.
    ///
    /// The hint also names the first missing file of an incomplete model.
    /// For a missing model, it suggests the complete model with the most similar name, if any name is similar enough.
    fn download_hint(&self, name: &str, tag: Option<&str>, revision: Option<&str>, required: Required) -> String {
        let revision_flag = revision.map(|it| format!(" --revision {}", shell_word(it))).unwrap_or_default();
        let with_tag = |name: &str| shell_word(&tag.map_or(name.to_string(), |tag| format!("{name}:{tag}")));
        let missing = self.caches().iter().find_map(|(cache, _)| {
            let repo = cache.repo(name);
            let commit = repo.commit(revision.unwrap_or(MAIN)).or_else(|| repo.commits().into_iter().next())?;
            first_missing_file(&repo.snapshot(&commit), required)
        });
        if let Some(file) = missing {
            return format!(
                "the model is incomplete: {file} is missing; to download all files: inferno download {}{revision_flag}",
                with_tag(name)
            );
        }
        let complete: BTreeSet<String> = self.list().into_iter().flatten().map(|snapshot| snapshot.name).collect();
        let complete: Vec<String> = complete.into_iter().collect();
        let nearest = names::nearest(name, &complete).filter(|nearest| *nearest != name);
        let nearest =
            nearest.map(|name| format!("\n  did you mean '{name}', which is on this machine?")).unwrap_or_default();
        let not_here = revision.map_or(NOT_HERE.to_string(), |it| format!("revision {it} is not on this machine"));
        if name.contains('/') {
            format!("{not_here}\n  inferno download {}{revision_flag}{nearest}", with_tag(name))
        } else {
            let name = with_tag(&format!("ORG/{name}"));
            format!("{not_here}\n  inferno download {name}{revision_flag}, where ORG is the organization{nearest}")
        }
    }

    /// Lists the complete models in both caches, sorted by repository name.
    ///
    /// For each repository, lists the snapshot that [`find`](Self::find) selects without a revision,
    /// then the complete snapshots of the other commits that have a ref.
    pub fn list(&self) -> Result<Vec<Snapshot>> {
        let mut found = Vec::new();
        for name in &self.repo_names() {
            let first = self.look_up(name, None, Required::Weights);
            let mut commits: BTreeSet<String> =
                self.caches().iter().flat_map(|(cache, _)| cache.repo(name).referenced_commits()).collect();
            if let Some(commit) = first.as_ref().and_then(|snapshot| snapshot.revision.as_ref()) {
                commits.remove(commit);
            }
            let others = commits.iter().filter_map(|commit| self.at_commit(name, commit, Required::Weights));
            found.extend(first.into_iter().chain(others).flat_map(|snapshot| snapshot.models()));
        }
        Ok(found)
    }

    /// Returns the models in both caches that have no complete snapshot.
    ///
    /// From the shared cache, returns only models that have config.json and tokenizer.json, but not all weights.
    /// Other repositories there may not be language models.
    pub fn incomplete(&self) -> Vec<IncompleteModel> {
        let missing = |name: &String| {
            if self.look_up(name, None, Required::Weights).is_some() {
                return None;
            }
            self.caches().iter().find_map(|(cache, source)| {
                let repo = cache.repo(name);
                let commit = repo.commit(MAIN).or_else(|| repo.commits().into_iter().next())?;
                let path = repo.snapshot(&commit);
                let is_model =
                    *source == SnapshotSource::Inferno || first_missing_file(&path, Required::Tokenizer).is_none();
                let missing_file = first_missing_file(&path, Required::Weights).filter(|_| is_model)?;
                Some(IncompleteModel { name: name.clone(), missing_file })
            })
        };
        self.repo_names().iter().filter_map(missing).collect()
    }

    /// Returns the full name of the repository on this machine that is called `name`, ignoring case and organization.
    /// Returns `name` unchanged if it has an organization, or if no repository or more than one is called `name`.
    ///
    /// Does not complete a partial name, because a full name such as `gpt2` is also part of longer names.
    pub(super) fn full_name(&self, name: &str) -> String {
        let names = self.repo_names();
        match &names.iter().filter(|other| names::is_same_name(other, name)).collect::<Vec<_>>()[..] {
            [full_name] if !name.contains('/') => full_name.to_string(),
            _ => name.to_string(),
        }
    }

    /// Returns the names of all repositories in both caches, including incomplete ones.
    fn repo_names(&self) -> BTreeSet<String> {
        self.caches().iter().flat_map(|(cache, _)| cache.names()).collect()
    }

    /// Returns the first snapshot of a repository that has the `required` files, or `None` if no snapshot has them.
    ///
    /// With `revision`, tries only the snapshots of this revision.
    /// Otherwise, tries `main` in both caches, then the other snapshots of each cache, newest first.
    pub(super) fn look_up(&self, name: &str, revision: Option<&str>, required: Required) -> Option<Snapshot> {
        let repos: Vec<RepoDir> = self.caches().iter().map(|(cache, _)| cache.repo(name)).collect();
        let wanted = repos.iter().filter_map(|repo| repo.commit(revision.unwrap_or(MAIN)));
        let others = repos.iter().flat_map(|repo| repo.commits()).filter(|_| revision.is_none());
        wanted.chain(others).find_map(|commit| self.at_commit(name, &commit, required))
    }

    fn at_commit(&self, name: &str, commit: &str, required: Required) -> Option<Snapshot> {
        self.caches().into_iter().find_map(|(cache, source)| {
            let path = cache.repo(name).snapshot(commit);
            let is_complete = first_missing_file(&path, required).is_none();
            is_complete.then(|| Snapshot { name: name.to_string(), revision: Some(commit.to_string()), path, source })
        })
    }

    /// Fails if `names` is empty or contains more than one distinct name. The error message names `model`.
    pub(super) fn check_is_one_model<'a>(&self, model: &str, names: impl Iterator<Item = &'a String>) -> Result<()> {
        let names: BTreeSet<&String> = names.collect();
        let hint = match names.len() {
            1 => return Ok(()),
            0 => list_hint(),
            _ => similar_names(&Vec::from_iter(names.into_iter().map(String::as_str))),
        };
        Err(Error::ModelNotFound { model: model.to_string(), hint }.into())
    }
}

/// Finds the model at a path: a GGUF file, a directory, or `directory:Q4_K_M`. Returns `None` if there is no model.
/// Fails like [`find_gguf`], or if the path has a model and `revision` is set. Local files have no revisions.
fn find_path(model: &str, revision: Option<&str>, required: Required) -> Result<Option<Snapshot>> {
    let path = match find_gguf(model)? {
        Some(file) => file,
        None if !model.is_empty() && Path::new(model).join(marker_file(required)).is_file() => PathBuf::from(model),
        None => return Ok(None),
    };
    if let Some(revision) = revision {
        let (model, revision) = (model.to_string(), revision.to_string());
        return Err(Error::NoRevisions { model, revision, why: "local files have no revisions" }.into());
    }
    Ok(Some(Snapshot { name: model.to_string(), revision: None, path, source: SnapshotSource::Directory }))
}

/// Returns the name of the file by which [`find_path`] recognizes the directory of a safetensors model.
fn marker_file(required: Required) -> &'static str {
    match required {
        Required::Tokenizer => "tokenizer.json",
        Required::Weights => "config.json",
    }
}

/// Returns the hint for a name that is neither the path of a model nor a repository name.
fn invalid_name_hint(model: &str, required: Required) -> String {
    let is_path = model.starts_with(['/', '.', '~']) || gguf::is_gguf(Path::new(model));
    match (Path::new(model).is_dir(), is_path) {
        (true, _) => format!("the directory {model} has no {}", marker_file(required)),
        (false, true) if Path::new(model).exists() => "the path is neither a directory nor a regular .gguf file".into(),
        (false, true) => "the path does not exist".into(),
        (false, false) => "the name is not valid; use org/name as on huggingface.co, or a directory; \
             `inferno list` lists the models on this machine"
            .into(),
    }
}

/// Returns the GGUF file at a path, or `None` if `model` is not the path of a GGUF model.
/// The path can be a file, a directory with one complete GGUF model, or `directory:Q4_K_M`.
/// Fails if the directory has no complete GGUF model with the tag, or if several GGUF models match.
fn find_gguf(model: &str) -> Result<Option<PathBuf>> {
    let path = Path::new(model);
    if path.is_file() {
        return gguf::find(path);
    }
    let (dir, tag) = if path.is_dir() { (model, None) } else { gguf::split_tag(model) };
    if Path::new(dir).is_dir() { gguf::choose(dir, Path::new(dir), tag) } else { Ok(None) }
}

/// Returns the GGUF model that `tag` selects in a snapshot. Without a tag, returns the only complete GGUF model,
/// or the whole snapshot if it has safetensors weights or no complete GGUF model.
/// Fails if `tag` selects no model, or if several models match.
fn choose_model(snapshot: Snapshot, tag: Option<&str>) -> Result<Snapshot> {
    let Some(path) = gguf::choose(&snapshot.name, &snapshot.path, tag)? else { return Ok(snapshot) };
    let name = tag.map_or(snapshot.name.clone(), |tag| format!("{}:{tag}", snapshot.name));
    Ok(Snapshot { name, path, ..snapshot })
}
