//! Parses, validates, encodes and compares the names of models, revisions, files and blobs.
//! A name from a user or a hub must be validated before it becomes part of a path or URL.

use std::collections::BTreeSet;

use anyhow::Result;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::error::Error;
use crate::snapshot::{gguf, is_safe_path};
use crate::text::printable;

/// The default revision of a repository.
pub(super) const MAIN: &str = "main";

/// Returns whether `model` is a valid repository name, with or without `:Q4_K_M` and `@revision`.
pub fn is_repo_name(model: &str) -> bool {
    split_revision(model, None).is_ok_and(|(name, _)| is_repo(gguf::split_tag(name).0))
}

/// Splits `org/name@revision` into the name and the revision. Without `@revision`, returns the argument `revision`.
///
/// Fails if both revisions are set and differ, or if the revision is not a safe path.
pub(super) fn split_revision<'a>(model: &'a str, revision: Option<&'a str>) -> Result<(&'a str, Option<&'a str>)> {
    let (name, inline) = match model.split_once('@') {
        Some((name, inline)) => (name, Some(inline)),
        None => (model, None),
    };
    if let (Some(inline), Some(revision)) = (inline, revision)
        && inline != revision
    {
        let problem = format!(
            "cannot choose a revision: {model:?} contains '{inline}', but --revision is '{revision}'\n  \
             use only one of them"
        );
        return Err(Error::usage(problem));
    }
    let revision = inline.or(revision);
    if let Some(revision) = revision
        && !is_safe_path(revision)
    {
        return Err(Error::usage(format!("{revision:?} is not a valid revision: use a branch, a tag or a commit")));
    }
    Ok((name, revision))
}

/// Returns whether a repository name is valid: `org/name`, or only `name` for the hub's oldest models.
pub(super) fn is_repo(repo: &str) -> bool {
    let is_valid = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
            && !part.starts_with(['.', '-'])
            && !part.ends_with(['.', '-'])
    };
    // A name cannot contain `--`, because directory names in the cache have `--` in place of the slash.
    repo.len() <= 96 && repo.split('/').count() <= 2 && repo.split('/').all(is_valid) && !repo.contains("--")
}

/// Fails if `name` is not a valid repository name.
pub(super) fn check_repo(name: &str) -> Result<()> {
    if is_repo(name) {
        return Ok(());
    }
    Err(Error::usage(format!("{name:?} is not a valid repository name: use org/name, as in openai/gpt-oss-20b")))
}

/// Returns what is wrong with a file name from a hub, such as `is not a valid path in a repository`.
/// Returns `None` for a valid name.
pub(super) fn file_name_problem(name: &str) -> Option<&'static str> {
    if !is_safe_path(name) {
        return Some("is not a valid path in a repository");
    }
    // Reject invisible characters, which could make a file name look like another file name.
    (printable(name) != name).then_some("has invisible characters in its name")
}

