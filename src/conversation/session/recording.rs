//! The methods of [`Session`] that record its conversation in a journal or continue a saved one.

use anyhow::{Result, bail};

use super::Session;
use crate::chat::{RenderOptions, Role};
use crate::conversation::backend::require_engine;
use crate::conversation::journal::{
    self, ConversationChange, ConversationState, Journal, Recording, SavedConversation,
};
use crate::conversation::{settings, state_folder};
use crate::engine::{GenerateOptions, SamplingParams};

impl Session {
    /// Records the conversation in a journal, which is created after the first answer.
    pub fn record_from_first_answer(&mut self) {
        self.recording = Recording::FromFirstAnswer;
    }

    pub fn recording(&self) -> &Recording {
        &self.recording
    }

    /// Returns the name under which the conversation is saved, or `None` if it has no journal.
    pub fn saved_name(&self) -> Option<&str> {
        match &self.recording {
            Recording::Journal(journal) => Some(journal.name()),
            Recording::Off | Recording::FromFirstAnswer => None,
        }
    }

    /// Renames the saved conversation. Fails if the conversation has no answer yet or is not saved, or if the name is
    /// invalid or taken.
    pub fn rename(&mut self, name: &str) -> Result<()> {
        if matches!(self.recording, Recording::FromFirstAnswer) {
            // An earlier attempt to create the journal may have failed. Try again to create it, or report the error.
            self.record(ConversationChange::Messages)?;
        }
        match &mut self.recording {
            Recording::Journal(journal) => journal.rename(name),
            Recording::FromFirstAnswer => bail!("cannot save this conversation: it has no answer yet"),
            Recording::Off => bail!(
                "cannot save this conversation: INFERNO_NOHISTORY or --raw disables saving, \
                 or no home directory was found"
            ),
        }
    }

    /// Saves the full blocks of the conversation's KV cache next to its journal. Returns the number of saved tokens.
    /// With the same model files, build and settings, a resumed conversation needs no prefill of these tokens.
    /// Fails if the conversation has no journal, if the model runs on a server, or if the KV cache cannot be saved.
    pub fn save_prefix(&mut self) -> Result<usize> {
        let engine = require_engine(self.backend(), "save the KV cache")?;
        let Recording::Journal(journal) = &self.recording else {
            bail!("cannot save the KV cache: this conversation is not saved")
        };
        let messages = self.visible_messages();
        let render = RenderOptions { add_generation_prompt: false, ..self.render_options() };
        let ids = engine.render(&messages, &render)?.ids;
        // The KV cache holds the last answer as it was generated, but the next prompt may render it differently, for
        // example without reasoning. Prefill the conversation in the form that the next prompt will have.
        let options = GenerateOptions { max_tokens: Some(0), ..GenerateOptions::new(SamplingParams::greedy()) };
        for event in engine.complete_ids(&ids, options)? {
            event?;
        }
        engine.save_prefix(&ids, &journal.prefix_path())
    }

    /// Continues a saved conversation with the current settings. An empty `name` selects the most recent resumable one.
    /// Returns a warning if its journal is damaged, otherwise `None`.
    ///
    /// Changes nothing if the conversation cannot be opened.
    pub fn resume(&mut self, name: &str) -> Result<Option<String>> {
        let (recording, saved) = open_saved(name)?;
        self.continue_with(recording, saved)
    }

    /// Continues a saved conversation like [`resume`](Self::resume), but with the conversation's own settings.
    /// Returns warnings for the user, if any.
    pub fn resume_with_saved_settings(&mut self, name: &str) -> Result<Option<String>> {
        let (recording, saved) = open_saved(name)?;
        self.requested.retain(|name, _| !settings::is_setting(name));
        self.requested.extend(saved.settings.clone().into_iter().filter(|(name, _)| settings::is_setting(name)));
        // For a server, greedy sampling is only a placeholder, because a request to a server contains only the settings
        // that the user chose.
        let defaults = self.backend().defaults().unwrap_or_else(SamplingParams::greedy);
        let problems = self.reset_settings(defaults);
        let damage = self.continue_with(recording, saved)?;
        let warnings: Vec<String> = damage.into_iter().chain(problems).collect();
        Ok((!warnings.is_empty()).then(|| warnings.join("\n")))
    }

    fn continue_with(&mut self, recording: Recording, saved: SavedConversation) -> Result<Option<String>> {
        self.attached.clear();
        (self.recording, self.messages, self.dropped) = (recording, saved.messages, 0);
        if saved.model != self.model_name() {
            self.record(ConversationChange::Model)?;
        } else if saved.settings != self.all_settings() {
            self.record(ConversationChange::Settings)?;
        }
        if let Recording::Journal(journal) = &self.recording
            && let Some(engine) = self.backend().engine()
            && journal.prefix_path().exists()
        {
            // An error is not fatal: without a saved KV cache, the next turn only needs a longer prefill.
            match engine.load_prefix(&journal.prefix_path()) {
                Ok(tokens) => tracing::info!(tokens, "loaded the saved KV cache"),
                Err(error) => tracing::warn!(error = format!("{error:#}"), "cannot load the saved KV cache"),
            }
        }
        Ok(saved.damage)
    }

    /// Writes a change to the journal, if any. Unless recording is off, the first answer creates the journal.
    pub(super) fn record(&mut self, change: ConversationChange) -> Result<()> {
        let (model, settings) = (self.model_name(), self.all_settings());
        let mut change = change;
        let has_answer = self.messages.iter().any(|message| message.role == Role::Assistant);
        if matches!(self.recording, Recording::FromFirstAnswer) && has_answer {
            self.recording = Journal::create(&model, &settings)?.map_or(Recording::Off, Recording::Journal);
            change = ConversationChange::Messages;
        }
        let state = ConversationState { model: &model, settings: &settings, messages: &self.messages };
        match &mut self.recording {
            Recording::Journal(journal) => journal.write_change(change, &state),
            Recording::Off | Recording::FromFirstAnswer => Ok(()),
        }
    }
}

/// Opens a saved conversation. If INFERNO_NOHISTORY disables saving, does not record its next turns.
fn open_saved(name: &str) -> Result<(Recording, SavedConversation)> {
    if !state_folder::is_enabled() {
        return Ok((Recording::Off, journal::read_saved(Some(name))?));
    }
    let (journal, saved) = Journal::open(Some(name))?;
    Ok((Recording::Journal(journal), saved))
}
