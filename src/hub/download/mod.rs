//! Downloads a model from the hub into inferno's cache.

mod fetch;
pub(in crate::hub) mod jobs;
pub(in crate::hub) mod partial;
pub(in crate::hub) mod transfer;

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use anyhow::{Result, bail};

use crate::files;
use crate::hub::cache::RepoDir;
use crate::hub::cache::disk;
use crate::hub::cache::lock::Lock;
use crate::hub::client::Hub;
use crate::hub::demo;
use crate::hub::filter::{CompiledFilter, FileFilter};
use crate::hub::limits::MAX_CONNECTIONS;
use crate::hub::names::{self, MAIN};
use crate::hub::parallel::try_map;
use crate::hub::progress::Progress;
use crate::hub::remote::Remote;
use crate::hub::remote::listing::{Listing, RemoteFile};
use crate::hub::snapshot::{Snapshot, SnapshotSource};
use crate::snapshot::{Required, safetensors::INDEX};
use crate::text::size;
use fetch::fetch;
use jobs::WantedFile;

/// If a download needs at least this number of requests for sizes and etags, inferno prints a message beforehand.
/// Fewer requests finish so quickly that no message is needed.
const MANY_REQUESTS: usize = 100;

impl Hub {
    /// Downloads a model into inferno's own cache, and returns its snapshot. Resumes an interrupted download.
    /// For the demo, only writes its missing files to the cache.
    ///
    /// `revision` is a branch, tag or commit. The default is `main`.
    /// If inferno's own cache or the shared cache has all selected files, fetches none and returns that snapshot.
    /// Waits while another process changes the same repository in the cache.
    ///
    /// If HF_HUB_OFFLINE is set, returns a complete snapshot from a cache.
    /// Fails if there is none, or if `filter` has `include` patterns or a tag.
    pub fn download(
        &self,
        repo: &str,
        revision: Option<&str>,
        filter: &FileFilter,
        progress: &dyn Progress,
    ) -> Result<Snapshot> {
        let (name, revision) = names::split_revision(repo, revision)?;
        if demo::is_demo(name, revision)? {
            let snapshot = demo::materialize(&self.config.cache)?;
            progress.already_present(&snapshot);
            return Ok(snapshot);
        }
        let name = &self.full_name(name);
        names::check_repo(name)?;
        self.check_own_cache()?;
        let compiled = CompiledFilter::new(filter)?;
        if self.config.offline
            && filter.include.is_empty()
            && filter.tag.is_none()
            && let Some(snapshot) = self.look_up(name, revision, Required::Weights)
        {
            progress.already_present(&snapshot);
            return Ok(snapshot);
        }
        self.check_online(|| cannot_download(name))?;
        self.download_online(name, revision.unwrap_or(MAIN), &compiled, progress)
    }

    fn download_online(
        &self,
        name: &str,
        revision: &str,
        filter: &CompiledFilter,
        progress: &dyn Progress,
    ) -> Result<Snapshot> {
        let remote = Remote::new(&self.config, name, revision, progress);
        let listing = remote.listing()?;
        let commit = &listing.commit;
        let repo = self.own_cache().repo(name);
        if let Some(snapshot) = self.find_present(name, &listing, filter)?
            && repo.has_ref(revision, commit)
        {
            progress.already_present(&snapshot);
            return Ok(snapshot);
        }
        let lock = disk::check_space(&self.config.cache, 0).and_then(|()| repo.lock(|| progress.waiting(name)));
        // Check the caches again: another process may have downloaded the model while this process waited for the lock.
        if let Some(snapshot) = self.find_present(name, &listing, filter)? {
            // Write the ref to inferno's own cache even if the snapshot is in the shared cache.
            // A lookup tries the ref in inferno's own cache first, and then finds `commit` in either cache.
            // If writing the ref fails, only log a warning, because the model is complete without the ref.
            let written = lock.and_then(|_lock| repo.write_ref(revision, commit));
            if let Err(error) = written {
                tracing::warn!(error = format!("{error:#}"), revision, "cannot write the ref");
            }
            progress.already_present(&snapshot);
            return Ok(snapshot);
        }
        let lock = lock?;

        let index = self.fetch_index(&remote, &listing, filter, &repo, &lock)?;
        let files = filter.choose(name, &listing.files, index.as_deref())?;
        self.fetch_files(&remote, commit, &repo, &lock, files, progress)?;
        repo.write_ref(revision, commit)?;
        let path = repo.snapshot(commit);
        Ok(Snapshot { name: name.to_string(), revision: Some(commit.clone()), path, source: SnapshotSource::Inferno })
    }

    /// Estimates the number of bytes that a download would fetch.
    ///
    /// Adds up the full sizes of the selected files that inferno's own cache lacks for this commit.
    /// The download fetches less if it can resume unfinished files or reuse blobs of other snapshots.
    /// Leaves out files whose size the hub does not list. For sharded weights, counts only the safetensors files in the
    /// root directory, because the shard index is not read.
    pub fn download_bytes(&self, repo: &str, revision: Option<&str>, filter: &FileFilter) -> Result<u64> {
        let (name, revision) = names::split_revision(repo, revision)?;
        names::check_repo(name)?;
        self.check_online(|| cannot_download(name))?;
        let listing = Remote::new(&self.config, name, revision.unwrap_or(MAIN), &()).listing()?;
        let filter = CompiledFilter::new(filter)?;
        let is_shard = |file: &&RemoteFile| file.name.ends_with(".safetensors") && !file.name.contains('/');
        let files = if filter.needs_index() && listing.file(INDEX).is_some() {
            listing.files.iter().filter(is_shard).cloned().collect()
        } else {
            filter.choose(name, &listing.files, None)?
        };
        let path = self.own_cache().repo(name).snapshot(&listing.commit);
        Ok(files.iter().filter(|file| !is_present(&path, file)).filter_map(|file| file.bytes).sum())
    }

