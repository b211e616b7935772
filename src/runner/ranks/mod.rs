//! The ranks that run a model together.
//!
//! - `group`: the group of all ranks, in which the first rank sends commands to the followers
//! - `follower`: the thread of a follower, which is a rank other than the first
//! - `command`: the commands that the first rank sends to the followers
//! - `rank_model`: the decoder and the KV cache of one rank
//! - `scored_pass`: a forward pass that also computes the logits of prompt tokens
//! - `failure`: the error messages of a failed rank; `fault`: faults that tests inject into a rank

mod command;
mod failure;
mod fault;
mod follower;
mod group;
mod rank_model;
mod scored_pass;

pub use command::{GraphCommand, RankCache};
pub use failure::{RANK_PANICKED, failure_message};
pub use fault::RankFault;
pub use group::RankGroup;
pub use rank_model::RankModel;
