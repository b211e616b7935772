//! The routes that generate no text. Its modules are:
//!
//! - `admission_preview`: tells whether and when a request would start
//! - `health`: the state of the server, its load and its metrics
//! - `models`: the served model
//! - `receipts`, `records`: records of requests, and signed statements about them
//! - `tokenize`: converts between text and token ids

pub mod admission_preview;
pub mod health;
pub mod models;
pub mod receipts;
pub mod records;
pub mod tokenize;
