//! What a one-shot call asks.

use std::fs::File;
use std::io::{IsTerminal, Read, Seek, stdin};

use anyhow::{Context, Result};

use crate::error::Error;

/// More than any context holds.
const LARGEST: u64 = 64 << 20;

/// The prompt of a one-shot call, none for a chat: `--prompt`, or else standard input if it is piped.
///
/// With `--prompt`, standard input is read only where it is sure to end: a file, from its start. A pipe may be what a
/// script or a service left open for good, and a file that was read in part belongs to a loop around this call
/// (`while read ..; do inferno ..; done < list`); `--stdin` says that it is meant.
pub fn one_shot(prompt: Option<&str>, read_stdin: bool, raw: bool, json: bool) -> Result<Option<String>> {
    let none = || Error::usage("there is no prompt: give --prompt TEXT, or pipe one in");
    match prompt {
        Some("") => Err(none()),
        Some(prompt) if read_stdin || is_file_at_its_start() => Ok(Some(behind(prompt, &piped(raw)?, raw))),
        Some(prompt) => Ok(Some(prompt.to_string())),
        None if stdin().is_terminal() && json => Err(none()),
        None if stdin().is_terminal() => Ok(None),
        None => match piped(raw)? {
            text if text.is_empty() => Err(none()),
            text => Ok(Some(text)),
        },
    }
}

fn behind(prompt: &str, text: &str, raw: bool) -> String {
    match text {
        "" => prompt.to_string(),
        text if raw => format!("{prompt}{text}"),
        text => format!("{prompt}\n\n{text}"),
    }
}

fn piped(raw: bool) -> Result<String> {
    let mut piped = String::new();
    stdin().take(LARGEST + 1).read_to_string(&mut piped).context("standard input is not UTF-8 text")?;
    if piped.len() as u64 > LARGEST {
        return Err(Error::usage("standard input is larger than any context"));
    }
    // A text to continue is taken to the letter; after a question, the line end that `echo` adds means nothing.
    Ok(if raw { piped } else { piped.trim_end_matches(['\n', '\r']).to_string() })
}

#[cfg(unix)]
fn is_file_at_its_start() -> bool {
    use std::os::fd::AsFd;
    let Ok(mut file) = stdin().as_fd().try_clone_to_owned().map(File::from) else { return false };
    file.metadata().is_ok_and(|metadata| metadata.is_file()) && file.stream_position().is_ok_and(|at| at == 0)
}

#[cfg(not(unix))]
fn is_file_at_its_start() -> bool {
    false
}
