//! Collects the pieces of an answer into items, and sends the events of a stream.
//!
//! Whole and streamed responses both use these items, so they cannot differ.

use super::events::{Event, EventSink, Place};
use super::item::{Item, ItemContent, ItemStatus, Part};
use crate::chat::Role;
use crate::server::chat::{TokenLogprob, scored_tokens};
use crate::server::choice::Piece;
use crate::tokenizer::Tokenizer;

/// What the client wants to see of an answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shape {
    pub shows_reasoning: bool,
    pub has_encoded_reasoning: bool,
    pub has_logprobs: bool,
}

/// The output items so far. Only the last one may be in progress.
pub struct Output {
    shape: Shape,
    items: Vec<Item>,
    /// The index of the item of each call.
    calls: Vec<usize>,
}

impl Output {
    pub fn new(shape: Shape) -> Self {
        Self { shape, items: Vec::new(), calls: Vec::new() }
    }

    /// Returns the items, which is meaningful after [`finish`](Self::finish).
    pub fn take(&mut self) -> Vec<Item> {
        std::mem::take(&mut self.items)
    }

    /// Adds a piece of the answer.
    pub fn push(&mut self, piece: Piece, tokenizer: &Tokenizer, events: &mut impl EventSink) {
        let tokens = scored_tokens(&piece).iter().filter(|_| self.shape.has_logprobs);
        let tokens = tokens.map(|token| TokenLogprob::new(token, tokenizer)).collect();
        match piece {
            Piece::Reasoning(_) if !self.shape.shows_reasoning => {}
            Piece::Reasoning(delta) => {
                if !matches!(self.open(), Some(ItemContent::Reasoning { .. })) {
                    let has_encoded_text = self.shape.has_encoded_reasoning;
                    self.start(ItemContent::Reasoning { text: String::new(), has_encoded_text }, events);
                }
                self.extend(&delta, Vec::new(), events);
            }
            Piece::Content(delta, _) => {
                if !matches!(self.open(), Some(ItemContent::Message { .. })) {
                    self.start_message(events);
                }
                self.extend(&delta, tokens, events);
            }
            Piece::ToolStart { id: call_id, name, .. } => {
                self.start(ItemContent::Call { call_id, name, arguments: String::new() }, events);
                self.calls.push(self.items.len() - 1);
            }
            Piece::ToolArguments { index, text } => {
                // A call that has ended got its arguments when the next item started.
                if self.calls.get(index).is_some_and(|&item| item + 1 == self.items.len()) && self.open().is_some() {
                    self.extend(&text, Vec::new(), events);
                }
            }
        }
    }

    /// Ends the last item. `is_whole` tells whether the answer ended by itself.
    pub fn finish(&mut self, is_whole: bool, events: &mut impl EventSink) {
        let status = if is_whole { ItemStatus::Completed } else { ItemStatus::Incomplete };
        self.end(status, events);
        // An answer without text and calls is an empty message.
        let is_answer = |item: &Item| !matches!(item.content, ItemContent::Reasoning { .. });
        if is_whole && !self.items.iter().any(is_answer) {
            self.start_message(events);
            self.end(status, events);
        }
    }

    /// Returns the content of the item in progress.
    fn open(&self) -> Option<&ItemContent> {
        self.items.last().filter(|item| item.status == ItemStatus::InProgress).map(|item| &item.content)
    }

    fn start_message(&mut self, events: &mut impl EventSink) {
        let (role, text, logprobs) = (Role::Assistant, String::new(), Vec::new());
        self.start(ItemContent::Message { role, text, logprobs }, events);
    }

    /// Ends the item in progress and starts the next one.
    fn start(&mut self, content: ItemContent, events: &mut impl EventSink) {
        self.end(ItemStatus::Completed, events);
        let output_index = self.items.len();
        let item = Item { id: content.new_id(), status: ItemStatus::InProgress, content };
        events.send("response.output_item.added", Event::Item { output_index, item: &item });
        if let Some(part) = item.content.part() {
            let place = place(&item, output_index);
            events.send("response.content_part.added", Event::Part { place, part });
        }
        self.items.push(item);
    }

    /// Adds text to the last item.
    fn extend(&mut self, delta: &str, tokens: Vec<TokenLogprob>, events: &mut impl EventSink) {
        let output_index = self.items.len().saturating_sub(1);
        let Some(item) = self.items.last_mut() else { return };
        let place = place(item, output_index);
        let name = match item.content {
            ItemContent::Message { .. } => "response.output_text.delta",
            ItemContent::Reasoning { .. } => "response.reasoning_text.delta",
            ItemContent::Call { .. } | ItemContent::CallOutput { .. } => "response.function_call_arguments.delta",
        };
        let logprobs = matches!(item.content, ItemContent::Message { .. }).then_some(tokens.as_slice());
        events.send(name, Event::Delta { place, delta, logprobs });
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
    fn end(&mut self, status: ItemStatus, events: &mut impl EventSink) {
        let Some(content) = self.open() else { return };
        // Clients parse the arguments, so a call without any gets an empty object.
        let is_empty_call = matches!(content, ItemContent::Call { arguments, .. } if arguments.is_empty());
        if is_empty_call && status == ItemStatus::Completed {
            self.extend("{}", Vec::new(), events);
        }
        let output_index = self.items.len() - 1;
        let Some(item) = self.items.last_mut() else { return };
        item.status = status;
        let place = place(item, output_index);
        match &item.content {
            ItemContent::Message { text, logprobs, .. } => {
                events.send("response.output_text.done", Event::Text { place, text, logprobs: Some(logprobs) });
            }
            ItemContent::Reasoning { text, .. } => {
                events.send("response.reasoning_text.done", Event::Text { place, text, logprobs: None });
            }
            ItemContent::Call { name, arguments, .. } => {
                events.send("response.function_call_arguments.done", Event::Arguments { place, name, arguments });
            }
            ItemContent::CallOutput { .. } => {}
        }
        if let Some(part) = item.content.part() {
            events.send("response.content_part.done", Event::Part { place, part });
        }
        events.send("response.output_item.done", Event::Item { output_index, item });
    }
}

/// Returns the place of the only content part of an item.
fn place(item: &Item, output_index: usize) -> Place<'_> {
    let is_part = matches!(item.content.part(), Some(Part::OutputText { .. } | Part::ReasoningText { .. }));
    Place { item_id: &item.id, output_index, content_index: is_part.then_some(0) }
}
