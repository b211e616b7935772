//! Shows a chat turn on stdout: as formatted Markdown on a color terminal, otherwise as plain text.
//! With the setting `plain` or the flag `--raw`, always shows plain text.

use std::io::Write;

use anyhow::Result;

#[cfg(unix)]
use super::keys::KeyListener;
use super::type_ahead::TypeAhead;
use crate::chat::{Channel, Delta};
use crate::conversation::{ReasoningVisibility, Session, Turn};
use crate::terminal::{Color, TurnView, WindowSize, dim, stdout_color, stdout_columns};
use crate::text::{printable, without_controls, wrapped};

/// Displays one chat turn. A key listener, if any, reads keys while the answer streams.
pub struct TurnDisplay {
    output: TurnOutput,
    /// The visibility of reasoning when the turn started.
    reasoning: ReasoningVisibility,
    #[cfg(unix)]
    keys: Option<KeyListener>,
    /// The number of suspensions (Ctrl-Z) after which the view was restarted.
    #[cfg(unix)]
    suspensions: usize,
    /// The input typed before the turn. Empty while a key listener runs, because the listener owns that input.
    type_ahead: TypeAhead,
}

enum TurnOutput {
    View(Box<TurnView>),
    Plain(PlainText),
}

/// Prints text as it arrives, without Markdown formatting.
/// With color, reasoning and tool calls are dimmed. Without color, labels mark the reasoning and the answer after it.
struct PlainText {
    hides_reasoning: bool,
    color: Color,
    last: Option<Channel>,
}

impl TurnDisplay {
    /// Prepares the display for a turn. If a key listener can run, the listener appends typed input to `type_ahead`.
    pub fn new(session: &Session, type_ahead: TypeAhead) -> Self {
        let settings = &session.settings;
        let hides_reasoning = settings.reasoning == ReasoningVisibility::Hidden;
        let color = stdout_color();
        let uses_view = color == Color::On && !settings.plain && !session.raw;
        #[cfg(unix)]
        let (keys, type_ahead) = match if uses_view { KeyListener::start(type_ahead) } else { Err(type_ahead) } {
            Ok(keys) => (Some(keys), TypeAhead::default()),
            Err(type_ahead) => (None, type_ahead),
        };
        #[cfg(unix)]
        let has_keys = keys.is_some();
        #[cfg(not(unix))]
        let has_keys = false;
        let output = if uses_view {
            TurnOutput::View(Box::new(
                TurnView::new(WindowSize::now()).with_folded_reasoning(hides_reasoning).with_keys(has_keys),
            ))
        } else {
            TurnOutput::Plain(PlainText { hides_reasoning, color, last: None })
        };
        Self {
            output,
            reasoning: settings.reasoning,
            #[cfg(unix)]
            keys,
            #[cfg(unix)]
            suspensions: 0,
            type_ahead,
        }
    }

    /// Shows the next piece of reasoning, answer or tool call.
    pub fn show(&mut self, delta: &Delta) -> Result<()> {
        let mut out = std::io::stdout().lock();
        match &mut self.output {
            TurnOutput::View(view) => {
                #[cfg(unix)]
                if let Some(keys) = &self.keys {
                    if keys.suspensions() != self.suspensions {
                        self.suspensions = keys.suspensions();
                        view.restart_below();
                    }
                    let folds = toggled(self.reasoning, keys.toggles()) == ReasoningVisibility::Hidden;
                    view.fold_reasoning(folds, WindowSize::now(), &mut out)?;
                }
                view.show(delta, WindowSize::now(), &mut out)?;
            }
            TurnOutput::Plain(plain) => plain.show(delta, &mut out)?,
        }
        Ok(())
    }

    /// Ends the display. Prints the names of the called tools, the statistics and the notes of `turn`.
    /// `turn` is `None` if the turn failed.
    ///
    /// Returns the visibility of reasoning for the next turn, and the input typed ahead.
    pub fn finish(mut self, turn: Option<&Turn>) -> Result<(ReasoningVisibility, TypeAhead)> {
        let mut out = std::io::stdout().lock();
        match &mut self.output {
            TurnOutput::View(view) => view.finish(WindowSize::now(), &mut out)?,
            TurnOutput::Plain(_) => writeln!(out)?,
        }
        if let Some(turn) = turn {
            let color = stdout_color();
            let dim_line = |line: &str| dim(&wrapped(&printable(line), stdout_columns()), color);
            for call in &turn.summary.tool_calls {
                writeln!(out, "{}", dim(&format!("[tool call: {}]", printable(&call.name)), color))?;
            }
            writeln!(out, "{}", dim_line(&turn.statistics()))?;
            for note in &turn.notes {
                writeln!(out, "{}", dim_line(note))?;
            }
            writeln!(out)?;
        }
        out.flush()?;
        #[cfg(unix)]
        if let Some(keys) = self.keys.take() {
            let reasoning = toggled(self.reasoning, keys.toggles());
            return Ok((reasoning, keys.stop()));
        }
        Ok((self.reasoning, self.type_ahead))
    }
}

/// Returns the visibility of the reasoning after `presses` presses of Ctrl-O.
#[cfg(unix)]
fn toggled(reasoning: ReasoningVisibility, presses: usize) -> ReasoningVisibility {
    match (reasoning, presses % 2) {
        (ReasoningVisibility::Shown, 1) => ReasoningVisibility::Hidden,
        (ReasoningVisibility::Hidden, 1) => ReasoningVisibility::Shown,
        (unchanged, _) => unchanged,
    }
}

impl PlainText {
    fn show(&mut self, delta: &Delta, out: &mut dyn Write) -> Result<()> {
        let (thinking, answer) = if self.color == Color::On { ("", "") } else { ("[thinking] ", "[answer] ") };
        let text = without_controls(&delta.text);
        match delta.channel {
            Channel::Reasoning if self.hides_reasoning => return Ok(()),
            Channel::Answer => {
                // Some models start an answer with line breaks. Skip them.
                let is_first = self.last != Some(Channel::Answer);
                let text = if is_first { text.trim_start_matches('\n') } else { &text };
                if text.is_empty() {
                    return Ok(());
                }
                if self.last == Some(Channel::Reasoning) {
                    write!(out, "\n\n{answer}")?;
                }
                write!(out, "{text}")?;
            }
            Channel::Reasoning | Channel::ToolCall => {
                if self.last.is_none() && delta.channel == Channel::Reasoning {
                    write!(out, "{thinking}")?;
                }
                write!(out, "{}", dim(&text, self.color))?;
            }
        }
        self.last = Some(delta.channel);
        Ok(out.flush()?)
    }
}
