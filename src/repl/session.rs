//! A conversation with a loaded model: its messages, its settings, one turn at a time.

use anyhow::Result;

use crate::chat::{Channel, Delta, Message, RenderOptions};
use crate::engine::{Engine, FinishReason, GenerateOptions, Summary};

/// Whether a person sees what the model thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reasoning {
    Shown,
    Hidden,
}

pub struct Session {
    pub engine: Engine,
    pub options: GenerateOptions,
    /// Its date stays what it was at the start: another one would make the whole conversation a new prompt.
    pub render: RenderOptions,
    pub messages: Vec<Message>,
    pub reasoning: Reasoning,
    /// Continue texts instead of answering messages.
    pub raw: bool,
    /// How many turns there have been. Each draws with a seed of its own: asked again, a model may answer otherwise.
    pub turns: u64,
}

/// What a turn brought.
pub struct Turn {
    pub text: String,
    pub reasoning: String,
    pub tokens: Vec<u32>,
    pub summary: Summary,
}

impl Session {
    /// Answers `text`; `show` sees each piece as it comes. The conversation grows only if this succeeds; an interrupted
    /// answer is kept as far as it came.
    pub fn turn(&mut self, text: &str, show: &mut dyn FnMut(&Delta) -> Result<()>) -> Result<Turn> {
        let mut messages = self.messages.clone();
        messages.push(Message::user(text));
        let mut options = self.options.clone();
        options.sampling.seed = options.sampling.seed.wrapping_add(self.turns);
        self.turns += 1;
        let mut generation = match self.raw {
            true => self.engine.complete(text, options)?,
            false => self.engine.chat(&messages, &self.render, options)?,
        };
        let (mut answer, mut reasoning, mut tokens) = (String::new(), String::new(), Vec::new());
        for chunk in &mut generation {
            let chunk = chunk?;
            tokens.extend(chunk.token);
            for delta in &chunk.deltas {
                match delta.channel {
                    Channel::Answer => answer.push_str(&delta.text),
                    Channel::Reasoning => reasoning.push_str(&delta.text),
                    Channel::ToolCall => {}
                }
                show(delta)?;
            }
        }
        let summary = generation.summary();
        // Stopped before a word was said: as if it had not been asked.
        let unanswered = summary.finish_reason == FinishReason::Interrupted && answer.is_empty();
        if !self.raw && !unanswered {
            let mut message = Message::assistant(&answer);
            message.reasoning = (!reasoning.is_empty()).then(|| reasoning.clone());
            message.tool_calls = summary.tool_calls.clone();
            messages.push(message);
            self.messages = messages;
        }
        Ok(Turn { text: answer, reasoning, tokens, summary })
    }

    /// Forgets the conversation, keeping the instructions.
    pub fn clear(&mut self) {
        self.messages.retain(|message| message.role == crate::chat::Role::System);
    }

    /// Replaces the instructions; the conversation starts anew.
    pub fn set_system(&mut self, text: &str) {
        self.messages = if text.is_empty() { Vec::new() } else { vec![Message::system(text)] };
    }
}
