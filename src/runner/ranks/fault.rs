//! Faults that tests inject into a rank.

use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};

/// How a rank fails.
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
