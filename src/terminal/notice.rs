//! Messages from inferno to the user, on stderr.

use super::style::{dim, stderr_color, stderr_columns};
use crate::text::{printable, wrapped};

/// Prints a line on stderr, wrapped to the window.
pub fn print(text: &str) {
    eprintln!("{}", wrapped(&printable(text), stderr_columns()));
}

/// Prints a dim line on stderr, wrapped to the window.
pub fn print_dim(text: &str) {
    eprintln!("{}", dim(&wrapped(&printable(text), stderr_columns()), stderr_color()));
}
