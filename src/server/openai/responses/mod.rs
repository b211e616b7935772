//! The routes of OpenAI's Responses API: `POST /v1/responses`, the token count, and the routes for stored responses.
//!
//! - `request`, `tools`, `input`: read a request: its body, its tools, and its input items
//! - `item`, `messages`: the items of a conversation, and their conversion to the messages of a prompt
//! - `object`, `output`: the response object, and its output items
//! - `events`: the stream events of a response
//! - `store`, `stored`: the responses in memory, and the routes that return, cancel and delete them

mod events;
mod input;
mod item;
mod messages;
mod object;
mod output;
mod request;
mod store;
mod stored;
mod tools;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;

use crate::engine;
use crate::server::generation::event_stream::{self, EventBuffer, EventWriter, NoEvents};
use crate::server::generation::pieces::{AnswerUpdate, Finish};
use crate::server::generation::reply;
use crate::server::generation::{self, Answers, Submission};
use crate::server::http::blocking::run_blocking;
use crate::server::http::body::{json_response, read_json};
use crate::server::http::error::ApiError;
use crate::server::http::log::RequestLog;
use crate::server::state::ServerState;
use crate::server::tenant::Tenant;
use events::{Event, NumberedEvents, ResponseEventSink};
use item::{Item, ItemStatus};
use object::{ResponseObject, ResponseStatus};
use output::Output;
use request::ResponseRequest;
use store::{RunningGuard, StoredResponse, TenantStore};

pub use store::Store;
pub use stored::{cancel, delete, get, input_items};

/// Handles `POST /v1/responses`: generates the next response in a conversation.
pub async fn create(
    State(server): State<Arc<ServerState>>,
    Extension(log): Extension<Arc<RequestLog>>,
    Extension(tenant): Extension<Tenant>,
    Extension(store): Extension<Arc<Store>>,
    request: Request,
) -> Result<Response, ApiError> {
    let engine = server.open_engine()?.clone();
    let store = TenantStore::new(store, tenant);
    let fields = read_json(request, &server.options.timeouts).await?;
    let ResponseRequest { messages, render, options, settings, input, parts, is_stream, ignored } =
        ResponseRequest::read(fields, &server, &engine, &store)?;
    let request = engine::Request::chat(messages).render(render).options(options);
    let can_call_in_parallel = settings.parallel_tool_calls;
    let submission = Submission { can_call_in_parallel, ..Submission::new(request, is_stream, "input") };
    let mut answers = generation::submit(&server, log, submission).await?;
    let output = Arc::new(Mutex::new(Output::new(parts)));
    let mut builder = ResponseBuilder { object: ResponseObject::new(settings), input, output, finish: None };
    let response = if is_stream {
        let (running, cancel) = store.start(&builder.object, &builder.output);
        answers.cancel_on(cancel);
        let writer = ResponseWriter { builder, running, next_event: 0 };
        event_stream::response(answers, writer, server.options.timeouts.ping)
    } else {
        while let Some(next) = answers.next().await {
            builder.push(next?.1, &answers, &mut NoEvents);
        }
        builder.end(&answers);
        let response = json_response(&builder.object)?;
        builder.save(&store);
        response
    };
    Ok(reply::with_ignored(response, &ignored))
}

#[derive(Serialize)]
struct InputTokens {
    object: &'static str,
    input_tokens: usize,
}

/// Handles `POST /v1/responses/input_tokens`: counts the tokens of a prompt.
pub async fn count_tokens(
    State(server): State<Arc<ServerState>>,
    Extension(tenant): Extension<Tenant>,
    Extension(store): Extension<Arc<Store>>,
    request: Request,
) -> Result<Response, ApiError> {
    let engine = server.loaded_engine()?.clone();
    let fields = read_json(request, &server.options.timeouts).await?;
    let request = ResponseRequest::read(fields, &server, &engine, &TenantStore::new(store, tenant))?;
    let render = move || engine.render(&request.messages, &request.render);
    let rendered = run_blocking("count the tokens", "input", render).await?;
    let tokens = InputTokens { object: "response.input_tokens", input_tokens: rendered.ids.len() };
    Ok(reply::with_ignored(json_response(&tokens)?, &request.ignored))
}

