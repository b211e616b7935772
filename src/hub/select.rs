//! Which of a repository's files are worth fetching.

use anyhow::{Context, Result, bail};
use globset::{Glob, GlobSet, GlobSetBuilder};

use crate::error::Error;
use crate::snapshot::gguf;
use crate::snapshot::safetensors::{INDEX, SINGLE_FILE, ShardIndex};

/// Taken whenever the repository has them; all lie at its root.
const SMALL: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];

/// A file in a repository, as far as the hub has told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteFile {
    /// Path inside the repository; checked to stay there.
    pub name: String,
    pub bytes: Option<u64>,
    /// Names the blob: SHA-256 for large files, git's blob SHA-1 for small ones.
    pub etag: Option<String>,
}

/// Which files of a repository are asked for, as glob patterns; what a model needs if there are none.
#[derive(Clone, Debug, Default)]
pub struct Pick {
    /// These instead of the weights; `*` crosses slashes, as in `hf download --include`.
    pub include: Vec<String>,
    /// None of these.
    pub exclude: Vec<String>,
}

/// A [`Pick`] whose patterns were understood.
pub(super) struct Choice {
    /// What replaces the safetensors that the index names, or model.safetensors.
    include: Option<GlobSet>,
    exclude: GlobSet,
}

impl Choice {
    pub fn new(pick: &Pick) -> Result<Self> {
        let include = if pick.include.is_empty() { None } else { Some(globs(&pick.include)?) };
        Ok(Self { include, exclude: globs(&pick.exclude)? })
    }

    /// Whether the index decides which weights are fetched.
    pub fn needs_index(&self) -> bool {
        self.include.is_none()
    }
}

fn globs(patterns: &[String]) -> Result<GlobSet> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        let wrong = |error| Error::Usage(format!("{pattern:?} is not a pattern: {error}"));
        set.add(Glob::new(pattern).map_err(wrong)?);
    }
    Ok(set.build()?)
}

/// Chooses from `files`, small ones first. `index` is the contents of [`INDEX`] where the repository has one.
pub(super) fn choose(
    repo: &str,
    files: &[RemoteFile],
    choice: &Choice,
    index: Option<&[u8]>,
) -> Result<Vec<RemoteFile>> {
    let mut chosen = included(repo, files, choice, index)?;
    chosen.retain(|file| !choice.exclude.is_match(&file.name));
    if chosen.is_empty() {
        bail!("--exclude leaves nothing of '{repo}'; it has {}", some_names(files));
    }
    Ok(chosen)
}

fn included(repo: &str, files: &[RemoteFile], choice: &Choice, index: Option<&[u8]>) -> Result<Vec<RemoteFile>> {
    let file = |name: &str| files.iter().find(|file| file.name == name);
    let mut chosen: Vec<RemoteFile> = SMALL.into_iter().filter_map(file).cloned().collect();
    match &choice.include {
        Some(set) => {
            if !files.iter().any(|file| set.is_match(&file.name)) {
                bail!("nothing in '{repo}' matches --include; it has {}", some_names(files));
            }
            // The index too: with `--include '*.safetensors'` the shards are of no use without it.
            chosen.extend(file(INDEX).cloned());
            let new = |file: &&RemoteFile| set.is_match(&file.name) && !chosen.iter().any(|c| c.name == file.name);
            let matching: Vec<RemoteFile> = files.iter().filter(new).cloned().collect();
            chosen.extend(matching);
        }
        None => {
            if index.is_none() && file(SINGLE_FILE).is_none() {
                chosen.extend(only_gguf(repo, files)?);
                return Ok(chosen);
            }
            let weights = match (index, file(SINGLE_FILE)) {
                (Some(index), _) => ShardIndex::parse(index)?.shards().into_iter().map(str::to_string).collect(),
                (None, _) => vec![SINGLE_FILE.to_string()],
            };
            // Better now than after gigabytes: without these two nothing can be loaded.
            for needed in ["config.json", "tokenizer.json"] {
                if file(needed).is_none() {
                    bail!("'{repo}' has no {needed}, which inferno needs; it has {}", some_names(files));
                }
            }
            if index.is_some() {
                chosen.extend(file(INDEX).cloned());
            }
            for name in weights {
                chosen
                    .push(file(&name).with_context(|| format!("'{repo}' lacks {name}, which {INDEX} names"))?.clone());
            }
        }
    }
    Ok(chosen)
}

