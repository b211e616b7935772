//! Limits the number of sequences that wait or run at once. The modules are:
//!
//! - `admission`: admits sequences up to a limit, and limits the share of each tenant
//! - `end_times`: estimates how long it takes until running sequences have ended

mod admission;
mod end_times;

pub use admission::{Admission, Permit};
