//! tokenizer.json, or what a GGUF file has in its place: text to ids and back, and a streaming decoder that never
//! splits a character.
//!
//! A thin wrapper over Hugging Face `tokenizers`. Some crafted files make that library panic (its issue #2094), so
//! loading and encoding run behind `catch_unwind`; a broken file is an error that names it, never a crash.

mod bpe;
pub mod gguf;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Mutex, Once};

use anyhow::{Context, Result, anyhow, bail};

/// How text that looks like a control token (`<|start|>`, `</s>`) is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlTokens {
    /// Parse control tokens, and add the tokenizer's own prefix and suffix (such as `<s>`): what `encode` does in the
    /// reference implementation by default.
    Default,
    /// Parse control tokens, add nothing: for a rendered chat template.
    Parse,
    /// Control tokens are ordinary text: for whatever a person or a tool wrote.
    Text,
}

/// A loaded tokenizer.
pub struct Tokenizer {
    /// Behind a mutex because reading control tokens as text is a switch on the tokenizer, not an argument of `encode`.
    inner: Mutex<tokenizers::Tokenizer>,
    /// Added tokens that act as control tokens, longest first: every special one, and those written `<...>` or `[...]`.
    controls: Vec<ControlToken>,
    /// Ids below this may have a token; `config.json`'s vocab_size is often larger.
    vocab_size: usize,
}

#[derive(Clone, Debug)]
struct ControlToken {
    content: String,
    id: u32,
    special: bool,
}

impl Tokenizer {
    /// Reads `tokenizer.json` in a snapshot directory.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::from_bytes(&bytes).with_context(|| format!("broken tokenizer {}", path.display()))
    }

    /// Parses the contents of a tokenizer.json.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let parse = || bpe::parse(bytes)?.map_or_else(|| tokenizers::Tokenizer::from_bytes(bytes), Ok);
        Self::new(guarded("loading", parse)?)
    }

    /// What the metadata of a GGUF file hold.
    pub fn from_gguf(vocabulary: &gguf::Vocabulary) -> Result<Self> {
        Self::new(gguf::build(vocabulary)?)
    }

    fn new(mut inner: tokenizers::Tokenizer) -> Result<Self> {
        // A file may carry the truncation and padding of its last training run; neither belongs in generation.
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

    /// Number of entries, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Ids of `text`.
    pub fn encode(&self, text: &str, controls: ControlTokens) -> Result<Vec<u32>> {
        match controls {
            ControlTokens::Default => self.encode_raw(text, true, false),
            ControlTokens::Parse => self.encode_raw(text, false, false),
            ControlTokens::Text => {
                // The library reads special tokens as text on demand, but never the added tokens that are not marked
                // special (`<think>`, `<tool_call>`): cut those in two, so that no piece holds a whole one.
                let mut ids = Vec::new();
                for piece in self.cut_unmarked_controls(text) {
                    ids.extend(self.encode_raw(piece, false, true)?);
                }
                Ok(ids)
            }
        }
    }

    fn encode_raw(&self, text: &str, add_special_tokens: bool, controls_are_text: bool) -> Result<Vec<u32>> {
        let mut inner = self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        inner.set_encode_special_tokens(controls_are_text);
        let encoding = guarded("encoding", || inner.encode_fast(text, add_special_tokens))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn cut_unmarked_controls<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut pieces = Vec::new();
        let mut start = 0;
        let mut at = 0;
        while at < text.len() {
            let hit = self.controls.iter().find(|c| !c.special && text[at..].starts_with(&c.content));
            let width = text[at..].chars().next().map_or(1, char::len_utf8);
            if hit.is_some() {
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

    /// The control tokens as (text, id), longest first.
    pub fn controls(&self) -> impl Iterator<Item = (&str, u32)> {
        self.controls.iter().map(|c| (c.content.as_str(), c.id))
    }

    /// Whether `id` is a control token.
    pub fn is_control(&self, id: u32) -> bool {
        self.controls.iter().any(|c| c.id == id)
    }

    /// Text of `ids`, control tokens included as they are written. Ids without a token (a config's vocab_size is often
    /// rounded up past the tokenizer's) contribute nothing.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let inner = self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        guarded("decoding", || inner.decode(ids, false))
    }

    /// The id of a token by its exact text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).token_to_id(token)
    }

    /// The token of an id, in the tokenizer's own spelling (`Ġthe`, `▁the`).
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).id_to_token(id)
    }
}

