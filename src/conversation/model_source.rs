//! The interface through which a conversation finds and loads models.

use anyhow::{Result, bail};

use super::settings::SettingValues;
use crate::engine::{Engine, SamplingParams};
use crate::hub::Snapshot;
use crate::language::Language;

/// Finds and loads models.
///
/// The command line implements this trait, so conversations do not depend on flags or progress bars.
pub trait ModelSource {
    /// Finds a model on this machine by its name or by a unique part of its name.
    fn find(&self, name: &str) -> Result<Snapshot>;

    /// Loads a model that [`find`](Self::find) returned.
    fn load(&self, snapshot: &Snapshot) -> Result<LoadedModel>;

    /// Returns the names of all models on this machine.
    fn names(&self) -> Vec<String>;
}

/// A loaded model with its settings.
pub struct LoadedModel {
    pub engine: Engine,
    /// The model's default sampling parameters, overridden by the user's settings.
    pub sampling: SamplingParams,
    /// Settings for this model from the configuration file.
    pub configured: SettingValues,
}

/// The error that ends a chat: neither the requested model nor the previous one could be loaded.
#[derive(Debug, thiserror::Error)]
#[error("no model is loaded")]
pub struct NoModelLoaded;

/// Returns an error if the model has no chat format.
pub fn require_chat_format(language: &Language, name: &str) -> Result<()> {
    match language.chat {
        Some(_) => Ok(()),
        None => bail!("cannot chat with {name}: it has no chat format\n  continue a text: inferno play {name} --raw"),
    }
}
