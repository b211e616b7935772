//! Turns the events of one answer into pieces of reasoning, content and tool calls.
//!
//! Streamed and non-streamed responses consist of the same pieces, so their content cannot differ.

use serde::Serialize;

use crate::chat::{Channel, Delta, ToolCall};
use crate::engine::{Event, FinishReason, Summary, TokenLogprobs};
use crate::server::ids;
use crate::tokenizer::Tokenizer;

/// A piece of an answer: the next part of its reasoning, its content or one of its tool calls.
#[derive(Clone, Debug)]
pub enum AnswerPiece {
    Reasoning(String),
    /// Text of the answer, and the tokens of the text if the request asked for log probabilities.
    Content(String, Vec<ScoredToken>),
    ToolStart {
        index: usize,
        id: String,
        name: String,
    },
    ToolArguments {
        index: usize,
        text: String,
    },
}

/// A token of the content with its log probabilities.
#[derive(Clone, Debug)]
pub struct ScoredToken {
    pub id: u32,
    pub logprobs: TokenLogprobs,
}

/// Returns the log probability, but at least -9999, as in OpenAI's API.
/// JSON cannot represent -inf, the value for impossible tokens.
pub fn finite_logprob(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// Why an answer ended, as in OpenAI's API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    Stop,
    Length,
    ToolCalls,
}

impl Finish {
    pub fn as_str(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::ToolCalls => "tool_calls",
        }
    }
}

/// What one event adds to an answer.
#[derive(Debug, Default)]
pub struct AnswerUpdate {
    pub pieces: Vec<AnswerPiece>,
    /// The finish reason. `None` unless the event is the last one of the answer.
    pub finish: Option<Finish>,
    /// Whether the server must end the answer, because the model started a second tool call but only one is allowed.
    pub is_complete: bool,
}

/// Converts the events of one answer to updates. OpenAI's API calls an answer a choice.
pub struct Choice {
    can_call_in_parallel: bool,
    must_call_named: bool,
    /// Whether the tokens of the content include tokens without text, such as stop tokens.
    keeps_all_tokens: bool,
    /// The generated tokens that are not part of a piece yet.
    pending: Vec<PendingToken>,
    calls: Vec<SentCall>,
    /// The number of tool calls whose start was sent to the client.
    sent_calls: usize,
    reasoning_tokens: usize,
    is_complete: bool,
}

/// A generated token that is not part of a piece yet.
struct PendingToken {
    id: u32,
    logprobs: Option<TokenLogprobs>,
}

/// The part of a tool call that was already sent to the client.
#[derive(Clone, Copy, Default)]
struct SentCall {
    /// The index of the tool call in the response. `None` until the function name is known,
    /// and always `None` for a call that is not sent because only one call is allowed.
    index: Option<usize>,
    argument_bytes: usize,
}

impl Choice {
    /// Creates the state of an answer that has no events yet.
    pub fn new() -> Self {
        Self {
            can_call_in_parallel: true,
            must_call_named: false,
            keeps_all_tokens: false,
            pending: Vec::new(),
            calls: Vec::new(),
            sent_calls: 0,
            reasoning_tokens: 0,
            is_complete: false,
        }
    }

    /// Sets whether the answer may have several tool calls. If not, the answer ends when the function name
    /// of a second call is known.
    pub fn with_parallel_calls(self, can_call_in_parallel: bool) -> Self {
        Self { can_call_in_parallel, ..self }
    }

    /// Sets whether the client named the tool that the model must call.
    /// If so, the finish reason is `stop` instead of `tool_calls`, as in OpenAI's API.
    pub fn with_named_call(self, must_call_named: bool) -> Self {
        Self { must_call_named, ..self }
    }

    /// Sets whether the tokens of the content include tokens without text. Allowed only for an answer without a chat
    /// format, because the tokens of the format's headers and tags would be included too.
    pub fn with_all_tokens(self, keeps_all_tokens: bool) -> Self {
        Self { keeps_all_tokens, ..self }
    }

