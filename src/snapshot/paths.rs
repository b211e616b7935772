//! Validates names that become part of a path, such as file names from hubs and shard indexes.

use std::path::{Component, Path};

/// Returns whether `name` is safe to join to a directory: a relative path without empty, `.` or `..` parts.
/// Also returns false for names with control characters, backslashes or more than 512 bytes.
///
/// Callers must check every name from a hub or a shard index before they use it as a path.
pub fn is_safe_path(name: &str) -> bool {
    name.len() <= 512
        && !name.chars().any(|c| c.is_control() || c == '\\')
        && name.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
        && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn safe_paths_stay_below_their_directory() {
        for good in ["config.json", "original/model 1.bin", "refs/pr/1", "v1.0", "..x"] {
            assert!(is_safe_path(good), "{good}");
        }
        for bad in ["", "..", "a/../b", "/etc/passwd", "a//b", "./a", "a/", "a\\b", "a\0b", "a\nb", "\u{1b}[2J"] {
            assert!(!is_safe_path(bad), "{bad:?}");
        }
    }
}
