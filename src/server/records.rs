//! `GET /v1/records/{id}`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, State};
use axum::response::Response;

use super::auth::Client;
use super::body::json_response;
use super::error::ApiError;
use super::state::Server;

/// Returns the record of a request. A client can read only the records of its own requests.
pub async fn get(
    State(server): State<Arc<Server>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    if server.options.is_open {
        // Without authentication, the server cannot tell clients apart.
        // Each client could therefore read the prompts of all others.
        return Err(ApiError::forbidden("a server with --no-auth shows no records: use --record FOLDER"));
    }
    match server.recorder.get(client, &id) {
        Some(record) => json_response(&*record),
        None => Err(ApiError::not_found(format!("the server has no record of the request '{id}'"))),
    }
}
