//! Tests of GGUF files: headers, blocks, hostile files, split models, tokenizers, and the logits of whole models.

mod blocks;
mod hostile;
pub mod models;
mod quantized;
mod reading;
mod splits;
mod tokenizers;
