//! Chats in a pseudo terminal. Tests read their output as a stream of text, while `screen` emulates a screen.

use std::process::Command;

use rexpect::session::{PtySession, spawn_command};
use tempfile::TempDir;

use super::at_home;

/// Starts a chat on the CPU.
pub fn play(home: &TempDir, args: &[&str]) -> PtySession {
    play_with(home, &[args, &["--device", "cpu"]].concat(), &[])
}

/// Starts a chat with a model that a server runs.
#[cfg(unix)]
pub fn play_url(home: &TempDir, url: &str, args: &[&str]) -> PtySession {
    play_with(home, &[&["--url", url], args].concat(), &[])
}

/// Starts a chat with additional environment variables. Unlike [`play`], adds no `--device cpu`.
pub fn play_with(home: &TempDir, args: &[&str], environment: &[(&str, &str)]) -> PtySession {
    let mut command = at_home(Command::new(env!("CARGO_BIN_EXE_inferno")), home);
    command.envs(environment.iter().copied()).arg("play").args(args);
    // Use a long timeout, because a debug build on a busy machine is slow.
    spawn_command(command, Some(120_000)).unwrap()
}

/// Waits until `text` appears in the output after the match of the previous call. Returns the output before `text`.
/// Panics if the program exits first, or after 120 s.
pub fn expect(session: &mut PtySession, text: &str) -> String {
    session.exp_string(text).unwrap_or_else(|error| panic!("the output does not contain {text:?}: {error}"))
}
