//! GGUF files: what the gguf package wrote and what hostile hands could.

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
