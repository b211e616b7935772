//! Verifies and repairs model files on disk.
//!
//! Verification needs no network: most files in a snapshot are symlinks to blobs that are named after the hash of
//! their contents. The files of the demo are compared with the files in the binary.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::cache::disk::{self, with_suffix};
use super::cache::{RepoDir, SnapshotFile};
use super::client::Hub;
use super::download::cannot_download;
use super::download::partial::BAD;
use super::progress::Progress;
use super::remote::Remote;
use super::snapshot::{FileState, SnapshotSource, VerifiedSnapshot};
use super::{demo, hash, names};
use crate::error::Error;
use crate::snapshot::{Required, first_missing_file, gguf, missing_files};

struct CandidateSnapshot {
    name: String,
    repo: RepoDir,
    commit: String,
    source: SnapshotSource,
}

impl Hub {
    /// Verifies the files of one model or of all models, at one revision or at all revisions in both caches.
    ///
    /// Ignores a tag in `model`, and verifies all GGUF models of the repository.
    /// Without `model`, skips snapshots in the shared cache that are incomplete according to `Required::Tokenizer`.
    /// Fails if no model or several models match `model` and `revision`.
    pub fn verify(
        &self,
        model: Option<&str>,
        revision: Option<&str>,
        progress: &dyn Progress,
    ) -> Result<Vec<VerifiedSnapshot>> {
        let (model, revision) = match model {
            Some(model) => {
                let (name, revision) = names::split_revision(model, revision)?;
                (Some(gguf::split_tag(name).0), revision)
            }
            None => (None, revision),
        };
        let verifies_demo = match model {
            Some(model) => demo::is_demo(model, revision)?,
            None => revision.is_none(),
        };
        // The name `demo` selects only the demo, and not models whose names contain "demo".
        let names_demo = model.is_some() && verifies_demo;
        let candidates = if names_demo { Vec::new() } else { self.candidates(model, revision) };
        if let Some(model) = model.filter(|_| !names_demo) {
            self.check_is_one_model(model, candidates.iter().map(|candidate| &candidate.name))?;
        }

        let mut verified = Vec::new();
        if verifies_demo {
            verified.extend(demo::verify(&self.config.cache)?);
        }
        // With several snapshots, progress reports include the model name, because file names repeat across models.
        let has_several = candidates.len() > 1;
        let label = |name: &str, file: &str| if has_several { format!("{name}/{file}") } else { file.to_string() };
        let mut sizes = Vec::new();
        for CandidateSnapshot { name, repo, commit, .. } in &candidates {
            for file in repo.snapshot_files(commit) {
                sizes.push((label(name, &file.name), fs::metadata(&file.path).map_or(0, |data| data.len())));
            }
        }
        progress.start(&sizes);
        // Read a blob only once, even if several snapshots link to it.
        let mut known_blobs = BTreeMap::new();
        for candidate in candidates {
            let report = |file: &str, bytes| progress.file(&label(&candidate.name, file), bytes);
            let files = file_states(&candidate, &mut known_blobs, report);
            let CandidateSnapshot { name, commit: revision, source, .. } = candidate;
            verified.push(VerifiedSnapshot { name, revision, source, files });
        }
        Ok(verified)
    }

    /// Returns the snapshots in inferno's own cache and the shared cache that match `model` and `revision`.
    /// Without `model`, skips snapshots in the shared cache that are incomplete according to [`Required::Tokenizer`].
    fn candidates(&self, model: Option<&str>, revision: Option<&str>) -> Vec<CandidateSnapshot> {
        let all_names: BTreeSet<String> = self.caches().iter().flat_map(|(cache, _)| cache.names()).collect();
        let selected = match model {
            None => Vec::from_iter(&all_names),
            Some(model) => names::matching(model, &all_names),
        };
        let mut candidates = Vec::new();
        for name in selected {
            for (cache, source) in self.caches() {
                let repo = cache.repo(name);
                let commits = match revision {
                    Some(revision) => repo.commit(revision).into_iter().collect(),
                    None => repo.commits(),
                };
                for commit in commits {
                    // Other tools may have downloaded only a few files of a model to the shared cache, or something
                    // other than a language model.
                    let is_model = source == SnapshotSource::Inferno
                        || first_missing_file(&repo.snapshot(&commit), Required::Tokenizer).is_none();
                    if is_model || model.is_some() {
                        candidates.push(CandidateSnapshot {
                            name: name.clone(),
                            repo: cache.repo(name),
                            commit,
                            source,
                        });
                    }
                }
            }
        }
        candidates
    }

