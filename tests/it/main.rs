//! All integration tests, in one binary that can be copied to a machine with a GPU.
//!
//! - kernels and layers: `kernels`, `quantized`, `decode_graph`
//! - models against transformers: `golden`, `full_size`
//! - configurations and checkpoint formats: `families`, `gguf`, `compressed`
//! - tokenizers and chat formats: `tokenizer`, `chat`
//! - several devices: `ranks`, `rank_mistakes`, `rank_faults`, `ranks_on_gpus`
//! - engine: `engine`, `sampling`, `engine_options`, `queued_steps`, `deterministic`
//! - engine outputs and caches: `prompt_logprobs`, `constraint`, `prefix_file`
//! - parts of the engine, with a virtual clock or random operations: `scheduler`, `fairness`, `blocks`
//! - weights and memory: `weights`, `memory`, `truncated`; the hub: `hub`, `show`
//! - server: `serve`
//! - command line: `cli`, `configuration`, `bench`, `doctor`, `examples`
//! - terminal: `conversation`, `journal`, `terminal`, `terminal_variants`, `render`, `signals`
//! - untrusted input and faults: `hostile_files`, `hostile_language`, `fuzz_corpus`, `full_disk`
//! - the repository itself: `docs`, `layers`
//! - helpers: `harness`, `support`

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

mod bench;
mod blocks;
mod chat;
mod cli;
mod compressed;
mod configuration;
mod constraint;
mod conversation;
#[cfg(feature = "cuda")]
mod decode_graph;
mod deterministic;
mod docs;
mod doctor;
mod engine;
mod engine_options;
mod examples;
mod fairness;
mod families;
#[cfg(target_os = "linux")]
mod full_disk;
mod full_size;
mod fuzz_corpus;
mod gguf;
mod golden;
mod harness;
mod hostile_files;
mod hostile_language;
mod hub;
mod journal;
mod kernels;
mod layers;
mod memory;
mod prefix_file;
mod prompt_logprobs;
mod quantized;
mod queued_steps;
mod rank_faults;
mod rank_mistakes;
mod ranks;
#[cfg(feature = "cuda")]
mod ranks_on_gpus;
mod render;
mod sampling;
mod scheduler;
#[cfg(unix)]
mod serve;
mod show;
mod signals;
mod support;
mod terminal;
mod terminal_variants;
mod tokenizer;
mod truncated;
mod weights;

fn main() -> std::process::ExitCode {
    inferno::init();
    harness::main()
}
