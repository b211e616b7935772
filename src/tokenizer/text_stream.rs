//! A streaming decoder that never splits a character.

use anyhow::Result;

use super::Tokenizer;

/// A streaming decoder that holds text back while the last character may be incomplete.
pub struct TextStream {
    /// The ids of the most recently returned text (the left context), followed by ids whose text was not returned yet.
    ids: Vec<u32>,
    /// The number of leading `ids` whose text was already returned.
    emitted: usize,
}

/// The number of held ids at which bytes that are not valid UTF-8 are returned as U+FFFD.
/// A UTF-8 character has at most 4 bytes, so fewer ids complete a valid character.
const MAX_HELD_IDS: usize = 8;

/// What happens to text whose last character is incomplete.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IncompleteEnd {
    /// The text waits for the ids that complete the character.
    Hold,
    /// The text is returned, with U+FFFD in place of the character.
    Replace,
}

impl TextStream {
    /// Creates a decoder for a new text.
    pub fn new() -> Self {
        Self { ids: Vec::new(), emitted: 0 }
    }

    /// Creates a decoder that continues a text after `ids`.
    ///
    /// The last four `ids` become the left context.
    /// Without left context, SentencePiece would drop the space before the next word.
    pub fn continuing(ids: &[u32]) -> Self {
        let context = &ids[ids.len().saturating_sub(4)..];
        Self { ids: context.to_vec(), emitted: context.len() }
    }

    /// Adds an id. Returns the text that this id completes, or an empty string.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        self.ids.push(id);
        let is_full = self.ids.len() - self.emitted >= MAX_HELD_IDS;
        // Once the stream is full, `take` returns invalid bytes as U+FFFD.
        // Hold back the last ids if they may begin a valid character.
        let begun = if is_full { self.begun_ids(tokenizer) } else { 0 };
        let held = self.ids.split_off(self.ids.len() - begun);
        let end = if is_full { IncompleteEnd::Replace } else { IncompleteEnd::Hold };
        let text = self.take(tokenizer, end)?;
        self.ids.extend(held);
        Ok(text)
    }

    /// Returns how many of the last ids to hold back: the fewest whose bytes are valid UTF-8 up to an incomplete last
    /// character, or 0 if there are none. Never returns all waiting ids, so that [`Self::push`] decodes at least one.
    fn begun_ids(&self, tokenizer: &Tokenizer) -> usize {
        let waiting = &self.ids[self.emitted..];
        let ends_within = |count: &usize| {
            let last = &waiting[waiting.len() - count..];
            let bytes: Vec<u8> = last.iter().flat_map(|&id| tokenizer.table().bytes(id)).collect();
            std::str::from_utf8(&bytes).is_err_and(|error| error.error_len().is_none())
        };
        (1..waiting.len()).find(ends_within).unwrap_or(0)
    }

    /// Ends the text and returns any text that was held back.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        self.take(tokenizer, IncompleteEnd::Replace)
    }

    /// Returns the text of the waiting ids, and makes these ids the left context.
    /// Returns an empty string and keeps the ids waiting if `end` is `Hold` and the last character may be incomplete.
    fn take(&mut self, tokenizer: &Tokenizer, end: IncompleteEnd) -> Result<String> {
        // Decode with left context. In SentencePiece vocabularies, the space before a word depends on this context.
        let emitted = tokenizer.decode(&self.ids[..self.emitted])?;
        let text = tokenizer.decode(&self.ids)?;
        if end == IncompleteEnd::Hold && text.ends_with('\u{FFFD}') {
            return Ok(String::new());
        }
        let new = match text.strip_prefix(emitted.as_str()) {
            Some(new) => new.to_string(),
            // The left context ended with an incomplete character, so the text of the left context has changed.
            // Skip as many characters as the left context had before.
            None => text.chars().skip(emitted.chars().count()).collect(),
        };
        // If the new ids add no text, they are not enough left context. Keep the old context too, but at most the last
        // `MAX_HELD_IDS` ids.
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
