//! The message object in responses of Anthropic's API.

use serde::Serialize;

use super::block::ContentBlock;
use crate::server::generation::usage::Usage;

/// A message: the body of a response that is not streamed, and part of the stream event `message_start`.
#[derive(Serialize)]
pub struct MessageObject {
    pub id: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub role: &'static str,
    pub model: String,
    pub content: Vec<ContentBlock>,
    #[serde(flatten)]
    pub stop: StopDelta,
    pub usage: MessagesUsage,
}

/// The token counts of a response. Unlike in OpenAI's API, `input_tokens` excludes cached tokens.
/// Fields of type `()` are always null: Anthropic's API requires them, but inferno has no values for them.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MessagesUsage {
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
    output_tokens: usize,
    output_tokens_details: OutputDetails,
    cache_creation: (),
    inference_geo: (),
    server_tool_use: (),
    service_tier: (),
}

#[derive(Clone, Copy, Debug, Serialize)]
struct OutputDetails {
    thinking_tokens: usize,
}

impl From<Usage> for MessagesUsage {
    fn from(usage: Usage) -> Self {
        let cached = usage.prompt_tokens_details.cached_tokens;
        Self {
            input_tokens: usage.prompt_tokens - cached,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: cached,
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputDetails { thinking_tokens: usage.completion_tokens_details.reasoning_tokens },
            cache_creation: (),
            inference_geo: (),
            server_tool_use: (),
            service_tier: (),
        }
    }
}

/// The reason why a message ended. All fields are null while the message is in progress.
/// Fields of type `()` are null even after the message has ended.
#[derive(Default, Serialize)]
pub struct StopDelta {
    pub stop_reason: Option<&'static str>,
    pub stop_sequence: Option<String>,
    pub stop_details: (),
    pub container: (),
}
