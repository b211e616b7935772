//! Logging to stderr: the messages that `-v` or RUST_LOG selects, and a server's requests and warnings.

use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::time;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use super::log_writer::LogWriter;
use crate::server::LOG_TARGET;

/// The format of a server's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One line of text per event.
    Text,
    /// One JSON object per event.
    Json,
}

/// Starts logging: `-v` logs at the info level, and `-vv` at the debug level.
///
/// Without `-v`, RUST_LOG sets the filter, as in `RUST_LOG=inferno::hub=debug`.
/// Without either, a server logs its warnings and errors, and other commands log nothing.
/// If `server` is set, also logs the server's requests, unless the filter from RUST_LOG has a level for `LOG_TARGET`.
pub fn start(verbose: u8, server: Option<LogFormat>) {
    let variable = std::env::var("RUST_LOG").ok().and_then(|value| value.parse::<Targets>().ok());
    let filter = match (verbose, variable) {
        (0, Some(variable)) => variable,
        (0, None) if server.is_some() => Targets::new().with_target("inferno", LevelFilter::WARN),
        (0, None) => return,
        (1, _) => Targets::new().with_target("inferno", LevelFilter::INFO),
        _ => Targets::new().with_target("inferno", LevelFilter::DEBUG),
    };
    let has_request_level = filter.iter().any(|(target, _)| target == LOG_TARGET);
    let filter = match server {
        Some(_) if verbose < 2 && !has_request_level => filter.with_target(LOG_TARGET, LevelFilter::INFO),
        _ => filter,
    };
    // By default, tracing-subscriber calls `eprintln!` if a write to stderr fails, and `eprintln!` would panic.
    let format = tracing_subscriber::fmt::layer().log_internal_errors(false).with_ansi(false).with_target(false);
    let format = match server {
        None => format.with_writer(std::io::stderr).with_timer(time::uptime()).boxed(),
        Some(LogFormat::Text) => format.with_writer(LogWriter::start()).boxed(),
        Some(LogFormat::Json) => format.with_writer(LogWriter::start()).json().flatten_event(true).boxed(),
    };
    // `try_init` fails only if logging has already started.
    let _ = tracing_subscriber::registry().with(format).with(filter).try_init();
}
