//! Prints a one-shot answer as text, as one JSON object, or as streamed JSON lines.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Result, anyhow};
use serde_json::{Value, json};

use super::note;
use crate::chat::Channel;
use crate::conversation::{CannotDropOldest, OnDelta, Overflow, ReasoningVisibility, Session, Turn};
use crate::engine::FinishReason;
use crate::terminal::interrupt::cancel_on_ctrl_c;
use crate::terminal::{self, Color, TurnView, WindowSize, dim, stderr_color, stdout_color};
use crate::text::{escaped_json, printable, without_controls};

/// Prints the answer to `prompt`. Renders Markdown if stdout is a terminal with colors, unless --plain or --raw is set.
///
/// If stderr is a terminal, also shows the statistics, the notes of the turn and, unless hidden, the reasoning.
/// The reasoning goes to stdout if Markdown is rendered, otherwise to stderr.
/// Prints a warning to stderr, even if stderr is not a terminal, if the reasoning left no tokens for the answer.
pub fn text(mut session: Session, prompt: &str) -> Result<ExitCode> {
    cancel_on_ctrl_c(session.cancel_flag())?;
    let shows_reasoning = std::io::stderr().is_terminal() && session.settings.reasoning == ReasoningVisibility::Shown;
    let uses_view = stdout_color() == Color::On && !session.settings.plain && !session.raw;
    let turn = if uses_view {
        draw(&mut session, prompt, shows_reasoning)?
    } else {
        write(&mut session, prompt, shows_reasoning)?
    };
    if let Some(warning) = missing_answer(&session, &turn) {
        terminal::write_stderr(&format!("warning: {warning}\n"));
    }
    note(&turn.statistics());
    for text in turn.notes.iter().chain(&context_warning(&session, &turn)) {
        note(&printable(text));
    }
    Ok(exit_code(&turn))
}

/// Answers `prompt` like [`Session::answer`]. Adds a hint about `--overflow stop` to a [`CannotDropOldest`] error.
fn answer(session: &mut Session, prompt: &str, on_delta: &mut OnDelta) -> Result<Turn> {
    session.answer(prompt, on_delta).map_err(|error| {
        if error.is::<CannotDropOldest>() { anyhow!("{error}\n  keep all messages: --overflow stop") } else { error }
    })
}

/// Returns a warning if the context is full or, in a saved conversation, if at least 80% of the context is used.
/// Otherwise returns `None`.
fn context_warning(session: &Session, turn: &Turn) -> Option<String> {
    let hint = match (session.saved_name(), session.settings.overflow) {
        (Some(_), Overflow::DropOldest) => "the oldest messages will be dropped",
        (Some(_), Overflow::Stop) => "--overflow drop-oldest continues without the oldest messages",
        _ if !turn.summary.is_context_full() => return None,
        _ if session.backend().engine().is_some() => "shorten the prompt, or raise --context",
        _ => "shorten the prompt",
    };
    Some(format!("{}: {hint}", turn.summary.context_warning()?))
}

/// Returns a warning if a turn reached a token limit during its reasoning, so that there is no answer.
/// Otherwise returns `None`.
fn missing_answer(session: &Session, turn: &Turn) -> Option<String> {
    let summary = &turn.summary;
    if !turn.text.is_empty() || turn.reasoning.is_empty() || summary.finish_reason != FinishReason::Length {
        return None;
    }
    let hint = match (summary.is_context_full(), session.backend().engine()) {
        (false, _) => "raise --max-tokens",
        (true, Some(_)) => "raise --context",
        (true, None) => "shorten the prompt",
    };
    let tokens = summary.completion_tokens.map_or_else(String::new, |count| format!("{count} "));
    Some(format!("the model used all {tokens}tokens for reasoning; {hint}"))
}

/// Renders the answer's Markdown on stdout, as in an interactive chat.
/// Also writes the reasoning to stdout if `shows_reasoning` is true.
fn draw(session: &mut Session, prompt: &str, shows_reasoning: bool) -> Result<Turn> {
    let mut out = std::io::stdout().lock();
    let mut view = TurnView::new(WindowSize::now());
    let turn = answer(session, prompt, &mut |delta| {
        if delta.channel == Channel::Answer || (delta.channel == Channel::Reasoning && shows_reasoning) {
            view.show(delta, WindowSize::now(), &mut out)?;
        }
        Ok(())
    });
    view.finish(WindowSize::now(), &mut out)?;
    turn
}

