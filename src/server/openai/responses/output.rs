//! Collects the pieces of an answer into output items, and sends these items as stream events.
//!
//! This module builds the items of streamed and of non-streamed responses, so both contain the same items.

use std::sync::Arc;

use super::events::{Event, EventPosition, ResponseEventSink};
use super::item::{Item, ItemContent, ItemStatus};
use crate::chat::Role;
use crate::server::generation::pieces::AnswerPiece;
use crate::server::openai::chat::{TokenLogprob, scored_tokens};
use crate::tokenizer::Tokenizer;

/// Which optional parts of an answer the client wants.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResponseParts {
    pub shows_reasoning: bool,
    pub has_encoded_reasoning: bool,
    pub has_logprobs: bool,
}

/// The output items of an answer so far. Only the last item can be in progress.
pub struct Output {
    parts: ResponseParts,
    items: Vec<Item>,
    /// For each function call, its index in `items`.
    calls: Vec<usize>,
}

impl Output {
    pub fn new(parts: ResponseParts) -> Self {
        Self { parts, items: Vec::new(), calls: Vec::new() }
    }

    /// Returns a copy of the output items so far. The last item can grow until [`finish`](Self::finish) is called.
    pub fn items(&self) -> Vec<Arc<Item>> {
        self.items.iter().cloned().map(Arc::new).collect()
    }

    pub fn push(&mut self, piece: AnswerPiece, tokenizer: &Tokenizer, events: &mut impl ResponseEventSink) {
        let tokens = scored_tokens(&piece).iter().filter(|_| self.parts.has_logprobs);
        let tokens = tokens.map(|token| TokenLogprob::new(token, tokenizer)).collect();
        match piece {
            AnswerPiece::Reasoning(_) if !self.parts.shows_reasoning => {}
            AnswerPiece::Reasoning(delta) => {
                if !matches!(self.open(), Some(ItemContent::Reasoning { .. })) {
                    let has_encoded_text = self.parts.has_encoded_reasoning;
                    self.start(ItemContent::Reasoning { text: String::new(), has_encoded_text }, events);
                }
                self.extend(&delta, Vec::new(), events);
            }
            AnswerPiece::Content(delta, _) => {
                if !matches!(self.open(), Some(ItemContent::Message { .. })) {
                    self.start_message(events);
                }
                self.extend(&delta, tokens, events);
            }
            AnswerPiece::ToolStart { id: call_id, name, .. } => {
                self.start(ItemContent::Call { call_id, name, arguments: String::new() }, events);
                self.calls.push(self.items.len() - 1);
            }
            AnswerPiece::ToolArguments { index, text } => {
                // Skip pieces of a function call that has ended, because `end` has already sent the arguments.
                if self.calls.get(index).is_some_and(|&item| item + 1 == self.items.len()) && self.open().is_some() {
                    self.extend(&text, Vec::new(), events);
                }
            }
        }
    }

    /// Ends the item in progress with `status`, which is `Incomplete` if the answer was cut off.
    pub fn finish(&mut self, status: ItemStatus, events: &mut impl ResponseEventSink) {
        self.end(status, events);
        // An answer that was not cut off gets an empty message if it has neither text nor function calls.
        let is_answer = |item: &Item| !matches!(item.content, ItemContent::Reasoning { .. });
        if status == ItemStatus::Completed && !self.items.iter().any(is_answer) {
            self.start_message(events);
            self.end(status, events);
        }
    }

    /// Returns the content of the item in progress, or `None` if no item is in progress.
    fn open(&self) -> Option<&ItemContent> {
        self.items.last().filter(|item| item.status == ItemStatus::InProgress).map(|item| &item.content)
    }

    fn start_message(&mut self, events: &mut impl ResponseEventSink) {
        let role = Role::Assistant;
        let text = String::new();
        let logprobs = Vec::new();
        self.start(ItemContent::Message { role, text, logprobs }, events);
    }

    /// Ends the item in progress, if there is one, and starts the next one.
    fn start(&mut self, content: ItemContent, events: &mut impl ResponseEventSink) {
        self.end(ItemStatus::Completed, events);
        let output_index = self.items.len();
        let item = Item { id: content.new_id(), status: ItemStatus::InProgress, content };
        events.send("response.output_item.added", Event::Item { output_index, item: &item });
        if let Some(part) = item.content.part() {
            let position = position(&item, output_index);
            events.send("response.content_part.added", Event::ContentPart { position, part });
        }
        self.items.push(item);
    }

