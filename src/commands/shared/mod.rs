//! Flags and functions that several subcommands share.

pub mod answer;
pub mod api_keys;
pub mod defaults;
mod load_args;
pub mod log_writer;
pub mod logging;
pub mod progress;
pub mod prompt;
pub mod sampling;

use std::io::IsTerminal;

use anyhow::Result;
use indicatif::{ProgressDrawTarget, ProgressStyle};

use crate::hub::{Hub, Snapshot, demo};
pub use load_args::{LoadArgs, SplitBy, parse_gpu_count};

/// Lists the complete models in the caches, then the demo. Omits the demo if it cannot be written to the cache.
pub fn playable(hub: &Hub) -> Result<Vec<Snapshot>> {
    let mut snapshots = hub.list()?;
    snapshots.extend(hub.find(demo::NAME, None));
    Ok(snapshots)
}

/// Parses a number of seconds from 0.001 to 1,000,000.
pub fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.001..=1e6).contains(seconds));
    seconds.ok_or_else(|| "expected a number of seconds from 0.001 to 1000000".to_string())
}

/// Prints a warning to stderr if an access token is set but not sent, because the connection to the hub is unencrypted.
pub fn warn_about_token(hub: &Hub) {
    if let Some(warning) = hub.token_warning() {
        crate::terminal::print(&format!("warning: {warning}"));
    }
}

/// Prints a dim note to stderr if stderr is a terminal.
pub fn note(text: &str) {
    if std::io::stderr().is_terminal() {
        crate::terminal::print_dim(text);
    }
}

/// Returns the target for progress bars: stderr if it is a terminal, otherwise hidden.
pub fn stderr_target() -> ProgressDrawTarget {
    if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() }
}

pub fn progress_style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