    /// Returns the number of reasoning tokens so far.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Adds an event and returns the update of the answer. `calls` are all tool calls of the answer so far.
    pub fn push(&mut self, event: Event, calls: &[ToolCall], tokenizer: &Tokenizer) -> AnswerUpdate {
        let (deltas, summary) = match event {
            Event::Token { id, deltas, logprobs } => {
                let is_boundary = deltas.is_empty() && tokenizer.is_control(id);
                self.add_token(PendingToken { id, logprobs }, is_boundary);
                (deltas, None)
            }
            Event::End { deltas, summary } => (deltas, Some(summary)),
        };
        let mut out = AnswerUpdate::default();
        self.send_text(deltas, tokenizer, &mut out);
        if summary.is_some() && self.keeps_all_tokens {
            let tokens = scored(std::mem::take(&mut self.pending));
            if !tokens.is_empty() {
                out.pieces.push(AnswerPiece::Content(String::new(), tokens));
            }
        }
        self.send_calls(calls, summary.as_deref(), &mut out);
        out.finish = summary.map(|summary| self.finish_reason(summary.finish_reason));
        out
    }

    /// Adds a token to the pending tokens. If `is_boundary`, drops this token and all pending tokens instead,
    /// unless the answer keeps all tokens.
    ///
    /// `is_boundary` is true for a control token without text. In harmony, such a token belongs to a header or ends a
    /// message. In other formats, such a token is a tag, or a token that the parser drops.
    fn add_token(&mut self, token: PendingToken, is_boundary: bool) {
        if is_boundary && !self.keeps_all_tokens {
            // Drop the pending tokens, which belong to a header or a tag and not to the text of the answer.
            self.pending.clear();
        } else {
            self.pending.push(token);
        }
    }

    /// Adds new reasoning and content to `out`, with the tokens of the content.
    fn send_text(&mut self, deltas: Vec<Delta>, tokenizer: &Tokenizer, out: &mut AnswerUpdate) {
        let deltas = merged(deltas);
        let tokens = self.take_tokens(&deltas, tokenizer);
        for (Delta { channel, text }, tokens) in deltas.into_iter().zip(tokens) {
            match channel {
                Channel::Reasoning => {
                    self.reasoning_tokens += tokens.len();
                    out.pieces.push(AnswerPiece::Reasoning(text));
                }
                Channel::Answer => out.pieces.push(AnswerPiece::Content(text, scored(tokens))),
                Channel::ToolCall => {}
            }
        }
    }

    /// Takes the pending tokens of each delta. If there are no deltas, all tokens stay pending.
    ///
    /// Assigns tokens from the last delta to the first. Each delta gets the last unassigned tokens that cover its text.
    /// The tokens left over belong to headers and tags, and are dropped.
    /// If the answer keeps all tokens, the first delta gets them instead.
    fn take_tokens(&mut self, deltas: &[Delta], tokenizer: &Tokenizer) -> Vec<Vec<PendingToken>> {
        if deltas.is_empty() {
            return Vec::new();
        }
        let mut pending = std::mem::take(&mut self.pending);
        let mut tokens: Vec<_> = deltas
            .iter()
            .rev()
            .map(|delta| {
                let (mut start, mut covered) = (pending.len(), 0);
                while start > 0 && covered < delta.text.len() {
                    start -= 1;
                    covered += tokenizer.table().bytes(pending[start].id).len();
                }
                pending.split_off(start)
            })
            .collect();
        tokens.reverse();
        if self.keeps_all_tokens {
            tokens[0].splice(..0, pending);
        }
        tokens
    }

    /// Adds the new parts of the tool calls to `out`. `summary` is set only at the end of the answer.
    /// Tool calls that still have no function name then become content.
    fn send_calls(&mut self, calls: &[ToolCall], summary: Option<&Summary>, out: &mut AnswerUpdate) {
        self.calls.resize(calls.len().max(self.calls.len()), SentCall::default());
        for (sent, call) in self.calls.iter_mut().zip(calls) {
            if call.name.is_empty() {
                if summary.is_some() && !call.arguments.is_empty() {
                    out.pieces.push(AnswerPiece::Content(call.arguments.clone(), Vec::new()));
                }
                continue;
            }
            if sent.index.is_none() {
                if self.sent_calls > 0 && !self.can_call_in_parallel {
                    (out.is_complete, self.is_complete) = (true, true);
                    continue;
                }
                let (index, id, name) = (self.sent_calls, ids::new("call_"), call.name.clone());
                out.pieces.push(AnswerPiece::ToolStart { index, id, name });
                sent.index = Some(index);
                self.sent_calls += 1;
            }
            let Some(index) = sent.index else { continue };
            let is_whole = summary.is_some_and(|summary| summary.finish_reason != FinishReason::Length);
            let text = match &call.arguments[sent.argument_bytes..] {
                // Clients parse the arguments of a call as JSON, so send `{}` for a call without arguments.
                "" if sent.argument_bytes == 0 && is_whole => "{}",
                text => text,
            };
            if !text.is_empty() {
                out.pieces.push(AnswerPiece::ToolArguments { index, text: text.to_string() });
                sent.argument_bytes = call.arguments.len();
            }
        }
    }

