//! An answer in a terminal as it streams: thoughts dim, Markdown laid out, the open block redrawn without flicker.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use super::live::{Live, Size};
use super::markdown::Markdown;
use super::markdown::text::Line;
use super::thoughts::Thoughts;
use crate::chat::{Channel, Delta};

/// Between two drawings: what comes faster than a screen shows it is drawn together.
const FRAME: Duration = Duration::from_millis(12);
/// A drawing is followed by so many times what it took, so that drawing takes 1 % of the time whatever is drawn ..
const REST: u32 = 100;
/// .. but for a screen that hardly keeps up: this is still fluent.
const SLOWEST_FRAME: Duration = Duration::from_millis(80);

/// Draws one turn.
pub struct View {
    live: Live,
    section: Section,
    folded: bool,
    /// Whether Ctrl-O is listened to.
    keys: bool,
    /// Finished, not drawn yet.
    finished: Vec<Line>,
    begun: bool,
    /// When the next drawing may be.
    next: Option<Instant>,
}

enum Section {
    None,
    Thoughts(Thoughts),
    /// The arguments of a tool's call.
    Call(Thoughts),
    Answer(Box<Markdown>),
}

impl View {
    /// `folded` hides what the model thinks behind one line; `keys` says whether a key can show it.
    pub fn new(size: Size, folded: bool, keys: bool) -> Self {
        let live = Live::new(size);
        Self { live, section: Section::None, folded, keys, finished: Vec::new(), begun: false, next: None }
    }

    /// Shows a piece of the turn in a window of this size.
    pub fn show(&mut self, delta: &Delta, size: Size, out: &mut dyn Write) -> io::Result<()> {
        let columns = size.text_columns();
        let goes_on = matches!(
            (&self.section, delta.channel),
            (Section::Thoughts(_), Channel::Reasoning)
                | (Section::Call(_), Channel::ToolCall)
                | (Section::Answer(_), Channel::Answer)
        );
        if !goes_on {
            self.end_section(columns);
            if self.begun {
                self.finished.push(Line::new());
            }
            self.section = match delta.channel {
                Channel::Reasoning => Section::Thoughts(Thoughts::new()),
                Channel::ToolCall => Section::Call(Thoughts::new()),
                Channel::Answer => Section::Answer(Box::new(Markdown::new(columns))),
            };
        }
        match &mut self.section {
            Section::Thoughts(thoughts) | Section::Call(thoughts) => thoughts.push(&delta.text, columns),
            Section::Answer(markdown) => {
                markdown.resize(columns);
                let finished = markdown.push(&delta.text);
                self.print(finished);
            }
            Section::None => {}
        }
        if self.next.is_none_or(|next| Instant::now() >= next) {
            self.draw(size, out)?;
        }
        Ok(())
    }

    /// Folds thoughts, or unfolds them.
    pub fn fold(&mut self, folded: bool, size: Size, out: &mut dyn Write) -> io::Result<()> {
        if folded == self.folded {
            return Ok(());
        }
        self.draw(size, out)?;
        self.folded = folded;
        if let Section::Thoughts(thoughts) = &mut self.section
            && folded
        {
            let taken = self.live.reopen(thoughts.printed());
            thoughts.unprint(taken);
        }
        self.draw(size, out)
    }

    /// Others have written to the screen: what is open is drawn below that.
    pub fn begin_anew(&mut self) {
        self.live.forget();
    }

    /// The turn is over: everything is printed, and the cursor stands at the start of a line.
    pub fn finish(&mut self, size: Size, out: &mut dyn Write) -> io::Result<()> {
        self.end_section(size.text_columns());
        self.draw(size, out)
    }

    fn print(&mut self, lines: Vec<Line>) {
        self.begun |= !lines.is_empty();
        self.finished.extend(lines);
    }

    fn end_section(&mut self, columns: usize) {
        let lines = match &mut self.section {
            Section::None => return,
            Section::Thoughts(thoughts) if self.folded => vec![thoughts.folded(false, self.keys)],
            Section::Thoughts(thoughts) | Section::Call(thoughts) => {
                thoughts.finish(columns);
                thoughts.finished()
            }
            Section::Answer(markdown) => {
                markdown.resize(columns);
                markdown.finish()
            }
        };
        self.section = Section::None;
        self.print(lines);
    }

    fn draw(&mut self, size: Size, out: &mut dyn Write) -> io::Result<()> {
        let started = Instant::now();
        let columns = size.text_columns();
        let mut finished = std::mem::take(&mut self.finished);
        let open = match &mut self.section {
            Section::None => Vec::new(),
            Section::Thoughts(thoughts) if self.folded => vec![thoughts.folded(true, self.keys)],
            Section::Thoughts(thoughts) | Section::Call(thoughts) => {
                finished.extend(thoughts.finished());
                thoughts.open(columns)
            }
            Section::Answer(markdown) => markdown.open(),
        };
        self.begun |= !finished.is_empty();
        self.live.update(&finished, &open, size, out)?;
        self.next = Some(Instant::now() + (started.elapsed() * REST).clamp(FRAME, SLOWEST_FRAME));
        Ok(())
    }
}
