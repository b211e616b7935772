//! The ranks of a model that several devices run together.
//!
//! - `followers`: all ranks except the first, as the runner sees them: sends them commands, and reports their failures
//! - `follower`: the thread of one such rank
//! - `command`: the commands that the first rank sends
//! - `fault`: faults that tests inject into a rank
//! - `parts`: the decoder and the KV cache of one rank

mod command;
mod fault;
mod follower;
mod followers;
mod parts;

pub use command::GraphCommand;
pub use command::RankCache;
pub use fault::RankFault;
pub use follower::{PANIC, failure};
pub use followers::Followers;
pub use parts::RankParts;
