//! Shows a turn on stdout: laid out where that is a terminal that can, else as plain text.

use std::io::Write;

use anyhow::Result;

#[cfg(unix)]
use super::keys::Keys;
use super::live::Size;
use super::session::{Reasoning, Session, Turn};
use super::style::{self, Color};
use super::typed::Typed;
use super::view::View;
use crate::chat::{Channel, Delta};
use crate::text;

pub struct Display {
    how: How,
    reasoning: Reasoning,
    #[cfg(unix)]
    keys: Option<Keys>,
    /// How often the program had been stopped when something was last shown.
    #[cfg(unix)]
    stops: usize,
    /// What was typed ahead, where nothing listens to keys.
    typed: Typed,
}

enum How {
    Drawn(Box<View>),
    Plain(Plain),
}

/// Pieces as they come. Words tell thoughts from the answer, as nothing may be dimmed here.
struct Plain {
    hidden: bool,
    color: Color,
    last: Option<Channel>,
}

impl Display {
    /// For the next turn of a chat. What is typed while it goes on is put behind `typed`.
    pub fn new(session: &Session, typed: Typed) -> Self {
        let hidden = session.reasoning == Reasoning::Hidden;
        let (color, drawn) = (style::stdout_color(), session.is_drawn());
        #[cfg(unix)]
        let (keys, typed) = match if drawn { Keys::listen(typed) } else { Err(typed) } {
            Ok(keys) => (Some(keys), Typed::default()),
            Err(typed) => (None, typed),
        };
        #[cfg(unix)]
        let listens = keys.is_some();
        #[cfg(not(unix))]
        let listens = false;
        let how = match drawn {
            true => How::Drawn(Box::new(View::new(Size::now(), hidden, listens))),
            false => How::Plain(Plain { hidden, color, last: None }),
        };
        Self {
            how,
            reasoning: session.reasoning,
            #[cfg(unix)]
            keys,
            #[cfg(unix)]
            stops: 0,
            typed,
        }
    }

    pub fn show(&mut self, delta: &Delta) -> Result<()> {
        let mut out = std::io::stdout().lock();
        match &mut self.how {
            How::Drawn(view) => {
                #[cfg(unix)]
                if let Some(keys) = &self.keys {
                    if keys.stops() != self.stops {
                        self.stops = keys.stops();
                        view.begin_anew();
                    }
                    let fold = self.reasoning.after(keys.presses()) == Reasoning::Hidden;
                    view.fold(fold, Size::now(), &mut out)?;
                }
                view.show(delta, Size::now(), &mut out)?;
            }
            How::Plain(plain) => plain.show(delta, &mut out)?,
        }
        Ok(())
    }

    /// Ends the turn, with a line of figures if it did not fail. Returns whether thoughts are shown from here on, and what
    /// was typed meanwhile.
    pub fn end(mut self, turn: Option<&Turn>) -> Result<(Reasoning, Typed)> {
        let mut out = std::io::stdout().lock();
        match &mut self.how {
            How::Drawn(view) => view.finish(Size::now(), &mut out)?,
            How::Plain(_) => writeln!(out)?,
        }
        let color = style::stdout_color();
        let wrapped = |line: &str| text::wrapped(line, style::columns(&console::Term::stdout()));
        if let Some(turn) = turn {
            for call in &turn.summary.tool_calls {
                let name = text::printable(&call.name);
                writeln!(out, "{}", style::dim(&format!("[asks for the tool {name}]"), color))?;
            }
            writeln!(out, "{}", style::dim(&wrapped(&style::stats(&turn.summary)), color))?;
            for note in &turn.notes {
                writeln!(out, "{}", style::dim(&wrapped(&text::printable(note)), color))?;
            }
            writeln!(out)?;
        }
        out.flush()?;
        #[cfg(unix)]
        if let Some(keys) = self.keys.take() {
            let reasoning = self.reasoning.after(keys.presses());
            return Ok((reasoning, keys.end()));
        }
        Ok((self.reasoning, self.typed))
    }
}

impl Reasoning {
    /// After so many presses of Ctrl-O.
    #[cfg(unix)]
    fn after(self, presses: usize) -> Reasoning {
        match (self, presses % 2) {
            (Reasoning::Shown, 1) => Reasoning::Hidden,
            (Reasoning::Hidden, 1) => Reasoning::Shown,
            (same, _) => same,
        }
    }
}

impl Plain {
    fn show(&mut self, delta: &Delta, out: &mut dyn Write) -> Result<()> {
        let (thinking, answering) = if self.color == Color::On { ("", "") } else { ("[thinking] ", "[answer] ") };
        let text = text::printable(&delta.text);
        match delta.channel {
            Channel::Reasoning if self.hidden => return Ok(()),
            Channel::Answer => {
                if self.last == Some(Channel::Reasoning) {
                    write!(out, "\n\n{answering}")?;
                }
                // A model's leading line breaks would only open a gap after its thoughts.
                let first = self.last != Some(Channel::Answer);
                write!(out, "{}", if first { text.trim_start_matches('\n') } else { &text })?;
            }
            Channel::Reasoning | Channel::ToolCall => {
                if self.last.is_none() {
                    write!(out, "{thinking}")?;
                }
                write!(out, "{}", style::dim(&text, self.color))?;
            }
        }
        self.last = Some(delta.channel);
        Ok(out.flush()?)
    }
}
