//! The routes of ollama's API: `/api/chat`, `/api/generate`, and the routes about the model and the version.
//!
//! A request for an answer is converted to a conversation, as for a chat completion.
//! With `"raw": true`, `/api/generate` instead sends the prompt to the engine as plain text.
//! The pieces of the answer are converted to a JSON object, or to a stream of JSON objects, one per line.
//!
//! Source: ollama's `docs/api.md`, and the types in version 0.6.3 of the Python package `ollama`.

mod conversation;
mod error;
mod models;
mod request;
mod response;

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;

use super::generation::event_stream::{self, EventBuffer, EventWriter};
use super::generation::pieces::AnswerUpdate;
use super::generation::reply;
use super::generation::{self, Answers, Submission};
use super::http::body::{Fields, json_response, read_json};
use super::http::error::ApiError;
use super::http::log::RequestLog;
use super::state::ServerState;
use crate::engine::EngineHandle;
use request::OllamaRequest;
use response::{OllamaRoute, UnsentParts, load_response, part};

pub use error::OllamaError;
pub use models::{pull, running, show, tags, version};

/// The content type of streams: one JSON object per line.
const LINES: &str = "application/x-ndjson";

/// Handles `/api/chat`: generates the next message in a conversation.
pub async fn chat(
    State(server): State<Arc<ServerState>>,
    Extension(log): Extension<Arc<RequestLog>>,
    request: Request,
) -> Result<Response, ApiError> {
    generate_with(OllamaRoute::Chat, OllamaRequest::read_chat, &server, log, request).await
}

/// Handles `/api/generate`: answers a prompt. If `raw` is true, continues the prompt as plain text.
pub async fn generate(
    State(server): State<Arc<ServerState>>,
    Extension(log): Extension<Arc<RequestLog>>,
    request: Request,
) -> Result<Response, ApiError> {
    generate_with(OllamaRoute::Generate, OllamaRequest::read_generate, &server, log, request).await
}

type Read = fn(Fields, &ServerState, &EngineHandle) -> Result<OllamaRequest, ApiError>;

async fn generate_with(
    route: OllamaRoute,
    read: Read,
    server: &Arc<ServerState>,
    log: Arc<RequestLog>,
    request: Request,
) -> Result<Response, ApiError> {
    let engine = server.open_engine()?.clone();
    let fields = read_json(request, &server.options.timeouts).await?;
    let OllamaRequest { request, has_logprobs, shows_thinking, is_stream, ignored } = read(fields, server, &engine)?;
    // In ollama, a request without a prompt loads the model. Here, the model is already loaded.
    let Some(request) = request else {
        let response = json_response(&load_response(route, &server.options.model))?;
        return Ok(reply::with_ignored(response, &ignored));
    };
    let submission = Submission::new(request, is_stream, route.prompt_field());
    let mut answers = generation::submit(server, log, submission).await?;
    let unsent = UnsentParts::new(shows_thinking, has_logprobs);
    let mut writer = LineWriter { route, model: server.options.model.clone(), unsent };
    let response = if is_stream {
        event_stream::response(answers, writer, server.options.timeouts.ping)
    } else {
        while let Some(next) = answers.next().await {
            next?.1.pieces.into_iter().for_each(|piece| writer.unsent.push(piece, &answers));
        }
        json_response(&part(route, &writer.model, writer.unsent.take(), Some(&answers)))?
    };
    Ok(reply::with_ignored(response, &ignored))
}

/// Writes the JSON lines of a stream.
struct LineWriter {
    route: OllamaRoute,
    model: String,
    /// The text and the tool calls that have not been sent yet. Tool calls are sent in full at the end of the answer.
    unsent: UnsentParts,
}

impl EventWriter for LineWriter {
    fn content_type(&self) -> &'static str {
        LINES
    }

    fn write(&mut self, _index: usize, update: AnswerUpdate, answers: &Answers, out: &mut EventBuffer) {
        update.pieces.into_iter().for_each(|piece| self.unsent.push(piece, answers));
        let text = if update.finish.is_some() { Some(self.unsent.take()) } else { self.unsent.take_text() };
        if let Some(text) = text.filter(|text| !text.is_empty()) {
            out.push_line(&part(self.route, &self.model, text, None));
        }
    }

    fn finish(&mut self, answers: &Answers, out: &mut EventBuffer) {
        out.push_line(&part(self.route, &self.model, self.unsent.take(), Some(answers)));
    }

    fn fail(&mut self, error: &ApiError, _answers: &Answers, out: &mut EventBuffer) {
        out.push_line(&OllamaError::new(error));
    }

    fn end(&mut self, _out: &mut EventBuffer) {}

    /// Sends a line without text, because JSON lines, unlike server-sent events, cannot contain comments.
    fn keep_alive(&mut self, out: &mut EventBuffer) {
        out.push_line(&part(self.route, &self.model, UnsentParts::default(), None));
    }
}
