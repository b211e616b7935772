//! Tests of GGUF files: headers, blocks, hostile files, sharded models, tokenizers, and the logits of whole models.

mod blocks;
mod hostile;
pub mod models;
mod quantized;
mod reading;
mod shards;
mod tokenizers;
