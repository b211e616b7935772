//! Selects the files of a repository to download.

use anyhow::{Context, Result, bail};
use globset::{Glob, GlobSet, GlobSetBuilder};

use super::names::{self, shell_word};
use super::remote::listing::{FileList, RemoteFile};
use crate::error::Error;
use crate::snapshot::safetensors::{INDEX, SINGLE_FILE, ShardIndex};
use crate::snapshot::{CONFIG_FILES, gguf};
use crate::text::quote;

/// The maximum number of GGUF models that an error message lists.
const MAX_LISTED_MODELS: usize = 30;

/// Selects the files to download. The default filter selects the files that inferno needs to run the model.
#[derive(Clone, Debug, Default)]
pub struct FileFilter {
    /// Patterns of files to download instead of the default weights.
    /// `*` also matches slashes, as in `hf download --include`.
    pub include: Vec<String>,
    /// Patterns of files to skip.
    pub exclude: Vec<String>,
    /// The tag of the GGUF model to download, as in `org/name:Q4_K_M`. Takes precedence over `include`.
    pub tag: Option<String>,
}

/// A model to download, as the user names it, such as `org/name:Q4_K_M@revision`.
pub struct DownloadName {
    /// The name of the repository, such as `org/name`.
    pub repo: String,
    pub revision: Option<String>,
    /// The tag of a GGUF model, such as `Q4_K_M`.
    pub tag: Option<String>,
}

impl DownloadName {
    /// Parses a name. Fails if `model` and `revision` give different revisions, or if the revision is invalid.
    pub fn parse(model: &str, revision: Option<&str>) -> Result<Self> {
        let (name, revision) = names::split_revision(model, revision)?;
        let (repo, tag) = gguf::split_tag(name);
        let (revision, tag) = (revision.map(str::to_string), tag.map(str::to_string));
        Ok(Self { repo: repo.to_string(), revision, tag })
    }
}

pub(super) struct CompiledFilter {
    /// The compiled `--include` patterns, or `None` without `--include`.
    include: Option<GlobSet>,
    exclude: GlobSet,
    tag: Option<String>,
}

impl CompiledFilter {
    pub fn new(filter: &FileFilter) -> Result<Self> {
        let include = if filter.include.is_empty() { None } else { Some(compile(&filter.include)?) };
        Ok(Self { include, exclude: compile(&filter.exclude)?, tag: filter.tag.clone() })
    }

    /// Returns whether the choice of weights depends on the shard index, if the repository has one.
    pub fn needs_index(&self) -> bool {
        self.include.is_none() && self.tag.is_none()
    }

    /// Returns the files to download, config files first.
    /// `index` is the contents of [`INDEX`]. `None` if the repository does not have this file, or if
    /// [`needs_index`](Self::needs_index) returns false.
    ///
    /// Fails if no file is selected, if a required file or the weights are missing, if the index is invalid,
    /// or if several GGUF models match.
    pub fn choose(&self, repo: &str, files: &FileList, index: Option<&[u8]>) -> Result<Vec<RemoteFile>> {
        let mut chosen = match (&self.tag, &self.include) {
            (Some(tag), _) => {
                let model = choose_gguf(repo, files, Some(tag))?;
                config_files(files).into_iter().chain(model.into_iter().flatten()).collect()
            }
            (None, Some(patterns)) => included_files(repo, files, patterns)?,
            (None, None) => model_files(repo, files, index)?,
        };
        chosen.retain(|file| !self.exclude.is_match(&file.name));
        if chosen.is_empty() {
            bail!("cannot download '{repo}': --exclude leaves no files; the repository has {}", some_names(files));
        }
        Ok(chosen)
    }
}

fn compile(patterns: &[String]) -> Result<GlobSet> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        let invalid = |error| Error::Usage(format!("{pattern:?} is not a valid glob pattern: {error}"));
        set.add(Glob::new(pattern).map_err(invalid)?);
    }
    Ok(set.build()?)
}

/// Returns the files that `filter` selects. Public only for fuzz targets.
/// `index` is the contents of [`INDEX`], if the repository has this file.
#[doc(hidden)]
pub fn choose_files(
    repo: &str,
    files: &FileList,
    filter: &FileFilter,
    index: Option<&[u8]>,
) -> Result<Vec<RemoteFile>> {
    CompiledFilter::new(filter)?.choose(repo, files, index)
}

/// Returns the files of [`CONFIG_FILES`] that the repository has.
/// They are downloaded with every model, unless `--exclude` matches them.
fn config_files(files: &FileList) -> Vec<RemoteFile> {
    CONFIG_FILES.into_iter().filter_map(|name| files.get(name)).cloned().collect()
}

