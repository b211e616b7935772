//! A conversation with a loaded model: its messages, its settings, one turn at a time.

use std::rc::Rc;

use anyhow::{Context, Result, bail};

use super::journal::{self, Change, Journal, Now, Saved, Settings};
use super::overflow::{self, Overflow};
use super::state;
use super::style::{self, Color};
use crate::chat::{Channel, Delta, Message, RenderOptions, Role};
use crate::engine::{Engine, FinishReason, GenerateOptions, SamplingParams, Summary};
use crate::hub::Snapshot;
use crate::language::Language;

/// Whether a person sees what the model thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reasoning {
    Shown,
    Hidden,
}

/// A loaded model, with its defaults under what was asked for.
pub struct Loaded {
    pub engine: Engine,
    pub sampling: SamplingParams,
    /// What the configuration has for it.
    pub configured: Settings,
}

type Find = dyn Fn(&str) -> Result<Snapshot>;
type Load = dyn Fn(&Snapshot) -> Result<Loaded>;

/// Where models come from: the repl knows neither flags nor progress bars.
pub struct Models {
    pub find: Box<Find>,
    pub load: Box<Load>,
    /// Names of all that are here.
    pub names: Box<dyn Fn() -> Vec<String>>,
}

/// Where a conversation is kept.
pub enum Keep {
    No,
    /// As soon as there is something to keep.
    New,
    In(Journal),
}

pub struct Session {
    /// None only while [`Session::switch`] loads another one.
    engine: Option<Engine>,
    pub models: Rc<Models>,
    pub snapshot: Snapshot,
    pub options: GenerateOptions,
    /// Its date stays what it was at the start: another one would make the whole conversation a new prompt.
    pub render: RenderOptions,
    pub messages: Vec<Message>,
    pub reasoning: Reasoning,
    /// Answers as the model wrote them, even in a terminal that could show their Markdown.
    pub plain: bool,
    /// Continue texts instead of answering messages.
    pub raw: bool,
    /// How many turns there have been. Each draws with a seed of its own: asked again, a model may answer otherwise.
    pub turns: u64,
    pub overflow: Overflow,
    /// How many of the oldest messages the model does not see any more.
    pub left_out: usize,
    /// Texts that go with the next message.
    pub attached: Vec<Attachment>,
    /// What was asked for, by flags, the environment, a conversation that goes on, or `/set`.
    pub settings: Settings,
    /// What the configuration has for this model, below that.
    pub configured: Settings,
    pub keep: Keep,
}

/// A file's text.
pub struct Attachment {
    pub path: String,
    pub text: String,
}

/// What a turn brought.
pub struct Turn {
    pub text: String,
    pub reasoning: String,
    pub tokens: Vec<u32>,
    pub summary: Summary,
    /// What the person should know beside the figures.
    pub notes: Vec<String>,
}

impl Session {
    pub fn new(snapshot: Snapshot, loaded: Loaded, render: RenderOptions, models: Models) -> Self {
        Self {
            engine: Some(loaded.engine),
            models: Rc::new(models),
            snapshot,
            options: GenerateOptions::new(loaded.sampling),
            render,
            messages: Vec::new(),
            reasoning: Reasoning::Shown,
            plain: false,
            raw: false,
            turns: 0,
            overflow: Overflow::Stop,
            left_out: 0,
            attached: Vec::new(),
            settings: Settings::new(),
            configured: loaded.configured,
            keep: Keep::No,
        }
    }

    pub fn engine(&self) -> &Engine {
        self.engine.as_ref().expect("switch puts an engine back, or ends the chat")
    }

    /// Whether answers are laid out: not where stdout is no terminal that can, and continued text is taken to the letter.
    pub fn is_drawn(&self) -> bool {
        style::stdout_color() == Color::On && !self.plain && !self.raw
    }

    /// Answers `text`, after what is attached; `show` sees each piece as it comes. The conversation grows only if this
    /// succeeds; an interrupted answer is kept as far as it came.
    pub fn turn(&mut self, text: &str, show: &mut dyn FnMut(&Delta) -> Result<()>) -> Result<Turn> {
        let text = with_attached(&self.attached, text);
        let turn = self.answer(self.messages.clone(), &text, show)?;
        self.attached.clear();
        Ok(turn)
    }

    /// Answers the last message anew. The old answer stays if this fails.
    pub fn regenerate(&mut self, show: &mut dyn FnMut(&Delta) -> Result<()>) -> Result<Turn> {
        let Some(question) = self.last_question() else { bail!("there is no answer yet") };
        let text = self.messages[question].content.clone();
        self.answer(self.messages[..question].to_vec(), &text, show)
    }

