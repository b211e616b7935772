//! Finds the GGUF models in a directory, and determines the names, tags and shards of GGUF models.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use super::paths::is_safe_path;
use super::safetensors;
use crate::error::Error;

/// The maximum number of shards in a sharded model.
pub const MAX_SHARDS: u32 = 1024;

/// One GGUF model. `path` is the single file, or the first shard of a sharded model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufFiles {
    pub path: PathBuf,
    /// The total size of all shards that exist, in bytes.
    pub bytes: u64,
    /// The file name of the first missing shard, if any.
    pub missing_shard: Option<String>,
}

impl GgufFiles {
    /// Finds the shards of a model and adds up their sizes. `first` is the single file or the first shard.
    fn from_first_shard(first: PathBuf) -> Self {
        let (mut bytes, mut missing_shard) = (0, None);
        for name in shard_names(&first.file_name().unwrap_or_default().to_string_lossy()) {
            match fs::metadata(first.with_file_name(&name)) {
                Ok(data) => bytes += data.len(),
                Err(_) => missing_shard = missing_shard.or(Some(name)),
            }
        }
        Self { path: first, bytes, missing_shard }
    }
}

/// The file name of one shard of a sharded model: `prefix-00002-of-00003.gguf`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardName<'n> {
    pub prefix: &'n str,
    /// The number of the shard, counted from 1.
    pub number: u32,
    pub count: u32,
    /// `gguf`, in upper or lower case as in the file name.
    extension: &'n str,
}

impl<'n> ShardName<'n> {
    /// Parses the file name of a shard. Returns `None` for all other file names.
    pub fn parse(file_name: &'n str) -> Option<Self> {
        let (stem, extension) = split_extension(file_name)?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let five_digits = |digits: &str| digits.len() == 5 && digits.bytes().all(|digit| digit.is_ascii_digit());
        if !five_digits(number) || !five_digits(count) {
            return None;
        }
        Some(Self { prefix, number: number.parse().ok()?, count: count.parse().ok()?, extension })
    }

    /// Returns the file name of the shard with this number, counted from 1.
    pub fn with_number(&self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}.{}", self.prefix, self.count, self.extension)
    }
}

/// Returns the file names of all shards of a model. `first` is the first shard or the single file.
/// Returns only `first` if the file name claims 0 shards or more than `MAX_SHARDS` shards.
pub fn shard_names(first: &str) -> Vec<String> {
    match ShardName::parse(first) {
        Some(shard) if (1..=MAX_SHARDS).contains(&shard.count) => {
            (1..=shard.count).map(|number| shard.with_number(number)).collect()
        }
        _ => vec![first.to_string()],
    }
}

/// Returns `path` if it names a GGUF file, or the only GGUF model in the directory `path`.
///
/// Returns `None` if the directory has safetensors weights or no GGUF model.
/// Fails if the directory has several GGUF models. The error lists the models.
pub fn find(path: &Path) -> Result<Option<PathBuf>> {
    if is_gguf(path) && !path.is_dir() {
        return Ok(Some(path.to_path_buf()));
    }
    if safetensors::is_present(path) {
        return Ok(None);
    }
    match &models_in(path)[..] {
        [] => Ok(None),
        [model] => Ok(Some(model.path.clone())),
        models => {
            let name = |model: &GgufFiles| model.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let list: Vec<String> = models.iter().map(|model| size_line(&name(model), Some(model.bytes))).collect();
            let example = models[0].path.display();
            bail!("{} has several GGUF models; choose one, such as {example}:\n{}", path.display(), list.join("\n"))
        }
    }
}

/// Returns every GGUF model in a directory and its direct subdirectories, sorted by path.
///
/// Vision projectors (`mmproj`) are skipped because they are not complete models.
pub fn models_in(dir: &Path) -> Vec<GgufFiles> {
    let entries = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let folders = entries(dir).filter(|path| path.is_dir());
    let mut files: Vec<PathBuf> =
        entries(dir).chain(folders.flat_map(|dir| entries(&dir).collect::<Vec<_>>())).collect();
    // Skip unsafe file names. Messages list the files, and a newline in a file name could fake a message.
    let is_usable = |name: &str| is_model_name(name) && is_safe_path(name);
    files.retain(|path| path.is_file() && is_usable(&path.file_name().unwrap_or_default().to_string_lossy()));
    files.sort();
    files.into_iter().map(GgufFiles::from_first_shard).collect()
}

/// Returns the total size of the existing shards of a model, in bytes. `first` is the first shard or the single file.
pub fn total_bytes(first: &Path) -> u64 {
    GgufFiles::from_first_shard(first.to_path_buf()).bytes
}

