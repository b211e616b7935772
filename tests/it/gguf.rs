//! Tests of GGUF files: headers, hostile files, split models, tokenizers, and the logits of whole models.

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
