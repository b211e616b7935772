//! One answer for a script: as text, as one JSON object, or as JSON lines while it comes.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::Result;
use serde_json::{Value, json};

use super::note;
use crate::chat::Channel;
use crate::engine::FinishReason;
use crate::repl::live::Size;
use crate::repl::view::View;
use crate::repl::{self, Reasoning, Session, Turn, style};
use crate::text;

/// The answer alone on stdout; reasoning and the stats line on stderr, for a person who looks on.
pub fn text(mut session: Session, prompt: &str) -> Result<ExitCode> {
    repl::stop_on_ctrl_c(&session.options)?;
    let watched = std::io::stderr().is_terminal();
    let show_reasoning = watched && session.reasoning == Reasoning::Shown;
    let turn = match session.is_drawn() {
        true => draw(&mut session, prompt, show_reasoning)?,
        false => write(&mut session, prompt, show_reasoning)?,
    };
    if let Some(warning) = only_thoughts(&turn) {
        writeln!(std::io::stderr(), "warning: {warning}")?;
    }
    note(&style::stats(&turn.summary));
    for remark in &turn.notes {
        note(&text::printable(remark));
    }
    Ok(exit_code(&turn))
}

/// What to do where an answer ended before its first word.
fn only_thoughts(turn: &Turn) -> Option<String> {
    let summary = &turn.summary;
    if !turn.text.is_empty() || turn.reasoning.is_empty() || summary.finish_reason != FinishReason::Length {
        return None;
    }
    let full = summary.context_used >= summary.context;
    let flag = if full { "--context" } else { "--max-tokens" };
    Some(format!("all {} tokens went into thinking; raise {flag}", summary.completion_tokens))
}

/// For a terminal: as in the chat.
fn draw(session: &mut Session, prompt: &str, show_reasoning: bool) -> Result<Turn> {
    let mut out = std::io::stdout().lock();
    let mut view = View::new(Size::now(), false, false);
    let turn = session.turn(prompt, &mut |delta| {
        if delta.channel == Channel::Answer || (delta.channel == Channel::Reasoning && show_reasoning) {
            view.show(delta, Size::now(), &mut out)?;
        }
        Ok(())
    });
    view.finish(Size::now(), &mut out)?;
    turn
}

fn write(session: &mut Session, prompt: &str, show_reasoning: bool) -> Result<Turn> {
    let (mut out, mut err) = (std::io::stdout().lock(), std::io::stderr().lock());
    let (to_terminal, color) = (std::io::stdout().is_terminal(), style::stderr_color());
    let (mut thinking, mut ended_line) = (false, true);
    let turn = session.turn(prompt, &mut |delta| {
        match delta.channel {
            Channel::Reasoning if show_reasoning => {
                thinking = true;
                write!(err, "{}", style::dim(&text::printable(&delta.text), color))?;
                err.flush()?;
            }
            Channel::Answer => {
                if std::mem::take(&mut thinking) {
                    write!(err, "\n\n")?;
                }
                ended_line = delta.text.ends_with('\n');
                if to_terminal {
                    out.write_all(text::printable(&delta.text).as_bytes())?;
                } else {
                    out.write_all(delta.text.as_bytes())?;
                }
                out.flush()?;
            }
            _ => {}
        }
        Ok(())
    })?;
    if !ended_line {
        writeln!(out)?;
    }
    out.flush()?;
    Ok(turn)
}

/// One object when all is done.
pub fn json(mut session: Session, prompt: &str) -> Result<ExitCode> {
    repl::stop_on_ctrl_c(&session.options)?;
    let seed = session.options.sampling.seed;
    let turn = session.turn(prompt, &mut |_| Ok(()))?;
    let mut object = json!({ "text": turn.text, "reasoning": turn.reasoning, "tokens": turn.tokens });
    extend(&mut object, figures(&session, &turn)?);
    object["model"] = session.snapshot.name.clone().into();
    object["revision"] = session.snapshot.revision.clone().into();
    object["seed"] = seed.into();
    print(&object)?;
    Ok(exit_code(&turn))
}

/// An object for each piece as it comes, between one that opens and one that ends.
pub fn json_lines(mut session: Session, prompt: &str) -> Result<ExitCode> {
    repl::stop_on_ctrl_c(&session.options)?;
    let (name, seed) = (session.snapshot.name.clone(), session.options.sampling.seed);
    print(&json!({ "event": "start", "model": name, "revision": session.snapshot.revision, "seed": seed }))?;
    let turn = session.turn(prompt, &mut |delta| {
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
            print(&json!({ "event": "error", "message": text::error_message(&error) }))?;
            return Err(error);
        }
    };
    let mut end = json!({ "event": "end" });
    extend(&mut end, figures(&session, &turn)?);
    print(&end)?;
    Ok(exit_code(&turn))
}

/// How it ended, counts and times.
fn figures(session: &Session, turn: &Turn) -> Result<Value> {
    let summary = &turn.summary;
    let load_s = session.engine().info().load.total_s;
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

fn extend(object: &mut Value, with: Value) {
    if let (Value::Object(object), Value::Object(with)) = (object, with) {
        object.extend(with);
    }
}

fn print(object: &Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{object}")?;
    Ok(out.flush()?)
}

fn exit_code(turn: &Turn) -> ExitCode {
    match turn.summary.finish_reason {
        FinishReason::Interrupted => ExitCode::from(130),
        _ => ExitCode::SUCCESS,
    }
}
