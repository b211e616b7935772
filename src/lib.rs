//! inferno: open-weight language models on one NVIDIA GPU.
//!
//! Shape letters used throughout: T tokens in this pass, S cached length, H query heads, K key/value heads, G = H/K,
//! D head dim, C hidden size, F intermediate size, E experts, N experts chosen per token, V vocabulary.

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
