//! Whether a file's bytes are those that its etag names.
//!
//! The hub names large files by their SHA-256 and small ones by git's blob id, the SHA-1 of `blob <length>\0` and the
//! contents. Mirrors may use other words, of which nothing can be said.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
// In the tree with rustls, and as fast as the machine allows.
use ring::digest::{self, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// An etag as a header has it, without what says how it may be compared.
pub(super) fn bare(etag: &str) -> &str {
    etag.trim_start_matches("W/").trim_matches('"')
}

/// Whether an etag is the hash of what it names.
pub(super) fn is_hash(etag: &str) -> bool {
    matches!(etag.len(), 40 | 64) && etag.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether a file is what `etag` says; true where that cannot be told. `progress` hears how many bytes were read; its
/// error ends the reading.
pub(super) fn matches(path: &Path, etag: &str, progress: &mut dyn FnMut(u64) -> Result<()>) -> Result<bool> {
    if !is_hash(etag) {
        return Ok(true);
    }
    let context = || format!("cannot read {}", path.display());
    let mut file = File::open(path).with_context(context)?;
    let mut hash = match etag.len() {
        64 => digest::Context::new(&SHA256),
        _ => {
            let mut hash = digest::Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
            hash.update(format!("blob {}\0", file.metadata().with_context(context)?.len()).as_bytes());
            hash
        }
    };
    let mut buffer = vec![0; 1 << 20];
    let mut done_bytes = 0;
    loop {
        match file.read(&mut buffer).with_context(context)? {
            0 => break,
            count => {
                hash.update(&buffer[..count]);
                done_bytes += count as u64;
                progress(done_bytes)?;
            }
        }
    }
    let found: String = hash.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(found.eq_ignore_ascii_case(etag))
}

/// A name for something that has no hash: the same for the same words, another for others.
pub(super) fn word(words: &[&str]) -> String {
    let mut hash = digest::Context::new(&SHA256);
    for word in words {
        hash.update(word.as_bytes());
        hash.update(b"\0");
    }
    let hash: String = hash.finish().as_ref()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("weak-{hash}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hubs_two_hashes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "hello\n").unwrap();
        let is = |etag: &str| matches(&path, etag, &mut |_| Ok(())).unwrap();
        // `git hash-object` and `sha256sum`.
        assert!(is("ce013625030ba8dba906f756967f9e9ca394464a"));
        assert!(is("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"));
        assert!(is("5891B5B522D5DF086D0FF0B110FBD9D21BB4FC7163AF34D08286A2E846F6BE03"));
        assert!(is("v1-some-word"));
        assert!(!is("ce013625030ba8dba906f756967f9e9ca394464b"));
        assert!(!is("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be04"));
    }
}
