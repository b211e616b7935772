//! The parts of a model besides its config and its weights: tokenizer, chat format, stop tokens and sampling defaults.
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! These parts are loaded without reading the weights.

mod gguf;
mod stop_ids;

use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use crate::chat::{ChatFormat, Message, Render, RenderOptions, Rendered};
use crate::error::Error;
use crate::snapshot;
use crate::tokenizer::Tokenizer;
use crate::weights::Checkpoint;
use crate::weights::gguf::GgufCheckpoint;
use gguf::GgufLanguage;

/// The tokenizer, chat format, stop tokens and sampling defaults of one model.
pub struct Language {
    pub tokenizer: Tokenizer,
    /// `None` for a model without a chat format, such as most base models.
    pub chat: Option<ChatFormat>,
    /// The JSON in generation_config.json, or null if this file is absent.
    /// For a GGUF file, the result of [`GgufCheckpoint::generation_config`].
    pub generation_config: Value,
    /// The ids of tokens that end a generation, sorted.
    stop_ids: Vec<u32>,
    /// Renders conversations in place of `chat`, for example in another process. Unused if `chat` is `None`.
    renderer: Option<Box<dyn Render>>,
}

impl Language {
    /// Loads the tokenizer, chat format, stop tokens and sampling defaults of the snapshot or GGUF file at `dir`.
    ///
    /// Loading a hostile model can take unbounded time and memory.
    /// On Linux, `sandbox::load_language` limits both if the program has called `sandbox::init`.
    pub fn load(dir: &Path) -> Result<Self> {
        match snapshot::gguf::find(dir)? {
            Some(file) => Self::from_gguf(&GgufCheckpoint::open(&file)?),
            None => Self::from_files(dir),
        }
    }

    /// Like [`Self::load`], but reuses the open `checkpoint`, so GGUF metadata is not parsed again.
    pub fn from_checkpoint(dir: &Path, checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint {
            Checkpoint::Gguf(model) => Self::from_gguf(model.file()),
            Checkpoint::Safetensors(_) => Self::from_files(dir),
        }
    }

    /// Makes [`Self::render`] use `renderer` instead of the chat format.
    pub fn with_renderer(self, renderer: Box<dyn Render>) -> Self {
        Self { renderer: Some(renderer), ..self }
    }

    pub fn new(tokenizer: Tokenizer, chat: Option<ChatFormat>, generation_config: Value, stop_ids: Vec<u32>) -> Self {
        Self { tokenizer, chat, generation_config, stop_ids, renderer: None }
    }

    /// Loads the tokenizer, chat format, stop tokens and sampling defaults of a GGUF file.
    fn from_gguf(checkpoint: &GgufCheckpoint) -> Result<Self> {
        let GgufLanguage { tokenizer, chat, generation_config, stop_ids } = gguf::read(checkpoint)?;
        Ok(Self::new(tokenizer, chat, generation_config, stop_ids))
    }

    /// Loads the tokenizer, chat format, stop tokens and sampling defaults from the files of a snapshot.
    fn from_files(dir: &Path) -> Result<Self> {
        let tokenizer = Tokenizer::from_dir(dir)?;
        let chat = ChatFormat::load(dir, &tokenizer)?;
        let generation_config = stop_ids::read_json(dir, "generation_config.json")?;
        let stop_ids = stop_ids::collect(dir, &generation_config, &tokenizer, chat.as_ref())?;
        Ok(Self::new(tokenizer, chat, generation_config, stop_ids))
    }

    /// Returns whether generation ends at `token`.
    pub fn is_stop(&self, token: u32) -> bool {
        self.stop_ids.contains(&token)
    }

    /// Returns the ids of the tokens at which generation ends, in ascending order.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Renders a conversation to token ids. Fails if the model has no chat format, even with a renderer.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<Rendered> {
        let chat_format = self.chat_format()?;
        match &self.renderer {
            Some(renderer) => renderer.render(messages, options),
            None => chat_format.render(&self.tokenizer, messages, options),
        }
    }

    /// Returns the chat format, or an error if the model has none.
    pub fn chat_format(&self) -> Result<&ChatFormat> {
        match &self.chat {
            Some(chat) => Ok(chat),
            None => {
                let problem = "cannot chat with this model: it has no chat format and only continues text";
                Err(Error::invalid_request(problem))
            }
        }
    }
}
