//! The channels of generated text: reasoning, answer and tool calls.

/// The part of the output that a piece of generated text belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// The model's reasoning. Clients show it separately from the answer, or hide it.
    Reasoning,
    /// Text for the user, including text before a tool call.
    Answer,
    /// The text of a tool call, as the model wrote it. In harmony, this text contains only the arguments.
    /// In other formats, it includes the function name. `Parser::tool_calls` returns the name and the arguments.
    ToolCall,
}

/// A piece of generated text that belongs to a single channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    pub channel: Channel,
    pub text: String,
}
