//! The routes `/api/tags`, `/api/ps`, `/api/show`, `/api/version` and `/api/pull`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use ring::digest::{SHA256, digest};
use serde::Serialize;
use serde_json::{Value, json};

use super::LINES;
use super::request::check_model;
use crate::chat::{ChatFormat, Message, RenderOptions};
use crate::engine::EngineHandle;
use crate::server::generation::reply;
use crate::server::http::blocking::run_blocking;
use crate::server::http::body::{json_response, read_json};
use crate::server::http::error::ApiError;
use crate::server::ids;
use crate::server::state::ServerState;
use crate::text;

/// The version of ollama that inferno reports. Codex requires version 0.13.4 or later.
/// The part after `+inferno.` is inferno's own version.
const VERSION: &str = concat!("0.13.4+inferno.", env!("CARGO_PKG_VERSION"));

#[derive(Serialize)]
struct Details {
    parent_model: &'static str,
    format: &'static str,
    family: &'static str,
    families: [&'static str; 1],
    parameter_size: String,
    quantization_level: String,
}

#[derive(Serialize)]
struct OllamaModel<'a> {
    name: &'a str,
    model: &'a str,
    size: u64,
    digest: String,
    details: Details,
    #[serde(flatten)]
    state: ModelState,
}

/// The model fields that differ between `/api/tags` and `/api/ps`.
#[derive(Serialize)]
#[serde(untagged)]
enum ModelState {
    Stored { modified_at: String },
    Loaded { expires_at: String, size_vram: u64, context_length: usize },
}

#[derive(Serialize)]
struct Models<'a> {
    models: [OllamaModel<'a>; 1],
}

fn details(engine: &EngineHandle) -> Details {
    let info = engine.info();
    Details {
        parent_model: "",
        format: "",
        family: info.family,
        families: [info.family],
        parameter_size: text::parameter_count(info.parameters),
        quantization_level: info.quantization.clone().unwrap_or_else(|| format!("{:?}", info.dtype).to_uppercase()),
    }
}

fn models(server: &ServerState, state: ModelState) -> Result<Response, ApiError> {
    let engine = server.loaded_engine()?;
    let name = server.options.model.as_str();
    let model = OllamaModel {
        name,
        model: name,
        size: engine.info().weight_bytes,
        // ollama sends the hash of a manifest. Any stable hash works here, because clients only compare hashes.
        digest: ids::hex(digest(&SHA256, name.as_bytes()).as_ref()),
        details: details(engine),
        state,
    };
    json_response(&Models { models: [model] })
}

/// Returns the time at which the server started, in the format of RFC 3339.
fn started(server: &ServerState) -> String {
    let seconds = i64::try_from(server.created).unwrap_or_default();
    jiff::Timestamp::from_second(seconds).unwrap_or_default().to_string()
}

/// Handles `/api/tags`: lists the served model.
pub async fn tags(State(server): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    models(&server, ModelState::Stored { modified_at: started(&server) })
}

/// Handles `/api/ps`: lists the served model, which stays loaded.
pub async fn running(State(server): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    let info = server.loaded_engine()?.info().clone();
    let size_vram = if info.device.compute_capability.is_some() { info.weight_bytes + info.cache_bytes } else { 0 };
    // Clients expect an expiry date. inferno never unloads the model, so the date is far in the future.
    let expires_at = "2999-12-31T00:00:00Z".to_string();
    models(&server, ModelState::Loaded { expires_at, size_vram, context_length: info.context })
}

/// Handles `/api/version`: returns the version of ollama that inferno reports.
pub async fn version() -> Result<Response, ApiError> {
    json_response(&json!({ "version": VERSION }))
}

/// Handles `/api/show`: describes the served model.
pub async fn show(State(server): State<Arc<ServerState>>, request: Request) -> Result<Response, ApiError> {
    let engine = server.loaded_engine()?.clone();
    let mut fields = read_json(request, &server.options.timeouts).await?;
    check_model(&mut fields, &server)?;
    let ignored = fields.finish()?;
    let handle = engine.clone();
    let capabilities = run_blocking("render a prompt", "model", move || Ok(capabilities(&handle))).await?;
    let info = engine.info();
    let mut model_info = json!({
        "general.architecture": info.family,
        "general.parameter_count": info.parameters,
    });
    model_info[format!("{}.context_length", info.family)] = json!(info.context);
    let response = json_response(&json!({
        "modelfile": format!("FROM {}\n", server.options.model),
        "parameters": "",
        "template": "",
        "license": "",
        "details": details(&engine),
        "model_info": model_info,
        "capabilities": capabilities,
        "modified_at": started(&server),
    }))?;
    Ok(reply::with_ignored(response, &ignored))
}

/// Returns the capabilities of the model. They include `tools` if a test tool makes the rendered prompt longer.
fn capabilities(engine: &EngineHandle) -> Vec<&'static str> {
    let mut capabilities = vec!["completion"];
    let Some(chat) = engine.language().chat.as_ref() else { return capabilities };
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } });
    let length = |tools: Vec<Value>| {
        let render = RenderOptions {
            tools,
            reasoning_effort: Default::default(),
            date: "2000-01-01".to_string(),
            add_generation_prompt: true,
            template_variables: serde_json::Map::new(),
        };
        engine.render(&[Message::user("Hi")], &render).map_or(0, |rendered| rendered.ids.len())
    };
    if length(vec![tool]) > length(Vec::new()) {
        capabilities.push("tools");
    }
    let has_thoughts = engine.tokenizer().token_id("<think>").is_some();
    if matches!(chat, ChatFormat::Harmony(_)) || has_thoughts {
        capabilities.push("thinking");
    }
    capabilities
}

/// Handles `/api/pull`: reports success without a download. Fails unless the request names the served model.
pub async fn pull(State(server): State<Arc<ServerState>>, request: Request) -> Result<Response, ApiError> {
    let mut fields = read_json(request, &server.options.timeouts).await?;
    check_model(&mut fields, &server)?;
    let is_stream = fields.take_bool("stream")?.unwrap_or(true);
    let ignored = fields.finish()?;
    let mut response = json_response(&json!({ "status": "success" }))?;
    if is_stream {
        response = "{\"status\":\"pulling manifest\"}\n{\"status\":\"success\"}\n".into_response();
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(LINES));
    }
    Ok(reply::with_ignored(response, &ignored))
}
