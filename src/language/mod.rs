//! The language side of a model: its tokenizer, its chat format, the tokens that end a text, and how it wants to be sampled.
//!
//! None of it needs the weights: a snapshot's tokenizer and config files are enough, or the head of a GGUF file.

mod gguf;
mod stop_ids;

use std::path::Path;

use anyhow::{Result, bail};
use serde_json::Value;

use crate::chat::{ChatFormat, Message, RenderOptions, Rendered};
use crate::snapshot;
use crate::tokenizer::Tokenizer;
use crate::weights::Checkpoint;
use crate::weights::gguf::GgufCheckpoint;
use gguf::GgufLanguage;

/// The tokenizer, chat format, stop tokens and generation defaults of one model.
pub struct Language {
    pub tokenizer: Tokenizer,
    /// `None` for a base model, which only continues texts.
    pub chat: Option<ChatFormat>,
    /// The contents of generation_config.json, or what a GGUF file has in its place. Null if there is none.
    pub generation_config: Value,
    /// Tokens that end a text, sorted.
    stop_ids: Vec<u32>,
}

impl Language {
    /// Loads the language of the snapshot in `dir`, which may be a GGUF file itself. Weights are not needed.
    pub fn load(dir: &Path) -> Result<Self> {
        match snapshot::gguf::find(dir)? {
            Some(file) => Self::from_gguf(&GgufCheckpoint::open(&file)?),
            None => Self::from_files(dir),
        }
    }

    /// Loads the language of the snapshot in `dir` whose checkpoint is already open: a GGUF head is not parsed again.
    pub fn from_checkpoint(dir: &Path, checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint {
            Checkpoint::Gguf(model) => Self::from_gguf(model.file()),
            Checkpoint::Safetensors(_) => Self::from_files(dir),
        }
    }

    /// Reads the metadata of a GGUF file.
    fn from_gguf(checkpoint: &GgufCheckpoint) -> Result<Self> {
        let GgufLanguage { tokenizer, chat, generation_config, stop_ids } = gguf::read(checkpoint)?;
        Ok(Self { tokenizer, chat, generation_config, stop_ids })
    }

    /// Reads tokenizer.json and the config files beside it.
    fn from_files(dir: &Path) -> Result<Self> {
        let tokenizer = Tokenizer::from_dir(dir)?;
        let chat = ChatFormat::load(dir, &tokenizer)?;
        let generation_config = stop_ids::read_json(dir, "generation_config.json")?;
        let stop_ids = stop_ids::collect(dir, &generation_config, &tokenizer, chat.as_ref())?;
        Ok(Self { tokenizer, chat, generation_config, stop_ids })
    }

    /// Returns whether `token` ends a text.
    pub fn is_stop(&self, token: u32) -> bool {
        self.stop_ids.contains(&token)
    }

    /// Tokens that end a text: all that config.json, generation_config.json, the tokenizer and the chat format name.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Renders a conversation to token ids. Fails for a model without a chat format.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<Rendered> {
        self.chat_format()?.render(&self.tokenizer, messages, options)
    }

    /// Returns the chat format. Fails for a base model, which has none.
    pub fn chat_format(&self) -> Result<&ChatFormat> {
        match &self.chat {
            Some(chat) => Ok(chat),
            None => bail!("this model has no chat format, it only continues texts"),
        }
    }
}
