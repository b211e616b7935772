//! Terminal output and control: formatted answers that are redrawn in place, messages, signals and terminal modes.
//!
//! - `view`: shows an assistant turn while it streams, with `markdown`, `styled_text` and `dim_text`
//! - `live_region`: redraws the last lines in place
//! - `notice`: prints messages on stderr; `style`: color support and window width
//! - `interrupt`, `signals`: Ctrl-C and other signals; `modes`: saves and restores the terminal modes

mod dim_text;
pub mod interrupt;
mod live_region;
mod markdown;
#[cfg(unix)]
pub mod modes;
mod notice;
#[cfg(unix)]
mod signals;
mod style;
mod styled_text;
mod view;

pub use live_region::WindowSize;
pub use notice::{print, print_dim, write_stderr};
pub use style::{Color, dim, stderr_color, stdout_color, stdout_columns};
pub use view::TurnView;

/// Saves the terminal modes. They are restored when the program exits, crashes or is ended by a catchable signal.
/// Does nothing outside Unix, or if stdin is not a terminal.
pub fn guard() {
    #[cfg(unix)]
    if modes::save() {
        signals::restore_modes_on_end();
    }
}

/// Makes a write beyond the file size limit (`ulimit -f`) fail instead of ending the program.
pub fn survive_file_size_limit() {
    #[cfg(unix)]
    signals::survive_file_size_limit();
}
