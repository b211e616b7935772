//! The routes `GET /v1/receipts/{id}` and `GET /v1/receipts/key`.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;

use super::records;
use crate::server::http::body::json_response;
use crate::server::http::error::ApiError;
use crate::server::records::Receipt;
use crate::server::records::ReceiptKey;
use crate::server::state::ServerState;
use crate::server::tenant::Tenant;

/// Returns the signed receipt of a request. A tenant can read only the receipts of its own requests.
pub async fn get(
    State(server): State<Arc<ServerState>>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let key = signing_key(&server)?;
    let record = records::find(&server, tenant, &id)?;
    let chat_format = server.loaded_engine()?.language().chat_format().ok().map(|format| format.name().to_string());
    let receipt = Receipt::new(&record, server.model_files()?.clone(), chat_format);
    let signed = receipt.and_then(|receipt| receipt.sign(key));
    let signed = signed.map_err(|error| ApiError::internal(format!("cannot sign the receipt: {error:#}")))?;
    let mut response = Response::new(Body::from(signed));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/jose"));
    Ok(response)
}

/// Returns the public key that verifies receipts.
pub async fn key(State(server): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    json_response(&signing_key(&server)?.public_key())
}

fn signing_key(server: &ServerState) -> Result<&ReceiptKey, ApiError> {
    let key = server.options.record.receipt_key.as_deref();
    key.ok_or_else(|| ApiError::not_found("this server does not sign receipts: start it with --receipt-key FILE"))
}
