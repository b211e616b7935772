//! Collects the ids of stop tokens from the config files and the chat format of a snapshot.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use crate::chat::ChatFormat;
use crate::files;
use crate::tokenizer::Tokenizer;

/// Reads the JSON file `name` in `dir`. Returns null if the file does not exist.
pub fn read_json(dir: &Path, name: &str) -> Result<Value> {
    let path = dir.join(name);
    let limit = match name {
        "tokenizer_config.json" => files::MAX_TOKENIZER_CONFIG_BYTES,
        "generation_config.json" => files::MAX_GENERATION_CONFIG_BYTES,
        _ => files::MAX_CONFIG_BYTES,
    };
    Ok(files::read_json_if_present(&path, limit)?.unwrap_or_default())
}

/// Returns the sorted ids of the stop tokens in config.json, tokenizer_config.json, `generation` and the chat format.
/// `generation` is the JSON in generation_config.json. In some models, no single source names all stop tokens.
pub fn collect(dir: &Path, generation: &Value, tokenizer: &Tokenizer, chat: Option<&ChatFormat>) -> Result<Vec<u32>> {
    let mut ids = BTreeSet::new();
    for json in [&read_json(dir, "config.json")?, generation] {
        match &json["eos_token_id"] {
            Value::Array(several) => ids.extend(several.iter().filter_map(Value::as_u64)),
            one => ids.extend(one.as_u64()),
        }
    }
    let mut ids: BTreeSet<u32> = ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect();
    let tokenizer_config = read_json(dir, "tokenizer_config.json")?;
    let eos = &tokenizer_config["eos_token"];
    let eos = eos.as_str().or_else(|| eos["content"].as_str());
    ids.extend(eos.and_then(|eos| tokenizer.token_id(eos)));
    ids.extend(chat.iter().flat_map(|chat| chat.stop_ids()));
    Ok(ids.into_iter().collect())
}
