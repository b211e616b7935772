//! Limits the number of sequences that wait or run at once. The modules are:
//!
//! - `admission`: admits sequences up to a limit, and usually leaves some capacity to other tenants
//! - `end_times`: estimates how long it takes until running sequences have ended

mod admission;
mod end_times;

pub use admission::{Admission, Permit};
