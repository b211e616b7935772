//! Reads the body of a text completion request.

use serde_json::{Value, json};

use crate::engine::{EngineHandle, MAX_LOGPROBS, Prompt, Request};
use crate::server::generation::generate_options::{self, StreamOptions, token_ids};
use crate::server::http::body::{Fields, IgnoredField};
use crate::server::http::error::ApiError;
use crate::server::state::ServerState;

/// The maximum number of answers to one request, summed over all prompts.
const MAX_ANSWERS: usize = 128;

/// The default of `max_tokens`, as in OpenAI's API.
const DEFAULT_TOKENS: i64 = 16;

/// The engine requests of a text completion, and how to format the response.
pub struct CompletionRequest {
    /// One engine request per prompt.
    pub requests: Vec<Request>,
    pub answers_per_prompt: usize,
    /// One entry per prompt: the text of the prompt, or `None` if the response does not repeat the prompts.
    pub echoes: Vec<Option<String>>,
    pub has_logprobs: bool,
    pub stream: StreamOptions,
    /// The request fields that have no effect, or not their full effect.
    pub ignored: Vec<IgnoredField>,
}

impl CompletionRequest {
    /// Reads a request. Fails if a field has an invalid or unsupported value.
    pub fn read(mut fields: Fields, server: &ServerState, engine: &EngineHandle) -> Result<Self, ApiError> {
        generate_options::check_model(&mut fields, server)?;
        let prompts = read_prompts(&mut fields)?;
        fields.refuse("suffix", &[json!("")], "")?;
        fields.refuse("response_format", &[json!({ "type": "text" })], "use /v1/chat/completions")?;
        fields.refuse("add_special_tokens", &[json!(true)], "send token ids")?;
        let mut options = generate_options::read(&mut fields, server, engine)?;
        let max_tokens = fields.take_integer("max_tokens", 0..=i64::from(u32::MAX))?;
        options.max_tokens = Some(max_tokens.unwrap_or(DEFAULT_TOKENS) as usize);
        options.logprobs = fields.take_integer("logprobs", 0..=MAX_LOGPROBS as i64)?.map(|count| count as usize);
        let has_logprobs = options.logprobs.is_some();
        let is_echo = fields.take_bool("echo")?.unwrap_or(false);
        options.prompt_logprobs = options.logprobs.filter(|_| is_echo);
        let answers_per_prompt = generate_options::read_answers_per_prompt(&mut fields)?;
        let stream = generate_options::read_stream(&mut fields)?;
        if prompts.len() * answers_per_prompt > MAX_ANSWERS {
            let limit = format!("expected at most {MAX_ANSWERS} answers in total for all prompts");
            return Err(fields.invalid("prompt", limit));
        }
        let echoes = prompts.iter().map(|prompt| is_echo.then(|| text_of(prompt, engine)).transpose());
        let echoes = echoes.collect::<anyhow::Result<_>>().map_err(|error| ApiError::from_engine(&error, "prompt"))?;
        let request = |prompt| Request { prompt, options: Some(options.clone()) };
        let requests = prompts.into_iter().map(request).collect();
        Ok(Self { requests, answers_per_prompt, echoes, has_logprobs, stream, ignored: fields.finish()? })
    }
}

/// Reads the field `prompt`: one prompt (a text or an array of token ids), or an array of prompts.
fn read_prompts(fields: &mut Fields) -> Result<Vec<Prompt>, ApiError> {
    let expected = "expected a string, token ids, or an array of strings or of arrays of token ids";
    let prompts = match fields.take("prompt") {
        Some(Value::String(text)) => vec![Prompt::Text(text)],
        Some(Value::Array(items)) if items.first().is_some_and(Value::is_number) => {
            vec![Prompt::Ids(token_ids(&items).ok_or_else(|| fields.invalid("prompt", expected))?)]
        }
        Some(Value::Array(items)) => {
            let prompt = |item| match item {
                Value::String(text) => Some(Prompt::Text(text)),
                Value::Array(ids) => token_ids(&ids).map(Prompt::Ids),
                _ => None,
            };
            let prompts: Option<_> = items.into_iter().map(prompt).collect();
            prompts.ok_or_else(|| fields.invalid("prompt", expected))?
        }
        _ => return Err(fields.invalid("prompt", expected)),
    };
    let is_empty = |prompt: &Prompt| match prompt {
        Prompt::Text(text) => text.is_empty(),
        Prompt::Ids(ids) => ids.is_empty(),
        Prompt::Chat { messages, .. } => messages.is_empty(),
    };
    if prompts.is_empty() || prompts.iter().any(is_empty) {
        return Err(fields.invalid("prompt", "expected one or more prompts, none of them empty"));
    }
    Ok(prompts)
}

/// Returns the text of a prompt, decoded if the prompt consists of token ids.
/// Returns an empty text for a chat, which cannot be the prompt of a text completion.
fn text_of(prompt: &Prompt, engine: &EngineHandle) -> anyhow::Result<String> {
    match prompt {
        Prompt::Text(text) => Ok(text.clone()),
        Prompt::Ids(ids) => engine.tokenizer().decode(ids),
        Prompt::Chat { .. } => Ok(String::new()),
    }
}