    fn answer(&mut self, before: Vec<Message>, text: &str, show: &mut dyn FnMut(&Delta) -> Result<()>) -> Result<Turn> {
        let grows = before.len() == self.messages.len();
        let mut messages = before;
        messages.push(Message::user(text));
        let mut notes = Vec::new();
        let sent = if self.raw { Vec::new() } else { self.fitting(&messages, &mut notes)? };
        let mut options = self.options.clone();
        options.sampling.seed = options.sampling.seed.wrapping_add(self.turns);
        self.turns += 1;
        let Some(engine) = &self.engine else { bail!("no model is loaded") };
        let mut stream = match self.raw {
            true => engine.complete(text, options)?,
            false => engine.chat(&sent, &self.render, options)?,
        };
        let (mut answer, mut reasoning, mut tokens) = (String::new(), String::new(), Vec::new());
        for event in &mut stream {
            let event = event?;
            tokens.extend(event.token());
            for delta in event.deltas() {
                match delta.channel {
                    Channel::Answer => answer.push_str(&delta.text),
                    Channel::Reasoning => reasoning.push_str(&delta.text),
                    Channel::ToolCall => {}
                }
                show(delta)?;
            }
        }
        let summary = stream.summary();
        // Stopped before a word was said: as if it had not been asked.
        let unanswered = summary.finish_reason == FinishReason::Interrupted && answer.is_empty();
        if !self.raw && !unanswered {
            let mut message = Message::assistant(&answer);
            message.reasoning = (!reasoning.is_empty()).then(|| reasoning.clone());
            message.tool_calls = summary.tool_calls.clone();
            messages.push(message);
            self.messages = messages;
            let kept = self.keep(if grows { Change::Turn } else { Change::Messages });
            // A full disk costs the journal, not the answer.
            notes.extend(kept.err().map(|error| format!("not kept for --resume: {error:#}")));
        }
        notes.extend(overflow::warning(&summary, self.overflow));
        Ok(Turn { text: answer, reasoning, tokens, summary, notes })
    }

    /// The messages that the model is to see.
    fn fitting(&mut self, messages: &[Message], notes: &mut Vec<String>) -> Result<Vec<Message>> {
        if self.overflow == Overflow::Stop {
            return Ok(messages.to_vec());
        }
        let engine = self.engine();
        let count = |messages: &[Message]| Ok(engine.language().render(messages, &self.render)?.ids.len());
        let (sent, left_out) =
            overflow::drop_oldest(messages, self.left_out, engine.context(), self.options.max_tokens, &count)?;
        if left_out > self.left_out {
            notes
                .push(format!("the oldest {left_out} messages no longer fit the context: the model does not see them"));
        }
        self.left_out = left_out;
        Ok(sent)
    }

    /// Whether a message would leave room for an answer if nothing had been said before.
    pub fn fits_alone(&self, text: &str) -> bool {
        let mut messages = overflow::seen(&self.messages, usize::MAX);
        messages.push(Message::user(with_attached(&self.attached, text)));
        let rendered = self.engine().language().render(&messages, &self.render);
        self.raw || rendered.is_ok_and(|rendered| rendered.ids.len() < self.engine().context())
    }

    fn last_question(&self) -> Option<usize> {
        self.messages.iter().rposition(|message| message.role == Role::User)
    }

    /// Takes the last question and its answer back. Returns the question.
    pub fn undo(&mut self) -> Result<Option<String>> {
        let Some(question) = self.last_question() else { return Ok(None) };
        let text = self.messages[question].content.clone();
        self.replace(self.messages[..question].to_vec())?;
        Ok(Some(text))
    }

    /// Forgets the conversation, keeping the instructions. Returns the name under which it is kept, if it is.
    pub fn clear(&mut self) -> Result<Option<String>> {
        self.attached.clear();
        let kept = self.messages.iter().filter(|message| message.role == Role::System).cloned().collect();
        self.begin_anew(kept)
    }

    /// Replaces the instructions; the conversation starts anew. Returns the name of the one before, if it is kept.
    pub fn set_system(&mut self, text: &str) -> Result<Option<String>> {
        self.begin_anew(if text.is_empty() { Vec::new() } else { vec![Message::system(text)] })
    }

    /// Replaces the instructions of a conversation that goes on.
    pub fn instruct(&mut self, text: &str) -> Result<()> {
        let spoken = self.messages.iter().filter(|message| message.role != Role::System).cloned();
        let messages: Vec<Message> = [Message::system(text)].into_iter().chain(spoken).collect();
        if messages == self.messages { Ok(()) } else { self.replace(messages) }
    }

    /// Another conversation, which must not be written over the one before.
    fn begin_anew(&mut self, messages: Vec<Message>) -> Result<Option<String>> {
        let before = match &self.keep {
            Keep::In(journal) if self.last_question().is_some() => Some(journal.name().to_string()),
            _ => None,
        };
        if before.is_some() {
            self.keep = Keep::New;
        }
        self.replace(messages)?;
        Ok(before)
    }

    fn replace(&mut self, messages: Vec<Message>) -> Result<()> {
        self.messages = messages;
        self.left_out = 0;
        self.keep(Change::Messages)
    }

