//! Runs the tokenizer and the chat template of a model in a sandbox process with limits on memory, CPU time and stack.
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! Tokenizers and chat templates of downloaded models are untrusted.
//! A template is a program, and a hostile tokenizer can take unbounded time and memory.
//! The operating system limits memory and CPU time per process, so inferno uses a sandbox process.
//! The sandbox process is the same executable, started with an internal command-line argument.
//! [`init`] looks for this argument, so `main` must call [`init`] first.
//! The sandbox process serves requests until the model's [`Language`] is dropped.
//! If a request exceeds a limit, the request fails, the sandbox process ends, and the next request starts a new one.
//!
//! Programs that do not call [`init`] or do not run on Linux use tokenizers and templates without a sandbox process.
//! Without a sandbox process, only a template's steps, recursion depth and output size are limited.

#[cfg(target_os = "linux")]
mod client;
#[cfg(target_os = "linux")]
mod limits;
#[cfg(target_os = "linux")]
mod protocol;
#[cfg(target_os = "linux")]
mod server;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;

use crate::language::Language;
use crate::weights::Checkpoint;

/// Whether [`init`] was called. Only then can this program start itself as a sandbox process.
static IS_ENABLED: AtomicBool = AtomicBool::new(false);

/// Lets inferno run tokenizers and chat templates in sandbox processes. Call this function first in `main`.
///
/// In a sandbox process, this function serves requests and never returns.
/// On systems other than Linux, the function has no effect.
pub fn init() {
    #[cfg(target_os = "linux")]
    if std::env::args_os().skip(1).eq([protocol::ARGUMENT]) {
        std::process::exit(server::run());
    }
    IS_ENABLED.store(true, Ordering::Relaxed);
}

/// Loads the tokenizer, chat format, stop tokens and sampling defaults of the snapshot or GGUF file at `dir`.
pub fn load_language(dir: &Path) -> Result<Language> {
    match start(dir) {
        Some(language) => language,
        None => Language::load(dir),
    }
}

/// Like [`load_language`], but reads the open `checkpoint` if the program cannot start sandbox processes.
pub fn load_language_of(dir: &Path, checkpoint: &Checkpoint) -> Result<Language> {
    match start(dir) {
        Some(language) => language,
        None => Language::from_checkpoint(dir, checkpoint),
    }
}

/// Starts a sandbox process that loads the tokenizer and the chat format of the model at `dir`.
/// Returns `None` if the program cannot start sandbox processes.
#[cfg_attr(not(target_os = "linux"), expect(unused_variables))]
fn start(dir: &Path) -> Option<Result<Language>> {
    #[cfg(target_os = "linux")]
    if IS_ENABLED.load(Ordering::Relaxed) {
        return Some(client::Sandbox::load(dir));
    }
    None
}
