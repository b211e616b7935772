//! A model on a server, used as the backend of a conversation.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use serde_json::{Map, Value, json};

use super::chunks::{Chunks, UsageReport};
use super::connection::{Connection, StreamEnd};
use super::models::{self, ServedModel};
use crate::chat::{Message, RenderOptions};
use crate::conversation::{Backend, BackendAnswer, OnDelta, TurnPrompt, TurnRequest, TurnSummary};
use crate::engine::sampling::SAMPLING_FIELDS;
use crate::engine::{Engine, FinishReason, SamplingParams};
use crate::error::Error;
use crate::text::{counted, escaped};

/// A model on a server. Implements [`Backend`] by sending chat completion requests.
pub struct RemoteModel {
    connection: Rc<Connection>,
    model: ServedModel,
    /// Whether to try the route `/tokenize`. False after a response has shown that the server does not support it.
    can_count: Cell<bool>,
    last: RefCell<Option<LastAnswer>>,
}

/// The token counts, the time to first token and the decode speed of the last answer.
struct LastAnswer {
    usage: Option<UsageReport>,
    ttft_s: f64,
    tok_per_s: f64,
}

impl RemoteModel {
    pub fn new(connection: Rc<Connection>, model: ServedModel) -> Self {
        Self { connection, model, can_count: Cell::new(true), last: RefCell::new(None) }
    }

    /// Returns the JSON body of a request. The body contains only the settings that the user chose, so that the server
    /// uses its own defaults for all others.
    fn body(&self, request: &TurnRequest<'_>, messages: &[Message]) -> Value {
        let options = &request.options;
        let mut body = Map::new();
        body.insert("model".into(), json!(self.model.name));
        body.insert("messages".into(), messages.iter().map(wire_message).collect());
        body.insert("stream".into(), json!(true));
        body.insert("stream_options".into(), json!({ "include_usage": true }));
        for field in SAMPLING_FIELDS.iter().filter(|field| request.chosen.contains_key(field.flag)) {
            // All sampling values are numbers, so their text is valid JSON.
            let value = serde_json::from_str(&field.get(&options.sampling)).unwrap_or_default();
            body.insert(field.name.into(), value);
        }
        if request.chosen.contains_key("reasoning") {
            body.insert("reasoning_effort".into(), json!(request.render.reasoning_effort.to_string()));
        }
        if let Some(limit) = options.max_tokens {
            body.insert("max_tokens".into(), json!(limit));
        }
        if !options.stop.is_empty() {
            body.insert("stop".into(), json!(options.stop));
        }
        if options.ignore_eos {
            body.insert("ignore_eos".into(), json!(true));
        }
        Value::Object(body)
    }

    /// Returns the token count from the route `/tokenize`, which inferno and vLLM have.
    /// Returns `None` if the server does not support the route, or if the request fails.
    fn count(&self, fields: Value) -> Option<usize> {
        if !self.can_count.get() {
            return None;
        }
        let mut body = fields;
        body["model"] = json!(self.model.name);
        let url = self.connection.url.root_route("/tokenize");
        // After an error, leave `can_count` set, because a server that is busy now may answer the next request.
        let response = self.connection.post_if_supported(&url, &body).ok()?;
        let count = response.and_then(|json| json["count"].as_u64());
        self.can_count.set(count.is_some());
        count.map(|count| count as usize)
    }

    /// Replaces the error for an unknown model with an error that lists the server's models.
    /// Returns other errors unchanged.
    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        match error.downcast_ref() {
            Some(Error::ServerRoute { .. }) => match models::list(&self.connection) {
                Ok(models) if !models.iter().any(|model| model.name == self.model.name) => {
                    models::find(&models, &self.model.name, &self.connection).err().unwrap_or(error)
                }
                _ => error,
            },
            _ => error,
        }
    }
}

/// Converts the role and the text of a message to JSON.
/// Omits the reasoning, because most chat formats drop the reasoning of earlier turns.
fn wire_message(message: &Message) -> Value {
    json!({ "role": message.role.as_str(), "content": message.content })
}

