//! Channels of generated text.

/// The purpose of a piece of generated text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// The model's reasoning, which is shown separately from the answer or hidden.
    Reasoning,
    /// Text for the user, including text before a tool call.
    Answer,
    /// The arguments of a tool call. `Parser::tool_calls` returns complete calls.
    ToolCall,
}

/// A piece of generated text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    pub channel: Channel,
    pub text: String,
}
