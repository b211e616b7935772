//! Runs the program, checks its errors, and prepares models for it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use super::{at_home, demo_dir};

/// Returns a command that runs inferno with the home directory `home`, an unreachable hub and no input.
pub fn inferno(home: &TempDir) -> Command {
    let mut command = at_home(Command::new(env!("CARGO_BIN_EXE_inferno")), home);
    command.stdin(Stdio::null());
    command
}

/// Runs inferno with an empty home directory and an unreachable hub, and waits until it ends.
pub fn run(args: &[&str]) -> Output {
    inferno(&TempDir::new().unwrap()).args(args).output().unwrap()
}

/// Returns the output of a program as text. Panics on invalid UTF-8.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Asserts that the program failed with exit code `code` and an error message, and that stderr contains all `words`.
pub fn assert_fails(output: &Output, code: i32, words: &[&str]) {
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(message.lines().any(|line| line.starts_with("error: ")), "{message}");
    for word in words {
        assert!(message.contains(word), "the error does not contain {word:?}: {message}");
    }
}

/// Copies the demo model to a temporary folder, for tests that modify the copy.
pub fn copy_of_demo() -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model");
    fs::create_dir(&path).unwrap();
    for entry in fs::read_dir(demo_dir()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), path.join(entry.file_name())).unwrap();
    }
    (folder, path)
}

/// Copies the demo model to a temporary folder and edits its config.json.
pub fn demo_with_config(change: impl FnOnce(&mut Value)) -> (TempDir, PathBuf) {
    let (folder, path) = copy_of_demo();
    let file = path.join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    change(&mut config);
    fs::write(file, config.to_string()).unwrap();
    (folder, path)
}

/// Returns whether the dynamic loader loads no NVIDIA library before `main`.
pub fn libraries_are_loaded_on_demand() -> bool {
    let output = inferno(&TempDir::new().unwrap()).env("LD_TRACE_LOADED_OBJECTS", "1").output().unwrap();
    let loaded = text(&output.stdout);
    !["libcuda.so", "libcublas", "libcurand", "libnvrtc", "libcudart"].iter().any(|library| loaded.contains(library))
}

/// Returns a command that runs a shell script with the environment of an inferno command.
/// In the script, `"$0"` is `path` and `"$@"` is the inferno command.
#[cfg(unix)]
pub fn in_shell(shell: &[&str], script: &str, path: &Path, inferno: &Command) -> Command {
    let mut command = Command::new(shell[0]);
    command.args(&shell[1..]).args(["-c", script]).arg(path).arg(inferno.get_program()).args(inferno.get_args());
    for (name, value) in inferno.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// The command of a shell in its own mount namespace, in which the shell can mount filesystems.
pub const MOUNTING: [&str; 3] = ["unshare", "-Urm", "sh"];

/// Returns whether the current user can mount filesystems in a new mount namespace.
pub fn can_mount() -> bool {
    let output = Command::new(MOUNTING[0]).args(&MOUNTING[1..]).args(["-c", "mount -t tmpfs tmpfs /mnt"]).output();
    output.is_ok_and(|output| output.status.success())
}

/// Returns a command that runs inferno as if the machine had no NVIDIA driver.
/// The dynamic loader finds a broken libcuda.so.1 before any other.
pub fn without_driver(home: &TempDir) -> Command {
    let broken = home.path().join("driver");
    fs::create_dir_all(&broken).unwrap();
    fs::write(broken.join("libcuda.so.1"), "no library").unwrap();
    let folders = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = env::join_paths([broken].into_iter().chain(env::split_paths(&folders))).unwrap();
    let mut command = inferno(home);
    command.env("LD_LIBRARY_PATH", folders);
    command
}
