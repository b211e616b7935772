//! What a person types while an answer comes: messages that wait for their turn, and the beginning of the next one.

use std::collections::VecDeque;

use unicode_segmentation::UnicodeSegmentation;

use super::editor::goes_on;

/// Keys that mean something at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Ctrl-O.
    Fold,
    /// Ctrl-Z.
    Suspend,
}

/// Takes bytes as a terminal sends them.
#[derive(Default)]
pub struct Typed {
    messages: VecDeque<String>,
    draft: String,
    /// Bytes of a character that is not whole yet.
    partial: Vec<u8>,
    sequence: Sequence,
    /// Between the marks that a terminal puts around what is pasted: there, line breaks are text.
    pasting: bool,
    after_return: bool,
}

/// Keys without a character, such as the arrows, come as sequences after an escape.
#[derive(Default, PartialEq)]
enum Sequence {
    #[default]
    None,
    Escape,
    /// What stands after `ESC [`.
    Csi(Vec<u8>),
    /// After `ESC O`, one byte.
    Ss3,
}

/// Longer sequences are none.
const LONGEST_SEQUENCE: usize = 32;

impl Typed {
    /// Takes a byte.
    pub fn press(&mut self, byte: u8) -> Option<Key> {
        match std::mem::take(&mut self.sequence) {
            Sequence::None => return self.plain(byte),
            Sequence::Escape => {
                self.sequence = match byte {
                    b'[' => Sequence::Csi(Vec::new()),
                    b'O' => Sequence::Ss3,
                    0x1b => Sequence::Escape,
                    // Alt with a letter: a key that means nothing here.
                    _ => Sequence::None,
                }
            }
            Sequence::Csi(mut sequence) => match byte {
                0x40..=0x7e => match sequence.as_slice() {
                    b"200" => self.pasting = true,
                    b"201" => self.pasting = false,
                    _ => {}
                },
                _ if sequence.len() < LONGEST_SEQUENCE => {
                    sequence.push(byte);
                    self.sequence = Sequence::Csi(sequence);
                }
                _ => {}
            },
            Sequence::Ss3 => {}
        }
        None
    }

    fn plain(&mut self, byte: u8) -> Option<Key> {
        let after_return = std::mem::replace(&mut self.after_return, byte == b'\r');
        if byte < 0x20 && !self.partial.is_empty() {
            // It will not be ended.
            self.partial.clear();
            self.draft.push(char::REPLACEMENT_CHARACTER);
        }
        match byte {
            0x1b => self.sequence = Sequence::Escape,
            b'\n' if after_return => {}
            b'\r' | b'\n' => self.new_line(),
            b'\t' if self.pasting => self.draft.push('\t'),
            0x0f if !self.pasting => return Some(Key::Fold),
            0x1a if !self.pasting => return Some(Key::Suspend),
            // Backspace.
            0x7f | 0x08 if !self.pasting => {
                let last = self.draft.grapheme_indices(true).next_back();
                let length = last.map_or(0, |(index, _)| index);
                self.draft.truncate(length);
            }
            // Ctrl-U.
            0x15 if !self.pasting => self.draft.clear(),
            // Ctrl-W.
            0x17 if !self.pasting => {
                let rest = self.draft.trim_end_matches(' ');
                let length = rest.rfind([' ', '\n']).map_or(0, |space| space + 1);
                self.draft.truncate(length);
            }
            0..0x20 | 0x7f => {}
            byte => {
                self.partial.push(byte);
                match std::str::from_utf8(&self.partial) {
                    Ok(text) => self.draft.push_str(text),
                    Err(error) if error.error_len().is_none() => return None,
                    Err(_) => {
                        self.draft.push(char::REPLACEMENT_CHARACTER);
                        // The byte that shows it may be a character by itself.
                        if self.partial.len() > 1 {
                            self.partial.clear();
                            return self.plain(byte);
                        }
                    }
                }
                self.partial.clear();
            }
        }
        None
    }

