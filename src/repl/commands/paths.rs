//! Paths as a person types them behind a command.

use std::path::PathBuf;

/// Without what a shell would take away: quotes around all of it, and the backslashes that Tab puts before spaces.
pub fn typed(path: &str) -> String {
    let path = path.trim();
    for quote in ['"', '\''] {
        if let Some(inner) = path.strip_prefix(quote).and_then(|path| path.strip_suffix(quote)) {
            return inner.to_string();
        }
    }
    path.replace("\\ ", " ")
}

/// With a home for `~`.
pub fn expanded(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => path.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_as_a_shell_takes_them() {
        for (as_typed, meant) in [
            ("a.txt", "a.txt"),
            ("a\\ b.txt ", "a b.txt"),
            ("\"a b.txt\"", "a b.txt"),
            ("'a b.txt'", "a b.txt"),
            ("\"", "\""),
            ("it's", "it's"),
        ] {
            assert_eq!(typed(as_typed), meant);
        }
        assert!(expanded("~/x").is_absolute());
    }
}
