//! Tests of the command line. The tests of `download`, `verify`, `remove` and `prune` are in `tests/it/hub`.

mod bench;
mod cli;
mod configuration;
mod doctor;
#[cfg(target_os = "linux")]
mod full_disk;
mod show;
pub mod signals;