/// Returns whether a path has the extension `.gguf`. Ignores case.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// Splits a file name into its stem and the extension `gguf`. Ignores the case of the extension.
/// Returns `None` for other extensions.
fn split_extension(file: &str) -> Option<(&str, &str)> {
    file.rsplit_once('.').filter(|(_, extension)| extension.eq_ignore_ascii_case("gguf"))
}

/// Returns whether `path` names a single-file GGUF model or the first shard of a sharded model.
/// Returns false for a vision projector.
pub fn is_model_name(path: &str) -> bool {
    let file = path.rsplit('/').next().unwrap_or(path);
    let is_first = ShardName::parse(file).is_none_or(|shard| shard.number == 1);
    is_gguf(Path::new(file)) && is_first && !file.to_lowercase().contains("mmproj")
}

/// Returns the tag of a GGUF file, such as `Q4_K_M` for `Llama-3.2-1B-Q4_K_M.gguf`.
///
/// The tag is the text after the last `-` or `.` in the file name without its extension and shard number.
/// It usually distinguishes the models in one repository.
pub fn tag(path: &str) -> &str {
    let stem = stem(path);
    stem.rsplit(['-', '.']).next().unwrap_or(stem)
}

/// Returns the file name without its extension and shard number.
fn stem(path: &str) -> &str {
    let file = path.rsplit('/').next().unwrap_or(path);
    match ShardName::parse(file) {
        Some(shard) => shard.prefix,
        None => split_extension(file).map_or(file, |(stem, _)| stem),
    }
}

/// Returns whether `tag` is the whole path, the last components of the path, or the last words of the file name
/// without `.gguf` and the shard number. Words are separated by `-` or `.`. Ignores case.
pub fn matches_tag(path: &str, tag: &str) -> bool {
    let (path, stem, tag) = (path.to_lowercase(), stem(path).to_lowercase(), tag.to_lowercase());
    let is_suffix = stem.strip_suffix(&tag).is_some_and(|rest| rest.is_empty() || rest.ends_with(['-', '.']));
    path == tag || path.ends_with(&format!("/{tag}")) || is_suffix
}

/// Splits a model name such as `name:Q4_K_M` into the name and the tag. The tag is optional.
pub fn split_tag(model: &str) -> (&str, Option<&str>) {
    match model.rsplit_once(':') {
        Some((name, tag)) if !name.is_empty() && !tag.is_empty() => (name, Some(tag)),
        _ => (model, None),
    }
}

/// Returns the name of each model in a repository: `name` for a single model, or `name:TAG` for each of several models.
///
/// Models that share a tag with another model of the repository are named `name:FILE` instead, after their files.
pub fn model_names(name: &str, files: &[impl AsRef<str>]) -> Vec<String> {
    let mut counts = HashMap::new();
    for file in files {
        *counts.entry(tag(file.as_ref())).or_insert(0) += 1;
    }
    let model_name = |path: &str| {
        let own_tag = tag(path);
        let is_unique = counts.get(own_tag) == Some(&1);
        match (files.len(), is_unique) {
            (1, _) => name.to_string(),
            (_, true) => format!("{name}:{own_tag}"),
            _ => format!("{name}:{}", path.rsplit('/').next().unwrap_or(path)),
        }
    };
    files.iter().map(|file| model_name(file.as_ref())).collect()
}

/// Returns the complete GGUF models in a directory, each with its name.
/// `name` is the repository or path without a tag.
///
/// The list is empty if the directory has safetensors weights.
pub fn named_models(name: &str, dir: &Path) -> Vec<(String, GgufFiles)> {
    if safetensors::is_present(dir) {
        return Vec::new();
    }
    let mut models = models_in(dir);
    models.retain(|model| model.missing_shard.is_none());
    let paths: Vec<String> = models.iter().map(|model| model.path.to_string_lossy().into_owned()).collect();
    model_names(name, &paths).into_iter().zip(models).collect()
}

