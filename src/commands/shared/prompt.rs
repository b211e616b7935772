//! Builds the prompt for one-shot mode from `--prompt` and standard input.

use std::fs::File;
use std::io::{IsTerminal, Read, Seek, stdin};

use anyhow::{Context, Result};

use crate::error::Error;
use crate::files;

/// The maximum size of standard input, in bytes. The limit keeps an endless pipe from filling the memory.
const MAX_BYTES: u64 = 64 << 20;

/// Returns the prompt for one-shot mode, or `None` for an interactive chat.
/// Fails if the prompt is empty, if `json` is true and there is no prompt, or if standard input is too large or not
/// valid UTF-8.
///
/// Without `--prompt`, standard input is the prompt, unless it is a terminal.
/// With `--prompt` and `--stdin`, standard input is appended to the prompt.
/// With `--prompt` alone, standard input is appended only on Unix, and only if it is a regular file at offset 0.
/// Otherwise, standard input is not read, for two reasons:
/// - A pipe may never end, because a script or a service may keep it open.
/// - A partly read file is probably the input of a shell loop, as in `while read ..; do inferno ..; done < list`.
pub fn one_shot(prompt: Option<&str>, append_stdin: bool, raw: bool, json: bool) -> Result<Option<String>> {
    const USE: &str = "use --prompt TEXT, or pipe a prompt to standard input";
    match prompt {
        Some("") => Err(Error::usage("the prompt is empty: give --prompt a text")),
        Some(prompt) if append_stdin || is_file_at_start() => Ok(Some(join(prompt, &read_stdin(raw)?, raw))),
        Some(prompt) => Ok(Some(prompt.to_string())),
        None if stdin().is_terminal() && json => Err(Error::usage(format!("no prompt given: {USE}"))),
        None if stdin().is_terminal() => Ok(None),
        None => match read_stdin(raw)? {
            text if text.is_empty() => {
                Err(Error::usage(format!("no prompt given, and standard input is empty: {USE}")))
            }
            text => Ok(Some(text)),
        },
    }
}

fn join(prompt: &str, text: &str, raw: bool) -> String {
    match text {
        "" => prompt.to_string(),
        text if raw => format!("{prompt}{text}"),
        text => format!("{prompt}\n\n{text}"),
    }
}

fn read_stdin(raw: bool) -> Result<String> {
    let failed = "cannot read standard input";
    let mut bytes = Vec::new();
    stdin().take(MAX_BYTES + 1).read_to_end(&mut bytes).context(failed)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Error::usage(format!("{failed}: it is larger than {} MiB", MAX_BYTES >> 20)));
    }
    let text = files::to_text(failed, bytes)?;
    // With --raw, keep the text unchanged. Otherwise, drop trailing line breaks, such as the one from `echo`.
    Ok(if raw { text } else { text.trim_end_matches(['\n', '\r']).to_string() })
}

#[cfg(unix)]
fn is_file_at_start() -> bool {
    use std::os::fd::AsFd;
    let Ok(mut file) = stdin().as_fd().try_clone_to_owned().map(File::from) else { return false };
    let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
    is_file && file.stream_position().is_ok_and(|position| position == 0)
}

#[cfg(not(unix))]
fn is_file_at_start() -> bool {
    false
}
