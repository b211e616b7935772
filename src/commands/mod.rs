//! The subcommands. Each module except `shared` defines the flags, help text and `run` function of one subcommand.

pub mod bench;
pub mod completions;
pub mod doctor;
pub mod download;
pub mod health;
pub mod list;
pub mod perplexity;
pub mod play;
pub mod prune;
pub mod receipt;
pub mod remove;
pub mod replay;
pub mod serve;
pub mod shared;
pub mod show;
pub mod tokenize;
pub mod verify;
