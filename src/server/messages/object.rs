//! The message object of a response.

use serde::Serialize;

use super::block::Block;
use crate::server::generation::usage::Usage;

/// The body of a response that is not streamed, and the message in the event `message_start` of a stream.
#[derive(Serialize)]
pub struct MessageObject {
    pub id: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub role: &'static str,
    pub model: String,
    pub content: Vec<Block>,
    #[serde(flatten)]
    pub stop: StopDelta,
    pub usage: MessagesUsage,
}

/// The token counts of a response. Unlike in OpenAI's API, `input_tokens` excludes cached tokens.
/// Anthropic's API requires the fields of type `()`. They are null, because inferno has no values for them.
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

/// The reason why a message ended. All fields of this struct are null while the message is in progress.
/// Fields of type `()` are always null.
#[derive(Default, Serialize)]
pub struct StopDelta {
    pub stop_reason: Option<&'static str>,
    pub stop_sequence: Option<String>,
    pub stop_details: (),
    pub container: (),
}
