//! Determines which files in a directory make up a model.
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! A model's weights are one of the following:
//! - a single `model.safetensors`
//! - the shards that `model.safetensors.index.json` lists
//! - a GGUF file, which may be split into shards
//!
//! `hub` follows these rules when it selects and checks downloads, and `weights`, `models` and `language` follow them
//! when they open models.

pub mod gguf;
mod paths;
pub mod safetensors;

use std::path::{MAIN_SEPARATOR, Path, PathBuf};

use anyhow::Result;
use gguf::GgufFiles;
pub use paths::is_safe_path;
use safetensors::{INDEX, SINGLE_FILE, ShardIndex};

/// Which files of a safetensors model must be present. A GGUF model must always be complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Required {
    /// Requires config.json and tokenizer.json, which are enough to tokenize text.
    Tokenizer,
    /// Requires config.json, tokenizer.json and the weights: the single weights file or every shard in the index.
    Weights,
}

/// The files in the root directory of a safetensors model, except the weights and the shard index.
/// All of them except config.json and tokenizer.json are optional.
pub const CONFIG_FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];

/// Returns the paths of all files that a model is loaded from: its weights, its tokenizer and its configuration.
///
/// `path` is a GGUF file, or a directory that contains safetensors weights or one GGUF model.
/// If a directory has safetensors weights, ignores its GGUF models.
/// Fails if the safetensors weights are incomplete, if the shard index is invalid, or if a directory without
/// safetensors weights does not have exactly one GGUF model. Does not check whether the shards of a GGUF model exist.
pub fn model_files(path: &Path) -> Result<Vec<PathBuf>> {
    if let Some(first) = gguf::find(path)? {
        let name = first.file_name().unwrap_or_default().to_string_lossy();
        return Ok(gguf::shard_names(&name).into_iter().map(|shard| first.with_file_name(shard)).collect());
    }
    let mut files = safetensors::files(path, ShardIndex::read(path)?.as_ref())?;
    files.extend(CONFIG_FILES.iter().chain([&INDEX]).map(|name| path.join(name)).filter(|file| file.exists()));
    Ok(files)
}

/// Returns the names of the files that are missing from a model's directory.
///
/// Without safetensors weights, one complete GGUF model is enough, whatever `required` is.
/// If all GGUF models in such a directory are incomplete, lists only the first missing shard of each of them.
/// The names are relative to `dir` and use `/` as the separator, as on a hub.
pub fn missing_files(dir: &Path, required: Required) -> Vec<String> {
    if !safetensors::is_present(dir) {
        let models = gguf::models_in(dir);
        if models.iter().any(|model| model.missing_shard.is_none()) {
            return Vec::new();
        }
        if !models.is_empty() {
            return models.iter().filter_map(|model| missing_shard(dir, model)).collect();
        }
    }
    let is_missing = |name: &str| !dir.join(name).is_file();
    let mut missing: Vec<String> =
        ["config.json", "tokenizer.json"].into_iter().filter(|name| is_missing(name)).map(str::to_string).collect();
    if required == Required::Weights {
        missing.extend(missing_weights(dir));
    }
    missing
}

/// Returns the first file in [`missing_files`], or `None` if no file is missing.
pub fn first_missing_file(dir: &Path, required: Required) -> Option<String> {
    missing_files(dir, required).into_iter().next()
}

/// Returns the path of the first missing shard of a sharded GGUF model, relative to `dir`.
fn missing_shard(dir: &Path, model: &GgufFiles) -> Option<String> {
    let path = model.path.with_file_name(model.missing_shard.as_ref()?);
    Some(path.strip_prefix(dir).ok()?.to_str()?.replace(MAIN_SEPARATOR, "/"))
}

/// Returns the names of the safetensors files that are missing from a directory.
/// If the shard index is unreadable or invalid, returns only its name, because the shards are unknown.
fn missing_weights(dir: &Path) -> Vec<String> {
    let is_missing = |name: &str| !dir.join(name).is_file();
    // Do not use `exists`, which follows symlinks: if the index is a dangling symlink, the model is still sharded.
    if dir.join(INDEX).symlink_metadata().is_err() {
        return [SINGLE_FILE].into_iter().filter(|name| is_missing(name)).map(str::to_string).collect();
    }
    match ShardIndex::read(dir) {
        Ok(Some(index)) => index.shards().into_iter().filter(|name| is_missing(name)).map(str::to_string).collect(),
        Ok(None) | Err(_) => vec![INDEX.to_string()],
    }
}

/// Returns whether a file has the extension of a common weights format, supported or not.
pub fn is_weights_file(path: &Path) -> bool {
    const EXTENSIONS: [&str; 8] = ["safetensors", "gguf", "bin", "pt", "pth", "ckpt", "h5", "onnx"];
    let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    EXTENSIONS.contains(&extension.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_files_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).unwrap();
        assert_eq!(missing_files(dir, Required::Tokenizer), ["config.json", "tokenizer.json"]);
        write("config.json", "{}");
        write("tokenizer.json", "{}");
        assert!(missing_files(dir, Required::Tokenizer).is_empty());
        assert_eq!(missing_files(dir, Required::Weights), [SINGLE_FILE]);
        write(INDEX, r#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}"#);
        write("2.safetensors", "");
        assert_eq!(missing_files(dir, Required::Weights), ["1.safetensors"]);
        assert!(model_files(dir).is_err());
        write("1.safetensors", "");
        let names = ["1.safetensors", "2.safetensors", "config.json", "tokenizer.json", INDEX];
        assert_eq!(model_files(dir).unwrap(), names.map(|name| dir.join(name)));
        write(INDEX, "{");
        assert_eq!(missing_files(dir, Required::Weights), [INDEX]);
        std::fs::remove_file(dir.join(INDEX)).unwrap();
        write(SINGLE_FILE, "");
        assert!(missing_files(dir, Required::Weights).is_empty());
    }

    #[test]
    fn complete_gguf_model_needs_no_other_file() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        std::fs::create_dir(dir.join("Q8")).unwrap();
        std::fs::write(dir.join("Q8/a-Q8-00001-of-00002.gguf"), "").unwrap();
        assert_eq!(missing_files(dir, Required::Weights), ["Q8/a-Q8-00002-of-00002.gguf"]);
        std::fs::write(dir.join("a-Q4.gguf"), "").unwrap();
        assert!(missing_files(dir, Required::Weights).is_empty());
        let shard = dir.join("Q8/a-Q8-00001-of-00002.gguf");
        assert_eq!(model_files(&shard).unwrap(), [shard.clone(), dir.join("Q8/a-Q8-00002-of-00002.gguf")]);
    }
}
