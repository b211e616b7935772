//! Paths as the user types them after a command.

use std::path::PathBuf;

use rustyline::completion::unescape;

/// Removes the quotes around a path, and the backslashes that Tab completion puts before special characters.
/// Between single quotes, a backslash is an ordinary character.
pub fn unquote(path: &str) -> String {
    let path = path.trim_start();
    let trimmed = path.trim_end();
    // Keep a trailing space that follows a backslash, because it is part of the name.
    let path = if trimmed.ends_with('\\') { &path[..path.len().min(trimmed.len() + 1)] } else { trimmed };
    let quoted = |quote: char| path.strip_prefix(quote)?.strip_suffix(quote);
    match (quoted('\''), quoted('"')) {
        (Some(inner), _) => inner.to_string(),
        (None, Some(inner)) => unescape(inner, Some('\\')).into_owned(),
        (None, None) => unescape(path, Some('\\')).into_owned(),
    }
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
            ("report\\ \\(1).txt", "report (1).txt"),
            ("a\\\\b", "a\\b"),
            ("\"a\\$b.txt\"", "a$b.txt"),
            ("'a\\b'", "a\\b"),
            ("ends\\  ", "ends "),
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
