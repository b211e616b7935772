//! Collects the pieces of an answer into content blocks, and sends these blocks as stream events.
//!
//! This module builds the content blocks of streamed and of non-streamed messages, so both contain the same blocks.

use serde_json::{Map, Value};

use super::block::{Caller, ContentBlock, SIGNATURE};
use super::events::{BlockDelta, BlockStart, Event, MessageEventSink};
use crate::server::generation::pieces::AnswerPiece;

/// The content blocks of an answer so far. Only the last block can be incomplete.
pub struct Content {
    shows_thinking: bool,
    blocks: Vec<ContentBlock>,
    is_open: bool,
    /// The arguments of the open tool call so far, as unparsed text.
    arguments: String,
    /// For each tool call, the index of its content block.
    calls: Vec<usize>,
}

impl Content {
    pub fn new(shows_thinking: bool) -> Self {
        Self { shows_thinking, blocks: Vec::new(), is_open: false, arguments: String::new(), calls: Vec::new() }
    }

    /// Takes the content blocks. Call [`finish`](Self::finish) first, to complete the last block.
    pub fn take(&mut self) -> Vec<ContentBlock> {
        std::mem::take(&mut self.blocks)
    }

    pub fn push(&mut self, piece: AnswerPiece, events: &mut impl MessageEventSink) {
        match piece {
            AnswerPiece::Reasoning(_) if !self.shows_thinking => {}
            AnswerPiece::Reasoning(text) => {
                if !matches!(self.open(), Some(ContentBlock::Thinking { .. })) {
                    self.start(ContentBlock::Thinking { thinking: String::new(), signature: SIGNATURE }, events);
                }
                self.extend(&text, events);
            }
            AnswerPiece::Content(text, _) => {
                if !matches!(self.open(), Some(ContentBlock::Text { .. })) {
                    self.start(ContentBlock::Text { text: String::new(), citations: () }, events);
                }
                self.extend(&text, events);
            }
            AnswerPiece::ToolStart { id, name, .. } => {
                let id = id.replacen("call_", "toolu_", 1);
                let (input, caller) = (Value::Object(Map::new()), Caller::Direct);
                self.start(ContentBlock::ToolUse { id, name, input, caller }, events);
                self.calls.push(self.blocks.len() - 1);
            }
            AnswerPiece::ToolArguments { index, text } => {
                // Skip arguments of a call whose block has ended. Only the `{}` of a call without arguments can arrive
                // this late: text before a call is complete when the call starts.
                if self.calls.get(index).is_some_and(|&block| block + 1 == self.blocks.len()) && self.is_open {
                    self.extend(&text, events);
                }
            }
        }
    }

    /// Ends the open content block, if there is one.
    pub fn finish(&mut self, events: &mut impl MessageEventSink) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let index = self.blocks.len() - 1;
        match self.blocks.last_mut() {
            Some(ContentBlock::Thinking { signature, .. }) => {
                let delta = BlockDelta::Signature { signature };
                events.send(Event::ContentBlockDelta { index, delta });
            }
            Some(ContentBlock::ToolUse { input, .. }) => *input = parse(&std::mem::take(&mut self.arguments)),
            Some(ContentBlock::Text { .. }) | None => {}
        }
        events.send(Event::ContentBlockStop { index });
    }

    fn open(&self) -> Option<&ContentBlock> {
        self.blocks.last().filter(|_| self.is_open)
    }

    /// Ends the open content block, if there is one, and starts the next one.
    fn start(&mut self, block: ContentBlock, events: &mut impl MessageEventSink) {
        self.finish(events);
        let content_block = match &block {
            ContentBlock::Thinking { .. } => BlockStart::Thinking { thinking: "", signature: "" },
            ContentBlock::Text { .. } => BlockStart::Text { text: "", citations: () },
            ContentBlock::ToolUse { id, name, caller, .. } => {
                BlockStart::ToolUse { id, name, input: Map::new(), caller: *caller }
            }
        };
        events.send(Event::ContentBlockStart { index: self.blocks.len(), content_block });
        self.blocks.push(block);
        self.is_open = true;
    }

    /// Adds text to the open content block, and sends the text as a delta event.
    fn extend(&mut self, more: &str, events: &mut impl MessageEventSink) {
        let index = self.blocks.len().saturating_sub(1);
        let delta = match self.blocks.last_mut() {
            Some(ContentBlock::Thinking { thinking, .. }) => {
                thinking.push_str(more);
                BlockDelta::Thinking { thinking: more }
            }
            Some(ContentBlock::Text { text, .. }) => {
                text.push_str(more);
                BlockDelta::Text { text: more }
            }
            Some(ContentBlock::ToolUse { .. }) => {
                self.arguments.push_str(more);
                BlockDelta::InputJson { partial_json: more }
            }
            None => return,
        };
        events.send(Event::ContentBlockDelta { index, delta });
    }
}

