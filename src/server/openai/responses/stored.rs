//! The routes that return, cancel and delete a response, and list its input items.

use std::sync::Arc;

use axum::Extension;
use axum::extract::Path;
use axum::http::Uri;
use axum::response::Response;
use serde::Serialize;

use super::item::Item;
use super::store::{Store, TenantStore};
use crate::server::http::body::json_response;
use crate::server::http::error::ApiError;
use crate::server::tenant::Tenant;

/// The default value of the query parameter `limit`.
const DEFAULT_LIMIT: usize = 20;
/// The maximum value of the query parameter `limit`.
const MAX_LIMIT: usize = 100;

/// Returns a stored response, or a response in progress that will be stored, with its output so far.
/// Fails if the query asks for a stream.
pub async fn get(
    Extension(tenant): Extension<Tenant>,
    Extension(store): Extension<Arc<Store>>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    if Query(&uri).get("stream").is_some_and(|value| value != "false") {
        return Err(ApiError::unsupported("stream", "inferno does not store the events of a response"));
    }
    json_response(&TenantStore::new(store, tenant).object(&id).ok_or_else(|| unknown(&id))?)
}

#[derive(Serialize)]
struct Deleted<'a> {
    id: &'a str,
    object: &'static str,
    deleted: bool,
}

/// Deletes a stored response.
pub async fn delete(
    Extension(tenant): Extension<Tenant>,
    Extension(store): Extension<Arc<Store>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    if TenantStore::new(store, tenant).remove(&id) {
        json_response(&Deleted { id: &id, object: "response", deleted: true })
    } else {
        Err(not_stored(&id))
    }
}

/// Cancels a response in progress and returns it. If the response has ended and is stored, returns it unchanged.
pub async fn cancel(
    Extension(tenant): Extension<Tenant>,
    Extension(store): Extension<Arc<Store>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    json_response(&TenantStore::new(store, tenant).cancel(&id).ok_or_else(|| unknown(&id))?)
}

#[derive(Serialize)]
struct ItemList<'a> {
    object: &'static str,
    data: &'a [&'a Item],
    first_id: Option<&'a str>,
    last_id: Option<&'a str>,
    has_more: bool,
}

/// Lists the input items of a stored response. The last item comes first, unless the query sets `order` to `asc`.
pub async fn input_items(
    Extension(tenant): Extension<Tenant>,
    Extension(store): Extension<Arc<Store>>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let query = Query(&uri);
    let stored = TenantStore::new(store, tenant).get(&id).ok_or_else(|| not_stored(&id))?;
    let limit = match query.get("limit").map(str::parse) {
        None => DEFAULT_LIMIT,
        Some(Ok(limit)) if (1..=MAX_LIMIT).contains(&limit) => limit,
        Some(_) => return Err(ApiError::invalid("limit", format!("expected a number from 1 to {MAX_LIMIT}"))),
    };
    let mut items: Vec<&Item> = stored.input.iter().map(Arc::as_ref).collect();
    match query.get("order") {
        Some("asc") => {}
        None | Some("desc") => items.reverse(),
        Some(_) => return Err(ApiError::invalid("order", "expected asc or desc")),
    }
    let start = match query.get("after") {
        None => 0,
        Some(after) => match items.iter().position(|item| item.id == after) {
            Some(index) => index + 1,
            None => return Err(ApiError::unknown_id("after", None, format!("the input has no item '{after}'"))),
        },
    };
    let rest = &items[start..];
    let data = &rest[..limit.min(rest.len())];
    json_response(&ItemList {
        object: "list",
        data,
        first_id: data.first().map(|item| item.id.as_str()),
        last_id: data.last().map(|item| item.id.as_str()),
        has_more: data.len() < rest.len(),
    })
}

/// Returns the error for a response that is not found: it is neither stored nor in progress, or the client asked
/// for the output so far of a response that will not be stored.
fn unknown(id: &str) -> ApiError {
    ApiError::not_found(format!(
        "cannot find the response '{id}': it is unknown or expired, or its request had 'store': false"
    ))
}

/// Returns the error for a response that is not stored, but may be in progress.
fn not_stored(id: &str) -> ApiError {
    ApiError::not_found(format!(
        "the response '{id}' is not stored: it is unknown, in progress or expired, or its request had 'store': false"
    ))
}

/// The query string of a request URL.
struct Query<'a>(&'a Uri);

impl<'a> Query<'a> {
    /// Returns the value of a query parameter, without percent-decoding it.
    /// As a result, an item id in `after` that must be percent-encoded is not found. Only clients choose such ids.
    fn get(&self, name: &str) -> Option<&'a str> {
        let mut pairs = self.0.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}
