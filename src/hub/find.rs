//! Finds models on this machine: in a directory, in a GGUF file, in inferno's own cache, or in the shared cache.
//! The shared cache is the cache of Hugging Face's Python tools. "Both caches" means these two caches.

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

/// A model with missing files.
pub struct IncompleteModel {
    pub name: String,
    /// The first missing file.
    pub missing_file: String,
}

impl Hub {
    /// Finds a model on this machine, without the network. A model in a cache must be complete.
    /// For the demo, first writes its missing files to the cache.
    ///
    /// `model` is `demo`, a directory, a GGUF file, or `org/name` with an optional `:Q4_K_M` and `@revision`.
    /// A part of the model name is enough if only one model matches. Fails if no model or several models match.
    pub fn find(&self, model: &str, revision: Option<&str>) -> Result<Snapshot> {
        self.find_with(model, revision, Required::Weights)
    }

    /// Finds a model like [`find`](Self::find), but does not require safetensors weights.
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

        // Match names loosely. The typed name may differ in case, lack the organization, or be only part of a name.
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
                Err(not_found(format!("several models match; type one of these names: {}", names.join(", "))))
            }
        }
    }

    /// Returns the hint for a model that is not on this machine: the command that downloads the model.
    /// If possible, the hint also names a missing file of the model, or a model with a similar name.
    fn download_hint(&self, name: &str, tag: Option<&str>, revision: Option<&str>, required: Required) -> String {
        let revision_flag = revision.map(|revision| format!(" --revision {revision}")).unwrap_or_default();
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
        if name.contains('/') {
            format!("inferno download {}{revision_flag}{nearest}", with_tag(name))
        } else {
            let name = with_tag(&format!("ORG/{name}"));
            format!("inferno download {name}{revision_flag}, where ORG is the organization{nearest}")
        }
    }

    /// Lists the complete models in both caches, sorted by repository name.
    ///
    /// The snapshot that [`find`](Self::find) returns for a repository comes before the snapshots of its other refs.
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

    /// Returns the incomplete models in both caches.
    ///
    /// Of the shared cache, returns only safetensors models that have config.json and tokenizer.json.
    /// Other repositories there may not be models.
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

    /// Adds the organization to `name` if exactly one repository on this machine has this name. Ignores case.
    /// Otherwise, returns `name` unchanged.
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

    /// Returns a snapshot of the model that has the `required` files, or `None` if no snapshot has them.
    ///
    /// Without `revision`, tries `main` in both caches, then the other snapshots of each cache, newest first.
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

    /// Fails if `names` is empty or contains more than one distinct name. `model` is what the user typed.
    pub(super) fn check_is_one_model<'a>(&self, model: &str, names: impl Iterator<Item = &'a String>) -> Result<()> {
        let names: BTreeSet<&String> = names.collect();
        let hint = match names.len() {
            1 => return Ok(()),
            0 => "list the models on this machine: inferno list".to_string(),
            _ => format!(
                "several models match; type one of these names: {}",
                Vec::from_iter(names.into_iter().map(String::as_str)).join(", ")
            ),
        };
        Err(Error::ModelNotFound { model: model.to_string(), hint }.into())
    }
}

/// Finds the model at a path: a GGUF file, a directory, or `directory:Q4_K_M`. Returns `None` if there is no model.
/// Fails if the path has a model and `revision` is set, because local files have no revisions.
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

/// Returns the name of the file that a directory without GGUF models must contain to count as a model.
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
        (false, false) => {
            "use org/name as on huggingface.co, or a directory; `inferno list` lists the models on this machine".into()
        }
    }
}

/// Returns the GGUF file that `model` names, or `None` if `model` is not the path of a GGUF model.
/// `model` is a file, a directory with one GGUF model, or `directory:Q4_K_M`.
/// Fails if no model in the directory has the tag, or if several GGUF models match.
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
