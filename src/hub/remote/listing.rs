//! [`Listing`]: the commit and the files of a repository, parsed from a hub's response and validated.

use std::cmp::Ordering;
use std::fmt;
use std::ops::Deref;

use anyhow::{Result, bail};
use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::hub::names;
use crate::text::quote;

/// The maximum size of a file, and of all files of a repository together: 1 PiB. No real repository is larger.
pub(in crate::hub) const MAX_FILE_BYTES: u64 = 1 << 50;

/// The maximum number of files in a repository. Limits the memory that a parsed response takes.
const MAX_FILES: usize = 200_000;

/// A commit of a repository and its files.
#[derive(Debug)]
pub struct Listing {
    pub commit: String,
    pub files: FileList,
}

impl Listing {
    /// Parses and validates the hub's response about the repository `repo`.
    ///
    /// Fails if the JSON is malformed or lacks the commit, if it contains unsafe paths, conflicting paths or impossible
    /// values, or if it lists more than `MAX_FILES` files.
    pub fn parse(repo: &str, json: &[u8]) -> Result<Self> {
        serde_json::from_slice::<ModelListing>(json)?.check(repo)
    }

    /// Returns the file with this path in the repository, or `None` if the hub does not list such a file.
    pub(in crate::hub) fn file(&self, name: &str) -> Option<&RemoteFile> {
        self.files.get(name)
    }
}

/// A file in a repository on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// The path of the file in the repository. [`Listing::parse`] rejects paths that point outside the repository.
    pub name: String,
    pub bytes: Option<u64>,
    /// The SHA-256 of a large file, the git blob id of a small file, or another etag that a mirror sent.
    /// `None` if the listing has no etag.
    pub etag: Option<String>,
}

impl RemoteFile {
    /// Returns whether the size and the etag of the file are known.
    pub(in crate::hub) fn has_size_and_etag(&self) -> bool {
        self.bytes.is_some() && self.etag.is_some()
    }
}

/// The files of a repository in the order in which the hub listed them.
#[derive(Debug)]
pub struct FileList {
    files: Vec<RemoteFile>,
    /// Indices in `files`, sorted by file name in [`path_order`].
    by_name: Vec<u32>,
}

impl FileList {
    pub(in crate::hub) fn new(files: Vec<RemoteFile>) -> Self {
        let mut by_name: Vec<u32> = (0..files.len() as u32).collect();
        by_name.sort_unstable_by(|&a, &b| path_order(&files[a as usize].name, &files[b as usize].name));
        Self { files, by_name }
    }

    /// Returns the file with this path in the repository, or `None` if the hub does not list such a file.
    pub(in crate::hub) fn get(&self, name: &str) -> Option<&RemoteFile> {
        let found = self.by_name.binary_search_by(|&index| path_order(&self.files[index as usize].name, name));
        Some(&self.files[self.by_name[found.ok()?] as usize])
    }

