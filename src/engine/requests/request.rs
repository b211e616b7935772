//! Requests to the engine: prompts, generation options and finish reasons.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde::Serialize;

use crate::chat::{Message, ReasoningEffort, RenderOptions, today};
use crate::engine::constraint::Constraint;
use crate::engine::sampling::SamplingParams;

/// A prompt with generation options, to pass to [`EngineHandle::submit`](crate::engine::EngineHandle::submit).
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Prompt,
    /// `None` means [`GenerateOptions::new`] with the model's sampling defaults.
    pub options: Option<GenerateOptions>,
}

/// The prompt of a request: a conversation, a text or token ids.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// A conversation, to render in the model's chat format. The request fails if the model has no chat format.
    Chat { messages: Vec<Message>, render: RenderOptions },
    /// A text to continue without a chat format. All generated text is on the answer channel.
    Text(String),
    /// Token ids to continue without a chat format, like [`Text`](Self::Text).
    Ids(Vec<u32>),
}

impl Request {
    /// Creates a request for the next message of a conversation.
    ///
    /// Uses medium reasoning effort, no tools and today's date, unless [`render`](Self::render) sets other options.
    pub fn chat(messages: impl Into<Vec<Message>>) -> Self {
        let render = RenderOptions {
            tools: Vec::new(),
            reasoning_effort: ReasoningEffort::Medium,
            date: today(),
            add_generation_prompt: true,
            template_variables: serde_json::Map::new(),
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

    /// Sets how to render a conversation. Has no effect on other prompts.
    pub fn render(mut self, options: RenderOptions) -> Self {
        if let Prompt::Chat { render, .. } = &mut self.prompt {
            *render = options;
        }
        self
    }

    /// Sets the generation options.
    pub fn options(mut self, options: GenerateOptions) -> Self {
        self.options = Some(options);
        self
    }
}

/// The options of a request, such as how its answers are sampled, when they end, and how the request is scheduled.
///
/// [`EngineHandle::defaults`](crate::engine::EngineHandle::defaults) returns the model's sampling defaults.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    pub sampling: SamplingParams,
    /// The maximum number of tokens in each answer. `None` allows as many as fit in the context.
    /// With 0, the request only computes its prompt.
    pub max_tokens: Option<usize>,
    /// Strings that end the answer. The answer does not include them.
    /// They have no effect in the reasoning or in tool calls.
    pub stop: Vec<String>,
    /// Tokens that end the answer, in addition to the model's stop tokens. Their text is not part of the answer.
    pub stop_token_ids: Vec<u32>,
    /// The minimum number of tokens to generate before a stop token.
    /// A stop string can begin in the text of these tokens, but must end in the text of a later token.
    /// The answer can be shorter than this minimum if it reaches `max_tokens` or fills the context,
    /// or if its constraint requires it to end.
    pub min_tokens: usize,
    /// Biases to add to the logits of tokens before penalties, by token id. Each bias is from -100 to 100.
    /// A bias of -100 usually bans a token, and a bias of 100 usually selects it.
    pub logit_bias: BTreeMap<u32, f32>,
    /// How many of the most likely tokens to report with log probabilities, for each generated token.
    /// With 0, only the generated token has a log probability. `None` reports no log probabilities.
    pub logprobs: Option<usize>,
    /// How many of the most likely tokens to report with log probabilities, for each prompt token except the first.
    /// With 0, only the prompt tokens themselves have log probabilities. `None` reports no log probabilities.
    /// If set, cached prompt tokens are computed again.
    /// [`RequestStream::scored_prompt`](super::RequestStream::scored_prompt) returns the log probabilities.
    pub prompt_logprobs: Option<usize>,
    /// The constraint that the answer must match. `None` allows any answer.
    pub constraint: Option<Constraint>,
    /// Whether the answer continues after the model's stop tokens, as in benchmarks. Not allowed with a constraint.
    /// The tokens in `stop_token_ids` still end the answer.
    pub ignore_eos: bool,
    /// A flag that another thread can set to cancel the request. The engine then ends the request before the next step.
    pub cancel: Option<Arc<AtomicBool>>,
    /// The owner of the request, such as a client with its own API key.
    ///
    /// Tenants with waiting requests get about equal numbers of tokens. A generated token counts as two prompt tokens.
    pub tenant: u64,
    /// The priority among the requests of a tenant: smaller values are more urgent.
    /// A value lower by 1 has the same effect as an arrival 2 seconds earlier.
    pub priority: i32,
    /// If set, the request shares cached prefixes only with requests that have the same salt.
    /// A client that does not know the salt therefore cannot infer from its time to first token
    /// whether its prompt begins like this prompt.
    pub cache_salt: Option<String>,
    /// Whether the answer must not depend on other requests, even if the engine is not
    /// [`deterministic`](crate::engine::LoadOptions::deterministic).
    /// If set on an engine that is not deterministic, this request and all concurrent requests are slower.
    pub deterministic: bool,
    /// Whether the stream keeps a [`RequestRecord`](super::RequestRecord), with which the answer can be recomputed.
    pub keeps_record: bool,
    /// The maximum time that the request may wait to start. A request that waits longer fails. `None` sets no limit.
    pub max_wait: Option<Duration>,
}

impl GenerateOptions {
    /// Creates options with the sampling parameters `sampling`. All other options are 0, `false`, `None` or empty.
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

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token or a stop string was generated, or the client called
    /// [`RequestStream::stop`](super::RequestStream::stop).
    Stop,
    /// The answer has `max_tokens` tokens, or the context is full.
    Length,
    /// The answer ended as with [`Stop`](Self::Stop), and it contains tool calls.
    ToolCalls,
    /// The client canceled the request. Serialized as `interrupted`.
    #[serde(rename = "interrupted")]
    Canceled,
}
