//! The routes that do not generate text. Its modules are:
//!
//! - `admission_preview`: reports whether and when a request would start
//! - `health`: the health, the load and the metrics of the server
//! - `models`: the served model
//! - `receipts`, `records`: records of requests, and signed receipts
//! - `tokenize`: converts between text and token ids

pub mod admission_preview;
pub mod health;
pub mod models;
pub mod receipts;
pub mod records;
pub mod tokenize;
