//! Requests to the engine: prompts and generation options.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde::Serialize;

use crate::chat::{Message, ReasoningEffort, RenderOptions, today};
use crate::engine::constraint::Constraint;
use crate::engine::sampling::SamplingParams;

/// A prompt and its generation options, for [`EngineHandle::submit`](crate::engine::EngineHandle::submit).
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Prompt,
    /// `None` uses the model's sampling defaults and sets no token limit.
    pub options: Option<GenerateOptions>,
}

/// The prompt of a request: a conversation, a text or token ids.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// A conversation, rendered in the model's chat format. Submitting it fails if the model has no chat format.
    Chat { messages: Vec<Message>, render: RenderOptions },
    /// A text to continue, without a chat format. All generated text belongs to the answer.
    Text(String),
    /// Token ids to continue.
    Ids(Vec<u32>),
}

impl Request {
    /// Creates a request for the next message of a conversation.
    ///
    /// The defaults are medium reasoning effort, no tools and today's date.
    pub fn chat(messages: impl Into<Vec<Message>>) -> Self {
        let render = RenderOptions {
            tools: Vec::new(),
            reasoning_effort: ReasoningEffort::Medium,
            date: today(),
            add_generation_prompt: true,
        };
        Self { prompt: Prompt::Chat { messages: messages.into(), render }, options: None }
    }

    /// Creates a request to continue a text.
    pub fn text(text: impl Into<String>) -> Self {
        Self { prompt: Prompt::Text(text.into()), options: None }
    }

    /// Creates a request to continue token ids.
    pub fn ids(ids: impl Into<Vec<u32>>) -> Self {
        Self { prompt: Prompt::Ids(ids.into()), options: None }
    }

    /// Sets the render options of a conversation. Has no effect on other prompts.
    pub fn render(mut self, options: RenderOptions) -> Self {
        if let Prompt::Chat { render, .. } = &mut self.prompt {
            *render = options;
        }
        self
    }

    /// Sets the sampling parameters, limits and stop strings.
    pub fn options(mut self, options: GenerateOptions) -> Self {
        self.options = Some(options);
        self
    }
}

/// Options that control how an answer is sampled and when it ends.
///
/// [`EngineHandle::defaults`](crate::engine::EngineHandle::defaults) returns the model's sampling defaults.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    pub sampling: SamplingParams,
    /// The maximum number of tokens to generate. `None` allows as many as fit in the context.
    pub max_tokens: Option<usize>,
    /// Strings that end the answer. The answer does not include them.
    pub stop: Vec<String>,
    /// Stop tokens in addition to the model's stop tokens. The answer does not include the text of a stop token.
    pub stop_token_ids: Vec<u32>,
    /// The minimum number of tokens to generate before a stop token. Stop strings end the answer at any time.
    pub min_tokens: usize,
    /// The bias that is added to the logit of each of these tokens, before penalties. In effect, -100 bans a token, and
    /// 100 selects it.
    pub logit_bias: BTreeMap<u32, f32>,
    /// The number of most likely tokens to report for each generated token, with log probabilities.
    /// 0 reports only the log probability of the generated token. `None` reports no log probabilities.
    pub logprobs: Option<usize>,
    /// The number of most likely tokens to report for each prompt token after the first, with log probabilities.
    /// [`RequestStream::scored_prompt`](super::RequestStream::scored_prompt) returns the log probabilities.
    /// If set, the whole prompt is computed, even if it is cached. `None` reports no log probabilities.
    pub prompt_logprobs: Option<usize>,
    /// The form that the answer must have. `None` allows any answer.
    pub constraint: Option<Constraint>,
    /// Whether to keep generating after a stop token of the model, as benchmarks do.
    pub ignore_eos: bool,
    /// A flag that another thread can set to cancel the request. The request then ends after the current step.
    pub cancel: Option<Arc<AtomicBool>>,
    /// The owner of the request, such as a client with its own API key.
    ///
    /// Tenants with waiting requests get equal numbers of tokens. A generated token counts as two prompt tokens.
    pub tenant: u64,
    /// The priority among the requests of a tenant: requests with smaller values start first.
    /// A value lower by 1 has the same effect as an arrival 2 seconds earlier.
    pub priority: i32,
    /// If set, the prompt reuses only cached prefixes of requests with the same salt.
    /// The time to the first token then reveals nothing about the prompts of other clients.
    pub cache_salt: Option<String>,
    /// Whether the answer must be independent of other requests, even on an engine that is not
    /// [`deterministic`](crate::engine::EngineBuilder::deterministic). Slows down this request and all concurrent
    /// requests.
    pub deterministic: bool,
    /// Whether the stream keeps a [`RequestRecord`](super::RequestRecord), so that the answer can be recomputed.
    pub keeps_record: bool,
    /// The maximum time that the request may wait before it starts. After this time, it fails. `None` sets no limit.
    pub max_wait: Option<Duration>,
}

impl GenerateOptions {
    /// Creates options without limits or stop strings.
    pub fn new(sampling: SamplingParams) -> Self {
        Self {
            sampling,
            max_tokens: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            min_tokens: 0,
            logit_bias: BTreeMap::new(),
            logprobs: None,
            prompt_logprobs: None,
            constraint: None,
            ignore_eos: false,
            cancel: None,
            tenant: 0,
            priority: 0,
            cache_salt: None,
            deterministic: false,
            keeps_record: false,
            max_wait: None,
        }
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token or a stop string was generated.
    Stop,
    /// The answer reached `max_tokens`, or the context is full.
    Length,
    /// The model called one or more tools.
    ToolCalls,
    /// The client canceled the request. Serialized as `interrupted`.
    #[serde(rename = "interrupted")]
    Canceled,
}