/// Returns the config files, the shard index and the files that match `patterns`. Fails if no file matches.
fn included_files(repo: &str, files: &FileList, patterns: &GlobSet) -> Result<Vec<RemoteFile>> {
    if !files.iter().any(|file| patterns.is_match(&file.name)) {
        bail!("cannot download '{repo}': no file matches --include; the repository has {}", some_names(files));
    }
    let mut chosen = config_files(files);
    // Without the index, the shards that `--include '*.safetensors'` selects could not be loaded.
    chosen.extend(files.get(INDEX).cloned());
    // A linear search in `chosen` is fast enough, because `chosen` has at most 7 files.
    let is_chosen = |file: &RemoteFile| chosen.iter().any(|other| other.name == file.name);
    let is_new = |file: &&RemoteFile| patterns.is_match(&file.name) && !is_chosen(file);
    let matching: Vec<RemoteFile> = files.iter().filter(is_new).cloned().collect();
    chosen.extend(matching);
    Ok(chosen)
}

/// Returns the config files and the default weights: the shards that `index` lists, or [`SINGLE_FILE`], or else the
/// only GGUF model. Fails if there are no such weights, if there are several GGUF models, or if a required file is missing.
fn model_files(repo: &str, files: &FileList, index: Option<&[u8]>) -> Result<Vec<RemoteFile>> {
    let mut chosen = config_files(files);
    if index.is_none() && files.get(SINGLE_FILE).is_none() {
        chosen.extend(only_gguf_model(repo, files)?);
        return Ok(chosen);
    }
    // inferno cannot load safetensors weights without these two files. Fail now instead of after the download.
    for required in ["config.json", "tokenizer.json"] {
        if files.get(required).is_none() {
            bail!(
                "cannot download '{repo}': inferno needs {required}, but the repository has only {}",
                some_names(files)
            );
        }
    }
    let Some(index) = index else {
        chosen.extend(files.get(SINGLE_FILE).cloned());
        return Ok(chosen);
    };
    chosen.extend(files.get(INDEX).cloned());
    for name in ShardIndex::parse(index)?.shards() {
        let lacks = || format!("cannot download '{repo}': it lacks {}, which {INDEX} lists", quote(name));
        let shard = files.get(name).with_context(lacks)?;
        chosen.push(shard.clone());
    }
    Ok(chosen)
}

/// Returns all shards of a GGUF model. `first` is its first shard or its only file. Fails if a shard is missing.
fn gguf_shards(repo: &str, files: &FileList, first: &RemoteFile) -> Result<Vec<RemoteFile>> {
    let (folder, name) = first.name.rsplit_once('/').map_or(("", first.name.as_str()), |(folder, name)| (folder, name));
    let path = |name: String| if folder.is_empty() { name } else { format!("{folder}/{name}") };
    let shard = |name: String| {
        let path = path(name);
        let shard = files.get(&path).cloned();
        shard.with_context(|| {
            format!("cannot use '{repo}': it lacks {}, a shard of {}", quote(&path), quote(&first.name))
        })
    };
    gguf::shard_names(name).into_iter().map(shard).collect()
}

/// Returns the size of a GGUF model in bytes, or `None` if the hub does not list all shards and their sizes.
fn gguf_bytes(repo: &str, files: &FileList, first: &RemoteFile) -> Option<u64> {
    gguf_shards(repo, files, first).ok()?.iter().map(|shard| shard.bytes).sum()
}

/// Returns one file for each GGUF model in a repository: the first shard of the model, or its only file.
fn gguf_models(files: &[RemoteFile]) -> Vec<&RemoteFile> {
    files.iter().filter(|file| gguf::is_model_name(&file.name)).collect()
}

/// Returns the shards of the GGUF model that `tag` selects, or of the only GGUF model if there is no tag.
/// Returns `None` if there is no tag and the repository has no GGUF model.
///
/// Fails if no model matches the tag, if several models match, or if the listing lacks a shard of the model.
pub(super) fn choose_gguf(repo: &str, files: &FileList, tag: Option<&str>) -> Result<Option<Vec<RemoteFile>>> {
    let models = gguf_models(files);
    let selected: Vec<&&RemoteFile> =
        models.iter().filter(|file| tag.is_none_or(|tag| gguf::matches_tag(&file.name, tag))).collect();
    let list = || {
        let names: Vec<&str> = models.iter().map(|file| file.name.as_str()).collect();
        let line = |(name, file): (String, &&RemoteFile)| {
            gguf::size_line(&format!("inferno show {} --remote", shell_word(&name)), gguf_bytes(repo, files, file))
        };
        model_list(gguf::model_names(repo, &names).into_iter().zip(&models).map(line))
    };
    match (&selected[..], tag) {
        ([model], _) => gguf_shards(repo, files, model).map(Some),
        ([], None) => Ok(None),
        ([], Some(tag)) => {
            let hint = if models.is_empty() {
                format!("'{repo}' has no GGUF model, only {}", some_names(files))
            } else {
                format!("'{repo}' has these GGUF models:\n{}", list())
            };
            Err(Error::ModelNotFound { model: format!("{repo}:{tag}"), hint }.into())
        }
        _ => Err(Error::usage(format!("'{repo}' has several GGUF models; choose one:\n{}", list()))),
    }
}

