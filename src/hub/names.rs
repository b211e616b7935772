//! Names from people and from servers, checked before one becomes a path or a URL.

use std::collections::BTreeSet;

use anyhow::Result;

use crate::error::Error;
use crate::snapshot::is_safe_path;
use crate::text;

/// Splits `org/name@revision`; a revision given apart as well must be the same one.
pub(super) fn split_revision<'a>(model: &'a str, revision: Option<&'a str>) -> Result<(&'a str, Option<&'a str>)> {
    let (name, inline) = match model.split_once('@') {
        Some((name, inline)) => (name, Some(inline)),
        None => (model, None),
    };
    if let (Some(inline), Some(revision)) = (inline, revision)
        && inline != revision
    {
        let problem = format!("two revisions are asked for: '{inline}' in {model:?}, and '{revision}'");
        return Err(Error::Usage(problem).into());
    }
    let revision = inline.or(revision);
    if let Some(revision) = revision
        && !is_safe_path(revision)
    {
        let problem = format!("{revision:?} is not a revision: write a branch, a tag or a commit");
        return Err(Error::Usage(problem).into());
    }
    Ok((name, revision))
}

/// The hub's own rule: `org/name`, or a bare `name` for its oldest models.
pub(super) fn is_repo(repo: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
            && !part.starts_with(['.', '-'])
            && !part.ends_with(['.', '-'])
    };
    // `--` stands for the slash in the cache's folder names, so a name cannot hold it.
    repo.len() <= 96 && repo.split('/').count() <= 2 && repo.split('/').all(part) && !repo.contains("--")
}

/// A full git commit id: SHA-1 or SHA-256.
pub(super) fn is_commit(commit: &str) -> bool {
    matches!(commit.len(), 40 | 64) && commit.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Whether an etag can name a blob: on the hub a hash, on mirrors some other plain word.
pub(super) fn is_etag(etag: &str) -> bool {
    (1..=128).contains(&etag.len())
        && !etag.starts_with('.')
        && etag.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

/// Percent-encodes a file name for a URL, slashes kept.
pub(super) fn url_path(name: &str) -> String {
    escape(name, b"-._~/")
}

/// Percent-encodes a revision for a URL: its slashes too, since it is one segment there.
pub(super) fn url_segment(name: &str) -> String {
    escape(name, b"-._~")
}

fn escape(name: &str, plain: &[u8]) -> String {
    let mut url = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || plain.contains(&byte) {
            url.push(char::from(byte));
        } else {
            url.push_str(&format!("%{byte:02X}"));
        }
    }
    url
}

/// The names that `model` stands for: itself, else those that are written otherwise or have another organization, else
/// those that it is a part of. A name with its organization is no part: whoever writes all of it means no other.
pub(super) fn meant<'a>(model: &str, names: &'a BTreeSet<String>) -> Vec<&'a String> {
    let found: Vec<&String> = names.iter().filter(|name| is_called(name, model)).collect();
    let model = model.to_lowercase();
    if !found.is_empty() || model.is_empty() || model.contains('/') {
        return found;
    }
    names.iter().filter(|name| name.to_lowercase().contains(&model)).collect()
}

/// Whether `model` is all of a name, in whatever letters, or all but its organization.
pub(super) fn is_called(name: &str, model: &str) -> bool {
    let last = name.rsplit('/').next().unwrap_or(name);
    name.eq_ignore_ascii_case(model) || last.eq_ignore_ascii_case(model)
}

/// The name most like `model`, if one is close enough to be a slip of the hand.
pub(super) fn nearest<'a>(model: &str, names: &'a [String]) -> Option<&'a String> {
    let model = model.to_lowercase();
    let distance = |name: &String| {
        let name = name.to_lowercase();
        let last = name.rsplit('/').next().unwrap_or(&name);
        // Without an organization only the last part can be compared.
        text::edits(&model, if model.contains('/') { &name } else { last })
    };
    let (distance, name) = names.iter().map(|name| (distance(name), name)).min()?;
    (distance <= (model.len() / 4).max(2)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories() {
        for good in ["openai/gpt-oss-20b", "gpt2", "a/b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "x_y/z.w"] {
            assert!(is_repo(good), "{good}");
        }
        for bad in ["", "/", "a/", "/a", "a/b/c", "../b", "a/..", "a b/c", "a/b?x", "a--b/c", "a/-b", "a/b.", "ä/b"] {
            assert!(!is_repo(bad), "{bad}");
        }
    }

    #[test]
    fn revisions() {
        assert_eq!(split_revision("a/b", None).unwrap(), ("a/b", None));
        assert_eq!(split_revision("a/b@v1", None).unwrap(), ("a/b", Some("v1")));
        assert_eq!(split_revision("a/b", Some("refs/pr/1")).unwrap(), ("a/b", Some("refs/pr/1")));
        assert!(split_revision("a/b@v1", Some("v2")).is_err());
        assert!(split_revision("a/b@../x", None).is_err());
        assert_eq!(url_segment("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(url_path("a b/c#d?.json"), "a%20b/c%23d%3F.json");
    }

    #[test]
    fn parts_of_names() {
        let names = ["openai/gpt-oss-120b", "openai/gpt-oss-20b", "unsloth/gpt-oss-20b-BF16", "gpt2"];
        let names = BTreeSet::from(names.map(str::to_string));
        let found = |model| meant(model, &names).into_iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(found("120B"), ["openai/gpt-oss-120b"]);
        assert_eq!(found("gpt-oss-20b"), ["openai/gpt-oss-20b"], "all of a name counts before a part of another");
        assert_eq!(found("oss-20b"), ["openai/gpt-oss-20b", "unsloth/gpt-oss-20b-BF16"]);
        assert_eq!(found("OpenAI/GPT-OSS-20B"), ["openai/gpt-oss-20b"]);
        assert!(found("openai/gpt-oss").is_empty() && found("").is_empty() && found("llama").is_empty());
    }

    #[test]
    fn slips_of_the_hand() {
        let names = ["openai/gpt-oss-20b".to_string(), "meta-llama/Llama-3.2-1B".to_string()];
        assert_eq!(nearest("openai/gpt-os-20b", &names), Some(&names[0]));
        assert_eq!(nearest("llama-3.2-1b", &names), Some(&names[1]));
        assert_eq!(nearest("mistralai/Mistral-7B", &names), None);
        assert_eq!(nearest("gpt2", &names), None);
    }
}