/// A response that is being built from the pieces of an answer.
struct ResponseBuilder {
    object: ResponseObject,
    input: Vec<Arc<Item>>,
    /// The output so far. While the response is streamed, the store reads this output for other requests.
    output: Arc<Mutex<Output>>,
    finish: Option<Finish>,
}

impl ResponseBuilder {
    /// Adds an update of the answer to the response.
    fn push(&mut self, update: AnswerUpdate, answers: &Answers, events: &mut impl ResponseEventSink) {
        self.finish = update.finish.or(self.finish);
        let mut output = self.lock_output();
        for piece in update.pieces {
            output.push(piece, answers.engine().tokenizer(), events);
        }
        if let Some(finish) = update.finish {
            let is_cut_off = finish == Finish::Length || answers.is_canceled();
            output.finish(if is_cut_off { ItemStatus::Incomplete } else { ItemStatus::Completed }, events);
        }
    }

    fn lock_output(&self) -> MutexGuard<'_, Output> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the fields that are known only at the end of the response. Returns the name of the last event.
    fn end(&mut self, answers: &Answers) -> &'static str {
        let (status, event) = match self.finish {
            _ if answers.is_canceled() => (ResponseStatus::Cancelled, "response.incomplete"),
            Some(Finish::Length) => (ResponseStatus::Incomplete, "response.incomplete"),
            Some(Finish::Stop | Finish::ToolCalls) => (ResponseStatus::Completed, "response.completed"),
            None => (ResponseStatus::Failed, "response.failed"),
        };
        // Copy the items instead of moving them: until the response is stored, the store reads the output so far.
        let items = self.lock_output().items();
        self.object.end(status, items, answers.usage());
        event
    }

    /// Stores the response, unless the request contains `"store": false`.
    fn save(&mut self, store: &TenantStore) {
        if self.object.settings.store {
            let input = std::mem::take(&mut self.input);
            store.insert(StoredResponse { object: self.object.clone(), input });
        }
    }
}

/// Writes the events of a streamed response.
struct ResponseWriter {
    builder: ResponseBuilder,
    /// While this guard lives, the store lists the response as in progress.
    running: RunningGuard,
    /// The sequence number of the next event.
    next_event: u64,
}

impl ResponseWriter {
    /// Sends an event that contains the current response object.
    fn send(&mut self, name: &'static str, out: &mut EventBuffer) {
        let mut events = NumberedEvents { next: &mut self.next_event, out };
        events.send(name, Event::Response { response: &self.builder.object });
    }

    /// Completes the response, stores it unless the request contains `"store": false`, and sends the last event.
    fn end(&mut self, answers: &Answers, out: &mut EventBuffer) {
        let event = self.builder.end(answers);
        self.builder.save(self.running.store());
        self.send(event, out);
    }
}

impl EventWriter for ResponseWriter {
    fn begin(&mut self, out: &mut EventBuffer) {
        self.send("response.created", out);
        self.send("response.in_progress", out);
    }

    fn write(&mut self, _index: usize, update: AnswerUpdate, answers: &Answers, out: &mut EventBuffer) {
        let mut events = NumberedEvents { next: &mut self.next_event, out };
        self.builder.push(update, answers, &mut events);
    }

    fn finish(&mut self, answers: &Answers, out: &mut EventBuffer) {
        self.end(answers, out);
    }

    fn fail(&mut self, error: &ApiError, answers: &Answers, out: &mut EventBuffer) {
        let mut events = NumberedEvents { next: &mut self.next_event, out };
        self.builder.lock_output().finish(ItemStatus::Incomplete, &mut events);
        self.builder.object.set_error(error);
        self.end(answers, out);
    }

    /// Sends `response.in_progress` again, because SSE comments do not reset the idle timers of clients such as Codex.
    fn keep_alive(&mut self, out: &mut EventBuffer) {
        self.send("response.in_progress", out);
    }
}