    /// Downloads the damaged files that [`verify`](Self::verify) found. For the demo, writes the built-in files.
    /// Fails if a damaged snapshot is in the shared cache, if the hub lacks a damaged file, or if a download fails.
    pub fn repair(&self, verified: &VerifiedSnapshot, progress: &dyn Progress) -> Result<()> {
        let damaged: BTreeSet<&str> = verified.damaged_files().map(|(file, _)| file.as_str()).collect();
        if damaged.is_empty() {
            return Ok(());
        }
        let VerifiedSnapshot { name, revision, .. } = verified;
        match verified.source {
            SnapshotSource::Inferno => self.check_own_cache()?,
            SnapshotSource::BuiltIn => return demo::repair(&self.config.cache),
            SnapshotSource::HuggingFace | SnapshotSource::Directory => {
                let what = format!(
                    "cannot repair '{name}': it is in the shared Hugging Face cache, which inferno does not change"
                );
                let hint = format!("hf download {name} --revision {revision} --force-download");
                return Err(Error::Verification { what, hint }.into());
            }
        }
        self.check_online(|| cannot_download(name))?;
        let remote = Remote::new(&self.config, name, revision, progress);
        let listing = remote.listing()?;
        let mut files = Vec::new();
        for name in &damaged {
            match listing.file(name) {
                Some(file) => files.push(file.clone()),
                None => bail!("cannot repair '{}': the hub has no file {name}; nothing was changed", verified.name),
            }
        }
        let repo = self.own_cache().repo(name);
        disk::check_space(&self.config.cache, 0)?;
        let lock = repo.lock(|| progress.waiting(name))?;
        let mut set_aside = Vec::new();
        let fetched = set_bad_blobs_aside(&repo, revision, &damaged, &mut set_aside)
            .and_then(|()| self.fetch_files(&remote, revision, &repo, &lock, files, progress));
        for SetAside { blob, bad } in set_aside {
            // If the download has not replaced the bad blob, restore the bad blob, because the snapshot links to it.
            // Ignore errors here, because `fetched` already tells the caller whether the repair succeeded.
            let _ = if blob.exists() {
                fs::remove_file(&bad).or_else(|_| fs::remove_dir_all(&bad))
            } else {
                fs::rename(&bad, &blob)
            };
        }
        fetched
    }
}

/// A bad blob that was renamed from `blob` to `bad`.
struct SetAside {
    blob: PathBuf,
    bad: PathBuf,
}

/// Renames the bad blobs of damaged files, so that [`Hub::fetch_files`] downloads them again.
/// Adds each renamed blob to `set_aside`, even if a later rename fails.
fn set_bad_blobs_aside(
    repo: &RepoDir,
    commit: &str,
    damaged: &BTreeSet<&str>,
    set_aside: &mut Vec<SetAside>,
) -> Result<()> {
    for SnapshotFile { name, path, etag } in repo.snapshot_files(commit) {
        let Some(etag) = etag.filter(|_| damaged.contains(name.as_str())) else { continue };
        // Verify the file again, because another process may have repaired it. An unreadable file counts as bad.
        if path.exists() && !hash::matches(&path, &etag, &mut |_| Ok(())).unwrap_or(false) {
            let blob = repo.blob(&etag);
            let bad = with_suffix(&blob, BAD);
            fs::rename(&blob, &bad).with_context(|| format!("cannot rename {}", blob.display()))?;
            set_aside.push(SetAside { blob, bad });
        }
    }
    Ok(())
}

/// Returns the name and state of each file in a snapshot, sorted by name.
/// For inferno's own cache, also lists as missing the files that the model needs but the snapshot lacks.
fn file_states(
    candidate: &CandidateSnapshot,
    known_blobs: &mut BTreeMap<PathBuf, bool>,
    report: impl Fn(&str, u64),
) -> Vec<(String, FileState)> {
    let mut files = Vec::new();
    for SnapshotFile { name, path, etag } in candidate.repo.snapshot_files(&candidate.commit) {
        let state = file_state(&path, etag.as_deref(), known_blobs, &mut |bytes| report(&name, bytes));
        files.push((name, state));
    }
    if candidate.source == SnapshotSource::Inferno {
        for missing in missing_files(&candidate.repo.snapshot(&candidate.commit), Required::Weights) {
            if !files.iter().any(|(file, _)| *file == missing) {
                files.push((missing, FileState::Missing));
            }
        }
    }
    files.sort_by(|(a, _), (b, _)| a.cmp(b));
    files
}

fn file_state(
    path: &Path,
    etag: Option<&str>,
    known_blobs: &mut BTreeMap<PathBuf, bool>,
    progress: &mut dyn FnMut(u64),
) -> FileState {
    let Ok(blob) = fs::canonicalize(path) else { return FileState::Missing };
    let Some(etag) = etag.filter(|etag| hash::is_hash(etag)) else { return FileState::Unknown };
    let is_good = *known_blobs.entry(blob).or_insert_with_key(|blob| {
        let mut progress = |bytes| {
            progress(bytes);
            Ok(())
        };
        // A file that cannot be read counts as corrupt.
        hash::matches(blob, etag, &mut progress).unwrap_or(false)
    });
    if is_good { FileState::Good } else { FileState::Corrupt }
}
