//! Tests of the command line. The tests of `download`, `verify` and other commands of the hub are in `hub`.

mod bench;
mod cli;
mod configuration;
mod doctor;
#[cfg(target_os = "linux")]
mod full_disk;
mod show;
mod signals;
