//! Whether what is on the disk is still what the hub has sent.
//!
//! A snapshot's files are links to blobs that are named by their hashes, so nobody needs to be asked.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::cache::RepoDir;
use super::partial::{BAD, with_ending};
use super::remote::Remote;
use super::{Hub, Progress, Source, demo, disk, hash, names};
use crate::error::Error;
use crate::snapshot::{Required, first_missing_file, gguf, missing_files};

/// A snapshot whose files were read again.
#[derive(Debug)]
pub struct Checked {
    pub name: String,
    pub revision: String,
    pub source: Source,
    /// Every file with its state, by name.
    pub files: Vec<(String, State)>,
}

/// What became of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Good,
    /// Its contents have another hash.
    Bad,
    /// The model needs it, and it is not there.
    Missing,
    /// Its name is no hash, as from a mirror that has none or on a disk without links.
    Unknown,
}

impl Checked {
    /// What is wrong.
    pub fn faults(&self) -> impl Iterator<Item = &(String, State)> {
        self.files.iter().filter(|(_, state)| matches!(state, State::Bad | State::Missing))
    }
}

impl Hub {
    /// Reads every file of a model again, at one revision or at all that are here; of all models in both caches if none
    /// is named. What was only partly downloaded counts too, in inferno's own cache.
    pub fn verify(&self, model: Option<&str>, revision: Option<&str>, progress: &dyn Progress) -> Result<Vec<Checked>> {
        let mut snapshots: Vec<(String, RepoDir, String, Source)> = Vec::new();
        let (wanted, revision) = match model {
            Some(model) => {
                let (name, revision) = names::split_revision(model, revision)?;
                (Some(gguf::split_tag(name).0), revision)
            }
            None => (None, revision),
        };
        let all = self.caches().iter().flat_map(|(cache, _)| cache.names()).collect();
        let names = match wanted {
            None => Vec::from_iter(&all),
            Some(name) => names::meant(name, &all),
        };
        for name in names {
            for (cache, source) in self.caches() {
                let repo = cache.repo(name);
                let commits = match revision {
                    Some(revision) => repo.commit(revision).into_iter().collect(),
                    None => repo.commits(),
                };
                for commit in commits {
                    // Python's tools keep much that is no model and was never meant to be whole.
                    let ours = source == Source::Inferno
                        || first_missing_file(&repo.snapshot(&commit), Required::Tokenizer).is_none();
                    if ours || wanted.is_some() {
                        snapshots.push((name.clone(), cache.repo(name), commit, source));
                    }
                }
            }
        }
        if let Some(model) = wanted {
            self.check_meant(model, snapshots.iter().map(|(name, ..)| name))?;
        }

        let mut checked = Vec::new();
        if wanted.is_none_or(|model| model == demo::NAME) {
            checked.extend(demo::check(&self.settings.cache)?);
        }
        // Of a blob that several revisions share one reading is enough.
        let mut known = BTreeMap::new();
        // Files of several models have the same names.
        let several = snapshots.len() > 1;
        let label = |name: &str, file: &str| if several { format!("{name}/{file}") } else { file.to_string() };
        let sizes = |(name, repo, commit, _): &(String, RepoDir, String, Source)| {
            let size = |path: &PathBuf| fs::metadata(path).map_or(0, |data| data.len());
            repo.linked(commit).into_iter().map(|(file, path, _)| (label(name, &file), size(&path))).collect::<Vec<_>>()
        };
        progress.start(&snapshots.iter().flat_map(sizes).collect::<Vec<_>>());
        for (name, repo, commit, source) in snapshots {
            let mut files = Vec::new();
            for (file, path, etag) in repo.linked(&commit) {
                let label = label(&name, &file);
                let state = state(&path, etag.as_deref(), &mut known, &mut |bytes| progress.file(&label, bytes));
                files.push((file, state));
            }
            if source == Source::Inferno {
                for lacking in missing_files(&repo.snapshot(&commit), Required::Weights) {
                    if !files.iter().any(|(file, _)| *file == lacking) {
                        files.push((lacking, State::Missing));
                    }
                }
            }
            files.sort_by(|(a, _), (b, _)| a.cmp(b));
            checked.push(Checked { name, revision: commit, source, files });
        }
        Ok(checked)
    }

