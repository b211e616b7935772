//! The hashes that identify a model regardless of its name.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use super::{hash, parallel};
use crate::snapshot;

/// The maximum number of files to hash at once. More threads would slow down the thread that loads the model.
const MAX_THREADS: usize = 4;

/// Returns the hexadecimal SHA-256 of each file of the model at `path`. The keys of the map are file names.
///
/// Reads every file in full. The Hugging Face hub lists the same hashes for large files.
pub fn file_hashes(path: &Path) -> Result<BTreeMap<String, String>> {
    let hashes = parallel::try_map(&snapshot::model_files(path)?, MAX_THREADS, |file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok((name, hash::sha256(file)?))
    })?;
    Ok(hashes.into_iter().collect())
}