/// Writes the answer to stdout without rendering its Markdown.
/// Writes the reasoning to stderr if `shows_reasoning` is true.
fn write(session: &mut Session, prompt: &str, shows_reasoning: bool) -> Result<Turn> {
    let (mut out, mut err) = (std::io::stdout().lock(), std::io::stderr().lock());
    let (is_terminal, color) = (std::io::stdout().is_terminal(), stderr_color());
    let (mut is_reasoning, mut ends_line) = (false, true);
    let turn = answer(session, prompt, &mut |delta| {
        match delta.channel {
            Channel::Reasoning if shows_reasoning => {
                is_reasoning = true;
                write!(err, "{}", dim(&without_controls(&delta.text), color))?;
                err.flush()?;
            }
            Channel::Answer => {
                if std::mem::take(&mut is_reasoning) {
                    write!(err, "\n\n")?;
                }
                ends_line = delta.text.ends_with('\n');
                if is_terminal {
                    out.write_all(without_controls(&delta.text).as_bytes())?;
                } else {
                    out.write_all(delta.text.as_bytes())?;
                }
                out.flush()?;
            }
            Channel::Reasoning | Channel::ToolCall => {}
        }
        Ok(())
    })?;
    if !ends_line {
        writeln!(out)?;
    }
    out.flush()?;
    Ok(turn)
}

/// Prints the answer as one JSON object when the answer is complete.
pub fn json(mut session: Session, prompt: &str) -> Result<ExitCode> {
    cancel_on_ctrl_c(session.cancel_flag())?;
    let seed = seed(&session);
    let turn = answer(&mut session, prompt, &mut |_| Ok(()))?;
    let mut object = json!({ "text": turn.text, "reasoning": turn.reasoning, "tokens": turn.tokens });
    extend(&mut object, figures(&session, &turn)?);
    object["model"] = session.model().name().into();
    object["revision"] = session.model().revision().into();
    object["seed"] = seed.into();
    print(&object)?;
    Ok(exit_code(&turn))
}

/// Prints JSON lines: `start`, an object for each piece of text as it arrives, then `end` or `error`.
pub fn json_lines(mut session: Session, prompt: &str) -> Result<ExitCode> {
    cancel_on_ctrl_c(session.cancel_flag())?;
    let (model, seed) = (session.model().clone(), seed(&session));
    print(&json!({ "event": "start", "model": model.name(), "revision": model.revision(), "seed": seed }))?;
    let turn = answer(&mut session, prompt, &mut |delta| {
        let event = match delta.channel {
            Channel::Reasoning => "reasoning",
            Channel::Answer => "answer",
            Channel::ToolCall => "tool_call",
        };
        print(&json!({ "event": event, "text": delta.text }))
    });
    let turn = match turn {
        Ok(turn) => turn,
        Err(error) => {
            print(&json!({ "event": "error", "message": crate::text::error_message(&error) }))?;
            return Err(error);
        }
    };
    let mut end = json!({ "event": "end" });
    extend(&mut end, figures(&session, &turn)?);
    print(&end)?;
    Ok(exit_code(&turn))
}

/// Returns the seed of the first turn, or `None` if the server chooses the seed.
fn seed(session: &Session) -> Option<u64> {
    let is_known = session.backend().defaults().is_some() || session.all_settings().contains_key("seed");
    is_known.then_some(session.settings.sampling.seed)
}

/// Returns the finish reason, token counts, timings and tool calls of a turn as JSON.
fn figures(session: &Session, turn: &Turn) -> Result<Value> {
    let summary = &turn.summary;
    let load_s = session.backend().engine().map(|engine| engine.info().load.total_s);
    let mut object = json!({
        "finish_reason": summary.finish_reason,
        "usage": { "prompt_tokens": summary.prompt_tokens, "completion_tokens": summary.completion_tokens },
        "stats": { "ttft_s": summary.ttft_s, "tok_per_s": summary.tok_per_s, "load_s": load_s },
    });
    if !summary.tool_calls.is_empty() {
        object["tool_calls"] = serde_json::to_value(&summary.tool_calls)?;
    }
    Ok(object)
}

/// Adds all entries of the JSON object `fields` to the JSON object `object`.
fn extend(object: &mut Value, fields: Value) {
    if let (Value::Object(object), Value::Object(fields)) = (object, fields) {
        object.extend(fields);
    }
}

fn print(object: &Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", escaped_json(&object.to_string()))?;
    Ok(out.flush()?)
}

fn exit_code(turn: &Turn) -> ExitCode {
    match turn.summary.finish_reason {
        FinishReason::Canceled => ExitCode::from(130),
        _ => ExitCode::SUCCESS,
    }
}
