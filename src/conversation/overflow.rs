//! Handles conversations that outgrow the context.

use std::fmt;
use std::str::FromStr;

use anyhow::Result;

use crate::chat::{Message, Role};

/// What to do when a conversation no longer fits in the context: the value of `--overflow`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overflow {
    /// Report that the context is full and let the user decide.
    #[default]
    Stop,
    /// Send only the system prompt and the latest messages to the model.
    DropOldest,
}

/// The error of [`Overflow::DropOldest`] with a server that does not count tokens, or does not report its context.
/// The caller says how to select [`Overflow::Stop`].
#[derive(Debug, thiserror::Error)]
#[error("cannot drop the oldest messages: the server must count tokens and report its context")]
pub struct CannotDropOldest;

impl FromStr for Overflow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "stop" => Ok(Overflow::Stop),
            "drop-oldest" => Ok(Overflow::DropOldest),
            other => Err(format!("unknown overflow mode '{other}': expected stop or drop-oldest")),
        }
    }
}

impl fmt::Display for Overflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Overflow::Stop => "stop",
            Overflow::DropOldest => "drop-oldest",
        })
    }
}

/// Drops the oldest messages of the dialog if the conversation does not fit in `context` tokens.
/// Returns the messages to send, and the total number of dropped messages.
///
/// `dropped_before` counts the messages dropped in earlier turns.
/// A quarter of the context, or `max_tokens` if that is less, is reserved for the answer.
/// If messages must be dropped, drops messages until another quarter is free, so that the next turns fit too.
/// Otherwise, every turn would drop messages, and all messages after the system prompt would need a new prefill.
/// The last question is never dropped, even if it does not fit in the context.
pub fn drop_oldest(
    messages: &[Message],
    dropped_before: usize,
    context: usize,
    max_tokens: Option<usize>,
    count_tokens: &dyn Fn(&[Message]) -> Result<usize>,
) -> Result<(Vec<Message>, usize)> {
    let (_, dialog) = split_instructions(messages);
    let reserve = (context / 4).min(max_tokens.unwrap_or(usize::MAX));
    let mut dropped = dropped_before.min(dialog.len().saturating_sub(1));
    let mut visible = visible_messages(messages, dropped);
    if count_tokens(&visible)? + reserve <= context {
        return Ok((visible, dropped));
    }
    while let Some(next) = next_question(dialog, dropped) {
        dropped = next;
        visible = visible_messages(messages, dropped);
        if count_tokens(&visible)? + reserve <= context / 4 * 3 {
            break;
        }
    }
    Ok((visible, dropped))
}

/// Returns the messages to send: the system prompt, then the dialog without its `dropped` oldest messages.
pub fn visible_messages(messages: &[Message], dropped: usize) -> Vec<Message> {
    let (instructions, dialog) = split_instructions(messages);
    [instructions, &dialog[dropped.min(dialog.len())..]].concat()
}

/// Splits the messages into the system prompt and the dialog, which starts with the first question.
fn split_instructions(messages: &[Message]) -> (&[Message], &[Message]) {
    messages.split_at(messages.iter().take_while(|message| message.role != Role::User).count())
}

/// Returns the index of the first question after `index`. The dialog sent to the model must start with a question.
fn next_question(dialog: &[Message], index: usize) -> Option<usize> {
    (index + 1..dialog.len()).find(|&later| dialog[later].role == Role::User)
}
