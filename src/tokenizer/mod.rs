//! Encodes text to token ids and decodes token ids to text. The streaming decoder never splits a character.
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! Tokenizers come from tokenizer.json or GGUF metadata, and use the `tokenizers` library from Hugging Face.
//! Malformed files can make this library panic (huggingface/tokenizers #2094).
//! Parsing, encoding and decoding therefore catch panics and return them as errors.
//!
//! With a hostile file, encoding can take unbounded time and memory.
//! [`Encode`] is a trait so that the encoder can run in another process (see `sandbox`).
//! Decoding runs in this process, because [`TokenTable`] bounds its cost.

mod bpe;
mod encode;
pub mod gguf;
mod guard;
mod library_encoder;
mod stop_tokens;
mod table;
mod text_stream;

use std::path::Path;

use anyhow::{Context, Result};

use crate::files;
use guard::guarded;
use library_encoder::LibraryEncoder;

pub use encode::{ControlTokens, Encode};
pub use table::{ControlToken, TokenTable};
pub use text_stream::TextStream;

/// The vocabulary of a model, with its encoder and decoder.
pub struct Tokenizer {
    table: TokenTable,
    encoder: Box<dyn Encode>,
}

impl Tokenizer {
    /// Loads `tokenizer.json` from a model's directory.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let bytes = files::read(&path, files::MAX_TOKENIZER_BYTES)?;
        Self::from_bytes(&bytes).with_context(|| format!("cannot use {}", path.display()))
    }

    /// Parses the contents of a tokenizer.json.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let parse = || bpe::parse(bytes)?.map_or_else(|| tokenizers::Tokenizer::from_bytes(bytes), Ok);
        Self::from_library(guarded("load the tokenizer", parse)?)
    }

    /// Builds the tokenizer from the vocabulary of a GGUF file.
    pub fn from_gguf(vocabulary: &gguf::Vocabulary) -> Result<Self> {
        Self::from_library(gguf::build(vocabulary)?)
    }

    fn from_library(library: tokenizers::Tokenizer) -> Result<Self> {
        let table = TokenTable::new(&library)?;
        let encoder = LibraryEncoder::new(library, table.controls())?;
        Ok(Self { table, encoder: Box::new(encoder) })
    }

    /// Creates a tokenizer from a table of tokens and an encoder for the same vocabulary.
    pub fn from_table(table: TokenTable, encoder: Box<dyn Encode>) -> Self {
        Self { table, encoder }
    }

    pub fn table(&self) -> &TokenTable {
        &self.table
    }

    /// Returns the number of tokens, including added tokens. `vocab_size` in config.json is often larger.
    pub fn vocab_size(&self) -> usize {
        self.table.len()
    }

    /// Encodes text to token ids. `controls` determines how control tokens in the text are treated.
    pub fn encode(&self, text: &str, controls: ControlTokens) -> Result<Vec<u32>> {
        self.encoder.encode(text, controls)
    }

    /// Returns the control tokens as (text, id) pairs, longest text first.
    pub fn controls(&self) -> impl Iterator<Item = (&str, u32)> {
        self.table.controls().iter().map(|control| (control.content.as_str(), control.id))
    }

    /// Returns the ids of known stop tokens among the control tokens, except `</s>` and `<eos>`.
    /// Other stop tokens may exist.
    pub fn known_stop_ids(&self) -> Vec<u32> {
        // Many files do not mark control tokens as special, so `</s>` may be the HTML tag of Gemma, which is text.
        let stop_tokens: Vec<_> = self.controls().filter(|(token, _)| stop_tokens::is_stop_token(token)).collect();
        stop_tokens::stop_ids(&stop_tokens)
    }

    /// Returns whether `id` is a control token, by a binary search. Returns false for an id that has no token.
    pub fn is_control(&self, id: u32) -> bool {
        self.table.is_control(id)
    }

    /// Returns whether normalization may turn other text into a control token.
    pub fn normalizes_controls(&self) -> bool {
        self.table.normalizes_controls()
    }

    /// Decodes ids to text, including control tokens. Ignores ids that have no token.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.table.decode(ids)
    }

    /// Returns the id of a token, or `None` if there is no such token. Searches all tokens one by one.
    /// `token` is spelled as in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.table.id(token)
    }

    /// Returns the token with this id, or `None` if there is no such token.
    /// The token is spelled as in the vocabulary, such as `Ġthe` or `▁the`.
    pub fn token(&self, id: u32) -> Option<&str> {
        self.table.token(id)
    }
}
