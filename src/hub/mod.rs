//! Finds models on this machine and downloads them from a Hugging Face hub.
//!
//! A [`Snapshot`] describes a model on this machine: its name, its commit and the path of its files.
//! inferno finds models in two caches: its own cache, and the Hugging Face cache that Python tools share.
//! inferno writes only to its own cache. Instead of a model's name, a user can pass the path of a directory or file.
//! The submodules of `hub` are:
//!
//! - `client`, `config`, `limits`: [`Hub`], its caches and its connection settings
//! - `find`, `snapshot`: the models on this machine
//! - `names`, `identity`, `usage`: the names, the file hashes and the times of last use of models
//! - `cache`, `disk`, `lock`: the layout of the caches, file operations and locks
//! - `remote`, `retry`, `endpoint`: requests to a hub
//! - `listing`: the files of a repository on a hub
//! - `inspect`: describes models that are not downloaded
//! - `download/`, `filter`, `hash`, `parallel`, `progress`: download files, and verify their hashes
//! - `verify`, `remove`, `prune`, `deletion`: check, repair and remove downloaded models
//! - `demo`: the built-in demo model

mod cache;
mod client;
mod config;
mod deletion;
pub mod demo;
mod disk;
mod download;
mod endpoint;
mod filter;
mod find;
mod hash;
mod identity;
mod inspect;
mod limits;
mod listing;
mod lock;
mod names;
mod parallel;
mod progress;
mod prune;
mod remote;
mod remove;
mod retry;
mod snapshot;
mod usage;
mod verify;

pub use client::Hub;
pub use config::{HubConfig, is_loopback};
pub use endpoint::TokenStatus;
#[doc(hidden)]
pub use filter::choose_files;
pub use filter::{DownloadName, FileFilter};
pub use find::IncompleteModel;
pub use identity::file_hashes;
pub use inspect::{HubModel, SafetensorsHeader};
pub use limits::Limits;
#[doc(hidden)]
pub use listing::{FileList, Listing, RemoteFile};
pub use names::{is_repo_name, shell_word};
pub use progress::Progress;
pub use prune::PrunedRepo;
pub use remove::RemovedModel;
pub use snapshot::{FileState, Snapshot, SnapshotSource, VerifiedSnapshot};
