//! The routes `POST /tokenize` and `POST /detokenize`, with the field names of vLLM.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;

use crate::chat::{RenderOptions, today};
use crate::engine::EngineHandle;
use crate::server::generation::generate_options::{check_model, read_token_ids};
use crate::server::generation::reply;
use crate::server::http::blocking::run_blocking;
use crate::server::http::body::{Fields, json_response, read_json};
use crate::server::http::error::ApiError;
use crate::server::openai::chat;
use crate::server::state::ServerState;
use crate::tokenizer::ControlTokens;

#[derive(Serialize)]
struct Tokens {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

#[derive(Serialize)]
struct Text {
    prompt: String,
}

/// Handles `POST /tokenize`: converts a text or a conversation to token ids.
pub async fn tokenize(State(server): State<Arc<ServerState>>, request: Request) -> Result<Response, ApiError> {
    let engine = server.loaded_engine()?.clone();
    let mut fields = read_json(request, &server.options.timeouts).await?;
    check_model(&mut fields, &server)?;
    let wants_strings = fields.take_bool("return_token_strs")?.unwrap_or(false);
    let (field, encode) = read_input(&mut fields, &engine)?;
    let ignored = fields.finish()?;
    let max_model_len = engine.context();
    let tokenize = move || {
        let tokens = encode(&engine)?;
        let string = |&id: &u32| engine.tokenizer().token(id).unwrap_or_default().to_string();
        let token_strs = wants_strings.then(|| tokens.iter().map(string).collect());
        Ok(Tokens { count: tokens.len(), max_model_len, tokens, token_strs })
    };
    let tokens = run_blocking("tokenize", field, tokenize).await?;
    Ok(reply::with_ignored(json_response(&tokens)?, &ignored))
}

type EncodeInput = Box<dyn FnOnce(&EngineHandle) -> anyhow::Result<Vec<u32>> + Send>;

/// Reads the input of `/tokenize`, which is either `prompt`, or `messages` with the fields of a chat completion that
/// change its prompt.
/// Returns `prompt` or `messages`, for error messages, and a function that encodes the input.
fn read_input(fields: &mut Fields, engine: &EngineHandle) -> Result<(&'static str, EncodeInput), ApiError> {
    if let Some(prompt) = fields.take_string("prompt")? {
        let controls = if fields.take_bool("add_special_tokens")?.unwrap_or(true) {
            ControlTokens::Default
        } else {
            ControlTokens::Parse
        };
        let encode: EncodeInput = Box::new(move |engine| {
            engine.check_prompt_bytes(prompt.len())?;
            engine.tokenizer().encode(&prompt, controls)
        });
        return Ok(("prompt", encode));
    }
    let messages = chat::read_messages(fields)?;
    let tools = chat::read_tools(fields, engine)?.shown;
    // Read the template variables before the reasoning effort, because they can contain the effort.
    let template_variables = chat::read_template_variables(fields, engine)?;
    let reasoning_effort = chat::read_effort(fields)?;
    let add_generation_prompt = fields.take_bool("add_generation_prompt")?.unwrap_or(true);
    let options = RenderOptions { tools, reasoning_effort, date: today(), add_generation_prompt, template_variables };
    Ok(("messages", Box::new(move |engine| Ok(engine.render(&messages, &options)?.ids))))
}

/// Handles `POST /detokenize`: converts token ids to text.
pub async fn detokenize(State(server): State<Arc<ServerState>>, request: Request) -> Result<Response, ApiError> {
    let engine = server.loaded_engine()?.clone();
    let mut fields = read_json(request, &server.options.timeouts).await?;
    check_model(&mut fields, &server)?;
    let tokens = read_token_ids(&mut fields, "tokens", usize::MAX)?;
    let tokens = tokens.ok_or_else(|| fields.invalid("tokens", "expected token ids"))?;
    let ignored = fields.finish()?;
    let vocab_size = engine.info().vocab_size;
    if let Some(id) = tokens.iter().find(|&&id| id as usize >= vocab_size) {
        let problem = format!("token id {id} is outside the vocabulary of {vocab_size} tokens");
        return Err(ApiError::invalid("tokens", problem));
    }
    let prompt = run_blocking("detokenize", "tokens", move || engine.tokenizer().decode(&tokens)).await?;
    Ok(reply::with_ignored(json_response(&Text { prompt })?, &ignored))
}
