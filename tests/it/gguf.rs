//! Tests of GGUF files: valid files from Python's gguf package, and hostile files.

mod blocks;
pub mod converter;
mod fuzzed;
mod hostile;
pub mod models;
mod quantized;
mod reading;
mod splits;
mod tokenizers;
pub mod writer;
