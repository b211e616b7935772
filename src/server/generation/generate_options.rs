//! Reads the request fields that the routes for generating text share, such as the sampling parameters.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::constraint;
use super::usage::Usage;
use crate::engine::sampling::SAMPLING_FIELDS;
use crate::engine::{Constraint, EngineHandle, GenerateOptions};
use crate::server::http::body::{Fields, RefusedField};
use crate::server::http::error::ApiError;
use crate::server::ids;
use crate::server::state::ServerState;

/// The maximum number of answers to one prompt.
const MAX_ANSWERS_PER_PROMPT: i64 = 8;

/// The maximum number of stop strings in a request, and also the maximum number of stop tokens.
pub const MAX_STOPS: usize = 16;
/// The maximum size of a stop string in bytes.
pub const MAX_STOP_BYTES: usize = 1024;

/// The maximum size of a cache salt in bytes.
const MAX_SALT_BYTES: usize = 1024;

/// Unsupported fields that would change the output.
/// Chat completions support `chat_template_kwargs`: they take this field before [`read`] checks the list.
const REFUSED: &[RefusedField] = &[
    RefusedField { name: "allowed_token_ids", neutral: &["[]"], hint: "" },
    RefusedField { name: "bad_words", neutral: &["[]"], hint: "" },
    RefusedField { name: "beam_width", neutral: &["1"], hint: "" },
    RefusedField { name: "chat_template", neutral: &[], hint: "" },
    RefusedField { name: "chat_template_kwargs", neutral: &["{}"], hint: "" },
    RefusedField { name: "continue_final_message", neutral: &["false"], hint: "" },
    RefusedField { name: "documents", neutral: &["[]"], hint: "" },
    RefusedField { name: "guided_choice", neutral: &[], hint: "" },
    RefusedField { name: "guided_decoding_backend", neutral: &[], hint: "" },
    RefusedField { name: "guided_grammar", neutral: &[], hint: "" },
    RefusedField { name: "guided_json", neutral: &[], hint: "" },
    RefusedField { name: "guided_regex", neutral: &[], hint: "" },
    RefusedField { name: "include_stop_str_in_output", neutral: &["false"], hint: "" },
    RefusedField { name: "length_penalty", neutral: &["1", "1.0"], hint: "" },
    RefusedField { name: "logits_processors", neutral: &["[]"], hint: "" },
    RefusedField { name: "prompt_logprobs", neutral: &["0"], hint: "" },
    RefusedField { name: "skip_special_tokens", neutral: &["true"], hint: "" },
    RefusedField { name: "truncate_prompt_tokens", neutral: &[], hint: "" },
    RefusedField { name: "use_beam_search", neutral: &["false"], hint: "" },
];

/// Reads the shared fields. Each route itself reads the token limit and whether to return log probabilities,
/// because the routes have different fields for these options.
pub fn read(fields: &mut Fields, server: &ServerState, engine: &EngineHandle) -> Result<GenerateOptions, ApiError> {
    fields.refuse_all(REFUSED)?;
    let mut options = GenerateOptions::new(engine.defaults().clone());
    options.sampling.seed = ids::random_u32().into();
    read_sampling(fields, &mut options)?;
    options.stop = read_stop(fields)?;
    options.stop_token_ids = read_token_ids(fields, "stop_token_ids", MAX_STOPS)?.unwrap_or_default();
    options.logit_bias = read_logit_bias(fields)?;
    let answer = constraint::read_structured_outputs(fields)?;
    options.constraint = answer.map(|answer| Constraint { answer: Some(answer), ..Constraint::default() });
    options.ignore_eos = fields.take_bool("ignore_eos")?.unwrap_or(false);
    options.min_tokens = fields.take_integer("min_tokens", 0..=i64::from(u32::MAX))?.unwrap_or(0) as usize;
    let priority = fields.take_integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?;
    options.priority = priority.unwrap_or(0) as i32;
    options.cache_salt = read_cache_salt(fields)?;
    options.deterministic = fields.take_bool("deterministic")?.unwrap_or(false);
    options.max_wait = Some(server.options.timeouts.queue);
    let vocab_size = engine.info().vocab_size;
    for (name, ids) in [
        ("stop_token_ids", options.stop_token_ids.clone()),
        ("logit_bias", options.logit_bias.keys().copied().collect()),
    ] {
        if let Some(id) = ids.into_iter().find(|&id| id as usize >= vocab_size) {
            return Err(fields.invalid(name, format!("token id {id} is outside the vocabulary of {vocab_size} tokens")));
        }
    }
    Ok(options)
}

/// Reads the sampling parameters that `SAMPLING_FIELDS` lists.
fn read_sampling(fields: &mut Fields, options: &mut GenerateOptions) -> Result<(), ApiError> {
    for field in SAMPLING_FIELDS {
        let Some(value) = fields.take(field.name) else { continue };
        let text = match (field.name, value.as_i64()) {
            // For `top_k`, vLLM's clients send -1 to keep all tokens. inferno uses 0.
            ("top_k", Some(-1)) => "0".to_string(),
            ("seed", Some(seed)) => (seed as u64).to_string(),
            _ if value.is_number() => value.to_string(),
            _ => return Err(fields.invalid(field.name, "expected a number")),
        };
        field.set(&mut options.sampling, &text).map_err(|expected| fields.invalid(field.name, expected))?;
    }
    Ok(())
}

