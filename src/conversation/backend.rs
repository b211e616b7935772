//! The interface between a conversation and its model, which runs in this process or on a server.

use anyhow::{Result, bail};

use super::settings::SettingValues;
use super::turn::TurnSummary;
use crate::chat::{Delta, Message, RenderOptions};
use crate::engine::{Engine, GenerateOptions, SamplingParams};

/// A callback that receives each piece of a turn's text as it arrives.
pub type OnDelta<'a> = dyn FnMut(&Delta) -> Result<()> + 'a;

/// A model that generates the answers of a conversation.
pub trait Backend {
    /// Generates an answer, and passes each piece of text to `on_delta` as it arrives.
    ///
    /// If the flag in `request.options.cancel` is set, stops early with the finish reason
    /// [`FinishReason::Canceled`](crate::FinishReason::Canceled).
    fn answer(&self, request: TurnRequest<'_>, on_delta: &mut OnDelta) -> Result<BackendAnswer>;

    /// Returns the number of tokens in the rendered messages, or `None` if the backend cannot count them.
    /// Fails if the messages cannot be rendered.
    fn count_tokens(&self, messages: &[Message], render: &RenderOptions) -> Result<Option<usize>>;

    /// Returns the number of tokens in a text, or `None` if the backend cannot count them.
    fn count_text(&self, text: &str) -> Option<usize>;

    /// Returns the context length in tokens, or `None` if it is unknown.
    fn context(&self) -> Option<usize>;

    /// Returns the model's default sampling parameters, or `None` for a server, which applies its own defaults.
    fn defaults(&self) -> Option<SamplingParams>;

    /// Returns the backend's rows for `/stats`, as pairs of a name and a value.
    fn stats(&self) -> Vec<(&'static str, String)>;

    /// Returns the backend's rows for `/context`, as pairs of a name and a value.
    fn context_stats(&self) -> Vec<(&'static str, String)>;

    /// Returns the number of context tokens that the last prompt and answer used, or `None` if it is unknown.
    fn last_context_used(&self) -> Option<usize>;

    /// Returns the engine if the model runs in this process, or `None` if it runs on a server.
    fn engine(&self) -> Option<&Engine>;
}

/// Returns the engine. Fails if the model runs on a server.
///
/// `what` is the action to name in the error message, such as `save the KV cache`.
pub fn require_engine<'b>(backend: &'b dyn Backend, what: &str) -> Result<&'b Engine> {
    match backend.engine() {
        Some(engine) => Ok(engine),
        None => bail!("cannot {what}: the model runs on a server"),
    }
}

/// The input of [`Backend::answer`].
pub struct TurnRequest<'a> {
    pub prompt: TurnPrompt<'a>,
    pub render: RenderOptions,
    pub options: GenerateOptions,
    /// The settings that the user chose, by flag name.
    /// For other settings, `options` and `render` contain defaults, which are not sent to a server.
    pub chosen: &'a SettingValues,
}

/// What the model continues: the messages of a chat, or a plain text.
pub enum TurnPrompt<'a> {
    Chat(&'a [Message]),
    /// A text to continue, without a chat format.
    Text(&'a str),
}

/// The result of [`Backend::answer`].
pub struct BackendAnswer {
    /// The ids of the generated tokens, or `None` for a model on a server.
    pub tokens: Option<Vec<u32>>,
    pub summary: TurnSummary,
}
