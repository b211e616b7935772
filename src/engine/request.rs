//! What a client asks of the engine: a prompt, and the limits of the answer.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::Serialize;

use super::sampling::SamplingParams;
use crate::chat::{Message, ReasoningEffort, RenderOptions};

/// A prompt and how to answer it, for [`EngineHandle::submit`](super::EngineHandle::submit).
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Prompt,
    /// `None` for the model's own sampling, until the model ends its text or the context is full.
    pub options: Option<GenerateOptions>,
}

/// The text or the tokens that a model reads before it generates.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// A conversation, rendered in the model's chat format. A model without one fails.
    Chat { messages: Vec<Message>, render: RenderOptions },
    /// A text to continue: no chat format, and everything generated is the answer.
    Text(String),
    /// Token ids to continue.
    Ids(Vec<u32>),
}

impl Request {
    /// Asks for the next message of a conversation: medium reasoning effort, no tools, and today as the date.
    pub fn chat(messages: impl Into<Vec<Message>>) -> Self {
        let render = RenderOptions {
            tools: Vec::new(),
            reasoning_effort: ReasoningEffort::Medium,
            date: jiff::Zoned::now().strftime("%Y-%m-%d").to_string(),
            add_generation_prompt: true,
        };
        Self { prompt: Prompt::Chat { messages: messages.into(), render }, options: None }
    }

    /// Asks for the continuation of a text.
    pub fn text(text: impl Into<String>) -> Self {
        Self { prompt: Prompt::Text(text.into()), options: None }
    }

    /// Asks for the continuation of token ids.
    pub fn ids(ids: impl Into<Vec<u32>>) -> Self {
        Self { prompt: Prompt::Ids(ids.into()), options: None }
    }

    /// Renders a conversation with these options. No effect on other prompts.
    pub fn render(mut self, options: RenderOptions) -> Self {
        if let Prompt::Chat { render, .. } = &mut self.prompt {
            *render = options;
        }
        self
    }

    /// Sets sampling, limits and stop strings.
    pub fn options(mut self, options: GenerateOptions) -> Self {
        self.options = Some(options);
        self
    }
}

/// How an answer is sampled, and where it ends. [`EngineHandle::defaults`](super::EngineHandle::defaults) has the model's
/// own sampling.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    pub sampling: SamplingParams,
    /// The most tokens to generate; `None` until the context is full.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer. They are not part of it.
    pub stop: Vec<String>,
    /// Generate past the model's own end of text, for measurements.
    pub ignore_eos: bool,
    /// Set to true from another thread (Ctrl-C) to end a generation at the next token, or a prefill at the next chunk.
    pub cancel: Option<Arc<AtomicBool>>,
}

impl GenerateOptions {
    /// No limits, no stop strings.
    pub fn new(sampling: SamplingParams) -> Self {
        Self { sampling, max_tokens: None, stop: Vec::new(), ignore_eos: false, cancel: None }
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its text, or a stop string was generated.
    Stop,
    /// `max_tokens` were generated, or the context is full.
    Length,
    /// The model asks for tools to be run.
    ToolCalls,
    /// The client canceled the request.
    Interrupted,
}
