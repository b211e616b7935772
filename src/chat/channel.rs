//! The channels of generated text: reasoning, answer, and tool calls.

/// The channel of a piece of generated text: the part of the output to which the text belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// The model's reasoning. Clients show it separately from the answer, or hide it.
    Reasoning,
    /// Text for the user, including text before a tool call.
    Answer,
    /// The text of a tool call, as the model wrote it: in harmony, only the arguments; in other formats, also the
    /// function name. `Parser::tool_calls` returns the parsed calls.
    ToolCall,
}

/// A piece of generated text that belongs to a single channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    pub channel: Channel,
    pub text: String,
}
