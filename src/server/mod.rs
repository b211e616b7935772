//! An HTTP server with OpenAI's API.
//!
//! The server is a client of an [`EngineHandle`](crate::EngineHandle) and holds no model code. Every route is in one file
//! or folder:
//!
//! - `chat/`, `completions/`, `responses/`, `admission`, `records`, `models`, `tokenize`, `health`: the routes
//! - `messages/`, `ollama/`: the routes of Anthropic's and ollama's API; `dialect`: their errors
//! - `body`, `generate_options`, `constraint`: read request fields
//! - `generation`, `choice`, `event_stream`: run requests and turn their events into responses
//! - `retries`, `orphans`: join the retry of a request with its answer
//! - `router`, `auth`, `log`, `listener`, `tls`, `write_limit`: everything around a route
//! - `receipt`, `receipt_key`, `receipts`: signed statements about records
//! - `recorder`: keeps records of requests, from which their answers can be computed again
//! - `page`: the chat in the browser, and its files in `page/`
//! - `state`, `options`, `limits`, `metrics`: shared state

mod admission;
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
mod limits;
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
