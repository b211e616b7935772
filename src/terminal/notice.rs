//! Messages from inferno to the user, on stderr.

use std::io::Write;

use super::style::{dim, stderr_color, stderr_columns};
use crate::text::{printable, wrapped};

/// Prints a message on stderr, wrapped to the window.
/// Escapes control and invisible characters, except newlines and tabs.
pub fn print(text: &str) {
    write_stderr(&format!("{}\n", wrapped(&printable(text), stderr_columns())));
}

/// Prints a message like [`print`], but dim if stderr supports color.
pub fn print_dim(text: &str) {
    write_stderr(&format!("{}\n", dim(&wrapped(&printable(text), stderr_columns()), stderr_color())));
}

/// Writes text to stderr. Errors are ignored, because a closed stderr or a full disk must not end the program.
pub fn write_stderr(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}
