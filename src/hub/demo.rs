//! The demo model: a small gpt-oss model that is built into the binary and written to the cache on first use.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result};

use super::disk;
use super::snapshot::{FileState, Snapshot, Source, VerifiedSnapshot};

/// The demo model's name.
pub const NAME: &str = "demo";

/// A hash of the demo's files, used as the revision instead of a commit.
const REVISION: &str = env!("INFERNO_DEMO_REVISION");

macro_rules! asset {
    ($name:literal) => {
        ($name, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo/", $name)))
    };
}

const FILES: &[(&str, &[u8])] = &[
    asset!("config.json"),
    asset!("generation_config.json"),
    asset!("tokenizer.json"),
    asset!("tokenizer_config.json"),
    asset!("special_tokens_map.json"),
    asset!("model.safetensors"),
];

/// Returns a one-line notice about the demo model's limits. Returns `None` for other models.
pub fn notice(snapshot: &Snapshot) -> Option<&'static str> {
    (snapshot.source == Source::BuiltIn).then_some("demo model: answers questions about inferno only")
}

/// Returns the demo's snapshot in `cache`. Writes the demo's files if any of them is missing.
///
/// Each version of the demo has its own directory.
pub fn materialize(cache: &Path) -> Result<Snapshot> {
    let path = cache.join(NAME).join(REVISION);
    if !is_complete(&path) {
        write_files(&path).with_context(|| format!("cannot write the demo model to {}", path.display()))?;
    }
    Ok(Snapshot { name: NAME.to_string(), revision: Some(REVISION.to_string()), path, source: Source::BuiltIn })
}

fn is_complete(path: &Path) -> bool {
    let is_present =
        |(name, bytes): &(&str, &[u8])| fs::metadata(path.join(name)).is_ok_and(|m| m.len() == bytes.len() as u64);
    FILES.iter().all(is_present)
}

/// Writes the files to a temporary directory and renames it, so no process sees a partial model.
fn write_files(path: &Path) -> io::Result<()> {
    let temporary = disk::temporary_path(path);
    fs::create_dir_all(&temporary)?;
    for (name, bytes) in FILES {
        fs::write(temporary.join(name), bytes)?;
    }
    match fs::rename(&temporary, path) {
        Ok(()) => Ok(()),
        // Another process wrote the files in the meantime.
        Err(_) if is_complete(path) => fs::remove_dir_all(&temporary),
        // Some files are gone, for example after a power failure or a cleanup. Replace the whole directory.
        Err(_) => {
            let _ = fs::remove_dir_all(path);
            fs::rename(&temporary, path)
        }
    }
}

/// Compares the demo's files on disk with the built-in files. Returns `None` if the demo is not on disk.
pub(super) fn verify(cache: &Path) -> Result<Option<VerifiedSnapshot>> {
    let path = cache.join(NAME).join(REVISION);
    if !path.exists() {
        return Ok(None);
    }
    let state = |name: &str, bytes: &[u8]| match fs::read(path.join(name)) {
        Ok(found) if found == bytes => FileState::Good,
        Ok(_) => FileState::Corrupt,
        Err(_) => FileState::Missing,
    };
    let files = FILES.iter().map(|(name, bytes)| (name.to_string(), state(name, bytes))).collect();
    let (name, revision) = (NAME.to_string(), REVISION.to_string());
    Ok(Some(VerifiedSnapshot { name, revision, source: Source::BuiltIn, files }))
}

/// Deletes the demo's files and writes them again.
pub(super) fn repair(cache: &Path) -> Result<()> {
    remove(cache)?;
    materialize(cache).map(drop)
}

/// Deletes every version of the demo from `cache` and returns the number of bytes freed.
pub(super) fn remove(cache: &Path) -> Result<u64> {
    let dir = cache.join(NAME);
    let bytes = disk::files_below(&dir).iter().filter_map(|path| fs::metadata(path).ok()).map(|m| m.len()).sum();
    if dir.exists() {
        fs::remove_dir_all(&dir).with_context(|| format!("cannot delete {}", dir.display()))?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn revision_is_a_hash_of_the_files() {
        let bytes = FILES.iter().flat_map(|(_, bytes)| bytes.iter());
        let hash =
            bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| (hash ^ byte as u64).wrapping_mul(0x0100_0000_01b3));
        assert_eq!(REVISION, format!("{hash:016x}"));
    }
}