    /// Fetches what [`verify`](Self::verify) found bad or missing, and nothing else. In inferno's own cache only.
    pub fn repair(&self, checked: &Checked, progress: &dyn Progress) -> Result<()> {
        let faults: Vec<&(String, State)> = checked.faults().collect();
        if faults.is_empty() {
            return Ok(());
        }
        let Checked { name, revision, .. } = checked;
        match checked.source {
            Source::Inferno => self.check_own_cache()?,
            Source::BuiltIn => return demo::renew(&self.settings.cache),
            Source::HuggingFace | Source::Directory => {
                let what = format!("'{name}' lies in the cache of Python's tools, which inferno does not change");
                let hint = format!("hf download {name} --revision {revision} --force-download");
                return Err(Error::Verification { what, hint }.into());
            }
        }
        if self.settings.offline {
            return Err(self.offline(name));
        }
        let remote = Remote::new(&self.settings, name, revision, progress);
        let listing = remote.listing()?;
        let mut files = Vec::new();
        for (fault, _) in &faults {
            match listing.files.iter().find(|file| file.name == *fault) {
                Some(file) => files.push(file.clone()),
                None => bail!("'{name}' has no {fault} on the hub; nothing was changed"),
            }
        }
        let repo = self.own().repo(name);
        disk::check_space(&self.settings.cache, 0)?;
        let _lock = repo.lock(|| progress.waiting(name))?;
        // What is bad stands aside until there is something better.
        let mut aside: Vec<(PathBuf, PathBuf)> = Vec::new();
        let mut put_aside = || -> Result<()> {
            for (file, path, etag) in repo.linked(revision) {
                if let (true, Some(etag)) = (faults.iter().any(|(fault, _)| *fault == file), etag)
                    && path.exists()
                    // Somebody else may have repaired it meanwhile. What cannot be read is as bad as what is wrong.
                    && !hash::matches(&path, &etag, &mut |_| Ok(())).unwrap_or(false)
                {
                    let blob = repo.blob(&etag);
                    let bad = with_ending(&blob, BAD);
                    fs::rename(&blob, &bad).with_context(|| format!("cannot rename {}", blob.display()))?;
                    aside.push((blob, bad));
                }
            }
            Ok(())
        };
        let fetched = put_aside().and_then(|()| self.fetch(&remote, revision, &repo, files, progress));
        for (blob, bad) in aside {
            // Links must lead somewhere; a second failure would say no more than the first.
            let _ = match blob.exists() {
                true => fs::remove_file(&bad).or_else(|_| fs::remove_dir_all(&bad)),
                false => fs::rename(&bad, &blob),
            };
        }
        fetched
    }

    /// Fails unless `names` are of one model; `model` is what was typed.
    pub(super) fn check_meant<'a>(&self, model: &str, names: impl Iterator<Item = &'a String>) -> Result<()> {
        let mut names: Vec<&String> = names.collect();
        names.sort();
        names.dedup();
        let hint = match &names[..] {
            [] if model == demo::NAME => return Ok(()),
            [_] => return Ok(()),
            [] => "`inferno list` shows what is here".to_string(),
            several => {
                let several: Vec<&str> = several.iter().map(|name| name.as_str()).collect();
                format!("several models have that name: {}", several.join(", "))
            }
        };
        Err(Error::ModelNotFound { model: model.to_string(), hint }.into())
    }
}

fn state(
    path: &PathBuf,
    etag: Option<&str>,
    known: &mut BTreeMap<PathBuf, bool>,
    progress: &mut dyn FnMut(u64),
) -> State {
    let Ok(blob) = fs::canonicalize(path) else { return State::Missing };
    let Some(etag) = etag.filter(|etag| hash::is_hash(etag)) else { return State::Unknown };
    let good = match known.get(&blob) {
        Some(good) => *good,
        None => {
            // What cannot be read is as bad as what is wrong.
            let good = hash::matches(&blob, etag, &mut |bytes| {
                progress(bytes);
                Ok(())
            })
            .unwrap_or(false);
            known.insert(blob, good);
            good
        }
    };
    if good { State::Good } else { State::Bad }
}