    /// Fails if two files have the same path, or if the path of a file is also the path of a folder.
    fn check(&self, repo: &str) -> Result<()> {
        for pair in self.by_name.windows(2) {
            let [first, second] = [pair[0], pair[1]].map(|index| self.files[index as usize].name.as_str());
            match second.strip_prefix(first) {
                Some("") => bail!("the hub lists {} in '{repo}' twice", quote(first)),
                Some(rest) if rest.starts_with('/') => {
                    bail!("the hub lists {} in '{repo}' both as a file and as a folder", quote(first))
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Deref for FileList {
    type Target = [RemoteFile];

    fn deref(&self) -> &[RemoteFile] {
        &self.files
    }
}

/// Orders paths by their bytes, with `/` before all other bytes, so that `a` and the paths below `a/` are neighbors.
fn path_order(a: &str, b: &str) -> Ordering {
    let key = |byte: u8| if byte == b'/' { 0 } else { byte };
    a.bytes().map(key).cmp(b.bytes().map(key))
}

/// The fields of the hub's response that inferno reads, before validation.
#[derive(Deserialize)]
struct ModelListing {
    sha: String,
    #[serde(default, deserialize_with = "deserialize_files")]
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

/// Deserializes the list of files, but keeps at most [`MAX_FILES`] + 1 files. `check` rejects a list of that length.
fn deserialize_files<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Sibling>, D::Error> {
    struct Files;

    impl<'de> Visitor<'de> for Files {
        type Value = Vec<Sibling>;

        fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
            formatter.write_str("a list of files")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Sibling>, A::Error> {
            let mut files = Vec::new();
            while files.len() <= MAX_FILES {
                match list.next_element()? {
                    Some(file) => files.push(file),
                    None => return Ok(files),
                }
            }
            while list.next_element::<IgnoredAny>()?.is_some() {}
            Ok(files)
        }
    }

    deserializer.deserialize_seq(Files)
}

impl ModelListing {
    /// Validates the response and converts it to a [`Listing`].
    fn check(self, repo: &str) -> Result<Listing> {
        if !names::is_commit(&self.sha) {
            bail!("the hub sent an invalid commit hash for '{repo}': {}", quote(&self.sha));
        }
        if self.siblings.len() > MAX_FILES {
            bail!("the hub lists more than {MAX_FILES} files in '{repo}'; inferno accepts at most {MAX_FILES}");
        }
        let files = self.siblings.into_iter().map(|file| file.check(repo)).collect::<Result<Vec<_>>>()?;
        // Limit the total size too, so that later sums of the listed sizes cannot overflow.
        let total_bytes = files.iter().filter_map(|file| file.bytes).fold(0u64, u64::saturating_add);
        if total_bytes > MAX_FILE_BYTES {
            bail!("the hub sent an impossible size for '{repo}': {total_bytes} bytes in total");
        }
        let files = FileList::new(files);
        files.check(repo)?;
        Ok(Listing { commit: self.sha, files })
    }
}

impl Sibling {
    fn check(self, repo: &str) -> Result<RemoteFile> {
        let name = self.rfilename;
        if let Some(problem) = names::file_name_problem(&name) {
            bail!("the hub lists a file for '{repo}' that inferno cannot use: {} {problem}", quote(&name));
        }
        // The git blob id of a large file is the hash of its LFS pointer, so the blob id cannot verify the contents.
        let (etag, bytes) = match self.lfs {
            Some(large) => (large.sha256, large.size.or(self.size)),
            None => (self.blob_id, self.size),
        };
        if let Some(bytes) = bytes.filter(|bytes| *bytes > MAX_FILE_BYTES) {
            bail!("the hub sent an impossible size for {}: {bytes} bytes", quote(&name));
        }
        if let Some(etag) = etag.as_ref().filter(|etag| !names::is_etag(etag)) {
            bail!("the hub sent an invalid hash for {}: {}", quote(&name), quote(etag));
        }
        Ok(RemoteFile { name, bytes, etag })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(files: &[&str]) -> Result<Listing> {
        let file = |name: &&str| format!(r#"{{"rfilename":{}}}"#, serde_json::to_string(name).unwrap());
        let files: Vec<String> = files.iter().map(file).collect();
        let json = format!(r#"{{"sha":"{}","siblings":[{}]}}"#, "a".repeat(40), files.join(","));
        Listing::parse("a/b", json.as_bytes())
    }

    #[test]
    fn files_keep_their_order_and_are_found_by_name() {
        let names = ["b", "a/c", "a-b", "a!/x", "a/b/c", "B", "é"];
        let listing = parse(&names).unwrap();
        assert!(listing.files.iter().map(|file| file.name.as_str()).eq(names));
        for name in names {
            assert_eq!(listing.file(name).unwrap().name, name);
        }
        assert!(["", "a", "a/b", "c", "z"].iter().all(|name| listing.file(name).is_none()));
    }

    #[test]
    fn names_are_unique_and_no_file_is_a_folder() {
        let problem = |names: &[&str]| parse(names).unwrap_err().to_string();
        assert!(problem(&["a", "b", "a"]).contains("lists 'a' in 'a/b' twice"));
        assert!(problem(&["a/b", "a!", "a-b", "a"]).contains("'a' in 'a/b' both as a file and as a folder"));
        assert!(problem(&["x/y/z", "x/y"]).contains("'x/y' in 'a/b' both as a file and as a folder"));
        // File names that differ only in case are different files.
        assert_eq!(parse(&["README.md", "readme.md"]).unwrap().files.len(), 2);
    }

    #[test]
    fn number_of_files_is_limited() {
        let listing = |count: usize| {
            let files: Vec<String> = (0..count).map(|number| format!(r#"{{"rfilename":"{number}"}}"#)).collect();
            let json = format!(r#"{{"sha":"{}","siblings":[{}]}}"#, "a".repeat(40), files.join(","));
            Listing::parse("a/b", json.as_bytes())
        };
        assert_eq!(listing(MAX_FILES).unwrap().files.len(), MAX_FILES);
        assert!(listing(MAX_FILES + 2).unwrap_err().to_string().contains("more than 200000 files"));
    }
}
