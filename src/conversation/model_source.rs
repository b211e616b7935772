//! Where a chat gets its models from.

use anyhow::{Result, bail};

use super::settings::SettingValues;
use crate::engine::{Engine, SamplingParams};
use crate::hub::Snapshot;
use crate::language::Language;

/// Finds and loads models. The command line implements it, since a conversation knows neither flags nor progress bars.
pub trait ModelSource {
    /// Finds a model on this machine by its name, or by a unique part of it.
    fn find(&self, name: &str) -> Result<Snapshot>;

    /// Loads a model that [`find`](Self::find) returned.
    fn load(&self, snapshot: &Snapshot) -> Result<LoadedModel>;

    /// Returns the names of all models on this machine.
    fn names(&self) -> Vec<String>;
}

/// A loaded model with its settings.
pub struct LoadedModel {
    pub engine: Engine,
    /// The model's own defaults, overridden by what was requested.
    pub sampling: SamplingParams,
    /// What the configuration file sets for this model.
    pub configured: SettingValues,
}

/// Neither the requested model nor the previous one could be loaded, so the chat must end.
#[derive(Debug, thiserror::Error)]
#[error("no model is loaded any more")]
pub struct NoModelLoaded;

/// Fails for a model that can only continue texts.
pub fn require_chat_format(language: &Language, name: &str) -> Result<()> {
    match language.chat {
        Some(_) => Ok(()),
        None => bail!("cannot chat with {name}: it has no chat format\n  continue a text: inferno play {name} --raw"),
    }
}
