//! A model by its name on this machine: a directory, a file, or a snapshot in either cache.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use super::cache::RepoDir;
use super::{Hub, MAIN, Snapshot, Source, demo, names};
use crate::error::Error;
use crate::snapshot::{Required, first_missing_file, gguf};

impl Hub {
    /// Finds a model that is here in full: a directory, a GGUF file, or `org/name` (also `org/name@revision`, or a part of
    /// the name that only one model has) in either cache. Of several GGUF files `org/name:Q4_K_M` means one. Never uses the
    /// network.
    pub fn find(&self, model: &str, revision: Option<&str>) -> Result<Snapshot> {
        self.find_needing(model, revision, Required::Weights)
    }

    /// As [`find`](Self::find), for work on text alone: tokenizer.json will do in a directory, weights may be absent.
    pub fn find_tokenizer(&self, model: &str, revision: Option<&str>) -> Result<Snapshot> {
        self.find_needing(model, revision, Required::Tokenizer)
    }

    fn find_needing(&self, model: &str, revision: Option<&str>, need: Required) -> Result<Snapshot> {
        let not_found = |hint: String| anyhow::Error::from(Error::ModelNotFound { model: model.to_string(), hint });
        let dir = Path::new(model);
        // A file, or a directory with one: what is in it is all of the model.
        if let Some(path) = gguf_at(model)? {
            if let Some(revision) = revision {
                bail!("{model} is on this disk, where it has no revision '{revision}'");
            }
            return Ok(Snapshot { name: model.to_string(), revision: None, path, source: Source::Directory });
        }
        let enough = if need == Required::Tokenizer { "tokenizer.json" } else { "config.json" };
        if !model.is_empty() && dir.join(enough).is_file() {
            if let Some(revision) = revision {
                bail!("{model} is a directory, which has no revision '{revision}'");
            }
            let path = dir.to_path_buf();
            return Ok(Snapshot { name: model.to_string(), revision: None, path, source: Source::Directory });
        }
        if model == demo::NAME {
            return demo::materialize(&self.settings.cache);
        }
        let (name, revision) = names::split_revision(model, revision)?;
        let (name, wanted) = gguf::split_tag(name);
        if !names::is_repo(name) {
            let is_path = model.starts_with(['/', '.', '~']) || model.ends_with(".gguf");
            return Err(not_found(match (dir.is_dir(), is_path) {
                (true, _) => format!("the directory {model} holds no {enough}"),
                (false, true) => "there is no such file or directory".into(),
                (false, false) => {
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
    fn hint(&self, name: &str, wanted: Option<&str>, revision: Option<&str>, need: Required) -> String {
        let at = revision.map(|revision| format!(" --revision {revision}")).unwrap_or_default();
        let at = wanted.map_or(at.clone(), |wanted| format!("{at} --include '*{wanted}*'"));
        let download = format!("inferno download {name}{at}");
        let lacking = self.caches().iter().find_map(|(cache, _)| {
            let repo = cache.repo(name);
            let commit = repo.commit(revision.unwrap_or(MAIN)).or_else(|| repo.commits().into_iter().next())?;
            first_missing_file(&repo.snapshot(&commit), need)
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
            false => format!("inferno download ORG/{name}{at}, with the organization it belongs to{near}"),
        }
    }

    /// Every whole model in both caches, sorted by name: of each, the snapshot that [`find`](Self::find) gives, and
    /// those that other refs lead to. What is only partly downloaded is left out.
    pub fn list(&self) -> Result<Vec<Snapshot>> {
        let names: BTreeSet<String> = self.caches().iter().flat_map(|(cache, _)| cache.names()).collect();
        let mut found = Vec::new();
        for name in &names {
            let first = self.look_up(name, None, Required::Weights);
            let mut commits: BTreeSet<String> =
                self.caches().iter().flat_map(|(cache, _)| cache.repo(name).referenced()).collect();
            if let Some(commit) = first.as_ref().and_then(|snapshot| snapshot.revision.as_ref()) {
                commits.remove(commit);
            }
            let others = commits.iter().filter_map(|commit| self.at_commit(name, commit, Required::Weights));
            found.extend(first.into_iter().chain(others).flat_map(|snapshot| snapshot.models()));
        }
        Ok(found)
    }

    /// Models of which only a part is here, each with the first thing that it lacks. Of the shared cache, where much lies
    /// that was never meant for inferno, those that lack weights alone.
    pub fn incomplete(&self) -> Vec<(String, String)> {
        let names: BTreeSet<String> = self.caches().iter().flat_map(|(cache, _)| cache.names()).collect();
        let lacking = |name: &String| {
            if self.look_up(name, None, Required::Weights).is_some() {
                return None;
            }
            self.caches().iter().find_map(|(cache, source)| {
                let repo = cache.repo(name);
                let commit = repo.commit(MAIN).or_else(|| repo.commits().into_iter().next())?;
                let path = repo.snapshot(&commit);
                let ours = *source == Source::Inferno || first_missing_file(&path, Required::Tokenizer).is_none();
                first_missing_file(&path, Required::Weights).filter(|_| ours).map(|missing| (name.clone(), missing))
            })
        };
        names.iter().filter_map(lacking).collect()
    }

    /// The name to ask the hub for: of a model that is here, or half of it, the organization may be left out. A mere part
    /// of the name will not do: `gpt2` is a model, of whichever others it is a part.
    pub(super) fn full_name(&self, name: &str) -> String {
        let here: BTreeSet<String> = self.caches().iter().flat_map(|(cache, _)| cache.names()).collect();
        match &here.iter().filter(|other| names::is_called(other, name)).collect::<Vec<_>>()[..] {
            [one] if !name.contains('/') => one.to_string(),
            _ => name.to_string(),
        }
    }

    /// A repository's snapshot at a revision. Without one: at main, else the newest that is whole.
    pub(super) fn look_up(&self, name: &str, revision: Option<&str>, need: Required) -> Option<Snapshot> {
        let repos: Vec<RepoDir> = self.caches().iter().map(|(cache, _)| cache.repo(name)).collect();
        let known = repos.iter().filter_map(|repo| repo.commit(revision.unwrap_or(MAIN)));
        let others = repos.iter().flat_map(|repo| repo.commits()).filter(|_| revision.is_none());
        known.chain(others).find_map(|commit| self.at_commit(name, &commit, need))
    }

    fn at_commit(&self, name: &str, commit: &str, need: Required) -> Option<Snapshot> {
        self.caches().into_iter().find_map(|(cache, source)| {
            let path = cache.repo(name).snapshot(commit);
            let whole = first_missing_file(&path, need).is_none();
            whole.then(|| Snapshot { name: name.to_string(), revision: Some(commit.to_string()), path, source })
        })
    }
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
