//! What a GGUF file says of the model's words and of how it wants to be sampled.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::Language;
use crate::chat::ChatFormat;
use crate::tokenizer::Tokenizer;
use crate::weights::gguf::GgufCheckpoint;

/// The file's own tokenizer. One beside it counts only if the file has none: what is in the file was made for it.
pub fn language(file: &Path) -> Result<Language> {
    let checkpoint = GgufCheckpoint::open(file)?;
    let broken = || format!("broken tokenizer in {}", file.display());
    let Some(vocabulary) = checkpoint.vocabulary().with_context(broken)? else {
        let dir = file.parent().unwrap_or(Path::new(""));
        let without = || format!("{} holds no vocabulary, and no tokenizer.json is beside it", file.display());
        let tokenizer = Tokenizer::from_dir(dir).with_context(without)?;
        let template = checkpoint.chat_template()?;
        let chat = match template {
            Some(_) => ChatFormat::from_template(&tokenizer, &name(file), template, Vec::new()),
            None => ChatFormat::load(dir, &tokenizer)?,
        };
        return Ok(Language { tokenizer, chat });
    };
    let tokenizer = Tokenizer::from_gguf(&vocabulary).with_context(broken)?;
    let special = vocabulary.special_ids().with_context(broken)?;
    let named = [
        ("bos_token", special.bos),
        ("eos_token", special.eos),
        ("unk_token", special.unk),
        ("pad_token", special.pad),
    ];
    let token = |id: u32| vocabulary.tokens.get(id as usize).map(|token| token.to_string());
    let named = named.into_iter().filter_map(|(name, id)| Some((name.to_string(), token(id?)?))).collect();
    let template = checkpoint.chat_template()?;
    let chat = ChatFormat::from_template(&tokenizer, &name(file), template, named);
    Ok(Language { tokenizer, chat })
}

/// Defaults for sampling, as generation_config.json would have them, and the ids that end an answer.
pub fn generation(file: &Path, language: &Language) -> Result<(Value, Vec<u32>)> {
    let checkpoint = GgufCheckpoint::open(file)?;
    let mut ids = BTreeSet::new();
    if let Some(vocabulary) = checkpoint.vocabulary()? {
        ids.extend(vocabulary.special_ids()?.stop);
    }
    ids.extend(language.chat.iter().flat_map(|chat| chat.stop_ids()));
    Ok((checkpoint.generation_config()?, ids.into_iter().collect()))
}

fn name(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
