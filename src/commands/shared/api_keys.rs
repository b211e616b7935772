//! Reads API keys from flags and files.

use std::path::Path;

use anyhow::Result;

use crate::error::Error;
use crate::files;

/// The maximum size of a file with API keys, in bytes.
const MAX_KEY_FILE: u64 = 1 << 20;

/// Returns the API keys. An argument `@FILE` stands for a file with one key per line.
///
/// Fails if a file cannot be read, if a key is not one or more printable ASCII characters without spaces,
/// or if there are arguments but no keys.
pub fn read(arguments: &[String]) -> Result<Vec<String>> {
    let mut keys = Vec::new();
    for argument in arguments {
        match argument.strip_prefix('@') {
            Some(path) => {
                let text = files::read_input_text(Path::new(path), MAX_KEY_FILE)?;
                keys.extend(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_string));
            }
            None => keys.push(argument.clone()),
        }
    }
    let is_valid = |key: &String| !key.is_empty() && key.chars().all(|c| c.is_ascii_graphic());
    if keys.iter().all(is_valid) && (arguments.is_empty() || !keys.is_empty()) {
        Ok(keys)
    } else {
        Err(Error::usage(
            "cannot use the API keys: a key must be one or more printable ASCII characters without spaces, \
             and a file must contain a key",
        ))
    }
}
