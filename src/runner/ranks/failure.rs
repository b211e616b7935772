//! The error messages of a failed rank.

use crate::world::World;

/// The reason to pass to [`failure_message`] if the thread of a rank has panicked.
pub const RANK_PANICKED: &str = "its thread panicked";

/// Returns the error message that all ranks get if the rank of `world` fails because of `reason`.
pub fn failure_message(world: &World, reason: &str) -> String {
    format!("GPU {} of {} failed: {reason}; the other GPUs were stopped", world.rank() + 1, world.size())
}