    /// Adds text to the item in progress, and sends the text as a delta event.
    fn extend(&mut self, delta: &str, tokens: Vec<TokenLogprob>, events: &mut impl ResponseEventSink) {
        let output_index = self.items.len().saturating_sub(1);
        let Some(item) = self.items.last_mut() else { return };
        let position = position(item, output_index);
        let name = match item.content {
            ItemContent::Message { .. } => "response.output_text.delta",
            ItemContent::Reasoning { .. } => "response.reasoning_text.delta",
            ItemContent::Call { .. } | ItemContent::CallOutput { .. } => "response.function_call_arguments.delta",
        };
        let logprobs = matches!(item.content, ItemContent::Message { .. }).then_some(tokens.as_slice());
        events.send(name, Event::Delta { position, delta, logprobs });
        match &mut item.content {
            ItemContent::Message { text, logprobs, .. } => {
                text.push_str(delta);
                logprobs.extend(tokens);
            }
            ItemContent::Reasoning { text, .. }
            | ItemContent::Call { arguments: text, .. }
            | ItemContent::CallOutput { output: text, .. } => text.push_str(delta),
        }
    }

    /// Ends the item in progress, if there is one.
    fn end(&mut self, status: ItemStatus, events: &mut impl ResponseEventSink) {
        let Some(content) = self.open() else { return };
        // Clients parse the arguments as JSON, so send `{}` for a function call without arguments.
        let is_empty_call = matches!(content, ItemContent::Call { arguments, .. } if arguments.is_empty());
        if is_empty_call && status == ItemStatus::Completed {
            self.extend("{}", Vec::new(), events);
        }
        let output_index = self.items.len() - 1;
        let Some(item) = self.items.last_mut() else { return };
        item.status = status;
        let position = position(item, output_index);
        match &item.content {
            ItemContent::Message { text, logprobs, .. } => {
                events.send("response.output_text.done", Event::Text { position, text, logprobs: Some(logprobs) });
            }
            ItemContent::Reasoning { text, .. } => {
                events.send("response.reasoning_text.done", Event::Text { position, text, logprobs: None });
            }
            ItemContent::Call { name, arguments, .. } => {
                events.send("response.function_call_arguments.done", Event::Arguments { position, name, arguments });
            }
            ItemContent::CallOutput { .. } => {}
        }
        if let Some(part) = item.content.part() {
            events.send("response.content_part.done", Event::ContentPart { position, part });
        }
        events.send("response.output_item.done", Event::Item { output_index, item });
    }
}

