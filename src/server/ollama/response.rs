//! The response bodies of ollama's routes `/api/chat` and `/api/generate`, streamed or not.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::engine::FinishReason;
use crate::server::generation::Answers;
use crate::server::generation::pieces::AnswerPiece;
use crate::server::openai::chat::{TokenLogprob, scored_tokens};

/// An ollama route that generates text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OllamaRoute {
    Chat,
    Generate,
}

impl OllamaRoute {
    /// Returns the name of the request field that contains the prompt.
    pub fn prompt_field(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Generate => "prompt",
        }
    }
}

/// The body of a response that is not streamed, or one line of a stream.
#[derive(Serialize)]
pub struct OllamaResponse<'a> {
    model: &'a str,
    created_at: String,
    #[serde(flatten)]
    content: Content,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logprobs: Vec<TokenLogprob>,
    done: bool,
    #[serde(flatten)]
    end: Option<End>,
}

/// The text of a response and, for `/api/chat`, its tool calls, under the field names of the route.
#[derive(Serialize)]
#[serde(untagged)]
enum Content {
    Chat {
        message: WireMessage,
    },
    Generate {
        response: String,
        #[serde(skip_serializing_if = "String::is_empty")]
        thinking: String,
    },
}

#[derive(Serialize)]
struct WireMessage {
    role: &'static str,
    content: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    thinking: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<WireCall>,
}

#[derive(Serialize)]
struct WireCall {
    function: WireFunction,
}

#[derive(Serialize)]
struct WireFunction {
    index: usize,
    name: String,
    arguments: Value,
}

/// The fields that a stream contains only in its last line. Durations are in nanoseconds.
#[derive(Serialize)]
struct End {
    done_reason: &'static str,
    #[serde(flatten)]
    figures: Option<Figures>,
}

#[derive(Serialize)]
struct Figures {
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
    prompt_eval_duration: u64,
    eval_count: usize,
    eval_duration: u64,
}

/// The text and the tool calls of an answer that have not been sent yet.
#[derive(Default)]
pub struct UnsentParts {
    shows_thinking: bool,
    has_logprobs: bool,
    content: String,
    thinking: String,
    logprobs: Vec<TokenLogprob>,
    calls: Vec<UnsentCall>,
}

/// A tool call whose arguments may still grow.
struct UnsentCall {
    name: String,
    arguments: String,
}

impl UnsentParts {
    pub fn new(shows_thinking: bool, has_logprobs: bool) -> Self {
        Self { shows_thinking, has_logprobs, ..Self::default() }
    }

    /// Adds a piece of the answer. Drops reasoning and log probabilities that the client does not want.
    pub fn push(&mut self, piece: AnswerPiece, answers: &Answers) {
        if self.has_logprobs {
            let entry = |token| TokenLogprob::new(token, answers.engine().tokenizer());
            self.logprobs.extend(scored_tokens(&piece).iter().map(entry));
        }
        match piece {
            AnswerPiece::Reasoning(_) if !self.shows_thinking => {}
            AnswerPiece::Reasoning(text) => self.thinking.push_str(&text),
            AnswerPiece::Content(text, _) => self.content.push_str(&text),
            AnswerPiece::ToolStart { name, .. } => self.calls.push(UnsentCall { name, arguments: String::new() }),
            AnswerPiece::ToolArguments { index, text } => {
                if let Some(call) = self.calls.get_mut(index) {
                    call.arguments.push_str(&text);
                }
            }
        }
    }

    /// Takes the unsent text, its log probabilities and the tool calls.
    pub fn take(&mut self) -> Self {
        let empty = Self::new(self.shows_thinking, self.has_logprobs);
        std::mem::replace(self, empty)
    }

    /// Takes the unsent text and its log probabilities. Leaves the tool calls, because they may be incomplete.
    pub fn take_text(&mut self) -> Option<Self> {
        let calls = std::mem::take(&mut self.calls);
        let text = self.take();
        self.calls = calls;
        Some(text)
    }

    pub fn is_empty(&self) -> bool {
        self.content.is_empty() && self.thinking.is_empty() && self.calls.is_empty()
    }
}

/// Creates the response for the unsent part of an answer, which can be the whole answer.
/// `ended` is set only for the last part. The response then contains the token counts and durations of the answer.
pub fn part<'a>(
    route: OllamaRoute,
    model: &'a str,
    unsent: UnsentParts,
    ended: Option<&Answers>,
) -> OllamaResponse<'a> {
    let UnsentParts { content, thinking, logprobs, calls, .. } = unsent;
    let call = |(index, UnsentCall { name, arguments })| WireCall {
        function: WireFunction { index, name, arguments: parse(&arguments) },
    };
    let content = match route {
        OllamaRoute::Chat => {
            let tool_calls = calls.into_iter().enumerate().map(call).collect();
            Content::Chat { message: WireMessage { role: "assistant", content, thinking, tool_calls } }
        }
        OllamaRoute::Generate => Content::Generate { response: content, thinking },
    };
    OllamaResponse { model, created_at: now(), content, logprobs, done: ended.is_some(), end: ended.map(end) }
}

/// Creates the response to a request without a prompt. Clients of ollama send such a request to load a model.
pub fn load_response(route: OllamaRoute, model: &str) -> OllamaResponse<'_> {
    let end = End { done_reason: "load", figures: None };
    OllamaResponse { done: true, end: Some(end), ..part(route, model, UnsentParts::default(), None) }
}

fn end(answers: &Answers) -> End {
    let nanoseconds = |seconds: f64| (seconds * 1e9).round() as u64;
    let figures = answers.summary(0).map(|summary| {
        let total_s = answers.elapsed().as_secs_f64();
        Figures {
            total_duration: nanoseconds(total_s),
            // The server rejects requests until the model is loaded, so a request never waits for loading.
            load_duration: 0,
            prompt_eval_count: summary.prompt_tokens,
            prompt_eval_duration: nanoseconds((summary.ttft_s - summary.queue_s).max(0.0)),
            eval_count: summary.completion_tokens,
            eval_duration: nanoseconds((total_s - summary.ttft_s).max(0.0)),
        }
    });
    let is_cut = answers.summary(0).is_some_and(|summary| summary.finish_reason == FinishReason::Length);
    End { done_reason: if is_cut { "length" } else { "stop" }, figures }
}

/// Converts the arguments of a tool call to a JSON object, as ollama's API requires.
/// Blank text becomes an empty object. Text that is not a JSON object becomes the field `arguments` of an object.
fn parse(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(Value::Object(map)) => Value::Object(map),
        _ if arguments.trim().is_empty() => Value::Object(Map::new()),
        _ => serde_json::json!({ "arguments": arguments }),
    }
}

/// Returns the current time in the format of RFC 3339.
pub fn now() -> String {
    jiff::Timestamp::now().to_string()
}
