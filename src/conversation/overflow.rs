//! Drops the oldest messages of conversations that no longer fit in the context.

use std::fmt;
use std::str::FromStr;

use anyhow::Result;

use crate::chat::{Message, Role};

/// What to do when a conversation no longer fits in the context: the value of `--overflow`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overflow {
    /// Send all messages. If they do not fit, the turn fails, and the user decides how to continue.
    #[default]
    Stop,
    /// If the conversation does not fit, send only the system prompt and the latest messages to the model.
    DropOldest,
}

/// The error of [`Overflow::DropOldest`] with a server that does not count tokens or report its context length.
/// Callers add how to select [`Overflow::Stop`]: with `/set` in the chat, with a flag on the command line.
#[derive(Debug, thiserror::Error)]
#[error("cannot drop the oldest messages: the server does not count tokens or does not report its context length")]
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

/// Drops the oldest messages after the system prompt if the conversation does not fit in `context` tokens.
/// Returns the messages to send, and the total number of dropped messages.
///
/// `dropped_before` is the number of messages dropped in earlier turns. They stay dropped.
/// A quarter of the context, or `max_tokens` if that is less, is reserved for the answer.
/// If messages must be dropped, drops whole turns until another quarter is free, so that the next turns fit too.
/// Otherwise, each of the next turns would also drop messages, and all remaining messages would need a new prefill.
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

/// Returns the index of the first question after `index`, or `None` if no question follows.
/// The messages after the system prompt must start with a question, because some chat templates require that.
fn next_question(dialog: &[Message], index: usize) -> Option<usize> {
    (index + 1..dialog.len()).find(|&later| dialog[later].role == Role::User)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates one message for each letter: `s` for system, `q` for a question, `a` for an answer, `t` for a tool.
    /// The text of each message is its index with ten digits, so that all messages are different.
    fn conversation(roles: &str) -> Vec<Message> {
        let role = |letter| match letter {
            's' => Role::System,
            'q' => Role::User,
            'a' => Role::Assistant,
            _ => Role::Tool,
        };
        roles.chars().enumerate().map(|(index, letter)| Message::new(role(letter), format!("{index:010}"))).collect()
    }

    /// Counts one token for each character, so each message of [`conversation`] has ten tokens.
    fn count_characters(messages: &[Message]) -> Result<usize> {
        Ok(messages.iter().map(|message| message.content.len()).sum())
    }

    #[test]
    fn drops_whole_turns_until_another_quarter_is_free() {
        for (what, roles, dropped_before, context, max_tokens, expected) in [
            ("fits with a reserve of a quarter", "sqaqaq", 0, 80, None, 0),
            ("exceeds the context with a reserve of a quarter", "sqaqaqaq", 0, 100, None, 4),
            ("a lower `max_tokens` is the reserve", "sqaqaqaq", 0, 100, Some(20), 0),
            ("a reserve one token too large", "sqaqaqaq", 0, 100, Some(21), 4),
            ("a higher `max_tokens` does not raise the reserve", "sqaqaq", 0, 80, Some(1000), 0),
            ("three quarters hold 60 tokens and a reserve of 15", "sqaqaqaqaq", 0, 100, Some(15), 4),
            ("three quarters do not hold 60 tokens and a reserve of 16", "sqaqaqaqaq", 0, 100, Some(16), 6),
            ("without a system prompt", "qaqaqaqaq", 0, 100, None, 4),
            ("dropped messages stay dropped, even if all messages fit", "sqaq", 2, 1000, None, 2),
            ("tokens of dropped messages do not count", "sqaqaqaq", 2, 100, None, 2),
            ("drops more messages than earlier turns did", "sqaqaqaqaq", 2, 100, None, 6),
            ("the last message stays, even if `dropped_before` counts all messages", "sqaq", 99, 1000, None, 2),
            ("the rest starts with a question, not with the answer after a tool message", "sqataqaq", 0, 100, None, 4),
            ("the last question stays, even if it does not fit", "sqaqaq", 0, 12, None, 4),
            ("a single question stays, even if it does not fit", "sq", 0, 12, None, 0),
            ("no messages", "", 0, 100, None, 0),
        ] {
            let messages = conversation(roles);
            let (visible, dropped) =
                drop_oldest(&messages, dropped_before, context, max_tokens, &count_characters).unwrap();
            assert_eq!(dropped, expected, "{what}");
            let instructions = roles.chars().take_while(|&letter| letter == 's').count();
            assert_eq!(visible, [&messages[..instructions], &messages[instructions + dropped..]].concat(), "{what}");
        }
    }

    #[test]
    fn an_error_of_the_counter_is_returned() {
        let fail = |_: &[Message]| Err(CannotDropOldest.into());
        let error = drop_oldest(&conversation("sq"), 0, 100, None, &fail).unwrap_err();
        assert!(error.is::<CannotDropOldest>(), "{error}");
    }
}
