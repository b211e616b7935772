//! The GGUF files of a directory: which of them are models, and what to call each.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use super::cache::{INDEX, SINGLE};
use crate::error::Error;

/// One model: a file, or the first of its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufFile {
    pub path: PathBuf,
    /// Of all parts.
    pub bytes: u64,
    /// A part that is not there.
    pub missing: Option<String>,
}

/// The GGUF file that `path` means: itself, or the only model of a directory that has no safetensors. None for a directory
/// without any. Fails where there are several, naming them.
pub fn find(path: &Path) -> Result<Option<PathBuf>> {
    if is_gguf(path) && !path.is_dir() {
        return Ok(Some(path.to_path_buf()));
    }
    if has_safetensors(path) {
        return Ok(None);
    }
    match &in_directory(path)[..] {
        [] => Ok(None),
        [one] => Ok(Some(one.path.clone())),
        several => {
            let example = several[0].path.display();
            bail!("{} holds several models; name one, such as {example}:\n{}", path.display(), table(several))
        }
    }
}

/// Every GGUF model of a directory and of its folders, by name. Those that only see pictures for another are left out.
pub fn in_directory(dir: &Path) -> Vec<GgufFile> {
    let entries = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let folders = entries(dir).filter(|path| path.is_dir());
    let mut files: Vec<PathBuf> =
        entries(dir).chain(folders.flat_map(|dir| entries(&dir).collect::<Vec<_>>())).collect();
    files.retain(|path| path.is_file() && is_model(&path.to_string_lossy()));
    files.sort();
    files.into_iter().map(with_parts).collect()
}

/// Bytes of a model in one file or more.
pub fn bytes(first: &Path) -> u64 {
    with_parts(first.to_path_buf()).bytes
}

/// Whether a directory has weights that are preferred.
pub(super) fn has_safetensors(dir: &Path) -> bool {
    [SINGLE, INDEX].iter().any(|name| dir.join(name).exists())
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// Whether a file's name is that of a model, or of its first part.
pub(super) fn is_model(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name);
    let first = split(file).is_none_or(|(_, number, _)| number == 1);
    is_gguf(Path::new(file)) && first && !file.to_lowercase().contains("mmproj")
}

fn with_parts(path: PathBuf) -> GgufFile {
    let (mut bytes, mut missing) = (0, None);
    for name in parts(&path.file_name().unwrap_or_default().to_string_lossy()) {
        match fs::metadata(path.with_file_name(&name)) {
            Ok(data) => bytes += data.len(),
            Err(_) => missing = missing.or(Some(name)),
        }
    }
    GgufFile { path, bytes, missing }
}

/// All parts of a model that is named by its first one.
pub(super) fn parts(first: &str) -> Vec<String> {
    match split(first) {
        // More parts than anyone makes are a slip of the pen, not a model.
        Some((prefix, _, count)) if (1..=1024).contains(&count) => {
            (1..=count).map(|number| format!("{prefix}-{number:05}-of-{count:05}.gguf")).collect()
        }
        _ => vec![first.to_string()],
    }
}

/// `prefix-00002-of-00003.gguf` as (prefix, 2, 3).
fn split(file: &str) -> Option<(&str, u32, u32)> {
    let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    (number.len() == 5 && count.len() == 5).then_some(())?;
    Some((prefix, number.parse().ok()?, count.parse().ok()?))
}

/// What tells a file from the others of its repository: the last word of its name, `Q4_K_M` of `Llama-3.2-1B-Q4_K_M.gguf`.
pub(super) fn tag(name: &str) -> &str {
    let stem = stem(name);
    stem.rsplit(['-', '.']).next().unwrap_or(stem)
}

fn stem(name: &str) -> &str {
    let file = name.rsplit('/').next().unwrap_or(name);
    split(file).map_or(file.strip_suffix(".gguf").unwrap_or(file), |(prefix, ..)| prefix)
}

/// Whether `wanted` names a file: whole, without its ending, or by the words that it ends with.
pub(super) fn is_named(name: &str, wanted: &str) -> bool {
    let (file, stem, wanted) = (name.to_lowercase(), stem(name).to_lowercase(), wanted.to_lowercase());
    let ends = stem.strip_suffix(&wanted).is_some_and(|rest| rest.is_empty() || rest.ends_with(['-', '.']));
    file == wanted || file.ends_with(&format!("/{wanted}")) || ends
}

