//! GGUF files: valid files from Python's gguf package, and hostile ones.

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
