//! The folder for conversations, the input history and messages that are open in $EDITOR.
//!
//! On Unix, only the user can access the folders that [`create_folder`] creates.

use std::fs::DirBuilder;
use std::io;
use std::path::{Path, PathBuf};

/// Returns whether conversations and the input history are saved.
///
/// INFERNO_NOHISTORY disables saving, unless its value is empty or 0.
pub fn is_enabled() -> bool {
    std::env::var_os("INFERNO_NOHISTORY").is_none_or(|value| value.is_empty() || value == "0")
}

/// Returns `$XDG_STATE_HOME/inferno` if XDG_STATE_HOME is an absolute path, or else `~/.local/state/inferno`.
/// Returns `None` if there is no home directory either.
pub fn path() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let state = state.or_else(|| Some(std::env::home_dir()?.join(".local/state")))?;
    Some(state.join("inferno"))
}

/// Creates a folder and its missing parents. On Unix, only the user can access the new folders.
/// An existing folder keeps its permissions.
pub fn create_folder(path: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}
