//! Computes the hashes of a model's files, which identify the model regardless of its name.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use super::{hash, parallel};
use crate::snapshot;

/// The maximum number of files to hash in parallel.
/// `inferno serve --receipt-key` hashes the files while it loads the model, and more threads would slow down loading.
const MAX_THREADS: usize = 4;

/// Returns the hexadecimal SHA-256 of each file of the model at `path`, by file name.
///
/// Reads every file in full. The Hugging Face hub lists the same hashes for large files, such as weights.
pub fn file_hashes(path: &Path) -> Result<BTreeMap<String, String>> {
    let hashes = parallel::try_map(&snapshot::model_files(path)?, MAX_THREADS, |file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok((name, hash::sha256(file)?))
    })?;
    Ok(hashes.into_iter().collect())
}
