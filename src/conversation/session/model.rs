//! The methods of [`Session`] for its model.

use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result};

use super::Session;
use crate::conversation::backend::Backend;
use crate::conversation::journal::ConversationChange;
use crate::conversation::model_source::{ModelId, ModelSource, NoModelLoaded};

impl Session {
    /// Returns the backend that generates the answers. Panics if no model is loaded.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_deref().expect("the chat must end if switch_model leaves no model loaded")
    }

    pub fn model(&self) -> &ModelId {
        &self.model
    }

    /// Returns the source that finds and loads other models.
    pub fn models(&self) -> &Rc<dyn ModelSource> {
        &self.models
    }

    /// Returns the model's name. A path becomes absolute, so that it is valid from any directory.
    pub fn model_name(&self) -> String {
        let name = self.model.name();
        let path = match &self.model {
            ModelId::Local(_) if Path::new(name).exists() => std::fs::canonicalize(name).ok(),
            _ => None,
        };
        path.map_or_else(|| name.to_string(), |path| path.to_string_lossy().into_owned())
    }

    /// Switches to another model. If the new model cannot be loaded, loads the old model again and returns the error.
    ///
    /// Returns a message for each setting that is invalid.
    /// Fails with [`NoModelLoaded`] if the old model cannot be loaded either.
    pub fn switch_model(&mut self, name: &str) -> Result<Vec<String>> {
        let models = self.models.clone();
        let model = models.find(name)?;
        // Drop the old model first, because the device may not have enough memory for two models.
        drop(self.backend.take());
        let loaded = match models.load(&model) {
            Ok(loaded) => loaded,
            Err(error) => {
                let reloaded = models.load(&self.model).with_context(|| {
                    format!(
                        "{error:#}; to continue a saved conversation, use --resume; cannot load {} again either",
                        self.model.name()
                    )
                });
                self.backend = Some(reloaded.map_err(|error| error.context(NoModelLoaded))?.backend);
                return Err(error);
            }
        };
        self.model = model;
        self.backend = Some(loaded.backend);
        self.dropped = 0;
        // A revision that the user requested applies only to the old model.
        self.requested.remove("revision");
        self.configured = loaded.configured;
        let problems = self.reset_settings(loaded.sampling);
        self.record(ConversationChange::Model)?;
        Ok(problems)
    }
}
