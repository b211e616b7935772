//! The chat at the terminal.

mod commands;
mod session;
pub mod style;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

use crate::chat::Channel;
use crate::engine::GenerateOptions;
use crate::error::Error;
pub use session::{Reasoning, Session, Turn};

/// Chats until the person leaves. `cancel` is the flag in the session's options that ends a generation.
pub fn run(mut session: Session, cancel: Arc<AtomicBool>) -> Result<ExitCode> {
    stop_on_ctrl_c(&session.options)?;
    let config = Config::builder().auto_add_history(false).max_history_size(1000)?.build();
    let mut editor = DefaultEditor::with_config(config).context("cannot use this terminal")?;
    let history = history_file();
    if let Some(path) = &history {
        // A missing or broken history is no reason not to chat.
        let _ = editor.load_history(path);
    }
    eprintln!(
        "{}",
        style::dim("/help shows the commands, Ctrl-C stops an answer, /exit leaves", style::stderr_colour())
    );

    let mut interrupted = false;
    loop {
        cancel.store(false, Ordering::Relaxed);
        let line = match read_message(&mut editor) {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) if interrupted => break,
            Err(ReadlineError::Interrupted) => {
                interrupted = true;
                eprintln!("{}", style::dim("Ctrl-C once more leaves", style::stderr_colour()));
                continue;
            }
            Err(ReadlineError::Eof) => break,
            Err(error) => return Err(error).context("cannot read from the terminal"),
        };
        interrupted = false;
        if line.trim().is_empty() {
            continue;
        }
        let _ = editor.add_history_entry(line.as_str());
        if let Some(path) = &history {
            let _ = editor.save_history(path);
        }
        match commands::run(&line, &mut session) {
            commands::Outcome::Leave => break,
            commands::Outcome::Done(text) => eprintln!("{text}"),
            commands::Outcome::NoCommand => {
                // An error (a prompt too long, a GPU out of memory) costs the turn, not the conversation.
                match show_turn(&mut session, &line) {
                    Ok(()) => interrupted = cancel.load(Ordering::Relaxed),
                    Err(error) if matches!(error.downcast_ref(), Some(Error::ContextFull { .. })) => {
                        let context = session.engine.context();
                        eprintln!("this would outgrow the context of {context} tokens: /clear starts anew");
                    }
                    Err(error) => eprintln!("error: {}", style::printable(&format!("{error:#}"))),
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// One message: a line, lines joined by a backslash at their end, or anything between two lines of `"""`.
fn read_message(editor: &mut DefaultEditor) -> rustyline::Result<String> {
    let first = editor.readline(">>> ")?;
    if let Some(rest) = first.trim_start().strip_prefix("\"\"\"") {
        let mut text = rest.to_string();
        while !text.trim_end().ends_with("\"\"\"") {
            text.push('\n');
            text.push_str(&editor.readline("... ")?);
        }
        return Ok(text.trim_end().trim_end_matches("\"\"\"").trim().to_string());
    }
    let mut text = first;
    while let Some(joined) = text.strip_suffix('\\') {
        text = format!("{joined}\n{}", editor.readline("... ")?);
    }
    Ok(text)
}

/// Streams one turn: thoughts dimmed, then the answer, then a line of figures.
fn show_turn(session: &mut Session, line: &str) -> Result<()> {
    let colour = std::io::stdout().is_terminal() && style::stderr_colour() == style::Colour::On;
    let colour = if colour { style::Colour::On } else { style::Colour::Off };
    let mut out = std::io::stdout().lock();
    // Without dimming, words have to tell thoughts from the answer.
    let (thinking, answering) = if colour == style::Colour::On { ("", "") } else { ("[thinking] ", "[answer] ") };
    let mut last = None;
    let show_reasoning = session.reasoning == Reasoning::Shown;
    let turn = session.turn(line, &mut |delta| {
        let text = style::printable(&delta.text);
        match delta.channel {
            Channel::Reasoning if !show_reasoning => return Ok(()),
            Channel::Answer => {
                if last == Some(Channel::Reasoning) {
                    write!(out, "\n\n{answering}")?;
                }
                // A model's leading line breaks would only open a gap after its thoughts.
                let text = if last == Some(Channel::Answer) { text.as_str() } else { text.trim_start_matches('\n') };
                write!(out, "{text}")?;
            }
            Channel::Reasoning | Channel::ToolCall => {
                if last.is_none() {
                    write!(out, "{thinking}")?;
                }
                write!(out, "{}", style::dim(&text, colour))?;
            }
        }
        last = Some(delta.channel);
        Ok(out.flush()?)
    })?;
    writeln!(out)?;
    for call in &turn.summary.tool_calls {
        writeln!(out, "{}", style::dim(&format!("[asks for the tool {}]", style::printable(&call.name)), colour))?;
    }
    writeln!(out, "{}\n", style::dim(&style::stats(&turn.summary), colour))?;
    Ok(out.flush()?)
}

/// Ctrl-C sets the flag that ends a generation; pressed again before that took effect, it ends the process.
pub fn stop_on_ctrl_c(options: &GenerateOptions) -> Result<()> {
    let Some(cancel) = options.cancel.clone() else { return Ok(()) };
    ctrlc::set_handler(move || {
        if cancel.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    })
    .context("cannot listen for Ctrl-C")
}

/// ~/.local/state/inferno/history, where the folder can be made.
fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let state = state.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/state")))?;
    let folder = state.join("inferno");
    std::fs::create_dir_all(&folder).ok()?;
    Some(folder.join("history"))
}
