//! The demo model: a small trained gpt-oss inside the binary, written to the cache like any other model.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::{Checked, Snapshot, Source, State};

/// The name it goes by.
pub const NAME: &str = "demo";

/// A hash of its files, in place of a commit.
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

/// An honest line about the demo model, for whoever starts it.
pub fn notice(snapshot: &Snapshot) -> Option<&'static str> {
    (snapshot.source == Source::BuiltIn).then_some("demo model: answers questions about inferno only")
}

/// The demo's snapshot under `cache`, written if it is not there. Another version of the binary writes another one.
pub fn materialize(cache: &Path) -> Result<Snapshot> {
    let snapshots = cache.join(NAME);
    let path = snapshots.join(REVISION);
    let whole =
        |(name, bytes): &(&str, &[u8])| fs::metadata(path.join(name)).is_ok_and(|m| m.len() == bytes.len() as u64);
    if !FILES.iter().all(whole) {
        let write = || -> std::io::Result<()> {
            // Written aside and renamed, so that no one ever sees half of it.
            fs::create_dir_all(&snapshots)?;
            let aside = super::cache::aside(&path);
            fs::create_dir_all(&aside)?;
            for (name, bytes) in FILES {
                fs::write(aside.join(name), bytes)?;
            }
            match fs::rename(&aside, &path) {
                Ok(()) => Ok(()),
                // Another process was quicker.
                Err(_) if FILES.iter().all(whole) => fs::remove_dir_all(&aside),
                // What is there is not whole: a cleaner or a power cut took some of it.
                Err(_) => {
                    let _ = fs::remove_dir_all(&path);
                    fs::rename(&aside, &path)
                }
            }
        };
        write().with_context(|| format!("cannot write the demo model to {}", path.display()))?;
    }
    Ok(Snapshot { name: NAME.to_string(), revision: Some(REVISION.to_string()), path, source: Source::BuiltIn })
}

/// Compares the files of the demo with those in the binary; none where they were never written.
pub(super) fn check(cache: &Path) -> Result<Option<Checked>> {
    let path = cache.join(NAME).join(REVISION);
    if !path.exists() {
        return Ok(None);
    }
    let state = |name: &str, bytes: &[u8]| match fs::read(path.join(name)) {
        Ok(found) if found == bytes => State::Good,
        Ok(_) => State::Bad,
        Err(_) => State::Missing,
    };
    let files = FILES.iter().map(|(name, bytes)| (name.to_string(), state(name, bytes))).collect();
    Ok(Some(Checked { name: NAME.to_string(), revision: REVISION.to_string(), source: Source::BuiltIn, files }))
}

/// Writes them again.
pub(super) fn renew(cache: &Path) -> Result<()> {
    remove(cache)?;
    materialize(cache).map(drop)
}

/// Takes them away, those of other versions too, and returns the bytes that were freed.
pub(super) fn remove(cache: &Path) -> Result<u64> {
    let dir = cache.join(NAME);
    let bytes =
        super::cache::files_below(&dir).iter().filter_map(|path| fs::metadata(path).ok()).map(|m| m.len()).sum();
    if dir.exists() {
        fs::remove_dir_all(&dir).with_context(|| format!("cannot delete {}", dir.display()))?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_revision_is_of_the_files() {
        let bytes = FILES.iter().flat_map(|(_, bytes)| bytes.iter());
        let hash =
            bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| (hash ^ byte as u64).wrapping_mul(0x0100_0000_01b3));
        assert_eq!(REVISION, format!("{hash:016x}"));
    }
}
