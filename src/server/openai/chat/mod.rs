//! The route `POST /v1/chat/completions`.

mod messages;
mod request;
mod response;
mod tools;

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;

use crate::server::generation::event_stream::{self, EventBuffer, EventWriter};
use crate::server::generation::generate_options::StreamOptions;
use crate::server::generation::pieces::{AnswerPiece, AnswerUpdate};
use crate::server::generation::reply::{self, ReplyHeader};
use crate::server::generation::{self, Answers, Submission};
use crate::server::http::body::{json_response, read_json};
use crate::server::http::error::ApiError;
use crate::server::http::log::RequestLog;
use crate::server::state::ServerState;
use response::{Chunk, ChunkChoice, ChunkDelta, Completion, Logprobs, WholeChoice, WholeMessage};

pub use messages::{read as read_messages, read_content};
pub use request::{ChatRequest, read_effort, read_reasoning, read_template_variables};
pub use response::{TokenLogprob, scored_tokens};
pub use tools::{MAX_TOOLS, ToolChoice, Tools, check_function, read as read_tools};

/// Handles a chat completion request. Streams the response if the field `stream` is true.
pub async fn create(
    State(server): State<Arc<ServerState>>,
    Extension(log): Extension<Arc<RequestLog>>,
    request: Request,
) -> Result<Response, ApiError> {
    let engine = server.open_engine()?.clone();
    let fields = read_json(request, &server.options.timeouts).await?;
    let chat = ChatRequest::read(fields, &server, &engine)?;
    let has_logprobs = chat.request.options.as_ref().is_some_and(|options| options.logprobs.is_some());
    let submission = Submission {
        answers_per_prompt: chat.answers_per_prompt,
        can_call_in_parallel: chat.can_call_in_parallel,
        must_call_named: chat.must_call_named,
        ..Submission::new(chat.request, chat.stream.is_stream, "messages")
    };
    let answers = generation::submit(&server, log, submission).await?;
    let parts = ChatParts { shows_reasoning: chat.shows_reasoning, has_logprobs };
    let response = if chat.stream.is_stream {
        let header = ReplyHeader::new(&server, &answers, "chatcmpl-", "chat.completion.chunk");
        let writer = ChunkWriter { header, stream: chat.stream, parts, has_role: vec![false; answers.len()] };
        event_stream::response(answers, writer, server.options.timeouts.ping)
    } else {
        whole(&server, answers, parts).await?
    };
    Ok(reply::with_ignored(response, &chat.ignored))
}

/// Which optional parts of an answer the client wants.
#[derive(Clone, Copy)]
struct ChatParts {
    shows_reasoning: bool,
    has_logprobs: bool,
}

impl ChatParts {
    fn shows(self, piece: &AnswerPiece) -> bool {
        self.shows_reasoning || !matches!(piece, AnswerPiece::Reasoning(_))
    }

    /// Returns the log probabilities of a content piece.
    /// Returns `None` for other pieces, and if the request did not ask for log probabilities.
    fn logprobs(self, piece: &AnswerPiece, answers: &Answers) -> Option<Logprobs> {
        let is_content = matches!(piece, AnswerPiece::Content(..));
        let tokens = response::scored_tokens(piece);
        let entry = |token| TokenLogprob::new(token, answers.engine().tokenizer());
        (self.has_logprobs && is_content).then(|| Logprobs { content: tokens.iter().map(entry).collect(), refusal: () })
    }
}

/// Collects the answers into a single response.
async fn whole(server: &ServerState, mut answers: Answers, parts: ChatParts) -> Result<Response, ApiError> {
    let choice = |index| WholeChoice {
        index,
        message: WholeMessage::default(),
        logprobs: parts.has_logprobs.then(Logprobs::default),
        finish_reason: None,
    };
    let mut choices: Vec<WholeChoice> = (0..answers.len()).map(choice).collect();
    while let Some(next) = answers.next().await {
        let (index, AnswerUpdate { pieces, finish, .. }) = next?;
        let choice = &mut choices[index];
        for piece in pieces.into_iter().filter(|piece| parts.shows(piece)) {
            if let (Some(all), Some(more)) = (&mut choice.logprobs, parts.logprobs(&piece, &answers)) {
                all.content.extend(more.content);
            }
            choice.message.push(piece);
        }
        if finish.is_some() {
            choice.message.finish();
            choice.finish_reason = finish;
        }
    }
    let header = ReplyHeader::new(server, &answers, "chatcmpl-", "chat.completion");
    json_response(&Completion { header: &header, choices, usage: answers.usage() })
}

/// Writes the chunks of a streamed chat completion.
struct ChunkWriter {
    header: ReplyHeader,
    stream: StreamOptions,
    parts: ChatParts,
    /// For each answer, whether the first chunk, which contains the role, was written.
    has_role: Vec<bool>,
}

impl ChunkWriter {
    fn push(&self, choices: Vec<ChunkChoice>, answers: &Answers, out: &mut EventBuffer) {
        let usage = self.stream.chunk_usage(|| answers.usage());
        out.push(&Chunk { header: &self.header, choices, usage });
    }
}

impl EventWriter for ChunkWriter {
    fn write(&mut self, index: usize, update: AnswerUpdate, answers: &Answers, out: &mut EventBuffer) {
        if !std::mem::replace(&mut self.has_role[index], true) {
            let delta = ChunkDelta::role();
            self.push(vec![ChunkChoice { index, delta, logprobs: None, finish_reason: None }], answers, out);
        }
        for piece in update.pieces.into_iter().filter(|piece| self.parts.shows(piece)) {
            let logprobs = self.parts.logprobs(&piece, answers);
            let delta = ChunkDelta::new(piece);
            self.push(vec![ChunkChoice { index, delta, logprobs, finish_reason: None }], answers, out);
        }
        if update.finish.is_some() {
            let (delta, finish_reason) = (ChunkDelta::default(), update.finish);
            self.push(vec![ChunkChoice { index, delta, logprobs: None, finish_reason }], answers, out);
        }
    }

    fn finish(&mut self, answers: &Answers, out: &mut EventBuffer) {
        if self.stream.has_usage {
            let usage = Some(Some(answers.usage()));
            out.push(&Chunk { header: &self.header, choices: Vec::new(), usage });
        }
    }
}
