//! Limits the number of concurrent requests. Its modules are:
//!
//! - `admission`: admits requests up to a limit, and reserves capacity for other clients
//! - `free_times`: estimates when the client of a rejected request should retry

mod admission;
mod free_times;

pub use admission::{Admission, Permit};