/// All parts of a GGUF model that is named by its first one.
fn parts(repo: &str, files: &[RemoteFile], first: &RemoteFile) -> Result<Vec<RemoteFile>> {
    let (folder, name) = first.name.rsplit_once('/').map_or(("", first.name.as_str()), |(folder, name)| (folder, name));
    let path = |name: String| if folder.is_empty() { name } else { format!("{folder}/{name}") };
    let part = |name: String| {
        let path = path(name);
        let found = files.iter().find(|file| file.name == path).cloned();
        found.with_context(|| format!("'{repo}' lacks {path}, a part of {}", first.name))
    };
    gguf::part_names(name).into_iter().map(part).collect()
}

/// Bytes of all parts, as far as that is told.
fn bytes(repo: &str, files: &[RemoteFile], first: &RemoteFile) -> Option<u64> {
    parts(repo, files, first).unwrap_or_default().iter().map(|part| part.bytes).sum()
}

/// The files of the GGUF model that is to be looked at: of the only one, or of the one that `wanted` names. None if the
/// repository has no GGUF model, and nobody asked for one.
pub(super) fn gguf_to_show(repo: &str, files: &[RemoteFile], wanted: Option<&str>) -> Result<Option<Vec<RemoteFile>>> {
    let models: Vec<&RemoteFile> = files.iter().filter(|file| gguf::is_model_name(&file.name)).collect();
    let meant: Vec<&&RemoteFile> =
        models.iter().filter(|file| wanted.is_none_or(|wanted| gguf::matches_tag(&file.name, wanted))).collect();
    let list = || {
        let names: Vec<&str> = models.iter().map(|file| file.name.as_str()).collect();
        let line = |(name, file): (String, &&RemoteFile)| {
            gguf::size_line(&format!("inferno show {name} --remote"), bytes(repo, files, file))
        };
        gguf::model_names(repo, &names).into_iter().zip(&models).map(line).collect::<Vec<_>>().join("\n")
    };
    match (&meant[..], wanted) {
        ([one], _) => parts(repo, files, one).map(Some),
        ([], None) => Ok(None),
        ([], Some(wanted)) => {
            let hint = match models.is_empty() {
                true => format!("there is no GGUF file in it; it has {}", some_names(files)),
                false => format!("no GGUF file of it is called so; there are:\n{}", list()),
            };
            Err(Error::ModelNotFound { model: format!("{repo}:{wanted}"), hint }.into())
        }
        _ => Err(Error::Usage(format!("'{repo}' has several GGUF models; choose one:\n{}", list())).into()),
    }
}

/// The files of the only GGUF model of a repository without safetensors. Of several one must be asked for.
fn only_gguf(repo: &str, files: &[RemoteFile]) -> Result<Vec<RemoteFile>> {
    let models: Vec<&RemoteFile> = files.iter().filter(|file| gguf::is_model_name(&file.name)).collect();
    match models[..] {
        [] => bail!("{}", no_safetensors(repo, files)),
        [one] => parts(repo, files, one),
        [first, ..] => {
            let line = |first: &&RemoteFile| gguf::size_line(&first.name, bytes(repo, files, first));
            let list: Vec<String> = models.iter().map(line).collect();
            let tag =
                gguf::tag(models.iter().find(|file| file.name.contains("Q4_K_M")).unwrap_or(&first).name.as_str());
            let problem = format!(
                "'{repo}' has several GGUF models; choose one, as in\n  inferno download {repo} --include '*{tag}*'\n{}",
                list.join("\n")
            );
            Err(Error::Usage(problem).into())
        }
    }
}

/// Says what a repository without loadable weights has instead.
fn no_safetensors(repo: &str, files: &[RemoteFile]) -> String {
    let has = |suffix: &str| files.iter().any(|file| file.name.ends_with(suffix));
    let elsewhere: Vec<&RemoteFile> = files.iter().filter(|file| file.name.ends_with(".safetensors")).collect();
    if let Some(file) = elsewhere.first() {
        return format!(
            "'{repo}' has neither {SINGLE_FILE} nor {INDEX}, only safetensors under other names such as {}\n  \
             --include GLOB fetches those",
            file.name
        );
    }
    let seen: Vec<&str> =
        [".bin", ".pth", ".pt", ".onnx", ".msgpack", ".h5"].into_iter().filter(|suffix| has(suffix)).collect();
    let seen = if seen.is_empty() { "no weights at all".to_string() } else { seen.join(", ") };
    format!(
        "'{repo}' has neither safetensors nor GGUF weights, which inferno needs; seen there: {seen}\n  \
         look for a safetensors version of the model (a converted copy, or the original repository)"
    )
}