    /// Goes on with another model, or with the old one if that fails.
    pub fn switch(&mut self, name: &str) -> Result<()> {
        let models = self.models.clone();
        let snapshot = (models.find)(name)?;
        if !self.raw {
            // Before the one that is here goes.
            must_chat(&Language::load(&snapshot.path)?, &snapshot.name)?;
        }
        // Both at once might not fit on the device.
        drop(self.engine.take());
        let loaded = match (models.load)(&snapshot) {
            Ok(loaded) => loaded,
            Err(error) => {
                let old = (models.load)(&self.snapshot).with_context(|| {
                    format!("{error:#}; and {} cannot be loaded any more, but --resume goes on", self.snapshot.name)
                });
                match old {
                    Ok(old) => self.engine = Some(old.engine),
                    // Without a model there is no chat.
                    Err(error) => return Err(error.context(super::NoModel)),
                }
                return Err(error);
            }
        };
        self.snapshot = snapshot;
        self.engine = Some(loaded.engine);
        self.left_out = 0;
        // Another model has no such branch.
        self.settings.remove("revision");
        self.configured = loaded.configured;
        self.options.sampling = SamplingParams { seed: self.options.sampling.seed, ..loaded.sampling };
        super::settings::apply_all(self);
        self.keep(Change::Model)
    }

    /// What finds this model again, from any directory.
    pub fn model_name(&self) -> String {
        let path = std::path::Path::new(&self.snapshot.name);
        let path = if path.exists() { std::fs::canonicalize(path).ok() } else { None };
        path.map_or_else(|| self.snapshot.name.clone(), |path| path.to_string_lossy().into_owned())
    }

    /// Goes on with a conversation that was kept, its settings as they are here. Returns what the person should know.
    /// Nothing has changed if it fails.
    pub fn resume(&mut self, name: &str) -> Result<Option<String>> {
        let (keep, saved) = reopened(name)?;
        self.go_on(keep, saved)
    }

    /// The same with the conversation's own settings in place of these.
    pub fn load(&mut self, name: &str) -> Result<Option<String>> {
        let (keep, saved) = reopened(name)?;
        let of_chat = |name: &String| super::settings::is_setting(name);
        self.settings.retain(|name, _| !of_chat(name));
        self.settings.extend(saved.settings.clone().into_iter().filter(|(name, _)| of_chat(name)));
        let defaults = self.engine().defaults().clone();
        self.options.sampling = SamplingParams { seed: self.options.sampling.seed, ..defaults };
        let problems = super::settings::apply_all(self);
        let damage = self.go_on(keep, saved)?;
        let notes: Vec<String> = damage.into_iter().chain(problems).collect();
        Ok((!notes.is_empty()).then(|| notes.join("\n")))
    }

    fn go_on(&mut self, keep: Keep, saved: Saved) -> Result<Option<String>> {
        self.attached.clear();
        (self.keep, self.messages, self.left_out) = (keep, saved.messages, 0);
        if saved.model != self.model_name() {
            self.keep(Change::Model)?;
        } else if saved.settings != self.all_settings() {
            self.keep(Change::Settings)?;
        }
        Ok(saved.damage)
    }

    /// All that differs from what it would be without being told.
    pub fn all_settings(&self) -> Settings {
        self.configured.clone().into_iter().chain(self.settings.clone()).collect()
    }

    /// Writes a change to where the conversation is kept.
    pub fn keep(&mut self, change: Change) -> Result<()> {
        let (model, settings) = (self.model_name(), self.all_settings());
        let mut change = change;
        let answered = self.messages.iter().any(|message| message.role == Role::Assistant);
        if matches!(self.keep, Keep::New) && answered {
            self.keep = Journal::create(&model, &settings)?.map_or(Keep::No, Keep::In);
            change = Change::Messages;
        }
        let now = Now { model: &model, settings: &settings, messages: &self.messages };
        match &mut self.keep {
            Keep::In(journal) => journal.write_change(change, &now),
            _ => Ok(()),
        }
    }
}

/// Fails for a model that only continues texts.
pub fn must_chat(language: &Language, name: &str) -> Result<()> {
    match language.chat {
        Some(_) => Ok(()),
        None => bail!("{name} has no chat format, it only continues texts: inferno play {name} --raw"),
    }
}

/// A conversation, and where it is kept from here on: nowhere where nothing is to be kept.
fn reopened(name: &str) -> Result<(Keep, Saved)> {
    if !state::is_kept() {
        return Ok((Keep::No, journal::peek(Some(name))?));
    }
    let (journal, saved) = Journal::open(Some(name))?;
    Ok((Keep::In(journal), saved))
}

/// The message as the model gets it: files first, each in a fence longer than any in it.
fn with_attached(attached: &[Attachment], text: &str) -> String {
    let mut message = String::new();
    for Attachment { path, text } in attached {
        let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
        let fence = "`".repeat(longest.max(2) + 1);
        message.push_str(&format!("{path}:\n{fence}\n{}\n{fence}\n\n", text.trim_end_matches('\n')));
    }
    message + text
}
