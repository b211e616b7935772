//! Limits the number of requests. Its modules are:
//!
//! - `admission`: admits requests up to a limit, and leaves room for every client
//! - `free_times`: estimates how long a rejected request should wait

mod admission;
mod free_times;

pub use admission::{Admission, Permit};
