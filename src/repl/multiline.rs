//! Multi-line messages: `"""` around the message, or `\` at the end of each line but the last.

const QUOTES: &str = "\"\"\"";

/// Returns whether a message needs more lines to be complete.
pub fn is_incomplete(input: &str) -> bool {
    match input.trim().strip_prefix(QUOTES) {
        Some(text) => !text.ends_with(QUOTES),
        None => input.ends_with('\\'),
    }
}

/// Returns a message without the quotes or backslashes that made it multi-line.
pub fn message(input: &str) -> String {
    match input.trim().strip_prefix(QUOTES) {
        Some(text) => text.strip_suffix(QUOTES).unwrap_or(text).trim().to_string(),
        None => input.replace("\\\n", "\n"),
    }
}
