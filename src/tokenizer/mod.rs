//! Encodes text to token ids and decodes token ids to text. The streaming decoder never splits a character.
//!
//! A tokenizer is loaded from tokenizer.json or from GGUF metadata.
//! It wraps the `tokenizers` library from Hugging Face.
//! Malformed files can make that library panic (huggingface/tokenizers #2094), so every call catches panics.
//! An invalid file causes an error, never a crash.

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
    /// This is the default of `encode` in Hugging Face libraries.
    Default,
    /// Parse control tokens and add nothing. Used for rendered chat templates.
    Parse,
    /// Encode control tokens as ordinary text. Used for text from users and tools.
    Text,
}

/// A loaded tokenizer.
pub struct Tokenizer {
    /// Guarded by a mutex, because control token handling is a setting of the tokenizer, not an argument of each call.
    inner: Mutex<tokenizers::Tokenizer>,
    /// Control tokens, longest first: special tokens and added tokens of the form `<...>` or `[...]`.
    controls: Vec<ControlToken>,
    /// The number of tokens. `vocab_size` in config.json is often larger.
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
        // The file may contain truncation and padding settings from training. Generation must not use them.
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

    /// Encodes text to token ids.
    pub fn encode(&self, text: &str, controls: ControlTokens) -> Result<Vec<u32>> {
        match controls {
            ControlTokens::Default => self.encode_raw(text, true, false),
            ControlTokens::Parse => self.encode_raw(text, false, false),
            ControlTokens::Text => {
                // The library can encode special tokens as text, but not added tokens that are not marked special.
                // Text is therefore split inside such tokens, such as `<think>`. No piece contains a whole token.
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

    /// Splits text after the first character of every control token that is not marked special.
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

    /// Returns the control tokens as (text, id) pairs, longest text first.
    pub fn controls(&self) -> impl Iterator<Item = (&str, u32)> {
        self.controls.iter().map(|c| (c.content.as_str(), c.id))
    }

    /// Returns whether `id` is a control token.
    pub fn is_control(&self, id: u32) -> bool {
        self.controls.iter().any(|c| c.id == id)
    }

    /// Decodes ids to text, including control tokens. Ignores ids that have no token.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let inner = self.lock();
        guarded("decode the tokens", || inner.decode(ids, false))
    }

    /// Returns the id of the token with exactly this text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.lock().token_to_id(token)
    }

    /// Returns the token for an id as the vocabulary spells it, such as `Ġthe` or `▁the`.
    pub fn token(&self, id: u32) -> Option<String> {
        self.lock().id_to_token(id)
    }
}

/// Returns whether a token looks like a control token, such as `<think>`, `</tool_call>` or `[INST]`.
///
/// Many vocabularies do not mark such tokens as special.
fn looks_like_control(content: &str) -> bool {
    let inner = content
        .strip_prefix('<')
        .and_then(|rest| rest.strip_suffix('>'))
        .or_else(|| content.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')));
    inner.is_some_and(|inner| !inner.is_empty() && !inner.contains(char::is_whitespace))
}

/// A streaming decoder. It holds back text while the last character may be incomplete.
pub struct TextStream {
    /// The ids of the last text that was returned, kept as left context, followed by newer ids.
    ids: Vec<u32>,
    /// The number of leading `ids` whose text was already returned.
    emitted: usize,
}

/// The number of ids after which an incomplete character is returned as U+FFFD. Valid characters need fewer.
const MAX_HELD_IDS: usize = 8;

impl TextStream {
    /// Creates a decoder for a new text.
    pub fn new() -> Self {
        Self { ids: Vec::new(), emitted: 0 }
    }

    /// Creates a decoder that continues a text after `ids`.
    ///
    /// The last few `ids` become left context, because SentencePiece drops the space before the first word of a text.
    pub fn continuing(ids: &[u32]) -> Self {
        let context = &ids[ids.len().saturating_sub(4)..];
        Self { ids: context.to_vec(), emitted: context.len() }
    }

    /// Adds an id and returns the text that is now complete, if any.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        self.ids.push(id);
        self.take(tokenizer, self.ids.len() - self.emitted >= MAX_HELD_IDS)
    }

    /// Ends the text and returns any text that was held back.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        self.take(tokenizer, true)
    }

    fn take(&mut self, tokenizer: &Tokenizer, force: bool) -> Result<String> {
        // Some text depends on its left context, such as the space before a word in SentencePiece vocabularies.
        let emitted = tokenizer.decode(&self.ids[..self.emitted])?;
        let text = tokenizer.decode(&self.ids)?;
        if !force && text.ends_with('\u{FFFD}') {
            return Ok(String::new());
        }
        let new = match text.strip_prefix(emitted.as_str()) {
            Some(new) => new.to_string(),
            // The left context ended with an incomplete character, so skip its characters by count instead.
            None => text.chars().skip(emitted.chars().count()).collect(),
        };
        // Keep the previous left context if the new ids add no text.
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
