//! Writes GGUF files, and converts checkpoints and tokenizers to GGUF.

pub mod converter;
pub mod models;
pub mod vocabulary;
pub mod writer;