/// Added tokens that are not marked special yet steer a model: `<think>`, `</tool_call>`, `[INST]`.
fn looks_like_control(content: &str) -> bool {
    let inner = content
        .strip_prefix('<')
        .and_then(|rest| rest.strip_suffix('>'))
        .or_else(|| content.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')));
    inner.is_some_and(|inner| !inner.is_empty() && !inner.contains(char::is_whitespace))
}

thread_local! {
    /// Whether a panic on this thread will be caught and reported as an error.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Panics on this thread print nothing as long as this lives: they will be caught.
struct Quiet {
    before: bool,
}

impl Quiet {
    fn new() -> Self {
        Self { before: GUARDED.replace(true) }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        GUARDED.set(self.before);
    }
}

/// Runs a call into `tokenizers`, turning its errors and its panics into errors.
fn guarded<T, E: std::fmt::Display>(what: &str, call: impl FnOnce() -> Result<T, E>) -> Result<T> {
    // A caught panic has already printed its message by then; here nobody is to see it.
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                loud(info);
            }
        }));
    });
    let quiet = Quiet::new();
    let result = catch_unwind(AssertUnwindSafe(call));
    drop(quiet);
    match result {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => bail!("{what} failed: {error}"),
        Err(_) => bail!("{what} failed: the tokenizer is inconsistent (its library panicked)"),
    }
}

/// Turns ids into text as they come. Text is held back while its last character may be incomplete.
pub struct TextStream {
    /// Ids since the last point where the text was complete, with one complete step before them as left context.
    ids: Vec<u32>,
    /// How many of `ids` the text given out so far covers.
    given: usize,
}

/// Ids held back before an invalid byte sequence is given out as U+FFFD after all; no character needs this many.
const MAX_HELD: usize = 8;

impl TextStream {
    pub fn new() -> Self {
        Self { ids: Vec::new(), given: 0 }
    }

    /// A stream that goes on where `ids` end: in SentencePiece vocabularies a first word has no space before it, a later
    /// one has.
    pub fn continuing(ids: &[u32]) -> Self {
        let context = &ids[ids.len().saturating_sub(4)..];
        Self { ids: context.to_vec(), given: context.len() }
    }

    /// Text that became complete with `id`, possibly empty.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        self.ids.push(id);
        self.take(tokenizer, self.ids.len() - self.given >= MAX_HELD)
    }

    /// What is still held back, at the end of a text.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        self.take(tokenizer, true)
    }

    fn take(&mut self, tokenizer: &Tokenizer, force: bool) -> Result<String> {
        // Decoding with left context keeps what depends on it: a space before a word in SentencePiece vocabularies.
        let before = tokenizer.decode(&self.ids[..self.given])?;
        let now = tokenizer.decode(&self.ids)?;
        if !force && now.ends_with('\u{FFFD}') {
            return Ok(String::new());
        }
        let new = match now.strip_prefix(before.as_str()) {
            Some(new) => new.to_string(),
            // The context itself ended in a forced, incomplete character: count characters instead.
            None => now.chars().skip(before.chars().count()).collect(),
        };
        // Ids without text are no context worth keeping.
        self.ids.drain(..if new.is_empty() { self.ids.len().saturating_sub(MAX_HELD) } else { self.given });
        self.given = self.ids.len();
        Ok(new)
    }
}

impl Default for TextStream {
    fn default() -> Self {
        Self::new()
    }
}
