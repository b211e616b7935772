//! The response object of the Responses API, with all fields that OpenAI's schema requires.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use super::item::Item;
use crate::server::generation::usage::Usage;
use crate::server::http::error::{ApiError, CONTEXT_LENGTH_EXCEEDED};
use crate::server::ids;

/// The estimated memory of a JSON value or an object key in bytes, without its text and its nested values.
const VALUE_BYTES: usize = 96;
/// The estimated memory of a response in bytes, without its items, texts and JSON values.
const OBJECT_BYTES: usize = 2048;

/// A response, under the field names of OpenAI's API.
#[derive(Clone, Serialize)]
pub struct ResponseObject {
    pub id: String,
    object: &'static str,
    created_at: u64,
    completed_at: Option<u64>,
    pub status: ResponseStatus,
    error: Option<ResponseError>,
    incomplete_details: Option<IncompleteDetails>,
    #[serde(serialize_with = "serialize_items")]
    pub output: Vec<Arc<Item>>,
    usage: Option<ResponseUsage>,
    #[serde(flatten, serialize_with = "serialize_shared")]
    pub settings: Arc<Settings>,
}

/// The fields of a response that describe its request. Fields that the request omits have their defaults.
#[derive(Serialize)]
pub struct Settings {
    pub model: String,
    pub previous_response_id: Option<String>,
    pub instructions: Option<String>,
    pub tools: Vec<Value>,
    pub tool_choice: Value,
    pub parallel_tool_calls: bool,
    pub max_tool_calls: Option<i64>,
    pub max_output_tokens: Option<usize>,
    pub truncation: &'static str,
    pub text: Value,
    pub reasoning: ReasoningSettings,
    pub temperature: f32,
    pub top_p: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub top_logprobs: usize,
    pub store: bool,
    pub background: bool,
    pub metadata: Map<String, Value>,
    pub service_tier: &'static str,
    pub user: Option<String>,
    pub safety_identifier: Option<String>,
    pub prompt_cache_key: Option<String>,
}

#[derive(Serialize)]
pub struct ReasoningSettings {
    pub effort: String,
    pub summary: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ResponseStatus {
    InProgress,
    Completed,
    /// The response was cut off by a token limit or a full context.
    Incomplete,
    Failed,
    Cancelled,
}

#[derive(Clone, Copy, Serialize)]
struct IncompleteDetails {
    reason: &'static str,
}

#[derive(Clone, Serialize)]
struct ResponseError {
    code: &'static str,
    message: String,
}

/// The token counts of a response, under the names of the Responses API.
#[derive(Clone, Copy, Serialize)]
struct ResponseUsage {
    input_tokens: usize,
    input_tokens_details: InputDetails,
    output_tokens: usize,
    output_tokens_details: OutputDetails,
    total_tokens: usize,
}

#[derive(Clone, Copy, Serialize)]
struct InputDetails {
    cached_tokens: usize,
    /// The number of tokens written to the cache. Always 0, because inferno does not count these tokens.
    cache_write_tokens: usize,
}

#[derive(Clone, Copy, Serialize)]
struct OutputDetails {
    reasoning_tokens: usize,
}

impl ResponseObject {
    /// Creates a response in progress.
    pub fn new(settings: Settings) -> Self {
        Self {
            id: ids::new("resp_"),
            object: "response",
            created_at: now(),
            completed_at: None,
            status: ResponseStatus::InProgress,
            error: None,
            incomplete_details: None,
            output: Vec::new(),
            usage: None,
            settings: Arc::new(settings),
        }
    }

    /// Sets the fields that are known only at the end of the response.
    pub fn end(&mut self, status: ResponseStatus, output: Vec<Arc<Item>>, usage: Usage) {
        self.set_status(status);
        self.output = output;
        self.usage = Some(ResponseUsage {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputDetails {
                cached_tokens: usage.prompt_tokens_details.cached_tokens,
                cache_write_tokens: 0,
            },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens: usage.completion_tokens_details.reasoning_tokens },
            total_tokens: usage.total_tokens,
        });
    }

    /// Sets the status, and the fields that depend on the status: `completed_at` and `incomplete_details`.
    pub fn set_status(&mut self, status: ResponseStatus) {
        self.status = status;
        self.completed_at = (status == ResponseStatus::Completed).then(now);
        let details = IncompleteDetails { reason: "max_output_tokens" };
        self.incomplete_details = (status == ResponseStatus::Incomplete).then_some(details);
    }

    /// Records the error that ended the response, with the code `server_error` unless clients know the error's code.
    pub fn set_error(&mut self, error: &ApiError) {
        let known = ["rate_limit_exceeded", CONTEXT_LENGTH_EXCEEDED];
        let code = error.code.filter(|code| known.contains(code)).unwrap_or("server_error");
        self.error = Some(ResponseError { code, message: error.message() });
    }

    /// Returns the estimated memory of the response without its items, in bytes.
    pub fn bytes(&self) -> usize {
        let settings = &self.settings;
        let texts = [&settings.instructions, &settings.user, &settings.safety_identifier, &settings.prompt_cache_key];
        let texts: usize = texts.into_iter().flatten().chain(settings.metadata.keys()).map(String::len).sum();
        let values = settings.tools.iter().chain([&settings.tool_choice, &settings.text]);
        OBJECT_BYTES + texts + values.chain(settings.metadata.values()).map(value_bytes).sum::<usize>()
    }
}

#[cfg(test)]
impl Settings {
    pub fn example() -> Self {
        let reasoning = ReasoningSettings { effort: "low".to_string(), summary: None };
        Self {
            model: "demo".to_string(),
            previous_response_id: None,
            instructions: None,
            tools: Vec::new(),
            tool_choice: Value::Null,
            parallel_tool_calls: true,
            max_tool_calls: None,
            max_output_tokens: None,
            truncation: "disabled",
            text: Value::Null,
            reasoning,
            temperature: 0.0,
            top_p: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            top_logprobs: 0,
            store: true,
            background: false,
            metadata: Map::new(),
            service_tier: "default",
            user: None,
            safety_identifier: None,
            prompt_cache_key: None,
        }
    }
}

/// Returns the estimated memory of a JSON value, in bytes.
fn value_bytes(value: &Value) -> usize {
    VALUE_BYTES
        + match value {
            Value::String(text) => text.len(),
            Value::Array(items) => items.iter().map(value_bytes).sum(),
            Value::Object(map) => map.iter().map(|(key, value)| VALUE_BYTES + key.len() + value_bytes(value)).sum(),
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

fn serialize_shared<T: Serialize, S: Serializer>(value: &Arc<T>, serializer: S) -> Result<S::Ok, S::Error> {
    value.as_ref().serialize(serializer)
}

fn serialize_items<S: Serializer>(items: &[Arc<Item>], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(items.iter().map(Arc::as_ref))
}
