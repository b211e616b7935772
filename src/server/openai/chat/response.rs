//! The bodies of streamed and non-streamed chat completion responses.

use serde::Serialize;

use crate::server::generation::pieces::{AnswerPiece, Finish};
use crate::server::generation::reply::ReplyHeader;
use crate::server::generation::text_tokens::{ScoredToken, finite_logprob};
use crate::server::generation::usage::Usage;
use crate::tokenizer::Tokenizer;

/// The body of a chat completion response that is not streamed.
#[derive(Serialize)]
pub struct Completion<'a> {
    #[serde(flatten)]
    pub header: &'a ReplyHeader,
    pub choices: Vec<WholeChoice>,
    pub usage: Usage,
}

#[derive(Serialize)]
pub struct WholeChoice {
    pub index: usize,
    pub message: WholeMessage,
    pub logprobs: Option<Logprobs>,
    pub finish_reason: Option<Finish>,
}

/// The message of a response that is not streamed.
/// The deltas of a stream add up to the same text, reasoning and tool calls.
#[derive(Serialize)]
pub struct WholeMessage {
    role: &'static str,
    /// The text of the answer. `null` if the answer has tool calls but no text.
    content: Option<String>,
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<WireCall>,
}

/// A chunk of a streamed chat completion.
#[derive(Serialize)]
pub struct Chunk<'a> {
    #[serde(flatten)]
    pub header: &'a ReplyHeader,
    pub choices: Vec<ChunkChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}

#[derive(Serialize)]
pub struct ChunkChoice {
    pub index: usize,
    pub delta: ChunkDelta,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Logprobs>,
    pub finish_reason: Option<Finish>,
}

#[derive(Default, Serialize)]
pub struct ChunkDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<WireCall>,
}

/// A complete tool call, or one part of a streamed tool call.
#[derive(Serialize)]
struct WireCall {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: WireFunction,
}

#[derive(Serialize)]
struct WireFunction {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

/// The log probabilities of content tokens.
#[derive(Default, Serialize)]
pub struct Logprobs {
    pub content: Vec<TokenLogprob>,
    /// The log probabilities of a refusal. Always null, because inferno does not separate refusals from content.
    pub refusal: (),
}

#[derive(Clone, Serialize)]
pub struct TokenLogprob {
    #[serde(flatten)]
    token: WireToken,
    top_logprobs: Vec<WireToken>,
}

#[derive(Clone, Serialize)]
struct WireToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl Default for WholeMessage {
    fn default() -> Self {
        let content = None;
        let refusal = None;
        let reasoning = None;
        Self { role: "assistant", content, refusal, reasoning, tool_calls: Vec::new() }
    }
}

impl WholeMessage {
    pub fn push(&mut self, piece: AnswerPiece) {
        match piece {
            AnswerPiece::Reasoning(text) => self.reasoning.get_or_insert_default().push_str(&text),
            AnswerPiece::Content(text, _) => self.content.get_or_insert_default().push_str(&text),
            AnswerPiece::ToolStart { id, name, .. } => {
                let function = WireFunction { name: Some(name), arguments: String::new() };
                self.tool_calls.push(WireCall { index: None, id: Some(id), kind: Some("function"), function });
            }
            AnswerPiece::ToolArguments { index, text } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.function.arguments.push_str(&text);
                }
            }
        }
    }

    /// Completes the message: sets the content to an empty string if the answer has neither text nor tool calls.
    pub fn finish(&mut self) {
        if self.tool_calls.is_empty() {
            self.content.get_or_insert_default();
        }
    }
}

impl ChunkDelta {
    /// Returns the first delta of an answer, which contains the role and empty content.
    pub fn role() -> Self {
        Self { role: Some("assistant"), content: Some(String::new()), ..Self::default() }
    }

    pub fn new(piece: AnswerPiece) -> Self {
        match piece {
            AnswerPiece::Reasoning(text) => Self { reasoning: Some(text), ..Self::default() },
            AnswerPiece::Content(text, _) => Self { content: Some(text), ..Self::default() },
            AnswerPiece::ToolStart { index, id, name } => {
                let function = WireFunction { name: Some(name), arguments: String::new() };
                let call = WireCall { index: Some(index), id: Some(id), kind: Some("function"), function };
                Self { tool_calls: vec![call], ..Self::default() }
            }
            AnswerPiece::ToolArguments { index, text } => {
                let function = WireFunction { name: None, arguments: text };
                let call = WireCall { index: Some(index), id: None, kind: None, function };
                Self { tool_calls: vec![call], ..Self::default() }
            }
        }
    }
}

impl TokenLogprob {
    /// Returns how many alternatives `top_logprobs` lists.
    pub fn alternatives(&self) -> usize {
        self.top_logprobs.len()
    }

    pub fn new(scored: &ScoredToken, tokenizer: &Tokenizer) -> Self {
        let wire = |id: u32, logprob: f32| {
            let bytes = tokenizer.table().bytes(id);
            let token = String::from_utf8_lossy(&bytes).into_owned();
            WireToken { token, logprob: finite_logprob(logprob), bytes }
        };
        Self {
            token: wire(scored.id, scored.logprobs.chosen),
            top_logprobs: scored.logprobs.top.iter().map(|&(id, logprob)| wire(id, logprob)).collect(),
        }
    }
}

/// Returns the scored tokens of a content piece, or an empty slice for pieces of reasoning and of tool calls.
pub fn scored_tokens(piece: &AnswerPiece) -> &[ScoredToken] {
    match piece {
        AnswerPiece::Content(_, tokens) => tokens,
        _ => &[],
    }
}