fn read_cache_salt(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    match fields.take_string("cache_salt")? {
        Some(salt) if salt.is_empty() || salt.len() > MAX_SALT_BYTES => {
            Err(fields.invalid("cache_salt", format!("expected a string of 1 to {MAX_SALT_BYTES} bytes")))
        }
        salt => Ok(salt),
    }
}

fn read_stop(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let expected = || "expected a string or an array of strings";
    let stops = match fields.take("stop") {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(stops)) => {
            let stops = stops.into_iter().map(|stop| match stop {
                Value::String(stop) => Ok(stop),
                _ => Err(fields.invalid("stop", expected())),
            });
            stops.collect::<Result<_, _>>()?
        }
        Some(_) => return Err(fields.invalid("stop", expected())),
    };
    if stops.len() > MAX_STOPS || stops.iter().any(|stop| stop.len() > MAX_STOP_BYTES) {
        let limit = format!("expected at most {MAX_STOPS} strings of at most {MAX_STOP_BYTES} bytes");
        return Err(fields.invalid("stop", limit));
    }
    Ok(stops)
}

fn read_logit_bias(fields: &mut Fields) -> Result<BTreeMap<u32, f32>, ApiError> {
    let Some(value) = fields.take("logit_bias") else { return Ok(BTreeMap::new()) };
    let problem = || fields.invalid("logit_bias", "expected an object that maps token ids to numbers from -100 to 100");
    let entries = value.as_object().ok_or_else(problem)?;
    let entry = |(id, bias): (&String, &Value)| {
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        Some((id.parse().ok()?, bias? as f32))
    };
    entries.iter().map(|pair| entry(pair).ok_or_else(problem)).collect()
}

/// Reads an array of at most `limit` token ids. Returns `None` if the field is missing.
pub fn read_token_ids(fields: &mut Fields, name: &str, limit: usize) -> Result<Option<Vec<u32>>, ApiError> {
    let Some(items) = fields.take_array(name)? else { return Ok(None) };
    if items.len() > limit {
        return Err(fields.invalid(name, format!("expected at most {limit} token ids")));
    }
    token_ids(&items).map(Some).ok_or_else(|| fields.invalid(name, "expected token ids"))
}

/// Converts a JSON array to token ids. Returns `None` if an item is not a token id.
pub fn token_ids(items: &[Value]) -> Option<Vec<u32>> {
    items.iter().map(|item| u32::try_from(item.as_u64()?).ok()).collect()
}

/// Fails if the field `model` names a model other than the server's. The field is optional.
pub fn check_model(fields: &mut Fields, server: &ServerState) -> Result<(), ApiError> {
    match fields.take_string("model")? {
        Some(model) if model != server.options.model => {
            let served = &server.options.model;
            Err(ApiError::unknown_model(format!("the model '{model}' does not exist: this server serves '{served}'")))
        }
        _ => Ok(()),
    }
}

/// Reads `stream` and `stream_options`. Fails if `stream_options` is set but `stream` is not true.
pub fn read_stream(fields: &mut Fields) -> Result<StreamOptions, ApiError> {
    let is_stream = fields.take_bool("stream")?.unwrap_or(false);
    let Some(mut nested) = fields.take_object("stream_options")? else {
        return Ok(StreamOptions { is_stream, ..StreamOptions::default() });
    };
    if !is_stream {
        return Err(fields.invalid("stream_options", "expected 'stream' to be true"));
    }
    let has_usage = nested.take_bool("include_usage")?.unwrap_or(false);
    let has_continuous_usage = nested.take_bool("continuous_usage_stats")?.unwrap_or(false);
    fields.ignore_rest(nested);
    Ok(StreamOptions { is_stream, has_usage, has_continuous_usage: has_usage && has_continuous_usage })
}

/// Whether a response is streamed, and which chunks contain the usage.
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamOptions {
    pub is_stream: bool,
    /// Whether the last chunk of the stream contains the token counts in the field `usage`.
    pub has_usage: bool,
    /// Whether every chunk of the stream contains the token counts so far in the field `usage`.
    pub has_continuous_usage: bool,
}

impl StreamOptions {
    /// Returns the value of the field `usage` for a chunk that is not the last one.
    /// Returns `None` if the chunk must not have the field, and `Some(None)` if the field must be null.
    pub fn chunk_usage(self, so_far: impl FnOnce() -> Usage) -> Option<Option<Usage>> {
        self.has_usage.then(|| self.has_continuous_usage.then(so_far))
    }
}

/// Reads `n`, the number of answers to each prompt. Also accepts `best_of` if it equals `n`.
pub fn read_answers_per_prompt(fields: &mut Fields) -> Result<usize, ApiError> {
    let n = fields.take_integer("n", 1..=MAX_ANSWERS_PER_PROMPT)?.unwrap_or(1);
    fields.refuse("best_of", &[json!(n)], "use 'n'")?;
    Ok(n as usize)
}
