//! Limits the number of requests. Its modules are:
//!
//! - `admission`: admits requests up to a limit, and leaves room for every client
//! - `free_times`: estimates when the client of a rejected request should retry

mod admission;
mod free_times;

pub use admission::{Admission, Permit};
