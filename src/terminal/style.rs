//! Color support and width of the terminals on stdout and stderr.

use std::io::IsTerminal;

use console::Term;

/// Whether output may contain colors and styles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Color {
    On,
    Off,
}

/// Returns whether to use color on stderr. Color is off if stderr is not a terminal.
/// A nonempty `NO_COLOR` (no-color.org) and `TERM=dumb` also turn color off.
pub fn stderr_color() -> Color {
    color(std::io::stderr().is_terminal())
}

/// Returns whether to use color on stdout, by the same rules as on stderr.
/// Without color, the callers do not format Markdown either.
pub fn stdout_color() -> Color {
    color(std::io::stdout().is_terminal())
}

fn color(is_terminal: bool) -> Color {
    let is_refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    if is_terminal && !is_refused && !is_dumb { Color::On } else { Color::Off }
}

/// Returns the width of the terminal on stdout in columns, or `None` if it is unknown.
pub fn stdout_columns() -> Option<usize> {
    columns(&Term::stdout())
}

/// Returns the width of the terminal on stderr in columns, or `None` if it is unknown.
pub fn stderr_columns() -> Option<usize> {
    columns(&Term::stderr())
}

fn columns(terminal: &Term) -> Option<usize> {
    let (_, columns) = terminal.size_checked()?;
    Some(usize::from(columns)).filter(|columns| *columns > 0)
}

/// Returns `text`, dimmed if `color` is on.
pub fn dim(text: &str, color: Color) -> String {
    match color {
        Color::On if !text.is_empty() => format!("\x1b[2m{text}\x1b[22m"),
        _ => text.to_string(),
    }
}
