//! One integration binary: a file for each area.

mod hub;