/// Returns the id and the index of an output item, and the index of its content part. An item has at most one part.
fn position(item: &Item, output_index: usize) -> EventPosition<'_> {
    EventPosition { item_id: &item.id, output_index, content_index: item.content.part().map(|_| 0) }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Collects the events of a response as JSON.
    #[derive(Default)]
    struct ResponseEvents(Vec<(&'static str, Value)>);

    impl ResponseEventSink for ResponseEvents {
        fn send(&mut self, name: &'static str, event: Event<'_>) {
            self.0.push((name.trim_start_matches("response."), serde_json::to_value(&event).unwrap()));
        }
    }

    fn run(pieces: Vec<AnswerPiece>, parts: ResponseParts, status: ItemStatus) -> (Vec<Value>, ResponseEvents) {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
        let tokenizer = Tokenizer::from_dir(&folder).unwrap();
        let mut output = Output::new(parts);
        let mut events = ResponseEvents::default();
        pieces.into_iter().for_each(|piece| output.push(piece, &tokenizer, &mut events));
        output.finish(status, &mut events);
        (output.items.iter().map(|item| serde_json::to_value(item).unwrap()).collect(), events)
    }

    fn reasoning(text: &str) -> AnswerPiece {
        AnswerPiece::Reasoning(text.to_string())
    }

    fn content(text: &str) -> AnswerPiece {
        AnswerPiece::Content(text.to_string(), Vec::new())
    }

    fn call(index: usize, name: &str) -> AnswerPiece {
        AnswerPiece::ToolStart { index, id: format!("call_{index}"), name: name.to_string() }
    }

    fn arguments(index: usize, text: &str) -> AnswerPiece {
        AnswerPiece::ToolArguments { index, text: text.to_string() }
    }

    const SHOWN: ResponseParts =
        ResponseParts { shows_reasoning: true, has_encoded_reasoning: false, has_logprobs: false };

    #[test]
    fn every_item_starts_grows_and_ends_in_order() {
        let pieces = vec![
            reasoning("Let "),
            reasoning("me look."),
            content("One moment."),
            call(0, "find"),
            arguments(0, "{\"q\""),
            arguments(0, ":1}"),
            call(1, "list"),
            call(2, "stop"),
            // The `{}` of a function call without arguments can arrive after the next call has started.
            arguments(1, "{}"),
            arguments(2, "{}"),
        ];
        let (items, ResponseEvents(events)) = run(pieces, SHOWN, ItemStatus::Completed);
        let names: Vec<&str> = events.iter().map(|(name, _)| *name).collect();
        let text = |kind: &'static str, deltas: usize| {
            let (delta, done) = match kind {
                "reasoning" => ("reasoning_text.delta", "reasoning_text.done"),
                _ => ("output_text.delta", "output_text.done"),
            };
            let start = ["output_item.added", "content_part.added"].into_iter();
            start.chain(vec![delta; deltas]).chain([done, "content_part.done", "output_item.done"])
        };
        let call = |deltas: usize| {
            let deltas = vec!["function_call_arguments.delta"; deltas];
            let done = ["function_call_arguments.done", "output_item.done"];
            ["output_item.added"].into_iter().chain(deltas).chain(done)
        };
        let expected = text("reasoning", 2).chain(text("message", 1)).chain(call(2)).chain(call(1)).chain(call(1));
        assert_eq!(names, expected.collect::<Vec<_>>());

        // The deltas of an item add up to its complete text or arguments, and the item id never changes.
        for (index, item) in items.iter().enumerate() {
            let of_item: Vec<&(&str, Value)> =
                events.iter().filter(|(_, event)| event["output_index"] == index).collect();
            let ids = of_item.iter().map(|(_, event)| event.get("item_id").unwrap_or(&event["item"]["id"]));
            assert!(ids.eq(vec![&item["id"]; of_item.len()]), "{of_item:?}");
            let added = &of_item[0].1["item"];
            assert_eq!(added["status"], "in_progress");
            assert!(added["content"].as_array().is_none_or(Vec::is_empty), "{added}");
            assert_eq!(&of_item[of_item.len() - 1].1["item"], item);
            let deltas: String = of_item.iter().filter_map(|(_, event)| event["delta"].as_str()).collect();
            let whole = item["content"][0]["text"].as_str().or(item["arguments"].as_str());
            assert_eq!(Some(deltas.as_str()), whole);
        }
        let summary: Vec<Value> =
            items.iter().map(|item| json!([item["type"], item["name"], item["arguments"]])).collect();
        assert_eq!(
            json!(summary[2..]),
            json!([
                ["function_call", "find", "{\"q\":1}"],
                ["function_call", "list", "{}"],
                ["function_call", "stop", "{}"],
            ])
        );
    }

    #[test]
    fn cut_answers_are_incomplete_and_empty_ones_are_messages() {
        let (items, _) = run(vec![call(0, "f"), arguments(0, "{\"a")], SHOWN, ItemStatus::Incomplete);
        assert_eq!((&items[0]["status"], &items[0]["arguments"]), (&json!("incomplete"), &json!("{\"a")));
        let (items, _) = run(vec![call(0, "f")], SHOWN, ItemStatus::Incomplete);
        assert_eq!(items[0]["arguments"], "");
        let (items, _) = run(vec![reasoning("r")], SHOWN, ItemStatus::Incomplete);
        assert_eq!(items.len(), 1);
        let (items, _) = run(vec![reasoning("r")], SHOWN, ItemStatus::Completed);
        assert_eq!((items.len(), &items[1]["content"][0]["text"]), (2, &json!("")));
    }

    #[test]
    fn reasoning_is_hidden_or_encoded_on_request() {
        let pieces = || vec![reasoning("r"), content("c")];
        let (items, _) = run(pieces(), ResponseParts::default(), ItemStatus::Completed);
        assert_eq!((items.len(), &items[0]["type"]), (1, &json!("message")));
        let parts = ResponseParts { has_encoded_reasoning: true, ..SHOWN };
        let (items, _) = run(pieces(), parts, ItemStatus::Completed);
        assert_eq!(items[0]["encrypted_content"], "inferno-72");
        let (items, _) = run(pieces(), SHOWN, ItemStatus::Completed);
        assert!(items[0].get("encrypted_content").is_none());
        assert_eq!(items[0]["content"], json!([{ "type": "reasoning_text", "text": "r" }]));
    }
}