/// Quotes a word for a shell command. Returns the word unchanged if it needs no quotes.
///
/// inferno suggests commands with file names from a hub, and users paste these commands into a shell.
pub fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-/:@%+=,".contains(c);
    if !word.is_empty() && !word.starts_with('-') && word.chars().all(is_plain) {
        return word.to_string();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Returns whether `commit` has the form of a full git commit hash, SHA-1 or SHA-256.
pub(super) fn is_commit(commit: &str) -> bool {
    matches!(commit.len(), 40 | 64) && commit.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Returns whether an etag is safe as the file name of a blob. Mirrors may send any text as an etag.
pub(super) fn is_etag(etag: &str) -> bool {
    (1..=128).contains(&etag.len())
        && !etag.starts_with('.')
        && etag.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

/// The characters to percent-encode in one segment of a URL path.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// The characters to percent-encode in a URL path: the characters in [`SEGMENT`], except the slash.
const PATH: &AsciiSet = &SEGMENT.remove(b'/');

/// Percent-encodes the path of a file for a URL, except its slashes, which separate the segments of the URL path.
pub(super) fn encode_path(name: &str) -> String {
    utf8_percent_encode(name, PATH).to_string()
}

/// Percent-encodes a revision for a URL, including its slashes, because a revision is one segment of the URL path.
pub(super) fn encode_segment(name: &str) -> String {
    utf8_percent_encode(name, SEGMENT).to_string()
}

/// Returns the names that match `model`.
///
/// If some names equal `model`, with or without their organization, returns only these names.
/// Otherwise, returns all names that contain `model`, or no names if `model` is empty or has an organization.
/// The comparison ignores case.
pub(super) fn matching<'a>(model: &str, names: &'a BTreeSet<String>) -> Vec<&'a String> {
    let exact: Vec<&String> = names.iter().filter(|name| is_same_name(name, model)).collect();
    let model = model.to_lowercase();
    if !exact.is_empty() || model.is_empty() || model.contains('/') {
        return exact;
    }
    names.iter().filter(|name| name.to_lowercase().contains(&model)).collect()
}

/// Returns whether `model` equals `name`, with or without the organization of `name`. Ignores case.
pub(super) fn is_same_name(name: &str, model: &str) -> bool {
    let last = name.rsplit('/').next().unwrap_or(name);
    name.eq_ignore_ascii_case(model) || last.eq_ignore_ascii_case(model)
}

/// Returns the name that is most similar to `model`, or `None` if no name is similar enough to be what the user meant.
/// The maximum edit distance is a quarter of the length of `model`, but at least 2.
pub(super) fn nearest<'a>(model: &str, names: &'a [String]) -> Option<&'a String> {
    let model = model.to_lowercase();
    let distance = |name: &String| {
        let name = name.to_lowercase();
        let last = name.rsplit('/').next().unwrap_or(&name);
        // If `model` has no organization, compare `model` only with the part of the name after the slash.
        strsim::levenshtein(&model, if model.contains('/') { &name } else { last })
    };
    let (distance, name) = names.iter().map(|name| (distance(name), name)).min()?;
    (distance <= (model.len() / 4).max(2)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repository_names_follow_the_hubs_rule() {
        for good in ["openai/gpt-oss-20b", "gpt2", "a/b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "x_y/z.w"] {
            assert!(is_repo(good), "{good}");
        }
        for bad in ["", "/", "a/", "/a", "a/b/c", "../b", "a/..", "a b/c", "a/b?x", "a--b/c", "a/-b", "a/b.", "ä/b"] {
            assert!(!is_repo(bad), "{bad}");
        }
    }

    #[test]
    fn revision_follows_an_at_sign() {
        assert_eq!(split_revision("a/b", None).unwrap(), ("a/b", None));
        assert_eq!(split_revision("a/b@v1", None).unwrap(), ("a/b", Some("v1")));
        assert_eq!(split_revision("a/b", Some("refs/pr/1")).unwrap(), ("a/b", Some("refs/pr/1")));
        assert!(split_revision("a/b@v1", Some("v2")).is_err());
        assert!(split_revision("a/b@../x", None).is_err());
    }

    #[test]
    fn file_names_are_safe_and_visible() {
        for good in ["config.json", "a b/ü-木星.bin", "README 👍.md", "'; rm -rf ~.gguf"] {
            assert_eq!(file_name_problem(good), None, "{good}");
        }
        for bad in ["../x", "/x", "a\\b", "a\0", "a\nb", "\u{1b}[2J", "\u{9b}", ""] {
            assert_eq!(file_name_problem(bad), Some("is not a valid path in a repository"), "{bad:?}");
        }
        for bad in ["a\u{202e}gpj.exe", "\u{200b}config.json", "a\u{2028}b", "\u{feff}a", "a\u{ad}b", "a\u{e0041}"] {
            assert_eq!(file_name_problem(bad), Some("has invisible characters in its name"), "{bad:?}");
        }
    }

    #[test]
    fn shell_words_are_quoted_if_necessary() {
        for plain in ["org/name:Q4_K_M", "a-1.0@v1"] {
            assert_eq!(shell_word(plain), plain);
        }
        assert_eq!(shell_word("*Q4*"), "'*Q4*'");
        assert_eq!(shell_word("a b"), "'a b'");
        assert_eq!(shell_word("$(x)'; y"), r"'$(x)'\''; y'");
        assert_eq!((shell_word(""), shell_word("-x")), ("''".to_string(), "'-x'".to_string()));
    }

    #[test]
    fn urls_are_percent_encoded() {
        assert_eq!(encode_segment("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(encode_path("a b/c#d?.json"), "a%20b/c%23d%3F.json");
        assert_eq!(encode_path("ü-._~%"), "%C3%BC-._~%25");
    }

    #[test]
    fn part_of_a_name_matches_unless_another_name_is_exact() {
        let names = ["openai/gpt-oss-120b", "openai/gpt-oss-20b", "unsloth/gpt-oss-20b-BF16", "gpt2"];
        let names = BTreeSet::from(names.map(str::to_string));
        let found = |model| matching(model, &names).into_iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(found("120B"), ["openai/gpt-oss-120b"]);
        assert_eq!(found("gpt-oss-20b"), ["openai/gpt-oss-20b"], "an exact match must exclude partial matches");
        assert_eq!(found("oss-20b"), ["openai/gpt-oss-20b", "unsloth/gpt-oss-20b-BF16"]);
        assert_eq!(found("OpenAI/GPT-OSS-20B"), ["openai/gpt-oss-20b"]);
        assert!(found("openai/gpt-oss").is_empty() && found("").is_empty() && found("llama").is_empty());
    }

    #[test]
    fn nearest_name_corrects_typing_errors() {
        let names = ["openai/gpt-oss-20b".to_string(), "meta-llama/Llama-3.2-1B".to_string()];
        assert_eq!(nearest("openai/gpt-os-20b", &names), Some(&names[0]));
        assert_eq!(nearest("llama-3.2-1b", &names), Some(&names[1]));
        assert_eq!(nearest("mistralai/Mistral-7B", &names), None);
        assert_eq!(nearest("gpt2", &names), None);
    }
}
