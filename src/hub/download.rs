//! A model from the hub into inferno's cache.

use std::fs;
use std::path::Path;

use anyhow::Result;

use super::cache::RepoDir;
use super::fetch::{Wanted, fetch};
use super::remote::{Listing, Remote};
use super::select::{self, Choice, RemoteFile};
use super::{Hub, MAIN, Pick, Progress, Snapshot, Source, check_repo, demo, disk, names};
use crate::error::Error;
use crate::snapshot::{Required, safetensors::INDEX};

impl Hub {
    /// Fetches a model at `revision` (a branch, tag or commit; else the newest) into inferno's cache, going on where an
    /// earlier attempt stopped. Fetches nothing if either cache has it all. Another process that downloads the same
    /// model is waited for.
    pub fn download(
        &self,
        repo: &str,
        revision: Option<&str>,
        pick: &Pick,
        progress: &dyn Progress,
    ) -> Result<Snapshot> {
        if repo == demo::NAME {
            let snapshot = demo::materialize(&self.settings.cache)?;
            progress.already_there(&snapshot);
            return Ok(snapshot);
        }
        let (name, revision) = names::split_revision(repo, revision)?;
        let name = &self.full_name(name);
        check_repo(name)?;
        self.check_own_cache()?;
        let choice = Choice::new(pick)?;
        if self.settings.offline {
            return match self.look_up(name, revision, Required::Weights) {
                Some(snapshot) if pick.include.is_empty() => {
                    progress.already_there(&snapshot);
                    Ok(snapshot)
                }
                _ => Err(self.offline(name)),
            };
        }

        let revision = revision.unwrap_or(MAIN);
        let remote = Remote::new(&self.settings, name, revision, progress);
        let listing = remote.listing()?;
        let commit = &listing.commit;
        let repo = self.own().repo(name);
        if let Some(snapshot) = self.here(name, &listing, &choice)?
            && repo.has_ref(revision, commit)
        {
            progress.already_there(&snapshot);
            return Ok(snapshot);
        }
        let lock = disk::check_space(&self.settings.cache, 0).and_then(|()| repo.lock(|| progress.waiting(name)));
        // Whoever was waited for may have fetched it.
        if let Some(snapshot) = self.here(name, &listing, &choice)? {
            // Also when it lies in the shared cache, so that both caches agree on what the newest commit is. Where nothing
            // can be written, it is here all the same.
            let noted = lock.and_then(|_lock| repo.write_ref(revision, commit));
            if let Err(error) = noted {
                tracing::warn!(error = format!("{error:#}"), revision, "not noted");
            }
            progress.already_there(&snapshot);
            return Ok(snapshot);
        }
        let _lock = lock?;

        let index = self.index(&remote, &listing, &choice, &repo)?;
        let files = select::choose(name, &listing.files, &choice, index.as_deref())?;
        self.fetch(&remote, commit, &repo, files, progress)?;
        repo.write_ref(revision, commit)?;
        let path = repo.snapshot(commit);
        Ok(Snapshot { name: name.to_string(), revision: Some(commit.clone()), path, source: Source::Inferno })
    }

    /// How many bytes a download would fetch, the files that are here already left out; from the hub's file list alone,
    /// so that of weights in many files an estimate is all there is.
    pub fn download_bytes(&self, repo: &str, revision: Option<&str>, pick: &Pick) -> Result<u64> {
        let (name, revision) = names::split_revision(repo, revision)?;
        check_repo(name)?;
        if self.settings.offline {
            return Err(self.offline(name));
        }
        let listing = Remote::new(&self.settings, name, revision.unwrap_or(MAIN), &()).listing()?;
        let choice = Choice::new(pick)?;
        let shards =
            || listing.files.iter().filter(|file| file.name.ends_with(".safetensors") && !file.name.contains('/'));
        let files = match choice.needs_index() && listing.files.iter().any(|file| file.name == INDEX) {
            true => shards().cloned().collect(),
            false => select::choose(name, &listing.files, &choice, None)?,
        };
        let path = self.own().repo(name).snapshot(&listing.commit);
        Ok(files.iter().filter(|file| !is_present(&path, file)).filter_map(|file| file.bytes).sum())
    }

    /// Fetches files into the snapshot of `commit`, as far as they are not in the cache. The lock is held.
    pub(super) fn fetch(
        &self,
        remote: &Remote,
        commit: &str,
        repo: &RepoDir,
        files: Vec<RemoteFile>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let files = files.into_iter().map(|file| Wanted::new(remote, commit, file)).collect::<Result<Vec<_>>>()?;
        let needed_bytes =
            // Of several names with the same contents one is fetched.
            files.iter().enumerate().filter(|(at, file)| !files[..*at].iter().any(|other| other.etag == file.etag)).fold(
                0,
                |sum: u64, (_, file)| sum.saturating_add(file.bytes - file.present_bytes(repo)),
            );
        disk::check_space(&self.settings.cache, needed_bytes)?;
        progress.start(&files.iter().map(|file| (file.name.clone(), file.bytes)).collect::<Vec<_>>());
        fetch(remote, commit, repo, &files, progress)
    }

    /// The snapshot in either cache, if it has all that is asked for.
    fn here(&self, name: &str, listing: &Listing, choice: &Choice) -> Result<Option<Snapshot>> {
        let index = match listing.files.iter().find(|file| file.name == INDEX) {
            Some(file) if choice.needs_index() => match self.on_disk(name, &listing.commit, file)? {
                None => return Ok(None),
                index => index,
            },
            _ => None,
        };
        let files = select::choose(name, &listing.files, choice, index.as_deref())?;
        let found = self.caches().into_iter().find_map(|(cache, source)| {
            let path = cache.repo(name).snapshot(&listing.commit);
            let here = files.iter().all(|file| is_present(&path, file));
            here.then(|| Snapshot { name: name.to_string(), revision: Some(listing.commit.clone()), path, source })
        });
        Ok(found)
    }

    /// The contents of a file, where a cache has it.
    fn on_disk(&self, name: &str, commit: &str, file: &RemoteFile) -> Result<Option<Vec<u8>>> {
        for (cache, _) in self.caches() {
            let dir = cache.repo(name).snapshot(commit);
            if is_present(&dir, file) {
                return Ok(Some(fs::read(dir.join(&file.name))?));
            }
        }
        Ok(None)
    }

    /// The contents of the shard index: from either cache, else from the hub; none if it is not needed.
    fn index(&self, remote: &Remote, listing: &Listing, choice: &Choice, repo: &RepoDir) -> Result<Option<Vec<u8>>> {
        let commit = &listing.commit;
        let Some(file) = listing.files.iter().find(|file| file.name == INDEX && choice.needs_index()) else {
            return Ok(None);
        };
        if let Some(index) = self.on_disk(remote.repo(), commit, file)? {
            return Ok(Some(index));
        }
        self.fetch(remote, commit, repo, vec![file.clone()], &())?;
        Ok(Some(fs::read(repo.snapshot(commit).join(INDEX))?))
    }

    pub(super) fn offline(&self, name: &str) -> anyhow::Error {
        Error::Offline { what: format!("'{name}' cannot be downloaded (HF_HUB_OFFLINE is set)") }.into()
    }
}

/// Whether a snapshot directory has a file, in the size that the hub tells.
fn is_present(dir: &Path, file: &RemoteFile) -> bool {
    let data = fs::metadata(dir.join(&file.name));
    data.is_ok_and(|data| data.is_file() && file.bytes.is_none_or(|bytes| data.len() == bytes))
}
