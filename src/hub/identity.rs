//! The hashes that identify a model, whatever its name.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use super::{hash, parallel};
use crate::snapshot;

/// The most files to hash at once. More threads compete with the thread that loads the model.
const MAX_THREADS: usize = 4;

/// Returns the SHA-256 of each file of the model at `path`, by file name, in hexadecimal.
///
/// Reads all of them. For large files, a Hugging Face hub shows the same hashes.
pub fn file_hashes(path: &Path) -> Result<BTreeMap<String, String>> {
    let hashes = parallel::try_map(&snapshot::model_files(path)?, MAX_THREADS, |file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok((name, hash::sha256(file)?))
    })?;
    Ok(hashes.into_iter().collect())
}
