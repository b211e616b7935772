//! The interactive chat in the terminal.
//!
//! - `editor`, `keys`, `multiline`, `type_ahead`: the user's input, at the prompt and while an answer streams
//! - `commands`: the slash commands, such as `/set`
//! - `display`: the display of an answer and its statistics

mod commands;
mod display;
mod editor;
#[cfg(unix)]
mod keys;
mod multiline;
mod type_ahead;

use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::Result;

use crate::conversation::{CannotDropOldest, NoModelLoaded, Overflow, Session, TurnSummary};
use crate::error::Error;
use crate::terminal;
use crate::text::{counted, without_controls};
use commands::CommandOutcome;
use display::TurnDisplay;
use editor::{Input, LineEditor};
use type_ahead::TypeAhead;

/// Runs the chat until the user leaves. Fails if the terminal cannot be used, or if `/model` leaves no model loaded.
pub fn run(mut session: Session) -> Result<ExitCode> {
    let cancel = session.cancel_flag();
    terminal::interrupt::cancel_on_ctrl_c(cancel.clone())?;
    let models = session.models().clone();
    let mut editor = LineEditor::new(Box::new(move || models.names()))?;
    if !session.messages().is_empty() {
        terminal::print_dim(&format!("continuing {}", commands::summary(&session)));
    }
    terminal::print_dim("/help lists the commands, Ctrl-C stops an answer, /exit leaves");
    terminal::print("");

    let mut was_interrupted = false;
    let mut type_ahead = TypeAhead::default();
    loop {
        if cancel.swap(false, Ordering::Relaxed) {
            // After Ctrl-C, let the user review the messages typed ahead before they are sent.
            type_ahead.hold();
        }
        let input = match next_input(&mut editor, &mut type_ahead)? {
            Input::Message(input) => input,
            Input::Interrupted if was_interrupted => break,
            Input::Interrupted => {
                was_interrupted = true;
                terminal::print_dim("press Ctrl-C again to leave");
                continue;
            }
            Input::Cleared => {
                was_interrupted = false;
                continue;
            }
            Input::End => break,
        };
        // Clear a Ctrl-C that arrived since the check above. Otherwise, the next answer would stop at once.
        cancel.store(false, Ordering::Relaxed);
        was_interrupted = false;
        if input.trim().is_empty() {
            continue;
        }
        let outcome = commands::run(&input, &mut session);
        let is_new_question = matches!(outcome, CommandOutcome::NotACommand);
        let result = match outcome {
            CommandOutcome::Leave => break,
            CommandOutcome::Done(text) => {
                terminal::print(&text);
                Ok(())
            }
            CommandOutcome::SwitchModel(name) => switch_model(&mut session, &name),
            CommandOutcome::Regenerate => show_turn(&mut session, None, &mut type_ahead),
            CommandOutcome::NotACommand => show_turn(&mut session, Some(&input), &mut type_ahead),
        };
        // Without a loaded model, the chat ends. After other errors, such as a lack of GPU memory, it continues.
        if let Err(error) = result {
            if error.is::<NoModelLoaded>() {
                return Err(error);
            }
            let question = if is_new_question { Some(input.as_str()) } else { session.question() };
            terminal::print(&turn_error(&error, &session, question.unwrap_or_default()));
        }
    }
    if let Some(name) = session.saved_name() {
        terminal::print_dim(&format!("to continue this conversation: inferno play --resume {name}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a message about `error` and, for some errors, what to do about it.
/// `question` is the question that was not answered, if the error occurred in a turn.
fn turn_error(error: &anyhow::Error, session: &Session, question: &str) -> String {
    if error.is::<CannotDropOldest>() {
        return format!("error: {error}\n  keep all messages: /set overflow stop");
    }
    match error.downcast_ref() {
        Some(Error::ContextFull { .. } | Error::PromptTooLong { .. }) => context_full(session, question),
        Some(Error::ServerContextFull { message }) => format!("error: cannot answer: {message}\n  /clear starts over"),
        _ => format!("error: {}", crate::text::error_message(error)),
    }
}

/// Returns a text that explains why `message` does not fit in the context, and what to do about it.
fn context_full(session: &Session, message: &str) -> String {
    let context = counted(session.backend().context().unwrap_or_default(), "token");
    if session.fits_alone(message) {
        format!(
            "this message would exceed the context of {context}: /clear starts over; /set overflow drop-oldest \
             continues without the oldest messages"
        )
    } else if session.attached().is_empty() {
        format!(
            "this message alone exceeds the context of {context}: shorten it, or start with a larger --context, \
             if the model allows one"
        )
    } else {
        format!("this message with its files exceeds the context of {context}: /file none detaches them")
    }
}

/// If at least 80% of the context is used, returns a warning that says what the user can do, or what will happen.
/// Otherwise returns `None`.
fn context_warning(summary: &TurnSummary, overflow: Overflow) -> Option<String> {
    let hint = match overflow {
        Overflow::Stop => "/clear starts over; /set overflow drop-oldest continues without the oldest messages",
        Overflow::DropOldest => "the oldest messages will be dropped",
    };
    Some(format!("{}: {hint}", summary.context_warning()?))
}

/// Returns the next message that was typed ahead. If there is none, prompts for one.
fn next_input(editor: &mut LineEditor, type_ahead: &mut TypeAhead) -> Result<Input> {
    match type_ahead.next_message() {
        Some(line) => {
            terminal::write_stderr(&format!(">>> {}\n", without_controls(&line)));
            Ok(Input::Message(editor.accept(&line)))
        }
        None => editor.read(&type_ahead.take_draft()),
    }
}

/// Streams one turn: reasoning, answer and statistics. If `message` is `None`, answers the last question again.
fn show_turn(session: &mut Session, message: Option<&str>, type_ahead: &mut TypeAhead) -> Result<()> {
    let mut display = TurnDisplay::new(session, std::mem::take(type_ahead));
    let mut turn = match message {
        Some(message) => session.answer(message, &mut |delta| display.show(delta)),
        None => session.regenerate(&mut |delta| display.show(delta)),
    };
    if let Ok(turn) = &mut turn {
        turn.notes.extend(context_warning(&turn.summary, session.settings.overflow));
    }
    (session.settings.reasoning, *type_ahead) = display.finish(turn.as_ref().ok())?;
    turn.map(|_| ())
}

fn switch_model(session: &mut Session, name: &str) -> Result<()> {
    for problem in session.switch_model(name)? {
        terminal::print(&problem);
    }
    terminal::print(&format!("switched to {}", session.model_name()));
    Ok(())
}
