//! Converts panics in the `tokenizers` library into errors.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use anyhow::{Result, bail};

use crate::text::library_error;

thread_local! {
    /// Whether the panic hook prints nothing on this thread, because panics are caught and reported as errors.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// A guard that silences panic messages on this thread, once [`guarded`] has installed its panic hook.
/// The caller must catch the panics.
pub struct SilencedPanics {
    /// Whether an outer guard already silences panic messages.
    was_guarded: bool,
}

impl SilencedPanics {
    pub fn new() -> Self {
        Self { was_guarded: GUARDED.replace(true) }
    }
}

impl Drop for SilencedPanics {
    fn drop(&mut self) {
        GUARDED.set(self.was_guarded);
    }
}

/// Runs `call` and converts its errors and panics to errors that start with `cannot {action}`.
pub fn guarded<T, E: std::fmt::Display>(action: &str, call: impl FnOnce() -> Result<T, E>) -> Result<T> {
    // The panic hook prints its message before the panic can be caught, so the hook itself must be silenced.
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print_message = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                print_message(info);
            }
        }));
    });
    let silenced = SilencedPanics::new();
    let result = catch_unwind(AssertUnwindSafe(call));
    drop(silenced);
    match result {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => bail!("cannot {action}: {}", library_error(&error)),
        Err(_) => bail!("cannot {action}: the tokenizer is inconsistent and caused a panic in the tokenizers library"),
    }
}
