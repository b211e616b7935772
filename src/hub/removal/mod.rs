//! Removes downloaded models, leftovers of interrupted downloads, and files that no snapshot uses.

mod deletion;
mod prune;
mod remove;

pub use prune::PrunedRepo;
pub use remove::RemovedModel;
