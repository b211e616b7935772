//! The interface through which a conversation finds and loads models.

use anyhow::{Result, bail};

use super::backend::Backend;
use super::settings::SettingValues;
use crate::engine::SamplingParams;
use crate::hub::Snapshot;
use crate::language::Language;

/// Finds and loads models.
///
/// `inferno play` implements this trait, so that conversations do not depend on its flags and progress bars.
pub trait ModelSource {
    /// Finds a model by its name, by a unique part of its name or, on this machine, by its path.
    /// Fails if no model or several models match, or if the model or its settings cannot be used.
    fn find(&self, name: &str) -> Result<ModelId>;

    /// Loads a model that [`find`](Self::find) returned.
    fn load(&self, model: &ModelId) -> Result<LoadedModel>;

    /// Returns the names of the models that can be loaded, or no names if the models cannot be listed.
    fn names(&self) -> Vec<String>;
}

/// Identifies a model of a [`ModelSource`].
#[derive(Clone, Debug)]
pub enum ModelId {
    /// A model on this machine.
    Local(Snapshot),
    /// The name of a model that a server offers.
    Remote(String),
}

impl ModelId {
    pub fn name(&self) -> &str {
        match self {
            Self::Local(snapshot) => &snapshot.name,
            Self::Remote(name) => name,
        }
    }

    /// Returns the revision of the model, or `None` if the model was named by its path or is on a server.
    pub fn revision(&self) -> Option<&str> {
        match self {
            Self::Local(snapshot) => snapshot.revision.as_deref(),
            Self::Remote(_) => None,
        }
    }
}

/// A loaded model with its settings.
pub struct LoadedModel {
    pub backend: Box<dyn Backend>,
    /// The model's default sampling parameters with the user's sampling settings applied.
    /// For a model on a server, whose defaults are unknown, greedy sampling takes the place of the defaults.
    pub sampling: SamplingParams,
    /// Settings from the configuration file that apply to this model.
    pub configured: SettingValues,
}

/// The error that ends a chat because neither the requested model nor the previous model could be loaded.
#[derive(Debug, thiserror::Error)]
#[error("cannot continue the chat without a model")]
pub struct NoModelLoaded;

/// Fails if the model has no chat format.
pub fn require_chat_format(language: &Language, name: &str) -> Result<()> {
    match language.chat {
        Some(_) => Ok(()),
        None => bail!("cannot chat with {name}: it has no chat format\n  continue a text: inferno play {name} --raw"),
    }
}
