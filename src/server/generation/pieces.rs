//! Turns the events of one answer into pieces of reasoning, content and tool calls.
//!
//! Streamed and non-streamed responses consist of the same pieces, so their content cannot differ.

use serde::Serialize;

use super::text_tokens::{ScoredToken, TextTokens};
use crate::chat::{Channel, Delta, ToolCall};
use crate::engine::{Event, FinishReason, Summary};
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

/// Converts the events of one answer to pieces.
pub struct PieceBuilder {
    can_call_in_parallel: bool,
    must_call_named: bool,
    tokens: TextTokens,
    calls: Vec<SentCall>,
    /// The number of tool calls whose start was sent to the client.
    sent_calls: usize,
    is_complete: bool,
}

/// The part of a tool call that was already sent to the client.
#[derive(Default)]
struct SentCall {
    /// The index of the tool call in the response. `None` until the function name is known,
    /// and always `None` for a call that is not sent because only one call is allowed.
    index: Option<usize>,
    argument_bytes: usize,
    /// The tokens of the call, in case it becomes content. Empty once the function name is known.
    tokens: Vec<ScoredToken>,
}

impl PieceBuilder {
    /// Creates the state of an answer that has no events yet.
    pub fn new() -> Self {
        Self {
            can_call_in_parallel: true,
            must_call_named: false,
            tokens: TextTokens::default(),
            calls: Vec::new(),
            sent_calls: 0,
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
        Self { tokens: TextTokens::new(keeps_all_tokens), ..self }
    }

    /// Returns the number of reasoning tokens so far.
    pub fn reasoning_tokens(&self) -> usize {
        self.tokens.reasoning_tokens()
    }

    /// Adds an event and returns the update of the answer. `calls` are all tool calls of the answer so far.
    /// `answer_bytes` is the length of the answer text that has passed the chat parser so far, including text that the
    /// stop filter holds back.
    pub fn push(
        &mut self,
        event: Event,
        calls: &[ToolCall],
        answer_bytes: usize,
        tokenizer: &Tokenizer,
    ) -> AnswerUpdate {
        let (deltas, summary) = match event {
            Event::Token { id, deltas, logprobs, is_requested_stop } => {
                self.tokens.push(id, logprobs, !is_requested_stop && !tokenizer.is_control(id));
                (deltas, None)
            }
            Event::End { deltas, summary } => (deltas, Some(summary)),
        };
        let mut out = AnswerUpdate::default();
        let deltas = merged(deltas);
        let call_tokens = self.tokens.assign(&deltas, answer_bytes, tokenizer);
        // A tool call starts at a control token, so the text of this event belongs to a call of an earlier event.
        if let Some(call) = self.calls.last_mut() {
            call.tokens.extend(call_tokens);
        }
        self.send_text(deltas, &mut out);
        if summary.is_some() {
            let tokens = self.tokens.finish();
            if !tokens.is_empty() {
                out.pieces.push(AnswerPiece::Content(String::new(), tokens));
            }
        }
        self.send_calls(calls, summary.as_deref(), &mut out);
        out.finish = summary.map(|summary| self.finish_reason(summary.finish_reason));
        out
    }

    /// Adds new reasoning and content to `out`, with the tokens of the content.
    fn send_text(&mut self, deltas: Vec<Delta>, out: &mut AnswerUpdate) {
        for Delta { channel, text } in deltas {
            match channel {
                Channel::Reasoning => out.pieces.push(AnswerPiece::Reasoning(text)),
                Channel::Answer => {
                    let tokens = self.tokens.release(text.len());
                    out.pieces.push(AnswerPiece::Content(text, tokens));
                }
                Channel::ToolCall => {}
            }
        }
    }

    /// Adds the new parts of the tool calls to `out`. `summary` is set only at the end of the answer.
    /// Tool calls that still have no function name then become content.
    fn send_calls(&mut self, calls: &[ToolCall], summary: Option<&Summary>, out: &mut AnswerUpdate) {
        self.calls.resize_with(calls.len().max(self.calls.len()), SentCall::default);
        for (sent, call) in self.calls.iter_mut().zip(calls) {
            if call.name.is_empty() {
                if summary.is_some() && !call.arguments.is_empty() {
                    let tokens = std::mem::take(&mut sent.tokens);
                    out.pieces.push(AnswerPiece::Content(call.arguments.clone(), tokens));
                }
                continue;
            }
            sent.tokens.clear();
            if sent.index.is_none() {
                if self.sent_calls > 0 && !self.can_call_in_parallel {
                    (out.is_complete, self.is_complete) = (true, true);
                    continue;
                }
                let index = self.sent_calls;
                let id = ids::new("call_");
                let name = call.name.clone();
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
    use crate::engine::TokenLogprobs;
    use crate::runner::ExecutionMode;
    use crate::tokenizer::ControlTokens;

    fn end(finish_reason: FinishReason) -> Event {
        end_with(finish_reason, Vec::new())
    }

    fn end_with(finish_reason: FinishReason, deltas: Vec<Delta>) -> Event {
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
        Event::End { deltas, summary: Box::new(summary) }
    }

    /// Returns the event of a token that is not in `stop_token_ids`.
    fn token(id: u32, deltas: Vec<Delta>) -> Event {
        let logprobs = Some(TokenLogprobs { chosen: 0.0, top: Vec::new() });
        Event::Token { id, deltas, logprobs, is_requested_stop: false }
    }

    fn call_token() -> Event {
        token(1, vec![Delta { channel: Channel::ToolCall, text: "x".to_string() }])
    }

    fn answer_deltas(text: &str) -> Vec<Delta> {
        if text.is_empty() { Vec::new() } else { vec![Delta { channel: Channel::Answer, text: text.to_string() }] }
    }

    /// Returns the ids of the tokens in all content.
    fn content_ids(pieces: &[AnswerPiece]) -> Vec<u32> {
        let tokens = pieces.iter().filter_map(|piece| match piece {
            AnswerPiece::Content(_, tokens) => Some(tokens),
            _ => None,
        });
        tokens.flatten().map(|token| token.id).collect()
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
        let mut builder = PieceBuilder::new();
        let mut all = Vec::new();
        let mut answer_bytes = 0;
        for id in tokenizer.encode(answer, ControlTokens::Parse).unwrap() {
            let deltas = parser.push(tokenizer, id).unwrap();
            let answers = deltas.iter().filter(|delta| delta.channel == Channel::Answer);
            answer_bytes += answers.map(|delta| delta.text.len()).sum::<usize>();
            let event = token(id, deltas);
            all.extend(builder.push(event, parser.tool_calls(), answer_bytes, tokenizer).pieces);
        }
        let last = builder.push(end(FinishReason::ToolCalls), parser.tool_calls(), answer_bytes, tokenizer);
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
        let bytes = content_ids(&all).into_iter().flat_map(|id| tokenizer.table().bytes(id)).collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), "One moment.");
        let reasoning = tokenizer.encode("Let me look 🦀.", ControlTokens::Text).unwrap();
        assert_eq!(builder.reasoning_tokens(), reasoning.len());
    }

    #[test]
    fn one_event_can_end_the_reasoning_and_start_the_answer() {
        let (mut builder, tokenizer) = (PieceBuilder::new(), demo());
        let encode = |text: &str| tokenizer.encode(text, ControlTokens::Text).unwrap();
        let (thought, answer) = (encode("Let me think about that."), encode("Yes, of course."));
        let ids = [&thought[..], &answer].concat();
        let mut pieces = Vec::new();
        for (index, &id) in ids.iter().enumerate() {
            let (mut deltas, mut answer_bytes) = (Vec::new(), 0);
            if index + 1 == ids.len() {
                deltas.push(Delta { channel: Channel::Reasoning, text: "Let me think about that.".into() });
                deltas.extend(answer_deltas("Yes, of course."));
                answer_bytes = "Yes, of course.".len();
            }
            let event = token(id, deltas);
            pieces.extend(builder.push(event, &[], answer_bytes, &tokenizer).pieces);
        }
        assert_eq!(text(&pieces), "r:Let me think about that. c:Yes, of course. ");
        assert_eq!(builder.reasoning_tokens(), thought.len());
        assert_eq!(content_ids(&pieces), answer);
    }

    /// The stop filter holds back the last `lag` bytes of the text, and the model ends the text with a control token.
    #[test]
    fn tokens_of_text_in_the_stop_filter_arrive_once_and_in_order() {
        let tokenizer = demo();
        let (all, control) = ("One moment, please. It is here.", "<|return|>");
        let ids = tokenizer.encode(all, ControlTokens::Text).unwrap();
        let control = tokenizer.encode(control, ControlTokens::Parse).unwrap();
        for lag in 0..all.len() {
            let mut builder = PieceBuilder::new();
            let mut pieces = Vec::new();
            let mut parsed = 0;
            let mut sent = 0;
            for &id in ids.iter().chain(&control) {
                if !tokenizer.is_control(id) {
                    parsed += tokenizer.table().bytes(id).len();
                }
                let until = parsed.saturating_sub(lag).max(sent);
                let event = token(id, answer_deltas(&all[sent..until]));
                pieces.extend(builder.push(event, &[], parsed, &tokenizer).pieces);
                sent = until;
            }
            let last = end_with(FinishReason::Stop, answer_deltas(&all[sent..]));
            pieces.extend(builder.push(last, &[], parsed, &tokenizer).pieces);
            assert_eq!(content_ids(&pieces), ids, "lag {lag}");
        }
    }

    #[test]
    fn tokens_of_text_in_the_parser_arrive_even_after_a_control_token() {
        let tokenizer = demo();
        let encode = |text: &str, controls| tokenizer.encode(text, controls).unwrap();
        let (text, control) = ("{\"name\": 1}", encode("<|return|>", ControlTokens::Parse));
        let ids = encode(text, ControlTokens::Text);
        // The parser returns the text at the end, or with the control token.
        for is_with_control in [false, true] {
            let (mut builder, mut pieces) = (PieceBuilder::new(), Vec::new());
            for &id in &ids {
                let event = token(id, Vec::new());
                pieces.extend(builder.push(event, &[], 0, &tokenizer).pieces);
            }
            let (first, last) = if is_with_control { (text, "") } else { ("", text) };
            let event = token(control[0], answer_deltas(first));
            pieces.extend(builder.push(event, &[], first.len(), &tokenizer).pieces);
            let event = end_with(FinishReason::Stop, answer_deltas(last));
            pieces.extend(builder.push(event, &[], text.len(), &tokenizer).pieces);
            assert_eq!(content_ids(&pieces), ids);
        }
    }

    /// The request ends the answer with a token that is not a control token, while the parser holds text back.
    #[test]
    fn a_token_that_the_request_stops_at_is_not_content() {
        let tokenizer = demo();
        let ids = tokenizer.encode("   ", ControlTokens::Text).unwrap();
        let stop = tokenizer.encode("x", ControlTokens::Text).unwrap()[0];
        let (mut builder, mut pieces) = (PieceBuilder::new(), Vec::new());
        for &id in &ids {
            pieces.extend(builder.push(token(id, Vec::new()), &[], 0, &tokenizer).pieces);
        }
        let logprobs = Some(TokenLogprobs { chosen: 0.0, top: Vec::new() });
        let event = Event::Token { id: stop, deltas: Vec::new(), logprobs, is_requested_stop: true };
        pieces.extend(builder.push(event, &[], 0, &tokenizer).pieces);
        pieces.extend(builder.push(end_with(FinishReason::Stop, answer_deltas("   ")), &[], 3, &tokenizer).pieces);
        assert_eq!(content_ids(&pieces), ids);
    }

    #[test]
    fn tokens_of_a_stop_string_are_not_content() {
        let tokenizer = demo();
        let (kept, stop) = ("One moment", "zzz");
        let encode = |text: &str| tokenizer.encode(text, ControlTokens::Text).unwrap();
        let (ids, stop_ids) = (encode(kept), encode(stop));
        let mut builder = PieceBuilder::new();
        let mut pieces = Vec::new();
        let mut parsed = 0;
        for &id in ids.iter().chain(&stop_ids) {
            let start = parsed;
            parsed += tokenizer.table().bytes(id).len();
            let deltas = answer_deltas(kept.get(start..parsed).unwrap_or_default());
            let event = token(id, deltas);
            pieces.extend(builder.push(event, &[], parsed, &tokenizer).pieces);
        }
        pieces.extend(builder.push(end(FinishReason::Stop), &[], parsed, &tokenizer).pieces);
        assert_eq!(content_ids(&pieces), ids);
    }

    #[test]
    fn arguments_are_sent_as_they_grow() {
        let (mut builder, tokenizer) = (PieceBuilder::new(), demo());
        let mut sent = |event, calls: &[ToolCall]| text(&builder.push(event, calls, 0, &tokenizer).pieces);
        assert_eq!(sent(call_token(), &[call("f", "")]), "0=f ");
        assert_eq!(sent(call_token(), &[call("f", "{\"a")]), "0+{\"a ");
        // In chat formats other than harmony, the function name is known only at the end of a call.
        assert_eq!(sent(call_token(), &[call("f", "{\"a\":1}"), call("", "{\"name")]), "0+\":1} ");
        assert_eq!(sent(call_token(), &[call("f", "{\"a\":1}"), call("g", "")]), "1=g ");
        let update =
            builder.push(end(FinishReason::ToolCalls), &[call("f", "{\"a\":1}"), call("g", "")], 0, &tokenizer);
        assert_eq!((text(&update.pieces).as_str(), update.finish), ("1+{} ", Some(Finish::ToolCalls)));
    }

    /// The text of a tool call that cannot be parsed becomes content, with the tokens of this call only.
    #[test]
    fn calls_that_become_content_keep_their_tokens() {
        let tokenizer = demo();
        let (good, bad) = ("{\"name\": 1}", "no call at all");
        let mut builder = PieceBuilder::new();
        let mut pieces = Vec::new();
        let mut calls: Vec<ToolCall> = Vec::new();
        for text in [good, bad] {
            calls.push(call("", ""));
            let start = tokenizer.encode("<|call|>", ControlTokens::Parse).unwrap()[0];
            pieces.extend(builder.push(token(start, Vec::new()), &calls, 0, &tokenizer).pieces);
            for id in tokenizer.encode(text, ControlTokens::Text).unwrap() {
                let text = String::from_utf8(tokenizer.table().bytes(id)).unwrap();
                calls.last_mut().unwrap().arguments.push_str(&text);
                let delta = Delta { channel: Channel::ToolCall, text };
                pieces.extend(builder.push(token(id, vec![delta]), &calls, 0, &tokenizer).pieces);
            }
            if text == good {
                *calls.last_mut().unwrap() = call("f", "{}");
            }
        }
        pieces.extend(builder.push(end(FinishReason::Stop), &calls, 0, &tokenizer).pieces);
        assert_eq!(text(&pieces), "0=f 0+{} c:no call at all ");
        assert_eq!(content_ids(&pieces), tokenizer.encode(bad, ControlTokens::Text).unwrap());
    }

    #[test]
    fn malformed_and_cut_calls_lose_no_text() {
        let tokenizer = demo();
        let mut builder = PieceBuilder::new();
        let update = builder.push(end(FinishReason::ToolCalls), &[call("", "nonsense")], 0, &tokenizer);
        assert_eq!((text(&update.pieces).as_str(), update.finish), ("c:nonsense ", Some(Finish::Stop)));
        let update = PieceBuilder::new().push(end(FinishReason::Length), &[call("f", "{\"a")], 0, &tokenizer);
        assert_eq!((text(&update.pieces).as_str(), update.finish), ("0=f 0+{\"a ", Some(Finish::Length)));
    }

    #[test]
    fn without_parallel_calls_the_answer_ends_after_the_first() {
        let mut builder = PieceBuilder::new().with_parallel_calls(false);
        let tokenizer = demo();
        let update = builder.push(call_token(), &[call("f", "{}"), call("g", "{}")], 0, &tokenizer);
        assert_eq!((text(&update.pieces).as_str(), update.is_complete), ("0=f 0+{} ", true));
        let update = builder.push(end(FinishReason::Canceled), &[call("f", "{}"), call("g", "{}")], 0, &tokenizer);
        assert_eq!((text(&update.pieces).as_str(), update.finish), ("", Some(Finish::ToolCalls)));
    }
}
