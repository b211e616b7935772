//! All integration tests, in one binary that can be copied to a machine with a GPU.
//!
//! - `kernels`, `quantized`, `models`, `weights`: kernels, forward passes and model files
//! - `runner`, `ranks`, `engine`: steps, several devices, requests
//! - `tokenizer`, `chat`: tokens and chat formats
//! - `hub`, `commands`: downloads and commands
//! - `conversation`, `terminal`, `render`: conversations in a terminal
//! - `serve`: the HTTP server
//! - `hostile`: untrusted files and prompts
//! - `docs`, `layers`, `examples`: the repository itself
//! - `harness`, `support`: helpers

/// Provides `#[test]`, which replaces the built-in attribute in every module.
#[macro_use]
extern crate inferno_test_macros;

/// Passes printed text to the harness. Captured text is shown only if the test fails.
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
    harness::main()
}