impl Backend for RemoteModel {
    fn answer(&self, request: TurnRequest<'_>, on_delta: &mut OnDelta) -> Result<BackendAnswer> {
        let TurnPrompt::Chat(messages) = request.prompt else {
            bail!("cannot continue plain text: the model runs on a server")
        };
        let body = self.body(&request, messages);
        let cancel = request.options.cancel.clone().unwrap_or_else(|| Arc::new(false.into()));
        let (started, mut chunks) = (Instant::now(), Chunks::default());
        let end = self.connection.stream("/chat/completions", &body, &cancel, &mut |data| {
            let (deltas, flow) = chunks.push(data)?;
            deltas.iter().try_for_each(&mut *on_delta)?;
            Ok(flow)
        });
        let finish_reason = match (end.map_err(|error| self.explain(error))?, chunks.finish) {
            (StreamEnd::Canceled, _) => FinishReason::Canceled,
            (_, Some(reason)) => reason,
            (_, None) => {
                bail!("cannot complete the answer: the server at {} ended the response too early", self.connection.url)
            }
        };
        let ttft_s = chunks.first_text.map_or(0.0, |first| (first - started).as_secs_f64());
        let (usage, tok_per_s) = (chunks.usage, chunks.tok_per_s());
        self.last.replace(Some(LastAnswer { usage, ttft_s, tok_per_s }));
        let summary = TurnSummary {
            finish_reason,
            prompt_tokens: usage.map(|usage| usage.prompt_tokens),
            completion_tokens: usage.map(|usage| usage.completion_tokens),
            ttft_s,
            tok_per_s,
            context: self.model.context,
            execution_mode: None,
            tool_calls: chunks.tool_calls,
            format_violations: 0,
        };
        Ok(BackendAnswer { tokens: None, summary })
    }

    fn count_tokens(&self, messages: &[Message], render: &RenderOptions) -> Result<Option<usize>> {
        let messages: Vec<Value> = messages.iter().map(wire_message).collect();
        Ok(self.count(json!({ "messages": messages, "add_generation_prompt": render.add_generation_prompt })))
    }

    fn count_text(&self, text: &str) -> Option<usize> {
        self.count(json!({ "prompt": text, "add_special_tokens": false }))
    }

    fn context(&self) -> Option<usize> {
        self.model.context
    }

    fn defaults(&self) -> Option<SamplingParams> {
        None
    }

    fn stats(&self) -> Vec<(&'static str, String)> {
        let mut rows = vec![("server", self.connection.url.to_string())];
        rows.extend(self.model.owner.as_ref().map(|owner| ("owned by", escaped(owner))));
        let context = self.model.context.map_or_else(|| "unknown".to_string(), |context| counted(context, "token"));
        rows.push(("context", context));
        let last = self.last.borrow();
        let Some(last) = last.as_ref() else { return rows };
        if let Some(usage) = last.usage {
            let part =
                |count: Option<usize>, name| count.map_or_else(String::new, |count| format!(" ({count} {name})"));
            let cached = part(usage.cached_tokens, "cached");
            let reasoning = part(usage.reasoning_tokens, "reasoning");
            rows.push(("last prompt", counted(usage.prompt_tokens, "token") + &cached));
            rows.push(("last answer", counted(usage.completion_tokens, "token") + &reasoning));
        }
        rows.push(("first token", format!("after {:.2} s", last.ttft_s)));
        if last.tok_per_s > 0.0 {
            rows.push(("speed", format!("{:.1} tok/s", last.tok_per_s)));
        }
        rows
    }

    fn context_stats(&self) -> Vec<(&'static str, String)> {
        let cached = self.last.borrow().as_ref().and_then(|last| last.usage?.cached_tokens);
        cached
            .map(|tokens| ("cached", format!("{} of the last prompt", counted(tokens, "token"))))
            .into_iter()
            .collect()
    }

    fn last_context_used(&self) -> Option<usize> {
        let usage = self.last.borrow().as_ref()?.usage?;
        Some(usage.prompt_tokens + usage.completion_tokens)
    }

    fn engine(&self) -> Option<&Engine> {
        None
    }
}
