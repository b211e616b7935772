//! Logging to stderr, enabled by `-v` or RUST_LOG.

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Starts logging: `-v` logs at the info level, and `-vv` at the debug level.
///
/// Without `-v`, RUST_LOG sets the filter, as in `RUST_LOG=inferno::hub=debug`.
pub fn start(verbose: u8) {
    let variable = std::env::var("RUST_LOG").ok().and_then(|value| value.parse::<Targets>().ok());
    let filter = match (verbose, variable) {
        (0, Some(variable)) => variable,
        (0, None) => return,
        (1, _) => Targets::new().with_target("inferno", LevelFilter::INFO),
        _ => Targets::new().with_target("inferno", LevelFilter::DEBUG),
    };
    let format = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).with_target(false);
    // By default, tracing-subscriber reports a failed write to stderr with `eprintln!`, which would panic.
    let format = format.with_timer(tracing_subscriber::fmt::time::uptime()).log_internal_errors(false);
    // Fails only if logging has already started.
    let _ = tracing_subscriber::registry().with(format).with(filter).try_init();
}
