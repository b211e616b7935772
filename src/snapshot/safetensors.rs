//! Finds the safetensors files of a model: a single `model.safetensors`, or the shards that the shard index lists.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::paths::is_safe_path;
use crate::files;
use crate::text::quote;

/// The weights file of a checkpoint that is not sharded.
pub const SINGLE_FILE: &str = "model.safetensors";

/// The file that lists the shards of a sharded checkpoint.
pub const INDEX: &str = "model.safetensors.index.json";

/// The shard index of a sharded checkpoint.
/// [`Self::parse`] ensures that the index lists at least one shard and that shard names contain no directories.
#[derive(Debug, Deserialize)]
pub struct ShardIndex {
    /// Maps each tensor name to the file name of its shard.
    pub weight_map: BTreeMap<String, String>,
}

impl ShardIndex {
    /// Parses a shard index and checks its shard names. Every shard must be in the same directory as the index.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let index: Self = files::parse_json(json).with_context(|| format!("{INDEX} is not a shard index"))?;
        if index.weight_map.is_empty() {
            bail!("{INDEX} lists no shards");
        }
        if let Some(name) = index.shards().into_iter().find(|name| !is_safe_path(name) || name.contains('/')) {
            bail!("{INDEX} lists the shard {}, which is not a plain file name", quote(name));
        }
        Ok(index)
    }

    /// Reads and checks the shard index in a directory. Returns `None` if the directory has no shard index.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(INDEX);
        let Some(json) = files::read_if_present(&path, files::MAX_SHARD_INDEX_BYTES)? else { return Ok(None) };
        Self::parse(&json).map(Some).with_context(|| format!("cannot use {}", path.display()))
    }

    /// Returns the names of the shards, sorted.
    pub fn shards(&self) -> BTreeSet<&str> {
        self.weight_map.values().map(String::as_str).collect()
    }
}

/// Returns whether a directory has `model.safetensors` or a shard index. If so, its GGUF files are ignored.
pub fn is_present(dir: &Path) -> bool {
    [SINGLE_FILE, INDEX].iter().any(|name| dir.join(name).exists())
}

/// Returns the paths of a model's safetensors files: the shards in the index, or the single file.
/// Fails if a file is missing.
pub fn files(dir: &Path, index: Option<&ShardIndex>) -> Result<Vec<PathBuf>> {
    let names = index.map_or_else(|| BTreeSet::from([SINGLE_FILE]), ShardIndex::shards);
    match names.iter().find(|name| !dir.join(name).exists()) {
        None => Ok(names.into_iter().map(|name| dir.join(name)).collect()),
        Some(shard) if index.is_some() => {
            bail!("cannot load the model: shard {shard} is missing from {}\n  download the model again", dir.display())
        }
        Some(_) => {
            bail!("cannot load the model: {} has no weights (no {SINGLE_FILE}, {INDEX} or .gguf file)", dir.display())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names_must_be_plain_file_names() {
        for bad in ["../x", "/etc/passwd", "a/b.safetensors", "..", "", "a\\\\b", "a\\u0000b"] {
            let error = ShardIndex::parse(format!(r#"{{"weight_map":{{"a":"{bad}"}}}}"#).as_bytes()).unwrap_err();
            assert!(error.to_string().contains("not a plain file name"), "{bad}: {error}");
        }
        let index = ShardIndex::parse(br#"{"weight_map":{"a":"2.safetensors","b":"1.safetensors"}}"#).unwrap();
        assert_eq!(Vec::from_iter(index.shards()), ["1.safetensors", "2.safetensors"]);
    }

    #[test]
    fn index_without_shards_is_an_error() {
        assert!(ShardIndex::parse(b"{\"weight_map\":{}}").unwrap_err().to_string().contains("lists no shards"));
        assert!(ShardIndex::parse(b"<html>").unwrap_err().to_string().contains("not a shard index"));
    }
}
