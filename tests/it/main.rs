//! The integration tests in Rust, in one binary that can be copied to a machine with a GPU.
//!
//! - `kernels`, `quantized`, `models`, `weights`: kernels, quantized matrices, forward passes, model files
//! - `runner`, `ranks`, `engine`: steps, models divided among ranks, requests
//! - `tokenizer`, `chat`: tokenizers and chat formats
//! - `hub`, `commands`: downloads, cached models, the command line
//! - `conversation`, `terminal`, `render`: conversations in a terminal
//! - `serve`: the HTTP server
//! - `hostile`: untrusted files and prompts
//! - `docs`, `layers`, `examples`: documentation, import rules, library examples
//! - `harness`, `support`: the test runner and helpers

/// Provides `#[test]`, which replaces the built-in attribute in every module, and `cuda_modules!`.
#[macro_use]
extern crate inferno_test_macros;

/// Like `print!` and `eprintln!` below, passes the text to the harness.
/// The harness shows captured text only if the test fails.
#[allow(unused_macros)]
macro_rules! println {
    () => { crate::harness::print(format_args!("\n")) };
    ($($arguments:tt)*) => { crate::harness::print(format_args!("{}\n", format_args!($($arguments)*))) };
}
#[allow(unused_macros)]
macro_rules! print {
    ($($arguments:tt)*) => { crate::harness::print(format_args!($($arguments)*)) };
}
#[allow(unused_macros)]
macro_rules! eprintln {
    ($($arguments:tt)*) => { println!($($arguments)*) };
}

mod chat;
mod commands;
mod conversation;
mod docs;
mod engine;
mod examples;
mod harness;
mod hostile;
mod hub;
mod kernels;
mod layers;
mod models;
mod quantized;
mod ranks;
mod render;
mod runner;
#[cfg(unix)]
mod serve;
mod support;
mod terminal;
mod tokenizer;
mod weights;

fn main() -> std::process::ExitCode {
    inferno::init();
    commands::signals::crash_if_requested();
    harness::main()
}