/// Returns the shards of the only GGUF model in a repository.
/// Fails if the repository has several GGUF models, none, or one with a missing shard.
fn only_gguf_model(repo: &str, files: &FileList) -> Result<Vec<RemoteFile>> {
    let models = gguf_models(files);
    match models[..] {
        [] => bail!("{}", no_weights(repo, files)),
        [model] => gguf_shards(repo, files, model),
        _ => {
            let line = |model: &&RemoteFile| gguf::size_line(&model.name, gguf_bytes(repo, files, model));
            let files: Vec<&str> = models.iter().map(|file| file.name.as_str()).collect();
            let suggested = models.iter().position(|file| file.name.contains("Q4_K_M")).unwrap_or(0);
            Err(Error::usage(format!(
                "'{repo}' has several GGUF models; choose one, for example:\n  inferno download {}\n{}",
                shell_word(&gguf::model_names(repo, &files)[suggested]),
                model_list(models.iter().map(line))
            )))
        }
    }
}

/// Joins the first [`MAX_LISTED_MODELS`] lines of a model list, and appends the number of omitted lines.
fn model_list(mut lines: impl ExactSizeIterator<Item = String>) -> String {
    let mut list: Vec<String> = lines.by_ref().take(MAX_LISTED_MODELS).collect();
    match lines.len() {
        0 => {}
        more => list.push(format!("  and {more} more")),
    }
    list.join("\n")
}

/// Returns the error message for a repository without weights that inferno can load.
fn no_weights(repo: &str, files: &[RemoteFile]) -> String {
    let has = |suffix: &str| files.iter().any(|file| file.name.ends_with(suffix));
    if let Some(other) = files.iter().find(|file| file.name.ends_with(".safetensors")) {
        return format!(
            "cannot download '{repo}': it has neither {SINGLE_FILE} nor {INDEX}, only other safetensors files \
             such as {}\n  to download them anyway: --include GLOB",
            quote(&other.name)
        );
    }
    let formats: Vec<&str> =
        [".bin", ".pth", ".pt", ".onnx", ".msgpack", ".h5"].into_iter().filter(|suffix| has(suffix)).collect();
    let formats = if formats.is_empty() { "neither".to_string() } else { formats.join(", ") };
    format!(
        "cannot download '{repo}': inferno needs safetensors or GGUF weights, but the repository has {formats}\n  \
         look for a safetensors version of the model: a converted copy, or the original repository"
    )
}

