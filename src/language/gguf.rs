//! Reads the tokenizer, chat format, stop tokens and sampling defaults of a model in a GGUF file.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::stop_ids::{collect, read_json};
use crate::chat::{ChatFormat, SpecialToken};
use crate::tokenizer::Tokenizer;
use crate::tokenizer::gguf::Vocabulary;
use crate::weights::gguf::GgufCheckpoint;

/// The result of [`read`].
pub struct GgufLanguage {
    pub tokenizer: Tokenizer,
    pub chat: Option<ChatFormat>,
    /// Sampling defaults in the format of generation_config.json.
    pub generation_config: Value,
    /// The sorted ids of the stop tokens, which end a generation.
    pub stop_ids: Vec<u32>,
}

/// Reads the tokenizer, chat format, stop tokens and sampling defaults of an open GGUF file.
///
/// A vocabulary in the GGUF file takes precedence over a tokenizer.json, which may not match the weights.
/// A GGUF file without a vocabulary needs a tokenizer.json in its directory. Its stop tokens are known stop tokens such
/// as `<|im_end|>`, and those that the other files in the directory name, if they are control tokens.
pub fn read(checkpoint: &GgufCheckpoint) -> Result<GgufLanguage> {
    let broken = || format!("cannot read the tokenizer in {}", checkpoint.path().display());
    let mut stop_ids = BTreeSet::new();
    let (tokenizer, chat) = match checkpoint.vocabulary().with_context(broken)? {
        Some(vocabulary) => {
            let tokenizer = Tokenizer::from_gguf(&vocabulary).with_context(broken)?;
            let chat = chat_format(checkpoint, &tokenizer, &vocabulary).with_context(broken)?;
            stop_ids.extend(vocabulary.special_ids().with_context(broken)?.stop);
            (tokenizer, chat)
        }
        None => {
            let dir = checkpoint.path().parent().unwrap_or(Path::new(""));
            let (tokenizer, chat) = from_folder(checkpoint, dir)?;
            let generation_config = read_json(dir, "generation_config.json")?;
            let named = collect(dir, &generation_config, &tokenizer, chat.as_ref())?;
            // The other files may belong to another model, whose id may be the id of an ordinary token here.
            stop_ids.extend(named.into_iter().filter(|&id| tokenizer.is_control(id)));
            // The directory may contain no other file of the model than tokenizer.json.
            stop_ids.extend(tokenizer.known_stop_ids());
            (tokenizer, chat)
        }
    };
    stop_ids.extend(chat.iter().flat_map(|chat| chat.stop_ids()));
    let generation_config = checkpoint.generation_config()?;
    Ok(GgufLanguage { tokenizer, chat, generation_config, stop_ids: stop_ids.into_iter().collect() })
}

/// Builds the chat format from the chat template and the special tokens in the GGUF file.
/// Returns harmony if the vocabulary has harmony's control tokens, otherwise `None` if there is no chat template.
fn chat_format(
    checkpoint: &GgufCheckpoint,
    tokenizer: &Tokenizer,
    vocabulary: &Vocabulary,
) -> Result<Option<ChatFormat>> {
    let special = vocabulary.special_ids()?;
    let named = [
        ("bos_token", special.bos),
        ("eos_token", special.eos),
        ("unk_token", special.unk),
        ("pad_token", special.pad),
    ];
    let token = |(name, id): (&str, Option<u32>)| {
        let text = vocabulary.tokens.get(id? as usize)?.to_string();
        Some(SpecialToken { name: name.to_string(), text })
    };
    let named = named.into_iter().filter_map(token).collect();
    let template = checkpoint.chat_template(None)?;
    let tool_use = checkpoint.chat_template(Some("tool_use"))?;
    Ok(ChatFormat::from_template(tokenizer, &file_name(checkpoint), template, tool_use, named))
}

/// Loads the tokenizer and the chat format of a GGUF file without a vocabulary. `dir` is the directory of the file.
/// The tokenizer comes from tokenizer.json. If the GGUF file has no chat template, the chat format comes from the other
/// files in the directory.
fn from_folder(checkpoint: &GgufCheckpoint, dir: &Path) -> Result<(Tokenizer, Option<ChatFormat>)> {
    let missing = || format!("{} has no vocabulary and needs a tokenizer.json beside it", checkpoint.path().display());
    let tokenizer = Tokenizer::from_dir(dir).with_context(missing)?;
    let template = checkpoint.chat_template(None)?;
    let tool_use = checkpoint.chat_template(Some("tool_use"))?;
    let chat = match template {
        Some(_) => ChatFormat::from_template(&tokenizer, &file_name(checkpoint), template, tool_use, Vec::new()),
        None => ChatFormat::load(dir, &tokenizer)?,
    };
    Ok((tokenizer, chat))
}

fn file_name(checkpoint: &GgufCheckpoint) -> String {
    checkpoint.path().file_name().unwrap_or_default().to_string_lossy().into_owned()
}
