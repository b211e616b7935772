//! The ranks that run a model together.
//!
//! - `group`: the group of all ranks, in which the first rank sends commands to the followers
//! - `follower`: the thread of a follower, which is a rank other than the first
//! - `command`: the commands that the first rank sends to the followers
//! - `scored_pass`: a forward pass that also computes the logits of prompt tokens
//! - `fault`: faults that tests inject into a rank

mod command;
mod fault;
mod follower;
mod group;
mod scored_pass;

pub use command::GraphCommand;
pub use command::RankCache;
pub use fault::RankFault;
pub use follower::{PANIC, RankModel, failure};
pub use group::RankGroup;
