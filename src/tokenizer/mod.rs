//! Tokenizers: text to token ids and back, and a streaming decoder that never splits a character.
//!
//! A tokenizer comes from tokenizer.json or from the metadata of a GGUF file.
//! The work is done by Hugging Face `tokenizers`.
//! Some crafted files make that library panic (its issue #2094), so every call into it catches panics.
//! A broken file is an error, never a crash.

mod bpe;
pub mod gguf;
mod guard;

use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use anyhow::{Context, Result, anyhow};

use guard::guarded;

/// How `encode` treats control tokens in a text, such as `<|start|>` and `</s>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlTokens {
    /// Parse control tokens, and add the tokenizer's own prefix and suffix, such as `<s>`.
    /// This is the default of `encode` in the reference implementation.
    Default,
    /// Parse control tokens and add nothing: for a rendered chat template.
    Parse,
    /// Encode control tokens as ordinary text: for text from people and tools.
    Text,
}

/// A loaded tokenizer.
pub struct Tokenizer {
    /// Behind a mutex, because the library has no argument of `encode` for control tokens,
    /// but a switch on the tokenizer.
    inner: Mutex<tokenizers::Tokenizer>,
    /// Added tokens that act as control tokens, longest first:
    /// all special tokens, and those of the form `<...>` or `[...]`.
    controls: Vec<ControlToken>,
    /// Ids at or above this have no token. The vocab_size in config.json is often larger.
    vocab_size: usize,
}

/// An added token that acts as a control token.
#[derive(Clone, Debug)]
struct ControlToken {
    content: String,
    id: u32,
    special: bool,
}

impl Tokenizer {
    /// Loads `tokenizer.json` from a model's directory.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::from_bytes(&bytes).with_context(|| format!("broken tokenizer {}", path.display()))
    }

    /// Parses the contents of a tokenizer.json.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let parse = || bpe::parse(bytes)?.map_or_else(|| tokenizers::Tokenizer::from_bytes(bytes), Ok);
        Self::new(guarded("load the tokenizer", parse)?)
    }

    /// Builds the tokenizer from the vocabulary of a GGUF file.
    pub fn from_gguf(vocabulary: &gguf::Vocabulary) -> Result<Self> {
        Self::new(gguf::build(vocabulary)?)
    }

    fn new(mut inner: tokenizers::Tokenizer) -> Result<Self> {
        // A file may have the truncation and the padding of its last training run. Generation must have neither.
        inner.with_truncation(None).map_err(|e| anyhow!("{e}"))?.with_padding(None);
        let mut controls: Vec<ControlToken> = inner
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special || looks_like_control(&token.content))
            .map(|(id, token)| ControlToken { content: token.content, id, special: token.special })
            .collect();
        controls.sort_by(|a, b| b.content.len().cmp(&a.content.len()).then(a.id.cmp(&b.id)));
        let vocab_size = inner.get_vocab_size(true);
        Ok(Self { inner: Mutex::new(inner), controls, vocab_size })
    }

    /// Returns the number of tokens, including added tokens.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Encodes a text to token ids.
    pub fn encode(&self, text: &str, controls: ControlTokens) -> Result<Vec<u32>> {
        match controls {
            ControlTokens::Default => self.encode_raw(text, true, false),
            ControlTokens::Parse => self.encode_raw(text, false, false),
            ControlTokens::Text => {
                // The library can encode special tokens as text,
                // but not the added tokens that are not marked special, such as `<think>` and `<tool_call>`.
                // Those are split between two pieces, so that no piece has a whole one.
                let mut ids = Vec::new();
                for piece in self.split_at_unmarked_controls(text) {
                    ids.extend(self.encode_raw(piece, false, true)?);
                }
                Ok(ids)
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, tokenizers::Tokenizer> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn encode_raw(&self, text: &str, add_special_tokens: bool, controls_are_text: bool) -> Result<Vec<u32>> {
        let mut inner = self.lock();
        inner.set_encode_special_tokens(controls_are_text);
        let encoding = guarded("encode the text", || inner.encode_fast(text, add_special_tokens))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Splits a text inside every control token that is not marked special.
    fn split_at_unmarked_controls<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut pieces = Vec::new();
        let mut start = 0;
        let mut at = 0;
        while at < text.len() {
            let control = self.controls.iter().find(|c| !c.special && text[at..].starts_with(&c.content));
            let width = text[at..].chars().next().map_or(1, char::len_utf8);
            if control.is_some() {
                pieces.push(&text[start..at + width]);
                start = at + width;
            }
            at += width;
        }
        if start < text.len() {
            pieces.push(&text[start..]);
        }
        pieces
    }

    /// Returns the control tokens as (text, id), longest first.
    pub fn controls(&self) -> impl Iterator<Item = (&str, u32)> {
        self.controls.iter().map(|c| (c.content.as_str(), c.id))
    }

    /// Returns true if `id` is a control token.
    pub fn is_control(&self, id: u32) -> bool {
        self.controls.iter().any(|c| c.id == id)
    }

    /// Decodes ids to text, including control tokens. Ids without a token add nothing.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let inner = self.lock();
        guarded("decode the tokens", || inner.decode(ids, false))
    }

    /// Returns the id of a token with exactly this text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.lock().token_to_id(token)
    }

    /// Returns the token of an id in the tokenizer's own spelling: `Ġthe`, `▁the`.
    pub fn token(&self, id: u32) -> Option<String> {
        self.lock().id_to_token(id)
    }
}

