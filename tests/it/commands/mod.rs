//! Tests of the command line. `tests/it/hub` has the tests of `download`, `verify` and other commands for the cache.

mod bench;
mod cli;
mod configuration;
mod doctor;
#[cfg(target_os = "linux")]
mod full_disk;
mod show;
mod signals;
