//! Terminal output for the chat and for one-shot answers: styles, Markdown and a view that is redrawn in place.

pub mod interrupt;
mod live_region;
mod markdown;
#[cfg(unix)]
pub mod modes;
mod notice;
mod reasoning;
mod style;
mod styled_text;
mod view;

pub use live_region::WindowSize;
pub use notice::{print, print_dim};
pub use style::{Color, dim, stderr_color, stdout_color, stdout_columns};
pub use view::TurnView;

/// Saves the terminal modes and restores them if a signal ends the chat.
///
/// Call this before any other thread starts.
pub fn guard() {
    #[cfg(unix)]
    modes::guard();
}
