//! One integration binary, so that a CUDA build's tests are one file to carry to a machine with a GPU.

mod bench;
mod chat;
mod cli;
mod compressed;
mod configuration;
mod conversation;
mod doctor;
mod engine;
#[cfg(feature = "cuda")]
mod executor;
mod families;
mod floors;
mod full_size;
mod gguf;
mod golden;
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
