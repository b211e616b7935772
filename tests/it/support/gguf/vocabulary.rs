//! Converts tokenizers to GGUF metadata.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::writer::Writer;

// The token types of GGUF, as in llama.cpp.
pub const NORMAL: i32 = 1;
pub const UNKNOWN: i32 = 2;
pub const CONTROL: i32 = 3;
pub const USER_DEFINED: i32 = 4;
pub const UNUSED: i32 = 5;
pub const BYTE: i32 = 6;

/// The GGUF tokenizer metadata that llama.cpp would write for a tokenizer.json.
pub struct Converted {
    pub tokens: Vec<String>,
    pub types: Vec<i32>,
    pub merges: Vec<String>,
}

/// Converts the tokenizer.json in `folder` as llama.cpp does.
pub fn converted(folder: &Path) -> Converted {
    let json: Value = serde_json::from_slice(&fs::read(folder.join("tokenizer.json")).unwrap()).unwrap();
    let mut by_id: BTreeMap<u64, (String, i32)> = BTreeMap::new();
    for (token, id) in json["model"]["vocab"].as_object().unwrap() {
        let byte = token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
        by_id.insert(id.as_u64().unwrap(), (token.clone(), if byte { BYTE } else { NORMAL }));
    }
    for added in json["added_tokens"].as_array().unwrap() {
        let content = added["content"].as_str().unwrap();
        let kind = match (content, added["special"].as_bool().unwrap()) {
            ("<unk>", _) => UNKNOWN,
            (_, true) => CONTROL,
            (_, false) => USER_DEFINED,
        };
        by_id.insert(added["id"].as_u64().unwrap(), (content.into(), kind));
    }
    let size = by_id.last_key_value().unwrap().0 + 1;
    let token = |id| by_id.get(&id).cloned().unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED));
    let (tokens, types) = (0..size).map(token).unzip();
    let merge = |merge: &Value| match merge {
        Value::String(both) => both.clone(),
        pair => [pair[0].as_str().unwrap(), pair[1].as_str().unwrap()].join(" "),
    };
    let merges = json["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    Converted { tokens, types, merges }
}

impl Converted {
    pub fn byte_level(&self, pre: &str) -> Writer {
        self.written("gpt2").string("tokenizer.ggml.pre", pre).strings("tokenizer.ggml.merges", &self.merges)
    }

    pub fn sentencepiece(&self, scores: &[f32]) -> Writer {
        self.written("llama").f32s("tokenizer.ggml.scores", scores)
    }

    pub fn written(&self, model: &str) -> Writer {
        Writer::new()
            .string("tokenizer.ggml.model", model)
            .strings("tokenizer.ggml.tokens", &self.tokens)
            .i32s("tokenizer.ggml.token_type", &self.types)
    }
}
