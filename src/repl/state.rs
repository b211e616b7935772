//! Where the chat keeps its files: `inferno` in the XDG state directory, readable by their owner alone.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// Whether anything of a chat may be written to disk: not with INFERNO_NOHISTORY.
pub fn is_kept() -> bool {
    std::env::var_os("INFERNO_NOHISTORY").is_none_or(|value| value.is_empty() || value == "0")
}

/// `$XDG_STATE_HOME/inferno`, or `~/.local/state/inferno`.
pub fn folder() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let state = state.or_else(|| Some(std::env::home_dir()?.join(".local/state")))?;
    Some(state.join("inferno"))
}

/// Makes a folder for its owner alone. One that is there stays as it is.
pub fn make_folder(path: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Makes a file for its owner alone. Fails if there is one.
pub fn make_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).append(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}