    /// Converts the engine's finish reason to the finish reason of the response.
    fn finish_reason(&self, reason: FinishReason) -> Finish {
        match reason {
            FinishReason::Length if !self.is_complete => Finish::Length,
            _ if self.sent_calls > 0 && !self.must_call_named => Finish::ToolCalls,
            _ => Finish::Stop,
        }
    }
}

/// Converts pending tokens to scored tokens. Omits tokens without log probabilities.
fn scored(tokens: Vec<PendingToken>) -> Vec<ScoredToken> {
    let scored = |PendingToken { id, logprobs }| Some(ScoredToken { id, logprobs: logprobs? });
    tokens.into_iter().filter_map(scored).collect()
}

/// Joins consecutive texts of the same channel.
fn merged(deltas: Vec<Delta>) -> Vec<Delta> {
    let mut merged: Vec<Delta> = Vec::with_capacity(deltas.len());
    for delta in deltas {
        match merged.last_mut() {
            Some(last) if last.channel == delta.channel => last.text.push_str(&delta.text),
            _ => merged.push(delta),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::ExecutionMode;

    fn end(finish_reason: FinishReason) -> Event {
        let summary = Summary {
            finish_reason,
            prompt_tokens: 1,
            cached_tokens: 0,
            completion_tokens: 1,
            queue_s: 0.0,
            ttft_s: 0.0,
            tok_per_s: 0.0,
            context_used: 2,
            context: 10,
            execution_mode: ExecutionMode::Eager,
            tool_calls: Vec::new(),
            format_violations: 0,
        };
        Event::End { deltas: Vec::new(), summary: Box::new(summary) }
    }

    fn token() -> Event {
        let delta = Delta { channel: Channel::ToolCall, text: "x".to_string() };
        Event::Token { id: 1, deltas: vec![delta], logprobs: None }
    }

    fn call(name: &str, arguments: &str) -> ToolCall {
        ToolCall { id: None, name: name.to_string(), arguments: arguments.to_string() }
    }

    fn demo() -> Tokenizer {
        Tokenizer::from_dir(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo")).unwrap()
    }

    fn text(pieces: &[AnswerPiece]) -> String {
        let text = |piece: &AnswerPiece| match piece {
            AnswerPiece::Reasoning(text) => format!("r:{text} "),
            AnswerPiece::Content(text, _) => format!("c:{text} "),
            AnswerPiece::ToolStart { index, name, .. } => format!("{index}={name} "),
            AnswerPiece::ToolArguments { index, text } => format!("{index}+{text} "),
        };
        pieces.iter().map(text).collect()
    }

    #[test]
    fn harmony_becomes_reasoning_content_and_calls() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
        let language = crate::language::Language::load(&folder).unwrap();
        let tokenizer = &language.tokenizer;
        let answer = "<|channel|>analysis<|message|>Let me look 🦀.<|end|>\
                      <|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>\
                      <|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>{\"q\": \"é\"}<|call|>";
        let prompt = crate::chat::Rendered { ids: Vec::new(), text: String::new() };
        let mut parser = language.chat_format().unwrap().parser(&prompt);
        let (mut choice, mut all) = (Choice::new(), Vec::new());
        for id in tokenizer.encode(answer, crate::tokenizer::ControlTokens::Parse).unwrap() {
            let deltas = parser.push(tokenizer, id).unwrap();
            let event = Event::Token { id, deltas, logprobs: Some(TokenLogprobs { chosen: 0.0, top: Vec::new() }) };
            all.extend(choice.push(event, parser.tool_calls(), tokenizer).pieces);
        }
        let last = choice.push(end(FinishReason::ToolCalls), parser.tool_calls(), tokenizer);
        assert_eq!((last.pieces.len(), last.finish), (0, Some(Finish::ToolCalls)));
        let of = |part: fn(&AnswerPiece) -> Option<&str>| all.iter().filter_map(part).collect::<String>();
        assert_eq!(
            of(|piece| if let AnswerPiece::Reasoning(text) = piece { Some(text) } else { None }),
            "Let me look 🦀."
        );
        assert_eq!(
            of(|piece| if let AnswerPiece::Content(text, _) = piece { Some(text) } else { None }),
            "One moment."
        );
        assert_eq!(of(|piece| if let AnswerPiece::ToolStart { name, .. } = piece { Some(name) } else { None }), "find");
        let arguments = of(|piece| if let AnswerPiece::ToolArguments { text, .. } = piece { Some(text) } else { None });
        assert_eq!(arguments, "{\"q\": \"é\"}");
        // Log probabilities cover only the tokens of the content, not the tokens of headers.
        let scored = all
            .iter()
            .filter_map(|piece| if let AnswerPiece::Content(_, tokens) = piece { Some(tokens) } else { None });
        let bytes = scored.flatten().flat_map(|token| tokenizer.table().bytes(token.id)).collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), "One moment.");
        let reasoning = tokenizer.encode("Let me look 🦀.", crate::tokenizer::ControlTokens::Text).unwrap();
        assert_eq!(choice.reasoning_tokens(), reasoning.len());
    }

    #[test]
    fn one_event_can_end_the_reasoning_and_start_the_answer() {
        let (mut choice, tokenizer) = (Choice::new(), demo());
        let encode = |text: &str| tokenizer.encode(text, crate::tokenizer::ControlTokens::Text).unwrap();
        let (thought, answer) = (encode("Let me think about that."), encode("Yes, of course."));
        let ids = [&thought[..], &answer].concat();
        let logprobs = || Some(TokenLogprobs { chosen: 0.0, top: Vec::new() });
        let mut pieces = Vec::new();
        for (index, &id) in ids.iter().enumerate() {
            let deltas = if index + 1 < ids.len() {
                Vec::new()
            } else {
                vec![
                    Delta { channel: Channel::Reasoning, text: "Let me think about that.".into() },
                    Delta { channel: Channel::Answer, text: "Yes, of course.".into() },
                ]
            };
            pieces.extend(choice.push(Event::Token { id, deltas, logprobs: logprobs() }, &[], &tokenizer).pieces);
        }
        assert_eq!(text(&pieces), "r:Let me think about that. c:Yes, of course. ");
        assert_eq!(choice.reasoning_tokens(), thought.len());
        let [_, AnswerPiece::Content(_, scored)] = &pieces[..] else { panic!("expected reasoning, then content") };
        assert_eq!(scored.iter().map(|token| token.id).collect::<Vec<_>>(), answer);
    }

    #[test]
    fn arguments_are_sent_as_they_grow() {
        let (mut choice, tokenizer) = (Choice::new(), demo());
        let mut sent = |event, calls: &[ToolCall]| text(&choice.push(event, calls, &tokenizer).pieces);
        assert_eq!(sent(token(), &[call("f", "")]), "0=f ");
        assert_eq!(sent(token(), &[call("f", "{\"a")]), "0+{\"a ");
        // In chat formats other than harmony, the function name is known only at the end of a call.
        assert_eq!(sent(token(), &[call("f", "{\"a\":1}"), call("", "{\"name")]), "0+\":1} ");
        assert_eq!(sent(token(), &[call("f", "{\"a\":1}"), call("g", "")]), "1=g ");
        let update = choice.push(end(FinishReason::ToolCalls), &[call("f", "{\"a\":1}"), call("g", "")], &tokenizer);
        assert_eq!((text(&update.pieces).as_str(), update.finish), ("1+{} ", Some(Finish::ToolCalls)));
    }

    #[test]
    fn malformed_and_cut_calls_lose_no_text() {
        let tokenizer = demo();
        let mut choice = Choice::new();
        let update = choice.push(end(FinishReason::ToolCalls), &[call("", "nonsense")], &tokenizer);
        assert_eq!((text(&update.pieces).as_str(), update.finish), ("c:nonsense ", Some(Finish::Stop)));
        let update = Choice::new().push(end(FinishReason::Length), &[call("f", "{\"a")], &tokenizer);
        assert_eq!((text(&update.pieces).as_str(), update.finish), ("0=f 0+{\"a ", Some(Finish::Length)));
    }

    #[test]
    fn without_parallel_calls_the_answer_ends_after_the_first() {
        let (mut choice, tokenizer) = (Choice::new().with_parallel_calls(false), demo());
        let update = choice.push(token(), &[call("f", "{}"), call("g", "{}")], &tokenizer);
        assert_eq!((text(&update.pieces).as_str(), update.is_complete), ("0=f 0+{} ", true));
        let update = choice.push(end(FinishReason::Canceled), &[call("f", "{}"), call("g", "{}")], &tokenizer);
        assert_eq!((text(&update.pieces).as_str(), update.finish), ("", Some(Finish::ToolCalls)));
    }
}
