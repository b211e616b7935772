//! Input that the user types while an answer streams: complete messages, and the draft of the next one.
//!
//! The `vte` crate is not suitable, because it parses the output of programs, not keyboard input.
//! It would treat Alt-] and Alt-Shift-P as the start of a control string, and would swallow the keys that follow.
//! It also cannot report that an escape sequence is incomplete.

use std::collections::VecDeque;

use unicode_segmentation::UnicodeSegmentation;

use super::multiline;

/// A key that acts at once, instead of editing the draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Ctrl-O shows or hides the reasoning.
    ToggleReasoning,
    /// Ctrl-Z suspends the program.
    Suspend,
}

/// Messages and a draft, parsed from the bytes that a terminal sends.
#[derive(Default)]
pub struct TypeAhead {
    messages: VecDeque<String>,
    draft: String,
    /// The first bytes of an incomplete UTF-8 character.
    partial: Vec<u8>,
    escape: EscapeState,
    /// Whether a paste is in progress. Line breaks in pasted text do not end a message.
    is_pasting: bool,
    follows_return: bool,
}

/// How much of an escape sequence has arrived.
/// Keys such as the arrow keys send escape sequences. Terminals also mark the start and the end of a paste with them.
#[derive(Default, PartialEq)]
enum EscapeState {
    #[default]
    None,
    Escape,
    /// A CSI sequence: the bytes after `ESC [`.
    Csi(Vec<u8>),
    /// An SS3 sequence, which starts with `ESC O`. One more byte completes the sequence.
    Ss3,
}

/// The maximum number of bytes after `ESC [` in an incomplete CSI sequence. No key sends a longer sequence.
const MAX_SEQUENCE_BYTES: usize = 32;

impl TypeAhead {
    /// Adds a byte of input.
    /// Returns a [`Key`] if the byte is Ctrl-O or Ctrl-Z, outside a paste and outside an escape sequence.
    pub fn push_byte(&mut self, byte: u8) -> Option<Key> {
        match std::mem::take(&mut self.escape) {
            EscapeState::None => return self.push_text_byte(byte),
            EscapeState::Escape => {
                self.escape = match byte {
                    b'[' => EscapeState::Csi(Vec::new()),
                    b'O' => EscapeState::Ss3,
                    0x1b => EscapeState::Escape,
                    // Alt with a key: ignore the escape byte and this byte.
                    _ => EscapeState::None,
                }
            }
            EscapeState::Csi(mut sequence) => match byte {
                0x40..=0x7e => match sequence.as_slice() {
                    b"200" => self.is_pasting = true,
                    b"201" => self.is_pasting = false,
                    _ => {}
                },
                _ if sequence.len() < MAX_SEQUENCE_BYTES => {
                    sequence.push(byte);
                    self.escape = EscapeState::Csi(sequence);
                }
                _ => {}
            },
            EscapeState::Ss3 => {}
        }
        None
    }

    fn push_text_byte(&mut self, byte: u8) -> Option<Key> {
        let follows_return = std::mem::replace(&mut self.follows_return, byte == b'\r');
        if matches!(byte, 0..0x20 | 0x7f) && !self.partial.is_empty() {
            // A control character ends an incomplete UTF-8 character.
            self.partial.clear();
            self.draft.push(char::REPLACEMENT_CHARACTER);
        }
        match byte {
            0x1b => self.escape = EscapeState::Escape,
            b'\n' if follows_return => {}
            b'\r' | b'\n' => self.push_line_break(),
            b'\t' if self.is_pasting => self.draft.push('\t'),
            // Ctrl-O.
            0x0f if !self.is_pasting => return Some(Key::ToggleReasoning),
            // Ctrl-Z.
            0x1a if !self.is_pasting => return Some(Key::Suspend),
            // Backspace deletes the last character.
            0x7f | 0x08 if !self.is_pasting => {
                let last = self.draft.grapheme_indices(true).next_back();
                let length = last.map_or(0, |(index, _)| index);
                self.draft.truncate(length);
            }
            // Ctrl-U deletes the draft.
            0x15 if !self.is_pasting => self.draft.clear(),
            // Ctrl-W deletes the last word.
            0x17 if !self.is_pasting => {
                let rest = self.draft.trim_end_matches(' ');
                let length = rest.rfind([' ', '\n']).map_or(0, |space| space + 1);
                self.draft.truncate(length);
            }
            0..0x20 | 0x7f => {}
            byte => return self.push_character_byte(byte),
        }
        None
    }

    /// Adds a byte of a UTF-8 character. A complete character goes to the draft, an invalid one becomes U+FFFD.
    fn push_character_byte(&mut self, byte: u8) -> Option<Key> {
        self.partial.push(byte);
        match std::str::from_utf8(&self.partial) {
            Ok(text) => self.draft.push_str(text),
            // The UTF-8 character is incomplete, so wait for its next byte.
            Err(error) if error.error_len().is_none() => return None,
            Err(_) => {
                self.draft.push(char::REPLACEMENT_CHARACTER);
                // The byte that makes a UTF-8 character invalid may start another character.
                if self.partial.len() > 1 {
                    self.partial.clear();
                    return self.push_text_byte(byte);
                }
            }
        }
        self.partial.clear();
        None
    }

