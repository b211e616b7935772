//! Ctrl-C ends an answer, not the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

/// Whether another program, such as $EDITOR, has the terminal and gets the Ctrl-C.
static IS_SUSPENDED: AtomicBool = AtomicBool::new(false);

/// Makes Ctrl-C set `cancel`, which ends a generation. A second Ctrl-C before that took effect ends the process.
pub fn cancel_on_ctrl_c(cancel: Arc<AtomicBool>) -> Result<()> {
    ctrlc::set_handler(move || {
        if !IS_SUSPENDED.load(Ordering::Relaxed) && cancel.swap(true, Ordering::Relaxed) {
            #[cfg(unix)]
            super::modes::restore();
            std::process::exit(130);
        }
    })
    .context("cannot handle Ctrl-C")
}

/// Runs `call` while Ctrl-C is ignored here, because it is meant for a program that `call` starts.
pub fn ignore_ctrl_c_during<T>(call: impl FnOnce() -> T) -> T {
    IS_SUSPENDED.store(true, Ordering::Relaxed);
    let result = call();
    IS_SUSPENDED.store(false, Ordering::Relaxed);
    result
}
