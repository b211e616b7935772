//! Prevents text from users and tools from becoming control tokens in a rendered template.
//!
//! A template joins its own control tokens and its input (messages, tools and variables) into one string.
//! In that string, an `<|im_end|>` from a message looks like an `<|im_end|>` from the template.
//! Before rendering, this module inserts a mark into the control tokens in the input.
//! The mark is a Unicode character that the input does not contain.
//! In the rendered prompt, strings without a mark that match a control token become this token.
//! If the text between two such tokens contains a mark, it is encoded as ordinary text, without its marks.
//!
//! Most conversations need no marks. Their prompts are encoded in one call, as in transformers.

use std::collections::HashMap;

use anyhow::Result;

use crate::chat::rendered::Rendered;
use crate::error::Error;
use crate::tokenizer::{ControlTokens, Tokenizer};

/// The Unicode characters that can serve as the mark: noncharacters, which are reserved for internal use.
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// Marks control tokens in the input of a template, and encodes the rendered text.
pub struct Marker<'t> {
    tokenizer: &'t Tokenizer,
    mark: char,
    /// For each byte, whether a control token starts with this byte.
    first_bytes: [bool; 256],
}

impl<'t> Marker<'t> {
    /// Creates a marker whose mark occurs in none of the `texts`. Fails if the texts contain every possible mark.
    pub fn new<'s>(tokenizer: &'t Tokenizer, texts: impl Iterator<Item = &'s str> + Clone) -> Result<Self> {
        let unused = |mark: &char| !texts.clone().any(|text| text.contains(*mark));
        let Some(mark) = MARKS.into_iter().find(unused) else {
            let problem =
                "cannot render the conversation: its text has every Unicode noncharacter from U+FDD0 to U+FDEF";
            return Err(Error::invalid_request(problem));
        };
        let mut first_bytes = [false; 256];
        for byte in tokenizer.controls().filter_map(|(control, _)| control.bytes().next()) {
            first_bytes[usize::from(byte)] = true;
        }
        Ok(Self { tokenizer, mark, first_bytes })
    }

    /// Returns `text` with a mark after the first character of every control token.
    ///
    /// If `text` ends with the start of a control token, the result also has a mark at its end.
    /// If normalizing `text` would create control tokens, the result has a mark after every character.
    pub fn mark(&self, text: &str) -> Result<String> {
        self.mark_except(text, &[])
    }

    /// Like [`mark`](Self::mark), but the control tokens in `allowed` get no mark, and so stay control tokens.
    pub fn mark_except(&self, text: &str, allowed: &[&str]) -> Result<String> {
        let mut out = String::with_capacity(text.len());
        if self.becomes_control(text)? {
            out.extend(text.chars().flat_map(|c| [c, self.mark]));
            return Ok(out);
        }
        for (at, c) in text.char_indices() {
            out.push(c);
            if self.control_at(text, at).is_some_and(|control| !allowed.contains(&control)) {
                out.push(self.mark);
            }
        }
        // A control token may start at the end of a message and continue in the template.
        let is_start_of = |control: &str| control.char_indices().skip(1).any(|(at, _)| text.ends_with(&control[..at]));
        if !out.ends_with(self.mark) && self.tokenizer.controls().any(|(control, _)| is_start_of(control)) {
            out.push(self.mark);
        }
        Ok(out)
    }

    /// Returns whether normalization creates a control token in `text`. NFKC, for example, creates one in `＜|end|＞`.
    fn becomes_control(&self, text: &str) -> Result<bool> {
        if !self.tokenizer.normalizes_controls() {
            return Ok(false);
        }
        let unknown = self.tokenizer.encode(&self.mark.to_string(), ControlTokens::Text)?;
        let found = self.tokenizer.encode(text, ControlTokens::Parse)?;
        let mut spelled: HashMap<u32, usize> = HashMap::new();
        for (at, _) in text.char_indices() {
            if let Some((_, id)) = self.control_and_id_at(text, at) {
                *spelled.entry(id).or_default() += 1;
            }
        }
        // Compare the counts per token, because normalization may remove one control token and create another.
        let mut found = found.into_iter().filter(|id| self.tokenizer.is_control(*id) && !unknown.contains(id));
        Ok(found.any(|id| match spelled.get_mut(&id) {
            Some(count) if *count > 0 => {
                *count -= 1;
                false
            }
            _ => true,
        }))
    }

    /// Returns the longest control token that starts at byte `at` of `text`, or `None` if none starts there.
    fn control_at(&self, text: &str, at: usize) -> Option<&str> {
        self.control_and_id_at(text, at).map(|(control, _)| control)
    }

    fn control_and_id_at(&self, text: &str, at: usize) -> Option<(&str, u32)> {
        let rest = &text[at..];
        if !rest.bytes().next().is_some_and(|byte| self.first_bytes[usize::from(byte)]) {
            return None;
        }
        self.tokenizer.controls().find(|(control, _)| !control.is_empty() && rest.starts_with(control))
    }

    /// Encodes the rendered text of a template, and removes the marks from it.
    pub fn encode(&self, rendered: String) -> Result<Rendered> {
        if !rendered.contains(self.mark) {
            return Ok(Rendered { ids: self.tokenizer.encode(&rendered, ControlTokens::Parse)?, text: rendered });
        }
        let mut ids = Vec::new();
        // The text before `begin` is already encoded. `control_end` is the end of the last unmarked control token.
        let mut begin = 0;
        let mut control_end = 0;
        let mut at = 0;
        while at < rendered.len() {
            // A one-character control token with a mark after it comes from the input, so it is ordinary text.
            let control = self.control_at(&rendered, at);
            let Some(control) = control.filter(|control| !rendered[at + control.len()..].starts_with(self.mark)) else {
                at += rendered[at..].chars().next().map_or(1, char::len_utf8);
                continue;
            };
            if rendered[control_end..at].contains(self.mark) {
                self.encode_marked(&rendered[begin..control_end], &rendered[control_end..at], &mut ids)?;
                begin = at;
            }
            at += control.len();
            control_end = at;
        }
        if rendered[control_end..].contains(self.mark) {
            self.encode_marked(&rendered[begin..control_end], &rendered[control_end..], &mut ids)?;
        } else {
            ids.extend(self.tokenizer.encode(&rendered[begin..], ControlTokens::Parse)?);
        }
        Ok(Rendered { ids, text: rendered.replace(self.mark, "") })
    }

    /// Encodes `template_text` with its control tokens, then all of `marked` as ordinary text.
    fn encode_marked(&self, template_text: &str, marked: &str, ids: &mut Vec<u32>) -> Result<()> {
        ids.extend(self.tokenizer.encode(template_text, ControlTokens::Parse)?);
        ids.extend(self.tokenizer.encode(&marked.replace(self.mark, ""), ControlTokens::Text)?);
        Ok(())
    }
}