/// Returns the first few file names of a repository and the number of further files, for an error message.
fn some_names(files: &[RemoteFile]) -> String {
    const SHOWN: usize = 8;
    let names: Vec<String> = files.iter().take(SHOWN).map(|file| quote(&file.name)).collect();
    match files.len() {
        0 => "no files".to_string(),
        count if count > SHOWN => format!("{} and {} more", names.join(", "), count - SHOWN),
        _ => names.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> FileList {
        let file = |name: &&str| RemoteFile { name: name.to_string(), bytes: None, etag: None };
        FileList::new(names.iter().map(file).collect())
    }

    /// Returns the files that `patterns` select. A pattern that starts with `!` is an `--exclude` pattern.
    fn choose(names: &[&str], patterns: &[&str], index: Option<&str>) -> Result<Vec<String>> {
        let (exclude, include): (Vec<&str>, Vec<&str>) = patterns.iter().partition(|glob| glob.starts_with('!'));
        let globs = |globs: Vec<&str>| globs.iter().map(|glob| glob.trim_start_matches('!').to_string()).collect();
        let filter = FileFilter { include: globs(include), exclude: globs(exclude), tag: None };
        let chosen = choose_files("a/b", &files(names), &filter, index.map(str::as_bytes))?;
        Ok(chosen.into_iter().map(|file| file.name).collect())
    }

    #[test]
    fn only_files_that_a_model_needs_are_chosen() {
        let names = [
            ".gitattributes",
            "README.md",
            "config.json",
            "tokenizer.json",
            "model.safetensors",
            "pytorch_model.bin",
            "original/model.safetensors",
            "metal/model.bin",
            "original/config.json",
        ];
        assert_eq!(choose(&names, &[], None).unwrap(), ["config.json", "tokenizer.json", "model.safetensors"]);
        let included = choose(&names, &["original/*", "*.bin"], None).unwrap();
        let originals = ["original/model.safetensors", "metal/model.bin", "original/config.json"];
        assert_eq!(included, [&["config.json", "tokenizer.json", "pytorch_model.bin"][..], &originals].concat());
        assert!(choose(&names, &["*.gguf"], None).unwrap_err().to_string().contains("no file matches --include"));
        let without = choose(&names, &["original/*", "!*.json"], None).unwrap();
        assert_eq!(without, ["original/model.safetensors"]);
        assert_eq!(choose(&names, &["!*.safetensors"], None).unwrap(), ["config.json", "tokenizer.json"]);
        assert!(choose(&names, &["!*"], None).unwrap_err().to_string().contains("leaves no files"));
        assert!(choose(&names, &["a{"], None).is_err() && choose(&names, &["!a{"], None).is_err());
    }

    #[test]
    fn index_selects_the_shards() {
        let names = ["config.json", "tokenizer.json", INDEX, "s1.safetensors", "s2.safetensors", "s3.safetensors"];
        let index = r#"{"metadata":{},"weight_map":{"a":"s2.safetensors","b":"s1.safetensors","c":"s2.safetensors"}}"#;
        let all = ["config.json", "tokenizer.json", INDEX, "s1.safetensors", "s2.safetensors"];
        assert_eq!(choose(&names, &[], Some(index)).unwrap(), all);
        for (index, expected) in [
            (r#"{"weight_map":{"a":"../../x"}}"#, "not a plain file name"),
            (r#"{"weight_map":{"a":"/etc/passwd"}}"#, "not a plain file name"),
            (r#"{"weight_map":{"a":"s9.safetensors"}}"#, "lacks 's9.safetensors'"),
            (r#"{"weight_map":{}}"#, "no shards"),
            ("<html>", "not a shard index"),
        ] {
            let error = format!("{:#}", choose(&names, &[], Some(index)).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn gguf_model_is_chosen_with_all_its_parts() {
        assert_eq!(choose(&["README.md", "m-Q8_0.gguf", "mmproj.gguf"], &[], None).unwrap(), ["m-Q8_0.gguf"]);
        let shards = ["config.json", "q/m-Q8_0-00001-of-00002.gguf", "q/m-Q8_0-00002-of-00002.gguf"];
        assert_eq!(choose(&shards, &[], None).unwrap(), shards);
        assert!(
            choose(&shards[..2], &[], None).unwrap_err().to_string().contains("lacks 'q/m-Q8_0-00002-of-00002.gguf'")
        );
        let several = ["m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"];
        let error = choose(&several, &[], None).unwrap_err().to_string();
        assert!(error.contains("inferno download a/b:Q4_K_M\n") && error.contains("m-Q2_K.gguf"), "{error}");
        assert!(!error.contains("00002-of-00002"), "{error}");
        assert_eq!(choose(&several, &["*Q4_K_M*"], None).unwrap(), ["m-Q4_K_M.gguf"]);
    }

    #[test]
    fn a_tag_selects_one_model() {
        let names = [
            "config.json",
            "m-F16.gguf",
            "m-BF16.gguf",
            "mmproj-m-F16.gguf",
            "m-Q4_K_M-00001-of-00002.gguf",
            "m-Q4_K_M-00002-of-00002.gguf",
            "model.safetensors",
        ];
        let choose = |model: &str| -> Result<Vec<String>> {
            let filter = FileFilter { tag: DownloadName::parse(model, None)?.tag, ..FileFilter::default() };
            Ok(choose_files("a/b", &files(&names), &filter, None)?.into_iter().map(|file| file.name).collect())
        };
        assert_eq!(choose("a/b:F16").unwrap(), ["config.json", "m-F16.gguf"]);
        assert_eq!(choose("a/b:q4_k_m").unwrap(), [&names[..1], &names[4..6]].concat());
        assert!(choose("a/b:Q4_0").unwrap_err().to_string().contains("a/b:BF16"));
    }

    #[test]
    fn error_names_the_formats_that_are_there() {
        let error = |names: &[&str]| choose(names, &[], None).unwrap_err().to_string();
        assert!(error(&["config.json", "x.pt", "y.bin"]).contains(".bin, .pt"));
        assert!(error(&["config.json", "consolidated.safetensors"]).contains("--include"));
        assert!(error(&["README.md"]).contains("the repository has neither"));
        assert!(error(&["tokenizer.model", SINGLE_FILE, "config.json"]).contains("inferno needs tokenizer.json"));
    }
}
