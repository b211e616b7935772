//! The hub's listing of a repository: its commit and its files, validated before use.

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use serde::Deserialize;

use super::names;
use crate::snapshot::is_safe_path;

/// One pebibyte. No real file is larger, and sums of file sizes cannot overflow.
pub(super) const MAX_FILE_BYTES: u64 = 1 << 50;

/// The files of a repository at one commit.
pub(super) struct Listing {
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

impl Listing {
    /// Returns the file with this name.
    pub fn file(&self, name: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.name == name)
    }
}

/// A file in a repository, as listed by the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteFile {
    /// The path inside the repository. It has been validated, and cannot point outside the repository.
    pub name: String,
    pub bytes: Option<u64>,
    /// The name of the blob: SHA-256 for large files, git's blob SHA-1 for small ones.
    pub etag: Option<String>,
}

/// The fields of the hub's response that inferno reads.
#[derive(Deserialize)]
pub(super) struct ModelListing {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: Option<String>,
    size: Option<u64>,
}

impl ModelListing {
    /// Validates the hub's response. Rejects paths that point outside the repository, and impossible values.
    pub fn check(self, repo: &str) -> Result<Listing> {
        if !names::is_commit(&self.sha) {
            bail!("the hub sent an invalid commit hash for '{repo}': {:?}", self.sha);
        }
        let files = self.siblings.into_iter().map(|file| file.check(repo)).collect::<Result<Vec<_>>>()?;
        let folders: BTreeSet<&str> =
            files.iter().flat_map(|file| file.name.match_indices('/').map(|(end, _)| &file.name[..end])).collect();
        if let Some(file) = files.iter().find(|file| folders.contains(file.name.as_str())) {
            bail!("the hub lists {:?} in '{repo}' both as a file and as a folder", file.name);
        }
        Ok(Listing { commit: self.sha, files })
    }
}

impl Sibling {
    fn check(self, repo: &str) -> Result<RemoteFile> {
        let name = self.rfilename;
        if !is_safe_path(&name) {
            bail!("the hub lists {name:?} in '{repo}', which is not a path inside the repository");
        }
        // The blob ID of a large file is the hash of its LFS pointer, not of its contents.
        let (etag, bytes) = match self.lfs {
            Some(large) => (large.sha256, large.size.or(self.size)),
            None => (self.blob_id, self.size),
        };
        if let Some(bytes) = bytes.filter(|bytes| *bytes > MAX_FILE_BYTES) {
            bail!("the hub sent an impossible size for {name}: {bytes} bytes");
        }
        if let Some(etag) = etag.as_ref().filter(|etag| !names::is_etag(etag)) {
            bail!("the hub sent an invalid hash for {name}: {etag:?}");
        }
        Ok(RemoteFile { name, bytes, etag })
    }
}