    fn push_line_break(&mut self) {
        if self.is_pasting || multiline::is_incomplete(&self.draft) {
            self.draft.push('\n');
        } else if !self.draft.is_empty() {
            self.messages.push_back(std::mem::take(&mut self.draft));
        }
    }

    /// Records a pause in the input. An escape byte before a pause is the Esc key, not the start of a sequence.
    pub fn pause(&mut self) {
        if self.escape == EscapeState::Escape {
            self.escape = EscapeState::None;
        }
    }

    /// Returns whether a paste, an escape sequence or a UTF-8 character is incomplete.
    pub fn is_incomplete(&self) -> bool {
        self.is_pasting || self.escape != EscapeState::None || !self.partial.is_empty()
    }

    /// Ends an incomplete paste. Drops an incomplete escape sequence or UTF-8 character.
    pub fn abandon_incomplete(&mut self) {
        self.is_pasting = false;
        self.escape = EscapeState::None;
        self.partial.clear();
    }

    /// Removes and returns the oldest queued message. Returns `None` if no message is queued.
    pub fn next_message(&mut self) -> Option<String> {
        self.messages.pop_front()
    }

    /// Removes and returns the draft of the next message.
    pub fn take_draft(&mut self) -> String {
        std::mem::take(&mut self.draft)
    }

    /// Moves all queued messages to the start of the draft, so that the user can review them before sending them.
    pub fn hold(&mut self) {
        let draft = self.take_draft();
        let lines: Vec<String> = self.messages.drain(..).chain((!draft.is_empty()).then_some(draft)).collect();
        self.draft = lines.join("\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the messages and the draft that result from typing `bytes`.
    fn typed(bytes: &str) -> (Vec<String>, String) {
        let mut type_ahead = TypeAhead::default();
        push_all(&mut type_ahead, bytes.as_bytes());
        let messages = std::iter::from_fn(|| type_ahead.next_message()).collect();
        (messages, type_ahead.take_draft())
    }

    fn push_all(type_ahead: &mut TypeAhead, bytes: &[u8]) {
        for byte in bytes {
            type_ahead.push_byte(*byte);
        }
    }

    fn expected(messages: &[&str], draft: &str) -> (Vec<String>, String) {
        (messages.iter().map(|message| message.to_string()).collect(), draft.to_string())
    }

    #[test]
    fn typed_lines_wait_in_order_and_a_paste_is_one_message() {
        assert_eq!(typed("a\rb\nc\r\nd"), expected(&["a", "b", "c"], "d"));
        assert_eq!(typed("\x1b[200~one\r/exit\ttwo\r\x1b[201~"), expected(&[], "one\n/exit\ttwo\n"));
        assert_eq!(typed("\x1b[200~one\ntwo\x1b[201~!\r"), expected(&["one\ntwo!"], ""));
        assert_eq!(typed("\"\"\"a\rb\"\"\"\rc\\\rd\r"), expected(&["\"\"\"a\nb\"\"\"", "c\\\nd"], ""));
    }

    #[test]
    fn keys_without_a_character_add_no_text() {
        assert_eq!(typed("a\x1b[A\x1bOB\x1b[1;5C\x1b[3~\x1bxb"), expected(&[], "ab"));
        assert_eq!(typed("a\x1b]b\x1bPc"), expected(&[], "abc"));
        let mut type_ahead = TypeAhead::default();
        assert_eq!(type_ahead.push_byte(0x0f), Some(Key::ToggleReasoning));
        assert_eq!(type_ahead.push_byte(0x1a), Some(Key::Suspend));
        type_ahead.push_byte(0x1b);
        type_ahead.pause();
        type_ahead.push_byte(b'x');
        assert_eq!(type_ahead.take_draft(), "x");
    }

    #[test]
    fn editing_keys_delete_characters_words_and_lines() {
        assert_eq!(typed("nä\u{65}\u{301}\x7f\x7fo\x15new\x08"), expected(&[], "ne"));
        assert_eq!(typed("\x7f\x7f\r\r"), expected(&[], ""));
        assert_eq!(typed("delete all files\x17\x17keep"), expected(&[], "delete keep"));
    }

    #[test]
    fn invalid_utf_8_becomes_a_replacement_character() {
        let mut type_ahead = TypeAhead::default();
        push_all(&mut type_ahead, b"a\xc3\x7fx");
        assert_eq!(type_ahead.take_draft(), "ax", "Backspace deletes the replacement character");
        type_ahead.push_byte(0xe9);
        assert!(type_ahead.is_incomplete());
        type_ahead.push_byte(b'x');
        assert_eq!(type_ahead.take_draft(), "\u{fffd}x");
        push_all(&mut type_ahead, b"caf\xe9\rabc");
        assert_eq!(type_ahead.next_message().as_deref(), Some("caf\u{fffd}"));
        assert_eq!(type_ahead.take_draft(), "abc");
    }

    #[test]
    fn held_messages_become_the_draft() {
        let mut type_ahead = TypeAhead::default();
        push_all(&mut type_ahead, b"/clear\rmore\rrest");
        type_ahead.hold();
        assert_eq!((type_ahead.next_message(), type_ahead.take_draft().as_str()), (None, "/clear\nmore\nrest"));
    }
}