/// Returns true for tokens such as `<think>`, `</tool_call>` and `[INST]`,
/// which steer a model without being marked special.
fn looks_like_control(content: &str) -> bool {
    let inner = content
        .strip_prefix('<')
        .and_then(|rest| rest.strip_suffix('>'))
        .or_else(|| content.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')));
    inner.is_some_and(|inner| !inner.is_empty() && !inner.contains(char::is_whitespace))
}

/// Decodes ids one by one. Text is held back while its last character may be incomplete.
pub struct TextStream {
    /// The ids of the last complete text, as left context, and the ids after them.
    ids: Vec<u32>,
    /// How many of `ids` are already decoded in returned text.
    emitted: usize,
}

/// An incomplete character is returned as U+FFFD after this many ids. No valid character needs as many.
const MAX_HELD_IDS: usize = 8;

impl TextStream {
    /// Starts a new text.
    pub fn new() -> Self {
        Self { ids: Vec::new(), emitted: 0 }
    }

    /// Continues a text after `ids`.
    /// In SentencePiece vocabularies, the first word of a text has no space before it, and later words have one.
    pub fn continuing(ids: &[u32]) -> Self {
        let context = &ids[ids.len().saturating_sub(4)..];
        Self { ids: context.to_vec(), emitted: context.len() }
    }

    /// Adds an id and returns the text that is now complete, possibly none.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        self.ids.push(id);
        self.take(tokenizer, self.ids.len() - self.emitted >= MAX_HELD_IDS)
    }

    /// Ends the text and returns what was held back.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        self.take(tokenizer, true)
    }

    fn take(&mut self, tokenizer: &Tokenizer, force: bool) -> Result<String> {
        // Some text depends on its left context: the space before a word in SentencePiece vocabularies.
        let emitted = tokenizer.decode(&self.ids[..self.emitted])?;
        let text = tokenizer.decode(&self.ids)?;
        if !force && text.ends_with('\u{FFFD}') {
            return Ok(String::new());
        }
        let new = match text.strip_prefix(emitted.as_str()) {
            Some(new) => new.to_string(),
            // The context ended in an incomplete character that was returned anyway. Count characters instead.
            None => text.chars().skip(emitted.chars().count()).collect(),
        };
        // Ids without text give no context.
        self.ids.drain(..if new.is_empty() { self.ids.len().saturating_sub(MAX_HELD_IDS) } else { self.emitted });
        self.emitted = self.ids.len();
        Ok(new)
    }
}

impl Default for TextStream {
    fn default() -> Self {
        Self::new()
    }
}