/// Parses the arguments of a tool call. Blank text becomes `{}`.
/// Any other text that is not a JSON object becomes `{"arguments": text}`.
fn parse(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(Value::Object(map)) => Value::Object(map),
        _ if arguments.trim().is_empty() => Value::Object(Map::new()),
        _ => serde_json::json!({ "arguments": arguments }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Collects the events of a message as JSON.
    #[derive(Default)]
    struct MessageEvents(Vec<Value>);

    impl MessageEventSink for MessageEvents {
        fn send(&mut self, event: Event<'_>) {
            self.0.push(serde_json::to_value(&event).unwrap());
        }
    }

    fn run(pieces: Vec<AnswerPiece>, shows_thinking: bool) -> (Value, Vec<Value>) {
        let mut content = Content::new(shows_thinking);
        let mut events = MessageEvents::default();
        pieces.into_iter().for_each(|piece| content.push(piece, &mut events));
        content.finish(&mut events);
        (json!(content.take()), events.0)
    }

    fn pieces() -> Vec<AnswerPiece> {
        let call =
            |index, name: &str| AnswerPiece::ToolStart { index, id: format!("call_{index}"), name: name.to_string() };
        let arguments = |index, text: &str| AnswerPiece::ToolArguments { index, text: text.to_string() };
        vec![
            AnswerPiece::Reasoning("Let ".to_string()),
            AnswerPiece::Reasoning("me look.".to_string()),
            AnswerPiece::Content("One moment.".to_string(), Vec::new()),
            call(0, "find"),
            arguments(0, "{\"q\""),
            arguments(0, ":1}"),
            call(1, "list"),
            call(2, "stop"),
            // The `{}` of a tool call without arguments can arrive after the next tool call has started.
            arguments(1, "{}"),
            arguments(2, "nonsense"),
        ]
    }

    #[test]
    fn every_block_starts_grows_and_stops_in_order() {
        let (content, events) = run(pieces(), true);
        let direct = json!({ "type": "direct" });
        let expected = json!([
            { "type": "thinking", "thinking": "Let me look.", "signature": "inferno" },
            { "type": "text", "text": "One moment.", "citations": null },
            { "type": "tool_use", "id": "toolu_0", "name": "find", "input": { "q": 1 }, "caller": direct },
            { "type": "tool_use", "id": "toolu_1", "name": "list", "input": {}, "caller": direct },
            { "type": "tool_use", "id": "toolu_2", "name": "stop", "input": { "arguments": "nonsense" }, "caller": direct },
        ]);
        assert_eq!(content, expected);
        let summary: Vec<String> = events
            .iter()
            .map(|event| {
                let kind = event["type"].as_str().unwrap().trim_start_matches("content_block_");
                format!("{}:{kind} {}", event["index"], event["delta"]["type"].as_str().unwrap_or_default())
            })
            .collect();
        let expected = [
            "0:start ",
            "0:delta thinking_delta",
            "0:delta thinking_delta",
            "0:delta signature_delta",
            "0:stop ",
            "1:start ",
            "1:delta text_delta",
            "1:stop ",
            "2:start ",
            "2:delta input_json_delta",
            "2:delta input_json_delta",
            "2:stop ",
            "3:start ",
            "3:stop ",
            "4:start ",
            "4:delta input_json_delta",
            "4:stop ",
        ];
        assert_eq!(summary, expected);
    }

    #[test]
    fn hidden_thinking_leaves_no_block() {
        let (content, events) = run(pieces(), false);
        assert_eq!((&content[0]["type"], &events[0]["index"]), (&json!("text"), &json!(0)));
        assert_eq!(run(vec![AnswerPiece::Reasoning("r".to_string())], false), (json!([]), Vec::new()));
    }
}