    fn new_line(&mut self) {
        if self.pasting || goes_on(&self.draft) {
            self.draft.push('\n');
        } else if !self.draft.is_empty() {
            self.messages.push_back(std::mem::take(&mut self.draft));
        }
    }

    /// Nothing came for a moment: an escape alone was the key of that name.
    pub fn pause(&mut self) {
        if self.sequence == Sequence::Escape {
            self.sequence = Sequence::None;
        }
    }

    /// Whether the end of something is still to come.
    pub fn is_open(&self) -> bool {
        self.pasting || self.sequence != Sequence::None || !self.partial.is_empty()
    }

    /// What was begun will not be ended.
    pub fn close(&mut self) {
        self.pasting = false;
        self.sequence = Sequence::None;
        self.partial.clear();
    }

    /// The message that has waited longest.
    pub fn next_message(&mut self) -> Option<String> {
        self.messages.pop_front()
    }

    /// The beginning of the next one.
    pub fn take_draft(&mut self) -> String {
        std::mem::take(&mut self.draft)
    }

    /// Nothing of it is to be sent unseen: all becomes the beginning of the next message.
    pub fn hold(&mut self) {
        let draft = self.take_draft();
        let lines: Vec<String> = self.messages.drain(..).chain((!draft.is_empty()).then_some(draft)).collect();
        self.draft = lines.join("\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages, and the draft.
    fn typed(bytes: &str) -> (Vec<String>, String) {
        let mut typed = Typed::default();
        bytes.bytes().for_each(|byte| {
            typed.press(byte);
        });
        let messages = std::iter::from_fn(|| typed.next_message()).collect();
        (messages, typed.take_draft())
    }

    fn all(messages: &[&str], draft: &str) -> (Vec<String>, String) {
        (messages.iter().map(|message| message.to_string()).collect(), draft.to_string())
    }

    #[test]
    fn lines_wait_in_their_order_and_what_was_pasted_is_one() {
        assert_eq!(typed("a\rb\nc\r\nd"), all(&["a", "b", "c"], "d"));
        assert_eq!(typed("\x1b[200~one\r/exit\ttwo\r\x1b[201~"), all(&[], "one\n/exit\ttwo\n"));
        assert_eq!(typed("\x1b[200~one\ntwo\x1b[201~!\r"), all(&["one\ntwo!"], ""));
        assert_eq!(typed("\"\"\"a\rb\"\"\"\rc\\\rd\r"), all(&["\"\"\"a\nb\"\"\"", "c\\\nd"], ""));
    }

    #[test]
    fn keys_without_a_character_leave_none() {
        assert_eq!(typed("a\x1b[A\x1bOB\x1b[1;5C\x1b[3~\x1bxb"), all(&[], "ab"));
        assert_eq!(typed("nä\u{65}\u{301}\x7f\x7fo\x15new\x08"), all(&[], "ne"));
        assert_eq!(typed("\x7f\x7f\r\r"), all(&[], ""));
        let mut escape = Typed::default();
        assert_eq!(escape.press(0x0f), Some(Key::Fold));
        assert_eq!(escape.press(0x1a), Some(Key::Suspend));
        escape.press(0x1b);
        escape.pause();
        escape.press(b'x');
        assert_eq!(escape.take_draft(), "x");
        escape.press(0xe9);
        assert!(escape.is_open());
        escape.press(b'x');
        assert_eq!(escape.take_draft(), "\u{fffd}x");
        for byte in b"caf\xe9\rabc" {
            escape.press(*byte);
        }
        assert_eq!((escape.next_message().as_deref(), escape.take_draft().as_str()), (Some("caf\u{fffd}"), "abc"));
        assert_eq!(typed("delete all files\x17\x17keep"), all(&[], "delete keep"));
    }

    #[test]
    fn what_is_held_is_sent_by_nobody() {
        let mut typed = Typed::default();
        b"/clear\rmore\rrest".iter().for_each(|byte| {
            typed.press(*byte);
        });
        typed.hold();
        assert_eq!((typed.next_message(), typed.take_draft().as_str()), (None, "/clear\nmore\nrest"));
    }
}
