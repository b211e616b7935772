//! Encodes text with the `tokenizers` library.

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, anyhow};

use super::encode::{ControlTokens, Encode};
use super::guard::guarded;
use super::table::ControlToken;
use crate::error::Error;
use crate::text::quote;

/// A Unicode noncharacter, which no vocabulary contains.
/// Encoding this text yields the unknown token, if the tokenizer uses one.
const UNKNOWN: &str = "\u{FDD0}";

/// An encoder that calls the `tokenizers` library in this process.
pub struct LibraryEncoder {
    /// The tokenizer. A mutex protects it, because each call changes how the tokenizer treats control tokens.
    tokenizer: Mutex<tokenizers::Tokenizer>,
    /// The ids of all control tokens except the unknown token, sorted.
    control_ids: Vec<u32>,
    /// The control tokens that are not marked special, longest first.
    unmarked: Vec<String>,
}

impl LibraryEncoder {
    pub fn new(mut library: tokenizers::Tokenizer, controls: &[ControlToken]) -> Result<Self> {
        // The file may contain truncation and padding settings from training, which generation must not use.
        library.with_truncation(None).map_err(|e| anyhow!("{e}"))?.with_padding(None);
        let mut control_ids: Vec<u32> = controls.iter().map(|control| control.id).collect();
        control_ids.sort_unstable();
        // Characters outside the vocabulary become the unknown token, which is harmless even if it is a control token.
        library.set_encode_special_tokens(true);
        let unknown = guarded("encode the text", || library.encode_fast(UNKNOWN, false))?;
        control_ids.retain(|id| !unknown.get_ids().contains(id));
        let unmarked = controls.iter().filter(|control| !control.is_special && !control.content.is_empty());
        let unmarked = unmarked.map(|control| control.content.clone()).collect();
        Ok(Self { tokenizer: Mutex::new(library), control_ids, unmarked })
    }

    /// Encodes text with one call of the library.
    /// With [`ControlTokens::Text`], the result can still contain control tokens, such as those not marked special.
    fn call_library(&self, text: &str, controls: ControlTokens) -> Result<Vec<u32>> {
        let mut tokenizer = self.tokenizer.lock().unwrap_or_else(PoisonError::into_inner);
        tokenizer.set_encode_special_tokens(controls == ControlTokens::Text);
        let adds_special_tokens = controls == ControlTokens::Default;
        let encoding = guarded("encode the text", || tokenizer.encode_fast(text, adds_special_tokens))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes text without producing control tokens. Fails if a single character becomes a control token.
    fn encode_text(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let piece_ids = self.call_library(text, ControlTokens::Text)?;
        if !piece_ids.iter().any(|id| self.control_ids.binary_search(id).is_ok()) {
            ids.extend(piece_ids);
            return Ok(());
        }
        // The library can match a control token after normalization, for example `＜|end|＞` after NFKC.
        // Halve the text until no half contains a complete control token.
        let middle = text.char_indices().map(|(at, _)| at).nth(text.chars().count() / 2).unwrap_or(0);
        if middle == 0 {
            let problem =
                format!("cannot encode {} as text: this tokenizer turns it into a control token", quote(text));
            return Err(Error::invalid_request(problem));
        }
        let (left, right) = text.split_at(middle);
        self.encode_text(left, ids)?;
        self.encode_text(right, ids)
    }

    /// Splits text after the first character of each occurrence of a control token that is not marked special.
    fn split_at_unmarked_controls<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut pieces = Vec::new();
        let mut start = 0;
        let mut at = 0;
        while at < text.len() {
            let width = text[at..].chars().next().map_or(1, char::len_utf8);
            if self.unmarked.iter().any(|control| text[at..].starts_with(control)) {
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
}

impl Encode for LibraryEncoder {
    fn encode(&self, text: &str, controls: ControlTokens) -> Result<Vec<u32>> {
        match controls {
            ControlTokens::Default | ControlTokens::Parse => self.call_library(text, controls),
            ControlTokens::Text => {
                // The library can encode special tokens as text, but not added tokens that are not marked special.
                // To prevent a match, split the text inside each unmarked control token, such as `<think>`.
                let mut ids = Vec::new();
                for piece in self.split_at_unmarked_controls(text) {
                    self.encode_text(piece, &mut ids)?;
                }
                Ok(ids)
            }
        }
    }
}
