//! Computes hashes of files, and compares them with etags. On the Hugging Face hub, etags are hashes.
//!
//! The etag of a large file, which the hub keeps outside git, is the SHA-256 of its contents.
//! The etag of a small file is its git blob id: the SHA-1 of `blob <length>\0` followed by the contents.
//! Mirrors may send etags that are not hashes. Such an etag cannot verify the contents of a file.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use ring::digest::{self, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

use crate::files;

/// Returns the value of an ETag header without its quotes and without the prefix `W/` of weak etags.
pub(super) fn bare_etag(etag: &str) -> &str {
    etag.trim_start_matches("W/").trim_matches('"')
}

/// Returns whether an etag has the form of a SHA-1 or SHA-256 hash in hexadecimal.
pub(super) fn is_hash(etag: &str) -> bool {
    matches!(etag.len(), 40 | 64) && etag.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns whether the contents of a file match `etag`. If `etag` is not a hash, returns true without reading the file.
///
/// `progress` receives the number of bytes read so far. If `progress` fails, `matches` stops and returns the error.
pub(super) fn matches(path: &Path, etag: &str, progress: &mut dyn FnMut(u64) -> Result<()>) -> Result<bool> {
    if !is_hash(etag) {
        return Ok(true);
    }
    let file = files::open(path)?;
    let mut hash = match etag.len() {
        64 => digest::Context::new(&SHA256),
        _ => {
            let mut hash = digest::Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
            let bytes = file.metadata().with_context(|| cannot_read(path))?.len();
            hash.update(format!("blob {bytes}\0").as_bytes());
            hash
        }
    };
    update(&mut hash, path, file, progress)?;
    Ok(hex(hash.finish().as_ref()).eq_ignore_ascii_case(etag))
}

/// Returns the SHA-256 of a file's contents as lowercase hexadecimal digits.
pub(super) fn sha256(path: &Path) -> Result<String> {
    let mut hash = digest::Context::new(&SHA256);
    update(&mut hash, path, files::open(path)?, &mut |_| Ok(()))?;
    Ok(hex(hash.finish().as_ref()))
}

/// Adds the contents of `file` to `hash`. `path` is for error messages.
fn update(
    hash: &mut digest::Context,
    path: &Path,
    mut file: File,
    progress: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut done_bytes = 0;
    loop {
        match file.read(&mut buffer).with_context(|| cannot_read(path))? {
            0 => return Ok(()),
            count => {
                hash.update(&buffer[..count]);
                done_bytes += count as u64;
                progress(done_bytes)?;
            }
        }
    }
}

fn cannot_read(path: &Path) -> String {
    format!("cannot read {}", path.display())
}

/// Returns a blob name for a file whose etag is not a hash. `words` must together identify the contents of the file.
///
/// The name is `weak-` and the first 16 bytes of the SHA-256 of `words`, in hexadecimal.
pub(super) fn weak_etag(words: &[&str]) -> String {
    let mut hash = digest::Context::new(&SHA256);
    for word in words {
        hash.update(word.as_bytes());
        hash.update(b"\0");
    }
    format!("weak-{}", hex(&hash.finish().as_ref()[..16]))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_hash_are_computed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "hello\n").unwrap();
        let matches = |etag: &str| matches(&path, etag, &mut |_| Ok(())).unwrap();
        // The expected hashes come from `git hash-object` and `sha256sum`.
        assert!(matches("ce013625030ba8dba906f756967f9e9ca394464a"));
        assert!(matches("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"));
        assert!(matches("5891B5B522D5DF086D0FF0B110FBD9D21BB4FC7163AF34D08286A2E846F6BE03"));
        assert!(matches("v1-some-word"));
        assert!(!matches("ce013625030ba8dba906f756967f9e9ca394464b"));
        assert!(!matches("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be04"));
    }
}
