//! What happens where a conversation outgrows the context.

use std::fmt;
use std::str::FromStr;

use anyhow::Result;

use crate::chat::{Message, Role};
use crate::engine::{FinishReason, Summary};

/// What `--overflow` says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overflow {
    /// Say so, and wait for the person to decide.
    #[default]
    Stop,
    /// The model sees the instructions and the latest messages only.
    DropOldest,
}

impl FromStr for Overflow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "stop" => Ok(Overflow::Stop),
            "drop-oldest" => Ok(Overflow::DropOldest),
            other => Err(format!("unknown overflow '{other}': stop or drop-oldest")),
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

/// The messages that fit, and how many of the oldest were left out; `already` of them were before. A quarter of the
/// context is kept for the answer. When messages must go, so many go that the next turns fit too: each time that the
/// start of a prompt changes, all of it is read anew.
pub fn drop_oldest(
    messages: &[Message],
    already: usize,
    context: usize,
    max_tokens: Option<usize>,
    count: &dyn Fn(&[Message]) -> Result<usize>,
) -> Result<(Vec<Message>, usize)> {
    let (_, rest) = parts(messages);
    let without = |left_out| seen(messages, left_out);
    let reserve = (context / 4).min(max_tokens.unwrap_or(usize::MAX));
    let mut left_out = already.min(rest.len().saturating_sub(1));
    let mut sent = without(left_out);
    if count(&sent)? + reserve <= context {
        return Ok((sent, left_out));
    }
    while let Some(next) = next_question(rest, left_out) {
        left_out = next;
        sent = without(left_out);
        if count(&sent)? + reserve <= context / 4 * 3 {
            break;
        }
    }
    Ok((sent, left_out))
}

/// What the model sees: the instructions, and what was not left out.
pub fn seen(messages: &[Message], left_out: usize) -> Vec<Message> {
    let (instructions, rest) = parts(messages);
    [instructions, &rest[left_out.min(rest.len())..]].concat()
}

fn parts(messages: &[Message]) -> (&[Message], &[Message]) {
    messages.split_at(messages.iter().take_while(|message| message.role != Role::User).count())
}

/// A conversation begins with a question.
fn next_question(messages: &[Message], after: usize) -> Option<usize> {
    let later = messages.iter().enumerate().skip(after + 1);
    later.filter(|(_, message)| message.role == Role::User).map(|(index, _)| index).next()
}

/// What to say when the end of the context is near.
pub fn warning(summary: &Summary, overflow: Overflow) -> Option<String> {
    let (used, context) = (summary.context_used, summary.context);
    let full = summary.finish_reason == FinishReason::Length && used >= context;
    if used * 10 < context * 8 && !full {
        return None;
    }
    let percent = used * 100 / context.max(1);
    let state = if full { "the context is full".to_string() } else { format!("{percent} % of the context is used") };
    Some(match overflow {
        Overflow::Stop => format!("{state}: /clear starts anew, /set overflow drop-oldest goes on without the oldest"),
        Overflow::DropOldest => format!("{state}: the oldest messages will make room"),
    })
}
