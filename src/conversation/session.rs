//! A conversation with a loaded model: its messages, settings and turns.

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};

use super::attachment::{Attachment, with_attachments};
use super::backend::{Backend, BackendAnswer, OnDelta, TurnPrompt, TurnRequest, require_engine};
use super::journal::{self, ConversationChange, ConversationState, Journal, SavedConversation};
use super::model_source::{LoadedModel, ModelId, ModelSource, NoModelLoaded};
use super::overflow::{self, CannotDropOldest, Overflow, visible_messages};
use super::settings::{self, ChatSettings, SettingValues};
use super::state_folder;
use super::turn::{Turn, TurnSummary};
use crate::chat::{Channel, Delta, Message, RenderOptions, Role};
use crate::engine::{FinishReason, GenerateOptions, SamplingParams};
use crate::text::counted;

/// Whether and where a conversation is recorded.
pub enum Recording {
    Off,
    /// Recording starts with the first answer, which creates the journal.
    FromFirstAnswer,
    Journal(Journal),
}

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

    /// Records the conversation in a journal, which is created after the first answer.
    pub fn record_from_first_answer(&mut self) {
        self.recording = Recording::FromFirstAnswer;
    }

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

    /// Returns the model's name. A path becomes absolute, so that it is valid from any directory.
    pub fn model_name(&self) -> String {
        let name = self.model.name();
        let path = match &self.model {
            ModelId::Local(_) if Path::new(name).exists() => std::fs::canonicalize(name).ok(),
            _ => None,
        };
        path.map_or_else(|| name.to_string(), |path| path.to_string_lossy().into_owned())
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

    /// Sends `text` and the attached files to the model. Passes each piece of generated text to `on_delta`.
    ///
    /// If the turn fails, the messages and the attached files do not change.
    /// If the turn is interrupted, stores the partial answer. If there is no answer text yet, discards the turn and
    /// keeps the attached files. With `raw`, stores no messages.
    pub fn answer(&mut self, text: &str, on_delta: &mut OnDelta) -> Result<Turn> {
        let text = with_attachments(&self.attached, text);
        let turn = self.run_turn(self.messages.clone(), &text, on_delta)?;
        if has_answer(&turn.summary, &turn.text) {
            self.attached.clear();
        }
        Ok(turn)
    }

    /// Answers the last question again. Fails if there is no question.
    /// Keeps the old answer if the turn fails or is interrupted before the new answer starts.
    pub fn regenerate(&mut self, on_delta: &mut OnDelta) -> Result<Turn> {
        let Some(question) = self.last_question() else { bail!("cannot answer again: no question yet") };
        let text = self.messages[question].content.clone();
        self.run_turn(self.messages[..question].to_vec(), &text, on_delta)
    }

    /// Generates the answer to `text` after `history` or, with `raw`, the continuation of `text` alone.
    ///
    /// `history`, `text` and the answer replace the messages of the conversation.
    /// The messages do not change with `raw`, if the turn fails, or if it is interrupted before its answer starts.
    fn run_turn(&mut self, history: Vec<Message>, text: &str, on_delta: &mut OnDelta) -> Result<Turn> {
        let is_new_turn = history.len() == self.messages.len();
        let mut messages = history;
        messages.push(Message::user(text));
        let mut notes = Vec::new();
        let visible = if self.raw { Vec::new() } else { self.fit_context(&messages, &mut notes)? };

        let (render, options, chosen) = (self.render_options(), self.next_options(), self.all_settings());
        let prompt = if self.raw { TurnPrompt::Text(text) } else { TurnPrompt::Chat(&visible) };
        let request = TurnRequest { prompt, render, options, chosen: &chosen };
        let (mut answer, mut reasoning) = (String::new(), String::new());
        let mut collect = |delta: &Delta| {
            match delta.channel {
                Channel::Answer => answer.push_str(&delta.text),
                Channel::Reasoning => reasoning.push_str(&delta.text),
                Channel::ToolCall => {}
            }
            on_delta(delta)
        };
        let BackendAnswer { tokens, summary } = self.backend().answer(request, &mut collect)?;

        if !self.raw && has_answer(&summary, &answer) {
            let mut message = Message::assistant(&answer);
            message.reasoning = (!reasoning.is_empty()).then(|| reasoning.clone());
            message.tool_calls = summary.tool_calls.clone();
            messages.push(message);
            self.messages = messages;
            let recorded =
                self.record(if is_new_turn { ConversationChange::Turn } else { ConversationChange::Messages });
            // Keep the answer even if it cannot be saved, for example on a full disk.
            notes.extend(recorded.err().map(|error| format!("this turn is not saved for --resume: {error:#}")));
        }
        Ok(Turn { text: answer, reasoning, tokens, summary, notes })
    }

    /// Returns the generation options for the next turn and counts the turn.
    fn next_options(&mut self) -> GenerateOptions {
        let mut sampling = self.settings.sampling.clone();
        sampling.seed = sampling.seed.wrapping_add(self.turns);
        self.turns += 1;
        GenerateOptions {
            max_tokens: self.settings.max_tokens,
            stop: self.settings.stop.clone(),
            ignore_eos: self.ignore_eos,
            cancel: Some(self.cancel.clone()),
            ..GenerateOptions::new(sampling)
        }
    }

    /// Returns the messages to send to the model. Adds a note if more messages were dropped than in earlier turns.
    /// With `drop-oldest`, fails with [`CannotDropOldest`] if the number of tokens or the context length is unknown.
    fn fit_context(&mut self, messages: &[Message], notes: &mut Vec<String>) -> Result<Vec<Message>> {
        if self.settings.overflow == Overflow::Stop {
            return Ok(messages.to_vec());
        }
        let count_tokens = |messages: &[Message]| Ok(self.count_tokens(messages)?.ok_or(CannotDropOldest)?);
        let context = self.backend().context().ok_or(CannotDropOldest)?;
        let max_tokens = self.settings.max_tokens;
        let (visible, dropped) = overflow::drop_oldest(messages, self.dropped, context, max_tokens, &count_tokens)?;
        if dropped > self.dropped {
            notes.push(format!(
                "the conversation does not fit in the context: the model no longer sees the oldest {}",
                counted(dropped, "message")
            ));
        }
        self.dropped = dropped;
        Ok(visible)
    }

    /// Returns whether the system prompt, the attached files and `text` fit in the context without earlier messages.
    ///
    /// Also returns true with `raw`, and if the number of tokens or the context length is unknown.
    pub fn fits_alone(&self, text: &str) -> bool {
        let mut messages = visible_messages(&self.messages, usize::MAX);
        messages.push(Message::user(with_attachments(&self.attached, text)));
        let context = self.backend().context().unwrap_or(usize::MAX);
        self.raw || self.count_tokens(&messages).is_ok_and(|tokens| tokens.is_none_or(|tokens| tokens < context))
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

    /// Changes a setting and saves it for `--resume`. Returns a message for the user.
    pub fn change_setting(&mut self, name: &str, value: &str) -> Result<String, String> {
        let (name, value) = settings::normalize(name, value)?;
        self.settings.set(name, std::slice::from_ref(&value))?;
        if self.settings.overflow == Overflow::Stop {
            // With `stop`, the next turn sends all messages.
            self.dropped = 0;
        }
        // Also store the value `none` of `max-tokens` or `stop`, because it must override a value from the
        // configuration file.
        self.requested.insert(name.to_string(), vec![value.clone()]);
        self.record(ConversationChange::Settings)
            .map_err(|error| format!("the setting is not saved for --resume: {error:#}"))?;
        Ok(match (name, value.as_str()) {
            ("hide-reasoning", "true") => "reasoning is hidden".to_string(),
            ("hide-reasoning", _) => "reasoning is shown".to_string(),
            _ => format!("{name} is {}", self.settings.get(name)),
        })
    }

    /// Returns the value of a setting as text, or `chosen by the server`.
    pub fn setting(&self, name: &str) -> String {
        let is_chosen_by_server = self.backend().defaults().is_none() && settings::has_server_default(name);
        if is_chosen_by_server && !self.all_settings().contains_key(name) {
            return "chosen by the server".to_string();
        }
        self.settings.get(name)
    }

    /// Resets all settings except the seed to their defaults, then applies configured and requested settings.
    ///
    /// Returns a message for each setting that is invalid.
    fn reset_settings(&mut self, sampling: SamplingParams) -> Vec<String> {
        let seed = self.settings.sampling.seed;
        self.settings = ChatSettings::new(SamplingParams { seed, ..sampling });
        let mut problems = Vec::new();
        // Skip flags that are not chat settings, such as --device.
        for (name, values) in self.all_settings().iter().filter(|(name, _)| settings::is_setting(name)) {
            if let Err(problem) = self.settings.set(name, values) {
                problems.push(format!("{name} stays {}: {problem}", self.settings.get(name)));
            }
        }
        problems
    }

    /// Returns the configured settings, overridden by the requested settings.
    pub fn all_settings(&self) -> SettingValues {
        self.configured.clone().into_iter().chain(self.requested.clone()).collect()
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
    fn record(&mut self, change: ConversationChange) -> Result<()> {
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

/// Returns whether to keep a turn: false if the turn was interrupted before its answer started.
fn has_answer(summary: &TurnSummary, answer: &str) -> bool {
    summary.finish_reason != FinishReason::Canceled || !answer.is_empty()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::engine::Engine;

    /// A model that echoes the last message, or ends without an answer if the turn is interrupted.
    /// Every message has 20 tokens.
    struct Echo;

    impl Backend for Echo {
        fn answer(&self, request: TurnRequest<'_>, on_delta: &mut OnDelta) -> Result<BackendAnswer> {
            let TurnPrompt::Chat(messages) = request.prompt else { bail!("the tests send only chat messages") };
            let is_canceled = request.options.cancel.is_some_and(|flag| flag.load(Ordering::Relaxed));
            if !is_canceled {
                let text = messages.last().map(|message| message.content.clone()).unwrap_or_default();
                on_delta(&Delta { channel: Channel::Answer, text })?;
            }
            let summary = TurnSummary {
                finish_reason: if is_canceled { FinishReason::Canceled } else { FinishReason::Stop },
                prompt_tokens: None,
                completion_tokens: None,
                ttft_s: 0.0,
                tok_per_s: 0.0,
                context: None,
                execution_mode: None,
                tool_calls: Vec::new(),
                format_violations: 0,
            };
            Ok(BackendAnswer { tokens: None, summary })
        }

        fn count_tokens(&self, messages: &[Message], _: &RenderOptions) -> Result<Option<usize>> {
            Ok(Some(20 * messages.len()))
        }

        fn count_text(&self, _: &str) -> Option<usize> {
            None
        }

        fn context(&self) -> Option<usize> {
            Some(100)
        }

        fn defaults(&self) -> Option<SamplingParams> {
            None
        }

        fn stats(&self) -> Vec<(&'static str, String)> {
            Vec::new()
        }

        fn context_stats(&self) -> Vec<(&'static str, String)> {
            Vec::new()
        }

        fn last_context_used(&self) -> Option<usize> {
            None
        }

        fn engine(&self) -> Option<&Engine> {
            None
        }
    }

    struct NoModels;

    impl ModelSource for NoModels {
        fn find(&self, _: &str) -> Result<ModelId> {
            bail!("there are no models")
        }

        fn load(&self, _: &ModelId) -> Result<LoadedModel> {
            bail!("there are no models")
        }

        fn names(&self) -> Vec<String> {
            Vec::new()
        }
    }

    fn session() -> Session {
        let (sampling, configured) = (SamplingParams::greedy(), SettingValues::new());
        let loaded = LoadedModel { backend: Box::new(Echo), sampling, configured };
        Session::new(ModelId::Remote("echo".to_owned()), loaded, Rc::new(NoModels), "2026-11-30".to_owned())
    }

    #[test]
    fn with_overflow_stop_no_message_is_dropped() {
        let mut session = session();
        session.change_setting("overflow", "drop-oldest").unwrap();
        for question in ["One?", "Two?", "Three?"] {
            session.answer(question, &mut |_| Ok(())).unwrap();
        }
        assert_eq!((session.dropped(), session.visible_messages().len()), (4, 2));
        session.change_setting("temperature", "0.5").unwrap();
        assert_eq!(session.dropped(), 4);
        session.change_setting("overflow", "stop").unwrap();
        assert_eq!((session.dropped(), session.visible_messages().len()), (0, 6));
    }

    #[test]
    fn a_turn_that_is_interrupted_before_its_answer_keeps_the_attached_files() {
        let mut session = session();
        session.attach(Attachment { path: "notes.txt".to_owned(), text: "My name is Ada".to_owned() });
        session.cancel_flag().store(true, Ordering::Relaxed);
        assert_eq!(session.answer("What is in it?", &mut |_| Ok(())).unwrap().text, "");
        assert!(session.messages().is_empty() && session.attached().len() == 1);
        session.cancel_flag().store(false, Ordering::Relaxed);
        let answer = session.answer("What is in it?", &mut |_| Ok(())).unwrap().text;
        assert!(answer.contains("My name is Ada") && answer.contains("What is in it?"), "{answer}");
        assert!(session.messages().len() == 2 && session.attached().is_empty());
    }
}
