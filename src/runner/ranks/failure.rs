//! The failure of a rank: its error message, and faults that tests inject.

use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::world::World;

/// The reason to pass to [`failure_message`] if the thread of a rank has panicked.
pub const RANK_PANICKED: &str = "its thread panicked";

/// Returns the error message that all ranks get if the rank of `world` fails because of `reason`.
pub fn failure_message(world: &World, reason: &str) -> String {
    format!("GPU {} of {} failed: {reason}; the other GPUs were stopped", world.rank() + 1, world.size())
}

/// How a rank fails in a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankFault {
    /// The rank returns an error.
    Error,
    /// The thread of the rank panics.
    Panic,
    /// The thread of the rank stops answering but does not end.
    Hang,
}

impl RankFault {
    /// Makes the calling rank fail: returns an error, panics, or never returns.
    pub fn inject(self) -> Result<()> {
        match self {
            RankFault::Error => bail!("injected fault of a rank"),
            RankFault::Panic => panic!("injected panic of a rank"),
            RankFault::Hang => loop {
                thread::sleep(Duration::from_secs(3600));
            },
        }
    }
}
