//! The chat at the terminal.

mod commands;
mod display;
mod editor;
pub mod journal;
#[cfg(unix)]
mod keys;
pub mod live;
pub mod markdown;
mod overflow;
mod session;
mod settings;
mod state;
pub mod style;
#[cfg(unix)]
mod terminal;
mod thoughts;
mod typed;
pub mod view;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

use crate::engine::GenerateOptions;
use crate::error::Error;
use crate::text;
use commands::Outcome;
pub use display::Display;
use editor::{Line, LineEditor};
pub use overflow::Overflow;
pub use session::{Keep, Loaded, Models, Reasoning, Session, Turn, must_chat};
pub use settings::is_setting;
use typed::Typed;

/// Neither the model that was asked for nor the one before could be loaded: the chat cannot go on.
#[derive(Debug, thiserror::Error)]
#[error("no model is loaded any more")]
struct NoModel;

/// Chats until the person leaves. `cancel` is the flag in the session's options that ends a generation.
pub fn run(mut session: Session, cancel: Arc<AtomicBool>) -> Result<ExitCode> {
    stop_on_ctrl_c(&session.options)?;
    let models = session.models.clone();
    let mut editor = LineEditor::new(Box::new(move || (models.names)()))?;
    if !session.messages.is_empty() {
        remark(&format!("going on with {}", commands::summary(&session)));
    }
    remark("/help shows the commands, Ctrl-C stops an answer, /exit leaves");

    let mut interrupted = false;
    let mut typed = Typed::default();
    loop {
        if cancel.swap(false, Ordering::Relaxed) {
            // Whoever stopped the answer has not seen it: what was typed behind it is not sent unasked.
            typed.hold();
        }
        let line = match next_message(&mut editor, &mut typed)? {
            Line::Message(line) => line,
            Line::Interrupted if interrupted => break,
            Line::Interrupted => {
                interrupted = true;
                remark("Ctrl-C once more leaves");
                continue;
            }
            Line::Cleared => {
                interrupted = false;
                continue;
            }
            Line::End => break,
        };
        // What was pressed in $EDITOR was for that.
        cancel.store(false, Ordering::Relaxed);
        interrupted = false;
        if line.trim().is_empty() {
            continue;
        }
        // An error (a prompt too long, a GPU out of memory) costs the turn, not the conversation.
        let done = match commands::run(&line, &mut session) {
            Outcome::Leave => break,
            Outcome::Done(text) => {
                say(&text);
                Ok(())
            }
            Outcome::Switch(name) => switch(&mut session, &name),
            Outcome::Regenerate => show_turn(&mut session, None, &mut typed),
            Outcome::NoCommand => show_turn(&mut session, Some(&line), &mut typed),
        };
        match done {
            Ok(()) => {}
            Err(error) if error.is::<NoModel>() => return Err(error),
            Err(error) if matches!(error.downcast_ref(), Some(Error::ContextFull { .. })) => {
                let context = session.engine().context();
                match session.fits_alone(&line) {
                    true => say(&format!(
                        "this would outgrow the context of {context} tokens: /clear starts anew, /set overflow drop-oldest \
                         goes on without the oldest"
                    )),
                    false if session.attached.is_empty() => say(&format!(
                        "this message alone is longer than the context of {context} tokens; the flag --context makes that \
                         larger, as far as the model and the memory allow"
                    )),
                    false => say(&format!(
                        "this message and what is attached are longer than the context of {context} tokens: /file none \
                         drops what is attached"
                    )),
                }
            }
            Err(error) => say(&format!("error: {}", text::error_message(&error))),
        }
    }
    if let Keep::In(journal) = &session.keep {
        remark(&format!("inferno play --resume {} goes on with this", journal.name()));
    }
    Ok(ExitCode::SUCCESS)
}

/// The next message: typed ahead, or asked for.
fn next_message(editor: &mut LineEditor, typed: &mut Typed) -> Result<Line> {
    match typed.next_message() {
        Some(line) => {
            eprintln!(">>> {}", text::printable(&line));
            Ok(Line::Message(editor.take(&line)))
        }
        None => editor.read(&typed.take_draft()),
    }
}

/// Streams one turn: thoughts dimmed, then the answer, then a line of figures. Without a message the last one is answered
/// anew.
fn show_turn(session: &mut Session, line: Option<&str>, typed: &mut Typed) -> Result<()> {
    let mut display = Display::new(session, std::mem::take(typed));
    let turn = match line {
        Some(line) => session.turn(line, &mut |delta| display.show(delta)),
        None => session.regenerate(&mut |delta| display.show(delta)),
    };
    (session.reasoning, *typed) = display.end(turn.as_ref().ok())?;
    turn.map(|_| ())
}

fn switch(session: &mut Session, name: &str) -> Result<()> {
    session.switch(name)?;
    eprintln!("{} answers from here on", text::printable(&session.model_name()));
    Ok(())
}

/// A dim line for the person.
pub fn remark(text: &str) {
    eprintln!(
        "{}",
        style::dim(
            &text::wrapped(&text::printable(text), style::columns(&console::Term::stderr())),
            style::stderr_color()
        )
    );
}

/// An answer of inferno's own.
fn say(text: &str) {
    eprintln!("{}", text::wrapped(&text::printable(text), style::columns(&console::Term::stderr())));
}

/// Another program has the terminal, and Ctrl-C is for that.
static ELSEWHERE: AtomicBool = AtomicBool::new(false);

/// Ctrl-C sets the flag that ends a generation; pressed again before that took effect, it ends the process.
pub fn stop_on_ctrl_c(options: &GenerateOptions) -> Result<()> {
    let Some(cancel) = options.cancel.clone() else { return Ok(()) };
    ctrlc::set_handler(move || {
        if !ELSEWHERE.load(Ordering::Relaxed) && cancel.swap(true, Ordering::Relaxed) {
            #[cfg(unix)]
            terminal::restore();
            std::process::exit(130);
        }
    })
    .context("cannot listen for Ctrl-C")
}

/// To be called at the start, before there are threads: however a chat ends, the terminal is left as it was found.
pub fn guard_terminal() {
    #[cfg(unix)]
    terminal::guard();
}
