//! Downloads models from a Hugging Face hub, and finds, verifies and removes models on this machine.
//!
//! A [`Snapshot`] describes a model on this machine: its name, its commit and the path of its files.
//! inferno finds models by path, or by name in two caches: its own cache, and the shared Hugging Face cache, which
//! Python tools use. inferno writes only to its own cache. The submodules of `hub` are:
//!
//! - `client`, `config`, `limits`: [`Hub`], its caches and its connection settings
//! - `find`, `snapshot`: the models on this machine
//! - `names`, `identity`, `usage`: model names, hashes of model files, and when each model was last used
//! - `cache/`: the layout of the caches, file operations and locks
//! - `remote/`: requests to a hub, and the files of a repository on a hub
//! - `inspect`: describes models on a hub without downloading their weights
//! - `download/`, `filter`, `hash`, `parallel`, `progress`: download files, and verify their hashes
//! - `verify`, `removal/`: check, repair and remove downloaded models
//! - `demo`: the built-in demo model

mod cache;
mod client;
mod config;
pub mod demo;
mod download;
mod filter;
mod find;
mod hash;
mod identity;
mod inspect;
mod limits;
mod names;
mod parallel;
mod progress;
mod remote;
mod removal;
mod snapshot;
mod usage;
mod verify;

pub use client::Hub;
pub use config::{HubConfig, is_loopback};
#[doc(hidden)]
pub use filter::choose_files;
pub use filter::{DownloadName, FileFilter};
pub use find::IncompleteModel;
pub use identity::file_hashes;
pub use inspect::{HubModel, SafetensorsHeader};
pub use limits::Limits;
pub use names::{is_repo_name, shell_word};
pub use progress::Progress;
pub use remote::endpoint::TokenStatus;
#[doc(hidden)]
pub use remote::listing::{FileList, Listing, RemoteFile};
pub use removal::{PrunedRepo, RemovedModel};
pub use snapshot::{FileState, Snapshot, SnapshotSource, VerifiedSnapshot};