/// The models of a directory that are all there, each with the name that tells it from the others, after `name`.
pub(super) fn named(name: &str, dir: &Path) -> Vec<(String, GgufFile)> {
    if has_safetensors(dir) {
        return Vec::new();
    }
    let mut files = in_directory(dir);
    files.retain(|file| file.missing.is_none());
    let paths: Vec<String> = files.iter().map(|file| file.path.to_string_lossy().into_owned()).collect();
    called(name, &paths).into_iter().zip(files).collect()
}

/// What to call the models of one repository or directory: by its name if there is one alone, else with what tells each
/// from the others.
pub(super) fn called(name: &str, files: &[impl AsRef<str>]) -> Vec<String> {
    let tags: Vec<&str> = files.iter().map(|file| tag(file.as_ref())).collect();
    let call = |file: &str| {
        let ours = tag(file);
        let unique = tags.iter().filter(|tag| **tag == ours).count() == 1;
        match (files.len(), unique) {
            (1, _) => name.to_string(),
            (_, true) => format!("{name}:{ours}"),
            _ => format!("{name}:{}", file.rsplit('/').next().unwrap_or(file)),
        }
    };
    files.iter().map(|file| call(file.as_ref())).collect()
}

/// The one model of a directory that is meant: the only one, or the one that `wanted` names. None if there is no GGUF
/// model at all.
pub(super) fn choose(name: &str, dir: &Path, wanted: Option<&str>) -> Result<Option<PathBuf>> {
    let named = named(name, dir);
    let meant =
        |(_, file): &&(String, GgufFile)| wanted.is_none_or(|wanted| is_named(&file.path.to_string_lossy(), wanted));
    let list = || {
        let line = |(name, file): &(String, GgufFile)| line(&format!("inferno play {name}"), Some(file.bytes));
        named.iter().map(line).collect::<Vec<_>>().join("\n")
    };
    match (&named.iter().filter(meant).collect::<Vec<_>>()[..], wanted) {
        ([(_, one)], _) => Ok(Some(one.path.clone())),
        ([], None) => Ok(None),
        ([], Some(wanted)) if named.is_empty() => {
            Err(Error::ModelNotFound { model: format!("{name}:{wanted}"), hint: "there is no GGUF file".into() }.into())
        }
        ([], Some(wanted)) => Err(Error::ModelNotFound {
            model: format!("{name}:{wanted}"),
            hint: format!("no GGUF file of it is called so; there are:\n{}", list()),
        }
        .into()),
        _ => Err(Error::Usage(format!("{name} holds several models; choose one:\n{}", list())).into()),
    }
}

/// `name:Q4_K_M` as name and what tells the file.
pub(super) fn split_tag(model: &str) -> (&str, Option<&str>) {
    match model.rsplit_once(':') {
        Some((name, tag)) if !name.is_empty() && !tag.is_empty() => (name, Some(tag)),
        _ => (model, None),
    }
}

/// Several models, one a line, with their sizes.
fn table(files: &[GgufFile]) -> String {
    let line = |file: &GgufFile| line(&file.path.file_name().unwrap_or_default().to_string_lossy(), Some(file.bytes));
    files.iter().map(line).collect::<Vec<_>>().join("\n")
}

pub(super) fn line(name: &str, bytes: Option<u64>) -> String {
    let size = bytes.map_or("?".into(), |bytes| format!("{:.2} GB", bytes as f64 / 1e9));
    format!("  {size:>10}  {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_apart_by_their_last_word() {
        assert_eq!(tag("Llama-3.2-1B-Instruct-Q4_K_M.gguf"), "Q4_K_M");
        assert_eq!(tag("Q8_0/big-Q8_0-00001-of-00003.gguf"), "Q8_0");
        assert_eq!(tag("tinyllama-1.1b.Q5_0.gguf"), "Q5_0");
        assert!(is_named("Llama-3.2-1B-Q4_K_M.gguf", "q4_k_m"));
        assert!(is_named("Llama-3.2-1B-Q4_K_M.gguf", "Llama-3.2-1B-Q4_K_M.gguf"));
        assert!(is_named("big-Q8_0-00001-of-00003.gguf", "Q8_0"));
        assert!(!is_named("Llama-3.2-1B-IQ4_K_M.gguf", "Q4_K_M"));
        assert!(!is_named("Llama-3.2-1B-Q4_K_M.gguf", "K_M"));
    }

    #[test]
    fn only_first_parts_are_models() {
        assert!(is_model("a/b-00001-of-00002.gguf") && is_model("b.gguf"));
        assert!(!is_model("b-00002-of-00002.gguf") && !is_model("mmproj-F16.gguf") && !is_model("b.bin"));
        assert_eq!(parts("b-00001-of-00002.gguf"), ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf"]);
        assert_eq!(parts("b.gguf"), ["b.gguf"]);
    }
}
