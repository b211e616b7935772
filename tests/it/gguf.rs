//! GGUF files: what the gguf package wrote and what hostile hands could.

mod blocks;
mod fuzzed;
mod hostile;
mod reading;
mod splits;
mod tokenizers;
mod writer;
