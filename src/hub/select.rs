//! Which of a repository's files are worth fetching.

use anyhow::{Context, Result, bail};
use globset::{Glob, GlobSet, GlobSetBuilder};

use super::cache::{INDEX, SINGLE, shards};

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

/// Which weights are asked for.
pub(super) enum Weights {
    /// What the safetensors index names, or model.safetensors.
    Safetensors,
    /// Whatever matches these patterns instead; `*` crosses slashes, as in `hf download --include`.
    Matching(GlobSet),
}

impl Weights {
    pub fn new(include: &[String]) -> Result<Self> {
        if include.is_empty() {
            return Ok(Self::Safetensors);
        }
        let mut set = GlobSetBuilder::new();
        for pattern in include {
            set.add(Glob::new(pattern).with_context(|| format!("{pattern:?} is not a pattern"))?);
        }
        Ok(Self::Matching(set.build()?))
    }
}

/// Chooses from `files`, small ones first. `index` is the contents of [`INDEX`] where the repository has one.
pub(super) fn choose(
    repo: &str,
    files: &[RemoteFile],
    weights: &Weights,
    index: Option<&[u8]>,
) -> Result<Vec<RemoteFile>> {
    let file = |name: &str| files.iter().find(|file| file.name == name);
    let mut chosen: Vec<RemoteFile> = SMALL.into_iter().filter_map(file).cloned().collect();
    match weights {
        Weights::Matching(set) => {
            if !files.iter().any(|file| set.is_match(&file.name)) {
                bail!("nothing in '{repo}' matches --include; it has {}", some_names(files));
            }
            // The index too: with `--include '*.safetensors'` the shards are of no use without it.
            chosen.extend(file(INDEX).cloned());
            let new = |file: &&RemoteFile| set.is_match(&file.name) && !chosen.iter().any(|c| c.name == file.name);
            let matching: Vec<RemoteFile> = files.iter().filter(new).cloned().collect();
            chosen.extend(matching);
        }
        Weights::Safetensors => {
            let weights = match (index, file(SINGLE)) {
                (Some(index), _) => shards(index)?,
                (None, Some(_)) => vec![SINGLE.to_string()],
                (None, None) => bail!("{}", no_safetensors(repo, files)),
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

/// Says what a repository without loadable weights has instead.
fn no_safetensors(repo: &str, files: &[RemoteFile]) -> String {
    let has = |suffix: &str| files.iter().any(|file| file.name.ends_with(suffix));
    let elsewhere: Vec<&RemoteFile> = files.iter().filter(|file| file.name.ends_with(".safetensors")).collect();
    if let Some(file) = elsewhere.first() {
        return format!(
            "'{repo}' has neither {SINGLE} nor {INDEX}, only safetensors under other names such as {}\n  \
             --include GLOB fetches those",
            file.name
        );
    }
    let seen: Vec<&str> =
        [".gguf", ".bin", ".pth", ".pt", ".onnx", ".msgpack", ".h5"].into_iter().filter(|suffix| has(suffix)).collect();
    let seen = if seen.is_empty() { "no weights at all".to_string() } else { seen.join(", ") };
    format!(
        "'{repo}' has no safetensors weights, which inferno needs; seen there: {seen}\n  \
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

    fn chosen(names: &[&str], include: &[&str], index: Option<&str>) -> Result<Vec<String>> {
        let include: Vec<String> = include.iter().map(|glob| glob.to_string()).collect();
        let chosen = choose("a/b", &files(names), &Weights::new(&include)?, index.map(str::as_bytes))?;
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
        assert!(chosen(&names, &["a{"], None).is_err());
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
    fn other_formats_are_named() {
        let said = |names: &[&str]| chosen(names, &[], None).unwrap_err().to_string();
        assert!(said(&["config.json", "x.gguf", "y.bin"]).contains(".gguf, .bin"));
        assert!(said(&["config.json", "consolidated.safetensors"]).contains("--include"));
        assert!(said(&["README.md"]).contains("no weights at all"));
        assert!(said(&["tokenizer.model", SINGLE, "config.json"]).contains("no tokenizer.json"));
    }
}
