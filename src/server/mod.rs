//! An HTTP server with the APIs of OpenAI, Anthropic and ollama.
//!
//! The server is a client of an [`EngineHandle`](crate::EngineHandle) and contains no model code.
//! Its modules are:
//!
//! - `openai/`, `anthropic/`, `ollama/`: the routes of these APIs; `dialect`: the error format of each API
//! - `routes/`: health, load, metrics, records, receipts, tokenization and the admission preview
//! - `generation/`: runs requests and turns their events into the parts of responses
//! - `http/`: request bodies, errors, access control and logging
//! - `connections/`: accepts, encrypts and closes connections
//! - `limits/`: limits the number of sequences, and estimates when the client should retry a rejected request
//! - `records/`: keeps records of requests, and signs receipts
//! - `router`: maps paths to route handlers, and runs shared code before and after each handler
//! - `retries`, `orphans`: let the retry of a request receive the answer to an earlier attempt
//! - `page/`: the chat page for browsers
//! - `state`, `options`, `metrics/`: the state, options and metrics that all handlers share
//! - `tenant`: the tenant of a request; `ids`: random ids, API keys and seeds

mod anthropic;
mod connections;
mod dialect;
mod generation;
mod http;
mod ids;
mod limits;
mod metrics;
mod ollama;
mod openai;
mod options;
mod orphans;
mod page;
mod records;
mod retries;
mod router;
mod routes;
mod state;
mod tenant;

pub use connections::{bind, read_tls, serve};
pub use http::log::TARGET as LOG_TARGET;
pub use ids::api_key as new_api_key;
pub use options::{ServerOptions, Timeouts};
pub use records::{PublicKey, Receipt, ReceiptKey, RecordOptions};
pub use router::router;
pub use state::ServerState;
