//! The routes of Anthropic's API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.
//!
//! A request is converted to a conversation for the engine, as for a chat completion.
//! The pieces of the answer are converted to content blocks.
//!
//! Source: Anthropic's API reference, "Messages", and the types of the package `anthropic` 2.12.0 (PyPI).

mod block;
mod content;
mod conversation;
mod error;
mod events;
mod object;
mod request;

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;

use super::generation::event_stream::{self, EventBuffer, EventWriter, NoEvents};
use super::generation::pieces::{AnswerUpdate, Finish};
use super::generation::reply;
use super::generation::{self, Answers, Submission};
use super::http::blocking::run_blocking;
use super::http::body::{json_response, read_json};
use super::http::error::ApiError;
use super::http::log::RequestLog;
use super::ids;
use super::state::ServerState;
use crate::engine;
use content::Content;
use events::{Event, MessageEventSink};
use object::{MessageObject, StopDelta};
use request::MessagesRequest;

pub use error::MessagesError;

/// Handles `POST /v1/messages`: generates the next message in a conversation.
pub async fn create(
    State(server): State<Arc<ServerState>>,
    Extension(log): Extension<Arc<RequestLog>>,
    request: Request,
) -> Result<Response, ApiError> {
    let engine = server.open_engine()?.clone();
    let mut fields = read_json(request, &server.options.timeouts).await?;
    let max_tokens = request::read_max_tokens(&mut fields)?;
    let mut request = MessagesRequest::read(fields, &server, &engine)?;
    request.options.max_tokens = Some(max_tokens);
    let chat = engine::Request::chat(request.messages).render(request.render).options(request.options);
    let submission = Submission {
        can_call_in_parallel: request.can_call_in_parallel,
        ..Submission::new(chat, request.is_stream, "messages")
    };
    let mut answers = generation::submit(&server, log.clone(), submission).await?;
    let mut builder = MessageBuilder {
        message: MessageObject {
            id: ids::new("msg_"),
            kind: "message",
            role: "assistant",
            model: server.options.model.clone(),
            content: Vec::new(),
            stop: StopDelta::default(),
            usage: answers.usage().into(),
        },
        content: Content::new(request.shows_thinking),
    };
    let response = if request.is_stream {
        let writer = MessageWriter { builder, request_id: log.id.clone() };
        event_stream::response(answers, writer, server.options.timeouts.ping)
    } else {
        while let Some(next) = answers.next().await {
            builder.push(next?.1, &answers, &mut NoEvents);
        }
        builder.message.content = builder.content.take();
        builder.message.usage = answers.usage().into();
        json_response(&builder.message)?
    };
    Ok(reply::with_ignored(response, &request.ignored))
}

#[derive(Serialize)]
struct TokenCount {
    input_tokens: usize,
}

/// Handles `POST /v1/messages/count_tokens`: counts the tokens of a prompt.
pub async fn count_tokens(State(server): State<Arc<ServerState>>, request: Request) -> Result<Response, ApiError> {
    let engine = server.loaded_engine()?.clone();
    let fields = read_json(request, &server.options.timeouts).await?;
    let request = MessagesRequest::read(fields, &server, &engine)?;
    let render = move || engine.render(&request.messages, &request.render);
    let rendered = run_blocking("count the tokens", "messages", render).await?;
    Ok(reply::with_ignored(json_response(&TokenCount { input_tokens: rendered.ids.len() })?, &request.ignored))
}

/// An answer that is being generated, in the format of Anthropic's messages.
struct MessageBuilder {
    message: MessageObject,
    content: Content,
}

impl MessageBuilder {
    /// Adds an update of the answer to the message, and sends its stream events.
    /// At the end of the answer, also sets the stop reason.
    fn push(&mut self, update: AnswerUpdate, answers: &Answers, events: &mut impl MessageEventSink) {
        for piece in update.pieces {
            self.content.push(piece, events);
        }
        if let Some(finish) = update.finish {
            self.content.finish(events);
            self.message.stop = stop(finish, answers);
        }
    }
}

/// Converts the finish reason of an answer to the stop reason of Anthropic's API.
fn stop(finish: Finish, answers: &Answers) -> StopDelta {
    let summary = answers.summary(0);
    let is_context_full = summary.is_some_and(|summary| summary.context_used >= summary.context);
    let stop_sequence = answers.stop_string(0).filter(|_| finish == Finish::Stop).map(str::to_string);
    let stop_reason = match finish {
        Finish::ToolCalls => "tool_use",
        Finish::Length if is_context_full => "model_context_window_exceeded",
        Finish::Length => "max_tokens",
        Finish::Stop if stop_sequence.is_some() => "stop_sequence",
        Finish::Stop => "end_turn",
    };
    StopDelta { stop_reason: Some(stop_reason), stop_sequence, ..StopDelta::default() }
}

/// Writes the stream events of a message.
struct MessageWriter {
    builder: MessageBuilder,
    request_id: String,
}

impl EventWriter for MessageWriter {
    fn begin(&mut self, out: &mut EventBuffer) {
        out.send(Event::MessageStart { message: &self.builder.message });
        out.send(Event::Ping {});
    }

    fn write(&mut self, _index: usize, update: AnswerUpdate, answers: &Answers, out: &mut EventBuffer) {
        self.builder.push(update, answers, out);
    }

    fn finish(&mut self, answers: &Answers, out: &mut EventBuffer) {
        let usage = answers.usage().into();
        out.send(Event::MessageDelta { delta: &self.builder.message.stop, usage });
        out.send(Event::MessageStop {});
    }

    fn fail(&mut self, error: &ApiError, _answers: &Answers, out: &mut EventBuffer) {
        out.push_named("error", &MessagesError::new(error, &self.request_id));
    }

    /// Sends no end marker, because the event `message_stop` or `error` already marks the end of the stream.
    fn end(&mut self, _out: &mut EventBuffer) {}

    fn keep_alive(&mut self, out: &mut EventBuffer) {
        out.send(Event::Ping {});
    }
}
