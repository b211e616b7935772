//! A conversation with a loaded model: its messages, settings and turns.
//!
//! - `turns`: sends questions to the model, and keeps its answers
//! - `model`: the loaded model, and switching to another model
//! - `session_settings`: changes and resets the settings
//! - `recording`: records the conversation in a journal, and continues a saved conversation

mod model;
mod recording;
mod session_settings;
mod turns;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Result;

use super::attachment::Attachment;
use super::backend::Backend;
use super::journal::{ConversationChange, Recording};
use super::model_source::{LoadedModel, ModelId, ModelSource};
use super::overflow::visible_messages;
use super::settings::{ChatSettings, SettingValues};
use crate::chat::{Message, RenderOptions, Role};

/// A conversation and its loaded model.
pub struct Session {
    /// The loaded model. `None` while [`Session::switch_model`] loads another model.
    /// Also `None` if both the new model and the old model failed to load.
    backend: Option<Box<dyn Backend>>,
    models: Rc<dyn ModelSource>,
    model: ModelId,
    pub settings: ChatSettings,
    /// Settings from flags, the environment, a resumed conversation or `/set`.
    requested: SettingValues,
    /// Settings from the configuration file that apply to this model. `requested` settings override them.
    configured: SettingValues,
    /// Whether to continue prompts as plain text, without a chat format.
    pub raw: bool,
    /// Whether to keep generating after a stop token.
    pub ignore_eos: bool,
    /// A flag that another thread sets to stop the current turn (Ctrl-C).
    cancel: Arc<AtomicBool>,
    messages: Vec<Message>,
    /// The number of oldest messages after the system prompt that are no longer sent to the model.
    dropped: usize,
    /// Files that are attached to the next message.
    attached: Vec<Attachment>,
    recording: Recording,
    /// The date that some chat formats put into the prompt. It stays the same for the whole session, because a new
    /// date would change the start of the prompt and require a prefill of the whole conversation.
    date: String,
    /// The number of turns that have started. It is added to the seed, so that `/regen` can generate another answer.
    turns: u64,
}

impl Session {
    /// Starts an empty conversation. `date` is the current date for the prompt, as `YYYY-MM-DD`.
    pub fn new(model: ModelId, loaded: LoadedModel, models: Rc<dyn ModelSource>, date: String) -> Self {
        Self {
            backend: Some(loaded.backend),
            models,
            model,
            settings: ChatSettings::new(loaded.sampling),
            requested: SettingValues::new(),
            configured: loaded.configured,
            raw: false,
            ignore_eos: false,
            cancel: Arc::new(AtomicBool::new(false)),
            messages: Vec::new(),
            dropped: 0,
            attached: Vec::new(),
            recording: Recording::Off,
            date,
            turns: 0,
        }
    }

    /// Sets the system prompt of an empty conversation.
    pub fn with_system(mut self, text: Option<&str>) -> Self {
        self.messages = text.map(Message::system).into_iter().collect();
        self
    }

    /// Stores the settings that the user requested, without applying them to [`settings`](Self::settings).
    pub fn with_requested(self, requested: SettingValues) -> Self {
        Self { requested, ..self }
    }

    /// Returns the flag that stops the current turn. Another thread sets the flag, for example on Ctrl-C.
    pub fn cancel_flag(&self) -> Arc<AtomicBool> {
        self.cancel.clone()
    }

    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Returns all messages except the dropped ones, which are no longer sent to the model.
    pub fn visible_messages(&self) -> Vec<Message> {
        visible_messages(&self.messages, self.dropped)
    }

    /// Returns the number of oldest messages after the system prompt that are no longer sent to the model.
    pub fn dropped(&self) -> usize {
        self.dropped
    }

    /// Returns the files that are attached to the next message.
    pub fn attached(&self) -> &[Attachment] {
        &self.attached
    }

    /// Attaches a file to the next message. If a file with the same path is already attached, replaces it.
    pub fn attach(&mut self, attachment: Attachment) {
        self.attached.retain(|attached| attached.path != attachment.path);
        self.attached.push(attachment);
    }

    /// Detaches all files from the next message.
    pub fn detach_all(&mut self) {
        self.attached.clear();
    }

    /// Returns the number of tokens in the rendered messages, or `None` if it is unknown.
    pub fn count_tokens(&self, messages: &[Message]) -> Result<Option<usize>> {
        self.backend().count_tokens(messages, &self.render_options())
    }

    fn render_options(&self) -> RenderOptions {
        RenderOptions {
            tools: Vec::new(),
            reasoning_effort: self.settings.reasoning_effort,
            date: self.date.clone(),
            add_generation_prompt: true,
            template_variables: serde_json::Map::new(),
        }
    }

    /// Returns the last question of the conversation, or `None` if there is no question.
    pub fn question(&self) -> Option<&str> {
        self.last_question().map(|index| self.messages[index].content.as_str())
    }

    fn last_question(&self) -> Option<usize> {
        self.messages.iter().rposition(|message| message.role == Role::User)
    }

    /// Removes the last question and its answer. Returns the question, or `None` if there is no question.
    pub fn undo(&mut self) -> Result<Option<String>> {
        let Some(question) = self.last_question() else { return Ok(None) };
        let text = self.messages[question].content.clone();
        self.replace_messages(self.messages[..question].to_vec())?;
        Ok(Some(text))
    }

    /// Starts a new conversation with the same system prompt and without attached files.
    /// Returns the old conversation's name, or `None` if it was not saved or has no question.
    pub fn clear(&mut self) -> Result<Option<String>> {
        self.attached.clear();
        let instructions = self.messages.iter().filter(|message| message.role == Role::System).cloned().collect();
        self.start_over(instructions)
    }

    /// Starts a new conversation with `text` as its system prompt, or without a system prompt if `text` is empty.
    /// Returns the old conversation's name, or `None` if it was not saved or has no question.
    pub fn clear_with_system(&mut self, text: &str) -> Result<Option<String>> {
        self.start_over(if text.is_empty() { Vec::new() } else { vec![Message::system(text)] })
    }

    /// Replaces the system prompt without ending the conversation.
    pub fn replace_system(&mut self, text: &str) -> Result<()> {
        let dialog = self.messages.iter().filter(|message| message.role != Role::System).cloned();
        let messages: Vec<Message> = [Message::system(text)].into_iter().chain(dialog).collect();
        if messages == self.messages { Ok(()) } else { self.replace_messages(messages) }
    }

    /// Starts a new conversation with `messages`. If the old conversation has a journal and a question, returns its
    /// name, and the next answer creates a new journal. If it has a journal but no question, reuses the journal.
    fn start_over(&mut self, messages: Vec<Message>) -> Result<Option<String>> {
        let old_name = self.saved_name().filter(|_| self.last_question().is_some()).map(str::to_string);
        if old_name.is_some() {
            self.recording = Recording::FromFirstAnswer;
        }
        self.replace_messages(messages)?;
        Ok(old_name)
    }

    fn replace_messages(&mut self, messages: Vec<Message>) -> Result<()> {
        self.messages = messages;
        self.dropped = 0;
        self.record(ConversationChange::Messages)
    }
}
