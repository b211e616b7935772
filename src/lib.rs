//! inferno runs open-weight language models on one or more NVIDIA GPUs.
//!
//! [`hub::Hub`] finds a model, [`Engine::builder`] loads it, and [`EngineHandle::submit`] generates an answer.
//!
//! ```no_run
#![doc = include_str!("../examples/blocking.rs")]
//! ```
//!
//! docs/library.md explains how to use the library, and the folder `examples/` has complete programs.
//!
//! # Stable API
//!
//! The stable API follows [semantic versioning](https://semver.org). Before version 1.0, only a new minor version, such
//! as 0.2.0, can break programs that use it. The stable API consists of:
//!
//! - the types and functions at the root of the crate, such as [`Engine`], [`Request`], [`Error`] and [`init`]
//! - the documented types in [`engine`] itself, such as [`engine::EngineBuilder`], [`engine::ModelInfo`] and
//!   [`engine::Summary`]
//! - the modules [`error`] and [`hub`]
//! - in [`chat`]: [`Message`](chat::Message), [`Role`](chat::Role), [`ToolCall`](chat::ToolCall),
//!   [`RenderOptions`](chat::RenderOptions), [`ReasoningEffort`](chat::ReasoningEffort), [`today`](chat::today),
//!   [`Rendered`](chat::Rendered), [`Channel`](chat::Channel), [`Delta`](chat::Delta) and
//!   [`FormatViolations`](chat::FormatViolations)
//! - in [`device`]: [`DeviceChoice`](device::DeviceChoice), [`Devices`](device::Devices), [`Split`](device::Split),
//!   [`DeviceInfo`](device::DeviceInfo) and [`MAX_RANKS`](device::MAX_RANKS)
//! - types of other modules that the items above use: [`AttentionBackend`](kernels::attention::AttentionBackend),
//!   [`QuantizationTarget`](weights::quantized::QuantizationTarget), [`ExecutionMode`](runner::ExecutionMode),
//!   [`NoDecodeGraphReason`](runner::NoDecodeGraphReason), [`Language`](language::Language) and
//!   [`Tokenizer`](tokenizer::Tokenizer)
//!
//! Everything else is internal and can change in any release: it is public only for inferno's own program, tests,
//! benchmarks and fuzz targets. Methods and fields with an internal type in their signature are internal too, such as
//! [`EngineHandle::with_runner`].
//!
//! # Tensor shapes
//!
//! The tensor shapes in the documentation, such as `[tokens, hidden]`, use these names:
//!
//! - `tokens`: tokens in the current forward pass
//! - `sequences`: sequences in the current forward pass
//! - `vocab`: vocabulary size
//! - `hidden`: hidden size
//! - `intermediate`: intermediate size of an MLP, or of one expert
//! - `heads`, `kv_heads`: query heads and key/value heads
//! - `head_dim`: size of one head
//! - `rotated`: number of elements at the start of a head that RoPE rotates
//! - `positions`: number of positions that a RoPE table or a position embedding covers
//! - `blocks`: entries of a block table; each block holds 64 positions of the KV cache
//! - `experts`: experts per layer
//! - `chosen`: experts selected per token
//! - `pairs`: number of (token, expert) pairs, equal to tokens · chosen
//! - `out`, `in`: output and input size of a linear layer
//! - `rows`, `columns`: numbers of rows and columns for which no name above fits
//!
//! In CUDA comments, `T` is the element type that a kernel is compiled for.

#![deny(
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "these macros panic if the stream is closed or the disk is full; use `writeln!` or `terminal`"
)]

pub mod chat;
#[doc(hidden)]
pub mod cli;
#[doc(hidden)]
pub mod client;
#[doc(hidden)]
pub mod commands;
#[doc(hidden)]
pub mod conversation;
pub mod device;
pub mod engine;
pub mod error;
#[doc(hidden)]
pub mod files;
pub mod hub;
pub mod kernels;
pub mod language;
pub mod models;
pub mod nn;
#[doc(hidden)]
pub mod repl;
pub mod runner;
pub mod sandbox;
#[doc(hidden)]
pub mod server;
pub mod snapshot;
#[doc(hidden)]
pub mod terminal;
#[doc(hidden)]
pub mod text;
pub mod tokenizer;
pub mod weights;
pub mod world;

pub use engine::{
    Engine, EngineHandle, Event, FinishReason, GenerateOptions, LoadOptions, Request, RequestStream, SamplingParams,
};
pub use error::Error;
pub use sandbox::init;
