//! inferno runs open-weight language models on a single NVIDIA GPU.
//!
//! Tensor shapes in the documentation use names, such as `[tokens, hidden]`, or these letters:
//!
//! - T: tokens in the current forward pass
//! - S: length of the KV cache in tokens
//! - H: query heads
//! - K: key/value heads
//! - G: query heads per key/value head, H / K
//! - D: head dimension
//! - C: hidden size, or the columns of a matrix
//! - F: intermediate size
//! - E: experts
//! - N: experts selected per token
//! - V: vocabulary size
//! - R: rows of a matrix
//! - P: (token, expert) pairs, T · N

pub mod chat;
#[doc(hidden)]
pub mod cli;
#[doc(hidden)]
pub mod commands;
#[doc(hidden)]
pub mod conversation;
pub mod device;
pub mod engine;
pub mod error;
pub mod hub;
pub mod kernels;
pub mod language;
pub mod models;
pub mod nn;
#[doc(hidden)]
pub mod repl;
pub mod runner;
pub mod snapshot;
#[doc(hidden)]
pub mod terminal;
#[doc(hidden)]
pub mod text;
pub mod tokenizer;
pub mod weights;

pub use engine::{
    Engine, EngineHandle, Event, FinishReason, GenerateOptions, LoadOptions, Request, RequestStream, SamplingParams,
};
pub use error::Error;
