//! Faults that tests inject into a running engine.

use anyhow::{Result, bail};

/// What goes wrong in the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The step fails. Later steps work.
    Step,
    /// The step fails, and the device no longer works. After an illegal memory access, CUDA behaves like this.
    Device,
    /// The engine thread panics.
    Panic,
}

impl Fault {
    /// Fails or panics like a step with this fault.
    pub fn strike(self) -> Result<()> {
        match self {
            Fault::Step => bail!("injected fault of a step"),
            Fault::Device => bail!("injected fault of the device"),
            Fault::Panic => panic!("injected panic of the engine thread"),
        }
    }
}
