//! All integration tests in one binary: one file to copy to a machine with a GPU.

/// The `#[test]` of this binary, which replaces the built-in one in every module.
#[macro_use]
extern crate inferno_test_macros;

/// Prints through the harness, which shows the output of failed tests only.
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

mod bench;
mod chat;
mod cli;
mod compressed;
mod configuration;
mod conversation;
#[cfg(feature = "cuda")]
mod decode_graph;
mod docs;
mod doctor;
mod engine;
mod examples;
mod families;
mod floors;
mod full_size;
mod gguf;
mod golden;
mod harness;
mod hub;
mod interrupted;
mod journal;
mod kernels;
mod memory;
mod odd_terminals;
mod quantized;
mod render;
mod screen;
mod show;
mod support;
mod terminal;
mod tokenizer;
mod weights;

fn main() -> std::process::ExitCode {
    harness::main()
}
