//! Reads the input of a Responses API request: new items, references to stored items, and the previous response.

use std::collections::HashSet;
use std::sync::Arc;

use serde_json::Value;

use super::item::{Item, ItemContent, ItemStatus, decode_reasoning};
use super::store::TenantStore;
use crate::chat::Role;
use crate::server::http::body::{Fields, MAX_BODY_BYTES};
use crate::server::http::error::ApiError;
use crate::server::openai::chat::read_content;

/// The maximum length, in bytes, of the id of an input item.
const MAX_ID: usize = 128;

/// The conversation that a request asks the model to continue.
pub struct Input {
    /// The items of the conversation up to the end of the previous response.
    pub earlier: Vec<Arc<Item>>,
    /// The items of the request field `input`.
    pub items: Vec<Arc<Item>>,
}

/// Reads the fields `previous_response_id` and `input`. Also returns the id of the previous response.
pub fn read(fields: &mut Fields, store: &TenantStore) -> Result<(Input, Option<String>), ApiError> {
    let previous = fields.take_string("previous_response_id")?;
    let mut budget = MAX_BODY_BYTES;
    let earlier = match &previous {
        None => Vec::new(),
        Some(id) => store.conversation(id).map_err(|missing| unknown_response(id, &missing))?,
    };
    earlier.iter().try_for_each(|item| spend(&mut budget, item, "previous_response_id"))?;
    let items = match fields.take("input") {
        Some(Value::String(text)) => {
            let content = ItemContent::Message { role: Role::User, text, logprobs: Vec::new() };
            vec![Arc::new(Item { id: content.new_id(), status: ItemStatus::Completed, content })]
        }
        Some(Value::Array(items)) => {
            let read = |(index, item)| read_item(fields, &format!("input[{index}]"), item, store, &mut budget);
            items.into_iter().enumerate().map(read).collect::<Result<_, _>>()?
        }
        None if previous.is_some() => Vec::new(),
        _ => return Err(fields.invalid("input", "expected a string or an array of items")),
    };
    if items.is_empty() && earlier.is_empty() {
        return Err(fields.invalid("input", "expected at least one item"));
    }
    check_calls(&earlier, &items)?;
    Ok((Input { earlier, items }, previous))
}

fn unknown_response(id: &str, missing: &str) -> ApiError {
    let message = if id == missing {
        format!("the response '{id}' is not stored: it may have expired; send the whole conversation as 'input'")
    } else {
        format!(
            "the conversation of the response '{id}' is not complete: the earlier response '{missing}' is not stored; \
             send the whole conversation as 'input'"
        )
    };
    ApiError::unknown_id("previous_response_id", Some("previous_response_not_found"), message)
}

/// Subtracts the estimated memory of a stored item from the budget. Fails if the rest of the budget is too small.
/// Without this budget, a small request with references to stored items could build a huge conversation.
fn spend(budget: &mut usize, item: &Item, param: &str) -> Result<(), ApiError> {
    *budget = budget.checked_sub(item.bytes()).ok_or_else(|| {
        let message = format!(
            "the stored items of the conversation exceed {} MiB: send a shorter conversation as 'input'",
            MAX_BODY_BYTES >> 20
        );
        ApiError::too_long(param, message)
    })?;
    Ok(())
}

/// Checks that every function output in `items` belongs to an earlier call. `earlier` was checked before it was stored.
fn check_calls(earlier: &[Arc<Item>], items: &[Arc<Item>]) -> Result<(), ApiError> {
    let mut calls: HashSet<&str> = earlier.iter().filter_map(|item| call_id(item)).collect();
    for (index, item) in items.iter().enumerate() {
        calls.extend(call_id(item));
        if let ItemContent::CallOutput { call_id, .. } = &item.content
            && !calls.contains(call_id.as_str())
        {
            let problem = format!("no earlier function call has the id '{call_id}'");
            return Err(ApiError::invalid(format!("input[{index}].call_id"), problem));
        }
    }
    Ok(())
}

/// Returns the call id of a function call, or `None` for other items.
fn call_id(item: &Item) -> Option<&str> {
    match &item.content {
        ItemContent::Call { call_id, .. } => Some(call_id),
        _ => None,
    }
}

/// Reads one input item. For a reference, returns the stored item.
fn read_item(
    fields: &mut Fields,
    path: &str,
    value: Value,
    store: &TenantStore,
    budget: &mut usize,
) -> Result<Arc<Item>, ApiError> {
    let mut item = Fields::nested(path, value)?;
    let kind = match item.take_string("type")? {
        Some(kind) => kind,
        // Messages and references may omit `type`.
        None if item.has("role") => "message".to_string(),
        None => "item_reference".to_string(),
    };
    let id = item.take_string("id")?;
    if id.as_ref().is_some_and(|id| id.len() > MAX_ID) {
        return Err(item.invalid("id", format!("expected at most {MAX_ID} bytes")));
    }
    item.take("status");
    if kind == "item_reference" {
        let id = id.ok_or_else(|| item.invalid("id", "expected the id of an item"))?;
        let found = store.item(&id).ok_or_else(|| {
            let message = format!("the item '{id}' is not stored: it may have expired; send the item itself");
            ApiError::unknown_id(item.path("id"), None, message)
        })?;
        spend(budget, &found, "input")?;
        return Ok(found);
    }
    let content = read_item_content(&mut item, &kind)?;
    fields.ignore_rest(item);
    Ok(Arc::new(Item { id: id.unwrap_or_else(|| content.new_id()), status: ItemStatus::Completed, content }))
}

fn read_item_content(item: &mut Fields, kind: &str) -> Result<ItemContent, ApiError> {
    match kind {
        "message" => {
            let role = match item.take_string("role")?.as_deref() {
                Some("user") => Role::User,
                Some("assistant") => Role::Assistant,
                Some("system") => Role::System,
                Some("developer") => Role::Developer,
                _ => return Err(item.invalid("role", "expected user, assistant, system or developer")),
            };
            let text = read_content(item, "content")?.ok_or_else(|| item.invalid("content", "expected text"))?;
            Ok(ItemContent::Message { role, text, logprobs: Vec::new() })
        }
        "reasoning" => {
            let text = read_content(item, "content")?.filter(|text| !text.is_empty());
            let encoded = item.take_string("encrypted_content")?;
            let decoded = encoded.as_deref().and_then(decode_reasoning);
            if text.is_none() && decoded.is_none() && encoded.is_some() {
                item.ignore_with_note("input[].encrypted_content", "of another service");
            }
            // The summary of a reasoning item has no effect, because it is not the reasoning itself.
            if item.take_array("summary")?.is_some_and(|summary| !summary.is_empty()) {
                item.ignore("input[].summary".to_string());
            }
            Ok(ItemContent::Reasoning {
                text: text.or(decoded).unwrap_or_default(),
                has_encoded_text: encoded.is_some(),
            })
        }
        "function_call" => {
            let call_id = item.require_string("call_id")?;
            let name = item.require_string("name")?;
            Ok(ItemContent::Call { call_id, name, arguments: item.require_string("arguments")? })
        }
        "function_call_output" => {
            let call_id = item.require_string("call_id")?;
            let output = read_content(item, "output")?;
            Ok(ItemContent::CallOutput {
                call_id,
                output: output.ok_or_else(|| item.invalid("output", "expected text"))?,
            })
        }
        _ => Err(ApiError::unsupported(
            item.path("type"),
            &format!(
                "only messages, reasoning, function calls, their outputs and item references are accepted, \
                 not items of type '{kind}'"
            ),
        )),
    }
}