/// Returns the GGUF model that `tag` selects in a directory. Without a tag, returns the only model.
/// Ignores models with missing shards.
///
/// Returns `None` if there is no tag and the directory has safetensors weights or no complete GGUF model.
/// Fails if `tag` selects no model, or if there are several models to choose from.
pub fn choose(name: &str, dir: &Path, tag: Option<&str>) -> Result<Option<PathBuf>> {
    let models = named_models(name, dir);
    let is_selected =
        |(_, model): &&(String, GgufFiles)| tag.is_none_or(|tag| matches_tag(&model.path.to_string_lossy(), tag));
    let list = || {
        let line = |(name, model): &(String, GgufFiles)| size_line(&format!("inferno play {name}"), Some(model.bytes));
        models.iter().map(line).collect::<Vec<_>>().join("\n")
    };
    let not_found = |tag: &str, hint: String| Error::ModelNotFound { model: format!("{name}:{tag}"), hint };
    match (&models.iter().filter(is_selected).collect::<Vec<_>>()[..], tag) {
        ([(_, model)], _) => Ok(Some(model.path.clone())),
        ([], None) => Ok(None),
        ([], Some(tag)) if safetensors::is_present(dir) => {
            Err(not_found(tag, format!("{name} has safetensors weights, so it has no tags; leave out the tag")).into())
        }
        ([], Some(tag)) if models.is_empty() => Err(not_found(tag, format!("{name} has no complete GGUF file")).into()),
        ([], Some(tag)) => Err(not_found(tag, format!("{name} has these GGUF models:\n{}", list())).into()),
        _ => Err(Error::usage(format!("{name} has several GGUF models; choose one:\n{}", list()))),
    }
}

/// Formats one line of a model list: the size, then the name.
pub fn size_line(name: &str, bytes: Option<u64>) -> String {
    let size = bytes.map_or("?".into(), |bytes| format!("{:.2} GB", bytes as f64 / 1e9));
    format!("  {size:>10}  {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_is_the_last_word_of_a_file_name() {
        assert_eq!(tag("Llama-3.2-1B-Instruct-Q4_K_M.gguf"), "Q4_K_M");
        assert_eq!(tag("Q8_0/big-Q8_0-00001-of-00003.gguf"), "Q8_0");
        assert_eq!(tag("tinyllama-1.1b.Q5_0.gguf"), "Q5_0");
        assert!(matches_tag("Llama-3.2-1B-Q4_K_M.gguf", "q4_k_m"));
        assert!(matches_tag("Llama-3.2-1B-Q4_K_M.gguf", "Llama-3.2-1B-Q4_K_M.gguf"));
        assert!(matches_tag("big-Q8_0-00001-of-00003.gguf", "Q8_0"));
        assert!(!matches_tag("Llama-3.2-1B-IQ4_K_M.gguf", "Q4_K_M"));
        assert!(!matches_tag("Llama-3.2-1B-Q4_K_M.gguf", "K_M"));
        assert_eq!(tag("Llama-3.2-1B-Q4_K_M.GGUF"), "Q4_K_M");
        assert!(matches_tag("big-Q8_0-00001-of-00003.GGUF", "q8_0"));
    }

    #[test]
    fn a_tag_beside_safetensors_weights_is_explained() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model.safetensors"), "").unwrap();
        assert_eq!(choose("a/b", dir.path(), None).unwrap(), None);
        let error = choose("a/b", dir.path(), Some("Q8_0")).unwrap_err();
        let Some(Error::ModelNotFound { model, hint }) = error.downcast_ref() else { panic!("{error:?}") };
        assert_eq!(
            (model.as_str(), hint.as_str()),
            ("a/b:Q8_0", "a/b has safetensors weights, so it has no tags; leave out the tag")
        );
    }

    #[test]
    fn only_first_shards_are_models() {
        assert!(is_model_name("a/b-00001-of-00002.gguf") && is_model_name("b.gguf"));
        assert!(!is_model_name("b-00002-of-00002.gguf") && !is_model_name("mmproj-F16.gguf"));
        assert!(!is_model_name("b.bin"));
        assert_eq!(shard_names("b-00001-of-00002.gguf"), ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf"]);
        assert_eq!(shard_names("b.gguf"), ["b.gguf"]);
        assert_eq!(shard_names("b-00001-of-00002.GGUF"), ["b-00001-of-00002.GGUF", "b-00002-of-00002.GGUF"]);
        assert!(!is_model_name("b-00002-of-00002.GGUF"));
        assert_eq!(shard_names("b-00001-of-09999.gguf"), ["b-00001-of-09999.gguf"], "9999 shards exceed MAX_SHARDS");
    }

    #[test]
    fn part_names_have_two_numbers_of_five_digits() {
        let shard = ShardName { prefix: "a-Q8", number: 2, count: 3, extension: "gguf" };
        assert_eq!(ShardName::parse("a-Q8-00002-of-00003.gguf"), Some(shard));
        assert_eq!(shard.with_number(3), "a-Q8-00003-of-00003.gguf");
        for other in ["a.gguf", "a-2-of-3.gguf", "a-00002-of-00003.bin", "a-+0002-of-00003.gguf"] {
            assert_eq!(ShardName::parse(other), None, "{other}");
        }
    }
}
