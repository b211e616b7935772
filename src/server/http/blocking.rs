//! Runs slow work of route handlers outside the worker threads of the async runtime.

use super::error::ApiError;

/// Calls a function of the engine or the tokenizer on a thread that may block, and converts its error.
///
/// Rendering and tokenizing take milliseconds of CPU time, and the engine answers some calls only between two steps,
/// so such a call must not block a worker thread of the runtime.
/// `action` is what the call does, such as "count the tokens". If the call panics, the error message contains it.
/// `prompt_field` is the request field that contains the prompt.
pub async fn run_blocking<T: Send + 'static>(
    action: &str,
    prompt_field: &str,
    call: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(call).await {
        Ok(result) => result.map_err(|error| ApiError::from_engine(&error, prompt_field)),
        Err(panic) => Err(ApiError::panicked(action, &panic)),
    }
}
