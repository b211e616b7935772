//! The stream events of a response in OpenAI's Responses API.

use serde::Serialize;

use super::item::{ContentPart, Item};
use super::object::ResponseObject;
use crate::server::generation::event_stream::{EventBuffer, NoEvents};
use crate::server::openai::chat::TokenLogprob;

/// Receives the stream events of a response.
pub trait ResponseEventSink {
    fn send(&mut self, name: &'static str, event: Event<'_>);
}

impl ResponseEventSink for NoEvents {
    fn send(&mut self, _name: &'static str, _event: Event<'_>) {}
}

/// Adds sequence numbers to events and writes the events to a stream.
pub struct NumberedEvents<'a> {
    /// The sequence number of the next event.
    pub next: &'a mut u64,
    pub out: &'a mut EventBuffer,
}

impl ResponseEventSink for NumberedEvents<'_> {
    fn send(&mut self, name: &'static str, event: Event<'_>) {
        self.out.push_named(name, &NumberedEvent { name, sequence_number: *self.next, event });
        *self.next += 1;
    }
}

#[derive(Serialize)]
struct NumberedEvent<'a> {
    #[serde(rename = "type")]
    name: &'static str,
    sequence_number: u64,
    #[serde(flatten)]
    event: Event<'a>,
}

/// The fields of a stream event, except the event's name and sequence number.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Event<'a> {
    /// An event that contains the current response object.
    Response { response: &'a ResponseObject },
    /// The start or the end of an output item.
    Item { output_index: usize, item: &'a Item },
    /// The start or the end of a content part of an item.
    ContentPart {
        #[serde(flatten)]
        position: EventPosition<'a>,
        part: ContentPart<'a>,
    },
    /// The next piece of a text, or of the arguments of a function call.
    Delta {
        #[serde(flatten)]
        position: EventPosition<'a>,
        delta: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        logprobs: Option<&'a [TokenLogprob]>,
    },
    /// The end of a text, with the complete text.
    Text {
        #[serde(flatten)]
        position: EventPosition<'a>,
        text: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        logprobs: Option<&'a [TokenLogprob]>,
    },
    /// The end of the arguments of a function call, with the complete arguments.
    Arguments {
        #[serde(flatten)]
        position: EventPosition<'a>,
        name: &'a str,
        arguments: &'a str,
    },
}

/// The output item and the content part that an event belongs to.
#[derive(Clone, Copy, Serialize)]
pub struct EventPosition<'a> {
    pub item_id: &'a str,
    pub output_index: usize,
    /// The index of the content part. `None` for a function call, which has no content parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_index: Option<usize>,
}
