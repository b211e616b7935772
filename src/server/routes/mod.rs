//! Routes that belong to none of the APIs of OpenAI, Anthropic and ollama. The modules of this folder are:
//!
//! - `admission_preview`: reports whether and when a request would start
//! - `health`: reports the health, the load and the metrics of the server
//! - `receipts`, `records`: return the signed receipts and the records of requests
//! - `tokenize`: converts between text and token ids

pub mod admission_preview;
pub mod health;
pub mod receipts;
pub mod records;
pub mod tokenize;
