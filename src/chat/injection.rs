//! Keeping what people wrote from becoming control tokens, when a template has made one text of everything.
//!
//! A template concatenates its own control tokens and the messages into one string, and after that nothing tells
//! `<|im_end|>` in a message from the template's own. So a spelling of a control token inside a message is marked
//! before rendering, with a character that no text may contain. Where a mark comes out, the text around it is encoded
//! as text, between the template's own control tokens. Where none does, as nearly always, the whole text is encoded at
//! once and the ids are exactly those of the reference implementation.

use anyhow::{Result, bail};

use crate::tokenizer::{ControlTokens, Tokenizer};

/// Noncharacters: Unicode reserves them for use inside a program.
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// Marks control token spellings, with a character that occurs in none of the texts.
pub struct Marker<'t> {
    tokenizer: &'t Tokenizer,
    mark: char,
    /// Which bytes a control token begins with: a long text is scanned once, not once for each of hundreds.
    begins: [bool; 256],
}

impl<'t> Marker<'t> {
    /// `texts`: everything that will be marked.
    pub fn new<'s>(tokenizer: &'t Tokenizer, texts: impl Iterator<Item = &'s str> + Clone) -> Result<Self> {
        let unused = |mark: &char| !texts.clone().any(|text| text.contains(*mark));
        let Some(mark) = MARKS.into_iter().find(unused) else {
            bail!("the messages contain every Unicode noncharacter from U+FDD0 to U+FDEF");
        };
        let mut begins = [false; 256];
        for byte in tokenizer.controls().filter_map(|(control, _)| control.bytes().next()) {
            begins[usize::from(byte)] = true;
        }
        Ok(Self { tokenizer, mark, begins })
    }

    /// `text` with every spelling of a control token broken up, but for those in `allowed`.
    pub fn mark(&self, text: &str, allowed: &[&str]) -> String {
        let mut out = String::with_capacity(text.len());
        for (at, c) in text.char_indices() {
            out.push(c);
            if self.control_at(text, at).is_some_and(|control| !allowed.contains(&control)) {
                out.push(self.mark);
            }
        }
        out
    }

    /// The longest control token that is spelled at a place in `text`.
    fn control_at(&self, text: &str, at: usize) -> Option<&str> {
        let rest = &text[at..];
        if !rest.bytes().next().is_some_and(|byte| self.begins[usize::from(byte)]) {
            return None;
        }
        self.tokenizer.controls().map(|(control, _)| control).find(|c| !c.is_empty() && rest.starts_with(c))
    }

    /// Ids of a rendered text, and the text without the marks.
    pub fn encode(&self, rendered: String) -> Result<(Vec<u32>, String)> {
        if !rendered.contains(self.mark) {
            return Ok((self.tokenizer.encode(&rendered, ControlTokens::Parse)?, rendered));
        }
        let mut ids = Vec::new();
        // Where the text that is encoded as one begins, where its last stretch between control tokens does.
        let (mut begin, mut stretch, mut at) = (0, 0, 0);
        while at < rendered.len() {
            let Some(control) = self.control_at(&rendered, at) else {
                at += rendered[at..].chars().next().map_or(1, char::len_utf8);
                continue;
            };
            if rendered[stretch..at].contains(self.mark) {
                self.encode_marked(&rendered[begin..stretch], &rendered[stretch..at], &mut ids)?;
                begin = at;
            }
            at += control.len();
            stretch = at;
        }
        if rendered[stretch..].contains(self.mark) {
            self.encode_marked(&rendered[begin..stretch], &rendered[stretch..], &mut ids)?;
        } else {
            ids.extend(self.tokenizer.encode(&rendered[begin..], ControlTokens::Parse)?);
        }
        Ok((ids, rendered.replace(self.mark, "")))
    }

    fn encode_marked(&self, scaffold: &str, marked: &str, ids: &mut Vec<u32>) -> Result<()> {
        ids.extend(self.tokenizer.encode(scaffold, ControlTokens::Parse)?);
        ids.extend(self.tokenizer.encode(&marked.replace(self.mark, ""), ControlTokens::Text)?);
        Ok(())
    }
}
