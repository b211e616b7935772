//! An HTTP server with the APIs of OpenAI, Anthropic and ollama.
//!
//! The server is a client of an [`EngineHandle`](crate::EngineHandle) and contains no model code.
//! Its modules are:
//!
//! - `chat/`, `completions/`, `responses/`, `models`: the routes of OpenAI's API
//! - `messages/`, `ollama/`: the routes of Anthropic's and ollama's APIs; `dialect`: the error formats of these APIs
//! - `admission_preview`, `records`, `tokenize`, `health`: other routes
//! - `body`, `generate_options`, `constraint`: read request fields
//! - `admission`, `free_times`: limit the number of requests, and estimate how long a rejected request should wait
//! - `generation`, `choice`, `event_stream`: run requests and turn their events into responses
//! - `reply`, `usage`, `ids`, `error`: the parts of responses that several routes share
//! - `retries`, `orphans`: let the retry of a request receive the answer to the first attempt
//! - `router`, `auth`, `log`, `listener`, `tls`, `write_limit`: routing, access, logging and connections
//! - `receipt`, `receipt_key`, `receipts`: sign statements about records
//! - `recorder`: keeps records of requests, so that their answers can be reproduced
//! - `page`: the chat page for browsers, with its files in `page/`
//! - `state`, `options`, `metrics`: shared state

mod admission;
mod admission_preview;
mod auth;
mod body;
mod chat;
mod choice;
mod completions;
mod constraint;
mod dialect;
mod error;
mod event_stream;
mod free_times;
mod generate_options;
mod generation;
mod health;
mod ids;
mod listener;
mod log;
mod messages;
mod metrics;
mod models;
mod ollama;
mod options;
mod orphans;
mod page;
mod receipt;
mod receipt_key;
mod receipts;
mod recorder;
mod records;
mod reply;
mod responses;
mod retries;
mod router;
mod state;
mod tls;
mod tokenize;
mod usage;
mod write_limit;

pub use ids::api_key as new_api_key;
pub use listener::{bind, serve};
pub use log::TARGET as LOG_TARGET;
pub use options::{RecordOptions, ServerOptions, Timeouts};
pub use receipt::Receipt;
pub use receipt_key::{PublicKey, ReceiptKey};
pub use router::router;
pub use state::Server;
pub use tls::read_tls;