/// A few file names for an error message.
fn some_names(files: &[RemoteFile]) -> String {
    const SHOWN: usize = 8;
    let names: Vec<&str> = files.iter().take(SHOWN).map(|file| file.name.as_str()).collect();
    match files.len() {
        0 => "no files".to_string(),
        count if count > SHOWN => format!("{} and {} more", names.join(", "), count - SHOWN),
        _ => names.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<RemoteFile> {
        names.iter().map(|name| RemoteFile { name: name.to_string(), bytes: None, etag: None }).collect()
    }

    fn chosen(names: &[&str], patterns: &[&str], index: Option<&str>) -> Result<Vec<String>> {
        let of = |exclude| patterns.iter().filter(move |glob| glob.starts_with('!') == exclude);
        let strings = |exclude| of(exclude).map(|glob| glob.trim_start_matches('!').to_string()).collect();
        let choice = Choice::new(&Pick { include: strings(false), exclude: strings(true) })?;
        let chosen = choose("a/b", &files(names), &choice, index.map(str::as_bytes))?;
        Ok(chosen.into_iter().map(|file| file.name).collect())
    }

    #[test]
    fn only_what_a_model_needs() {
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
        assert_eq!(chosen(&names, &[], None).unwrap(), ["config.json", "tokenizer.json", "model.safetensors"]);
        let included = chosen(&names, &["original/*", "*.bin"], None).unwrap();
        let originals = ["original/model.safetensors", "metal/model.bin", "original/config.json"];
        assert_eq!(included, [&["config.json", "tokenizer.json", "pytorch_model.bin"][..], &originals].concat());
        assert!(chosen(&names, &["*.gguf"], None).unwrap_err().to_string().contains("nothing in 'a/b' matches"));
        let without = chosen(&names, &["original/*", "!*.json"], None).unwrap();
        assert_eq!(without, ["original/model.safetensors"]);
        assert_eq!(chosen(&names, &["!*.safetensors"], None).unwrap(), ["config.json", "tokenizer.json"]);
        assert!(chosen(&names, &["!*"], None).unwrap_err().to_string().contains("leaves nothing"));
        assert!(chosen(&names, &["a{"], None).is_err() && chosen(&names, &["!a{"], None).is_err());
    }

    #[test]
    fn the_index_decides() {
        let names = ["config.json", "tokenizer.json", INDEX, "s1.safetensors", "s2.safetensors", "s3.safetensors"];
        let index = r#"{"metadata":{},"weight_map":{"a":"s2.safetensors","b":"s1.safetensors","c":"s2.safetensors"}}"#;
        let all = ["config.json", "tokenizer.json", INDEX, "s1.safetensors", "s2.safetensors"];
        assert_eq!(chosen(&names, &[], Some(index)).unwrap(), all);
        for (index, said) in [
            (r#"{"weight_map":{"a":"../../x"}}"#, "refused"),
            (r#"{"weight_map":{"a":"/etc/passwd"}}"#, "refused"),
            (r#"{"weight_map":{"a":"s9.safetensors"}}"#, "lacks s9.safetensors"),
            (r#"{"weight_map":{}}"#, "no shards"),
            ("<html>", "not a shard index"),
        ] {
            let error = format!("{:#}", chosen(&names, &[], Some(index)).unwrap_err());
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn gguf_files_are_models() {
        assert_eq!(chosen(&["README.md", "m-Q8_0.gguf", "mmproj.gguf"], &[], None).unwrap(), ["m-Q8_0.gguf"]);
        let parts = ["config.json", "q/m-Q8_0-00001-of-00002.gguf", "q/m-Q8_0-00002-of-00002.gguf"];
        assert_eq!(chosen(&parts, &[], None).unwrap(), parts);
        assert!(chosen(&parts[..2], &[], None).unwrap_err().to_string().contains("lacks q/m-Q8_0-00002-of-00002.gguf"));
        let several = ["m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"];
        let error = chosen(&several, &[], None).unwrap_err().to_string();
        assert!(
            error.contains("inferno download a/b --include '*Q4_K_M*'") && error.contains("m-Q2_K.gguf"),
            "{error}"
        );
        assert!(!error.contains("00002-of-00002"), "{error}");
        assert_eq!(chosen(&several, &["*Q4_K_M*"], None).unwrap(), ["m-Q4_K_M.gguf"]);
    }

    #[test]
    fn other_formats_are_named() {
        let said = |names: &[&str]| chosen(names, &[], None).unwrap_err().to_string();
        assert!(said(&["config.json", "x.pt", "y.bin"]).contains(".bin, .pt"));
        assert!(said(&["config.json", "consolidated.safetensors"]).contains("--include"));
        assert!(said(&["README.md"]).contains("no weights at all"));
        assert!(said(&["tokenizer.model", SINGLE_FILE, "config.json"]).contains("no tokenizer.json"));
    }
}
