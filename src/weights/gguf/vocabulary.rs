//! The vocabulary and the chat template in the metadata of a GGUF file.

use anyhow::{Result, bail};

use super::file::GgufCheckpoint;
use super::file::GgufMetadata;
use crate::files::MAX_CHAT_TEMPLATE_BYTES;
use crate::text::{excerpt, size};
use crate::tokenizer::gguf::Vocabulary;

impl GgufCheckpoint {
    /// Returns the vocabulary in the file, or `None` if the file has no vocabulary.
    /// Fails if the tokens are missing, or if a value has the wrong type.
    pub fn vocabulary(&self) -> Result<Option<Vocabulary<'_>>> {
        let metadata = self.metadata();
        match metadata.string("tokenizer.ggml.model")? {
            None | Some("none" | "no_vocab") => Ok(None),
            Some(_) => vocabulary(&metadata).map(Some),
        }
    }

    /// Returns the Jinja chat template with this name, such as `tool_use`, or the default template if `name` is `None`.
    /// Returns `None` if the file does not have this template. Fails if the template is too large.
    pub fn chat_template(&self, name: Option<&str>) -> Result<Option<&str>> {
        chat_template(&self.metadata(), name)
    }
}

/// Returns the vocabulary in the metadata.
/// Fails if the model type or the tokens are missing, or if a value has the wrong type.
/// `Tokenizer::from_gguf` validates the contents.
pub fn vocabulary<'c>(metadata: &GgufMetadata<'c>) -> Result<Vocabulary<'c>> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let id = |name: &str| metadata.u32(&key(name));
    Ok(Vocabulary {
        architecture: metadata.string("general.architecture")?,
        model: metadata.required(&key("model"), GgufMetadata::string)?,
        pre: metadata.string(&key("pre"))?,
        tokens: metadata.required(&key("tokens"), GgufMetadata::strings)?,
        scores: metadata.f32s(&key("scores"))?,
        types: metadata.i32s(&key("token_type"))?,
        merges: metadata.strings(&key("merges"))?,
        bos: id("bos_token_id")?,
        eos: id("eos_token_id")?,
        eot: id("eot_token_id")?,
        eom: id("eom_token_id")?,
        unk: id("unknown_token_id")?,
        pad: id("padding_token_id")?,
        add_bos: metadata.bool(&key("add_bos_token"))?,
        add_eos: metadata.bool(&key("add_eos_token"))?,
        add_space_prefix: metadata.bool(&key("add_space_prefix"))?,
    })
}

/// Returns the Jinja chat template with this name, such as `tool_use`, or the default template if `name` is `None`.
/// Returns `None` if the metadata does not have this template.
/// Fails if the template is larger than `MAX_CHAT_TEMPLATE_BYTES`.
pub fn chat_template<'c>(metadata: &GgufMetadata<'c>, name: Option<&str>) -> Result<Option<&'c str>> {
    let key = match name {
        None => "tokenizer.chat_template".to_string(),
        Some(name) => format!("tokenizer.chat_template.{name}"),
    };
    match metadata.string(&key)? {
        Some(template) if template.len() as u64 > MAX_CHAT_TEMPLATE_BYTES => {
            bail!("metadata key {}: the template is larger than {}", excerpt(&key), size(MAX_CHAT_TEMPLATE_BYTES))
        }
        template => Ok(template),
    }
}
