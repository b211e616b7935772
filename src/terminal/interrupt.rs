//! Makes Ctrl-C stop the current answer. Until the answer has stopped, a second Ctrl-C ends the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

/// Whether to ignore Ctrl-C because another program, such as $EDITOR, controls the terminal.
static IS_SUSPENDED: AtomicBool = AtomicBool::new(false);

/// Installs a Ctrl-C handler that sets `cancel`, which stops the current generation.
///
/// If `cancel` is already set when the user presses Ctrl-C, the process exits with code 130.
pub fn cancel_on_ctrl_c(cancel: Arc<AtomicBool>) -> Result<()> {
    ctrlc::set_handler(move || {
        if !IS_SUSPENDED.load(Ordering::Relaxed) && cancel.swap(true, Ordering::Relaxed) {
            // On exit, the function that `modes::save` registered restores the terminal modes.
            std::process::exit(130);
        }
    })
    .context("cannot handle Ctrl-C")
}

/// Ignores Ctrl-C while `call` runs, because the program that `call` starts handles Ctrl-C.
pub fn ignore_ctrl_c_during<T>(call: impl FnOnce() -> T) -> T {
    IS_SUSPENDED.store(true, Ordering::Relaxed);
    let result = call();
    IS_SUSPENDED.store(false, Ordering::Relaxed);
    result
}
