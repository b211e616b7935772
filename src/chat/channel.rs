//! The channels of generated text: reasoning, answer, and tool calls.

/// The part of an answer to which generated text belongs.
///
/// An *answer* is everything that the model generates for a request. The *answer channel* has only its text for the
/// user, without reasoning and tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// The model's reasoning. Clients show it separately from the answer, or hide it.
    Reasoning,
    /// The text for the user, including text before a tool call.
    Answer,
    /// The text of a tool call, as the model wrote it: in harmony, only the arguments; in other formats, also the
    /// function name. [`Summary::tool_calls`](crate::engine::Summary::tool_calls) has the parsed calls.
    ToolCall,
}

/// New text on one channel of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    pub channel: Channel,
    pub text: String,
}