    /// Adds `files` to the snapshot of `commit`. Fetches only the bytes that are missing.
    /// `_lock` is the lock of `repo`. Passing it proves that the caller holds the lock.
    pub(in crate::hub) fn fetch_files(
        &self,
        remote: &Remote,
        commit: &str,
        repo: &RepoDir,
        _lock: &Lock,
        files: Vec<RemoteFile>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let requests = files.iter().filter(|file| !file.has_size_and_etag()).count();
        if requests >= MANY_REQUESTS {
            progress.asking_for_sizes(requests);
        }
        let threads = if requests == 0 { 1 } else { remote.limits().connections.clamp(1, MAX_CONNECTIONS) };
        let files = try_map(&files, threads, |file| WantedFile::new(remote, commit, file.clone()))?;
        // Count files with equal contents only once, because they are fetched only once.
        let mut etags = HashSet::new();
        let needed_bytes = files
            .iter()
            .filter(|file| etags.insert(file.etag.as_str()))
            .fold(0u64, |sum, file| sum.saturating_add(file.bytes - file.present_bytes(repo)));
        disk::check_space(&self.config.cache, needed_bytes)?;
        progress.start(&files.iter().map(|file| (file.name.clone(), file.bytes)).collect::<Vec<_>>());
        fetch(remote, commit, repo, &files, progress)
    }

    /// Returns the snapshot of the listed commit from the first cache that has all selected files.
    /// Returns `None` if no cache has all of them.
    fn find_present(&self, name: &str, listing: &Listing, filter: &CompiledFilter) -> Result<Option<Snapshot>> {
        let index = match listing.file(INDEX) {
            Some(file) if filter.needs_index() => match self.read_present(name, &listing.commit, file)? {
                None => return Ok(None),
                index => index,
            },
            _ => None,
        };
        let files = filter.choose(name, &listing.files, index.as_deref())?;
        let found = self.caches().into_iter().find_map(|(cache, source)| {
            let path = cache.repo(name).snapshot(&listing.commit);
            let is_complete = files.iter().all(|file| is_present(&path, file));
            is_complete.then(|| Snapshot {
                name: name.to_string(),
                revision: Some(listing.commit.clone()),
                path,
                source,
            })
        });
        Ok(found)
    }

    /// Reads the shard index from the first cache that has it. Returns `None` if no cache has the shard index.
    fn read_present(&self, name: &str, commit: &str, file: &RemoteFile) -> Result<Option<Vec<u8>>> {
        for (cache, _) in self.caches() {
            let dir = cache.repo(name).snapshot(commit);
            if is_present(&dir, file) {
                return files::read(&dir.join(&file.name), files::MAX_SHARD_INDEX_BYTES).map(Some);
            }
        }
        Ok(None)
    }

    /// Returns the contents of the shard index. Downloads the index if it is in no cache.
    ///
    /// Returns `None` if the repository has no shard index, or if `filter` does not need the index.
    /// Fails if the index is larger than [`files::MAX_SHARD_INDEX_BYTES`].
    fn fetch_index(
        &self,
        remote: &Remote,
        listing: &Listing,
        filter: &CompiledFilter,
        repo: &RepoDir,
        lock: &Lock,
    ) -> Result<Option<Vec<u8>>> {
        let commit = &listing.commit;
        let Some(file) = listing.file(INDEX).filter(|_| filter.needs_index()) else { return Ok(None) };
        if let Some(index) = self.read_present(remote.repo(), commit, file)? {
            return Ok(Some(index));
        }
        let file = if file.has_size_and_etag() { file.clone() } else { remote.head(commit, INDEX)? };
        if let Some(bytes) = file.bytes.filter(|bytes| *bytes > files::MAX_SHARD_INDEX_BYTES) {
            bail!("cannot download '{}': {INDEX} is too large ({})", remote.repo(), size(bytes));
        }
        self.fetch_files(remote, commit, repo, lock, vec![file], &())?;
        files::read(&repo.snapshot(commit).join(INDEX), files::MAX_SHARD_INDEX_BYTES).map(Some)
    }
}

/// Returns the first line of the message of [`Error::Offline`](crate::error::Error::Offline) for a download.
pub(in crate::hub) fn cannot_download(name: &str) -> String {
    format!("cannot download '{name}': HF_HUB_OFFLINE is set")
}

/// Returns whether the snapshot in `dir` contains `file`. If the hub listed the size of the file, it must match.
fn is_present(dir: &Path, file: &RemoteFile) -> bool {
    let data = fs::metadata(dir.join(&file.name));
    data.is_ok_and(|data| data.is_file() && file.bytes.is_none_or(|bytes| data.len() == bytes))
}
