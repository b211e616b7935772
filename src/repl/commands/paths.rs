//! Paths as the user types them after a command.

use std::path::PathBuf;

/// Removes the quotes around a path, or the backslashes that Tab completion puts before spaces.
pub fn unquote(path: &str) -> String {
    let path = path.trim();
    for quote in ['"', '\''] {
        if let Some(inner) = path.strip_prefix(quote).and_then(|path| path.strip_suffix(quote)) {
            return inner.to_string();
        }
    }
    path.replace("\\ ", " ")
}

/// Replaces `~/` at the start of a path with the home directory.
pub fn expand_home(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => path.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_unquoted_as_in_a_shell() {
        for (typed, path) in [
            ("a.txt", "a.txt"),
            ("a\\ b.txt ", "a b.txt"),
            ("\"a b.txt\"", "a b.txt"),
            ("'a b.txt'", "a b.txt"),
            ("\"", "\""),
            ("it's", "it's"),
        ] {
            assert_eq!(unquote(typed), path);
        }
        assert!(expand_home("~/x").is_absolute());
    }
}
