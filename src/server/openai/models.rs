//! The routes `GET /v1/models` and `GET /v1/models/{id}`, which describe the served model.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use serde::Serialize;

use crate::server::http::body::json_response;
use crate::server::http::error::ApiError;
use crate::server::state::ServerState;

#[derive(Serialize)]
struct ModelObject<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: &'a str,
    parent: Option<&'a str>,
    max_model_len: usize,
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: [ModelObject<'a>; 1],
}

fn describe(server: &ServerState) -> Result<ModelObject<'_>, ApiError> {
    let id = server.options.model.as_str();
    let max_model_len = server.loaded_engine()?.context();
    Ok(ModelObject {
        id,
        object: "model",
        created: server.created,
        owned_by: "inferno",
        root: id,
        parent: None,
        max_model_len,
    })
}

/// Handles `GET /v1/models`: lists the served model.
pub async fn list(State(server): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    json_response(&List { object: "list", data: [describe(&server)?] })
}

/// Handles `GET /v1/models/{id}`: describes the served model if `id` is its name.
pub async fn get(State(server): State<Arc<ServerState>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let model = describe(&server)?;
    if id == model.id {
        json_response(&model)
    } else {
        let message = format!("the model '{id}' does not exist: this server serves '{}'", model.id);
        Err(ApiError::unknown_model(message))
    }
}
