//! Errors in the JSON format of ollama's API.

use serde::Serialize;

use crate::server::http::error::ApiError;

/// An error in the JSON format of ollama's API.
#[derive(Serialize)]
pub struct OllamaError {
    error: String,
}

impl OllamaError {
    pub fn new(error: &ApiError) -> Self {
        Self { error: error.message() }
    }
}
