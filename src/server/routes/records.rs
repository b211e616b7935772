//! The route `GET /v1/records/{id}`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, State};
use axum::response::Response;

use crate::engine::GenerationRecord;
use crate::server::http::body::json_response;
use crate::server::http::error::ApiError;
use crate::server::state::ServerState;
use crate::server::tenant::Tenant;

/// Returns the record of a request. A tenant can read only the records of its own requests.
pub async fn get(
    State(server): State<Arc<ServerState>>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    json_response(&*find(&server, tenant, &id)?)
}

/// Returns the record of a request of this tenant.
/// Fails if the server has no such record, or if it was started with `--no-auth`.
pub fn find(server: &ServerState, tenant: Tenant, id: &str) -> Result<Arc<GenerationRecord>, ApiError> {
    if server.options.no_auth {
        // With `--no-auth`, all clients belong to one tenant, and they may be on other machines.
        // Each client could read the prompts of all other clients.
        return Err(ApiError::forbidden(
            "cannot return records or receipts: the server was started with --no-auth; \
             start it without --no-auth, or, for records only, let it write them to files with --record FOLDER",
        ));
    }
    let record = server.recorder.get(tenant, id);
    record.ok_or_else(|| ApiError::not_found(format!("the server has no record of the request '{id}'")))
}
