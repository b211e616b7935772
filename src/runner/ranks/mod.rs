//! The ranks that run a model together.
//!
//! - `group`: the group of all ranks, in which the first rank sends commands to the followers
//! - `follower`: the thread of a follower, which is a rank other than the first
//! - `command`: the commands that the first rank sends to the followers
//! - `rank_model`: the decoder and the KV cache of one rank, and the plan of its decode graph
//! - `scored_pass`: a forward pass that also computes the logits of prompt tokens
//! - `failure`: the error message of a failed rank, and faults that tests inject into a rank

mod command;
mod failure;
mod follower;
mod group;
mod rank_model;
mod scored_pass;

pub use command::RankCache;
pub use failure::{RANK_PANICKED, RankFault, failure_message};
pub use group::RankGroup;
pub(super) use rank_model::PlannedGraph;
pub use rank_model::RankModel;
