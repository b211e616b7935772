//! Shows an assistant turn while it streams: dim reasoning and tool calls, and an answer formatted as Markdown.
//! The last Markdown block is redrawn in place until it is complete.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use super::dim_text::DimText;
use super::live_region::{LiveRegion, WindowSize};
use super::markdown::Markdown;
use super::styled_text::StyledLine;
use crate::chat::{Channel, Delta};

/// The minimum pause after a frame (one update of the screen). Pieces that arrive during the pause are drawn together.
const MIN_FRAME: Duration = Duration::from_millis(12);
/// The pause after a frame, as a multiple of the time to draw the frame. Drawing then takes about 1% of the time,
/// unless `MIN_FRAME` or `MAX_FRAME` limits the pause.
const REST_FACTOR: u32 = 100;
/// The maximum pause after a frame. Longer pauses would make the output jerky on slow terminals.
const MAX_FRAME: Duration = Duration::from_millis(80);

/// The view of one assistant turn while it streams.
pub struct TurnView {
    region: LiveRegion,
    section: TurnSection,
    folds_reasoning: bool,
    /// Whether Ctrl-O can unfold the reasoning.
    has_keys: bool,
    /// Finished lines that are not drawn yet.
    finished: Vec<StyledLine>,
    has_content: bool,
    /// The earliest time at which [`show`](Self::show) draws a frame. `None` before the first frame.
    next_frame: Option<Instant>,
}

/// The section of the turn that is currently streaming.
enum TurnSection {
    None,
    Reasoning(DimText),
    ToolCall(DimText),
    Answer(Box<Markdown>),
}

impl TurnView {
    /// Creates an empty view that shows reasoning unfolded.
    pub fn new(size: WindowSize) -> Self {
        Self {
            region: LiveRegion::new(size),
            section: TurnSection::None,
            folds_reasoning: false,
            has_keys: false,
            finished: Vec::new(),
            has_content: false,
            next_frame: None,
        }
    }

    /// Sets whether reasoning is folded into one line.
    pub fn with_folded_reasoning(self, folds_reasoning: bool) -> Self {
        Self { folds_reasoning, ..self }
    }

    /// Sets whether Ctrl-O can unfold the reasoning. If so, the line of folded reasoning mentions Ctrl-O.
    pub fn with_keys(self, has_keys: bool) -> Self {
        Self { has_keys, ..self }
    }

    /// Adds the next piece of reasoning, answer or tool call. Draws a frame if the last frame's pause is over.
    pub fn show(&mut self, delta: &Delta, size: WindowSize, out: &mut dyn Write) -> io::Result<()> {
        let columns = size.text_columns();
        let is_same_section = matches!(
            (&self.section, delta.channel),
            (TurnSection::Reasoning(_), Channel::Reasoning)
                | (TurnSection::ToolCall(_), Channel::ToolCall)
                | (TurnSection::Answer(_), Channel::Answer)
        );
        if !is_same_section {
            self.end_section(columns);
            if self.has_content {
                self.finished.push(StyledLine::new());
            }
            self.section = match delta.channel {
                Channel::Reasoning => TurnSection::Reasoning(DimText::new()),
                Channel::ToolCall => TurnSection::ToolCall(DimText::new()),
                Channel::Answer => TurnSection::Answer(Box::new(Markdown::new(columns))),
            };
        }
        match &mut self.section {
            TurnSection::Reasoning(text) | TurnSection::ToolCall(text) => text.push(&delta.text, columns),
            TurnSection::Answer(markdown) => {
                markdown.resize(columns);
                let finished = markdown.push(&delta.text);
                self.add_finished(finished);
            }
            TurnSection::None => {}
        }
        if self.next_frame.is_none_or(|next| Instant::now() >= next) {
            self.draw(size, out)?;
        }
        Ok(())
    }

    /// Folds or unfolds the reasoning that is streaming and all later reasoning.
    /// Redraws the view if the setting changed.
    pub fn fold_reasoning(&mut self, folds: bool, size: WindowSize, out: &mut dyn Write) -> io::Result<()> {
        if folds == self.folds_reasoning {
            return Ok(());
        }
        self.draw(size, out)?;
        self.folds_reasoning = folds;
        if let TurnSection::Reasoning(text) = &mut self.section
            && folds
        {
            let reopened = self.region.reopen(text.printed());
            text.unprint(reopened);
        }
        self.draw(size, out)
    }

    /// Makes the next frame start at the cursor, below any output that other programs wrote to the terminal.
    pub fn restart_below(&mut self) {
        self.region.restart();
    }

    /// Ends the turn: prints all remaining lines and leaves the cursor at the start of a line.
    pub fn finish(&mut self, size: WindowSize, out: &mut dyn Write) -> io::Result<()> {
        self.end_section(size.text_columns());
        self.draw(size, out)
    }

    fn add_finished(&mut self, lines: Vec<StyledLine>) {
        self.has_content |= !lines.is_empty();
        self.finished.extend(lines);
    }

    fn end_section(&mut self, columns: usize) {
        let lines = match &mut self.section {
            TurnSection::None => return,
            TurnSection::Reasoning(text) if self.folds_reasoning => vec![text.thought_line()],
            TurnSection::Reasoning(text) | TurnSection::ToolCall(text) => {
                text.finish(columns);
                text.take_finished()
            }
            TurnSection::Answer(markdown) => {
                markdown.resize(columns);
                markdown.finish()
            }
        };
        self.section = TurnSection::None;
        self.add_finished(lines);
    }

    fn draw(&mut self, size: WindowSize, out: &mut dyn Write) -> io::Result<()> {
        let started = Instant::now();
        let columns = size.text_columns();
        let mut finished = std::mem::take(&mut self.finished);
        let open = match &mut self.section {
            TurnSection::None => Vec::new(),
            TurnSection::Reasoning(text) if self.folds_reasoning => vec![text.thinking_line(self.has_keys)],
            TurnSection::Reasoning(text) | TurnSection::ToolCall(text) => {
                finished.extend(text.take_finished());
                text.open(columns)
            }
            TurnSection::Answer(markdown) => markdown.open(),
        };
        self.has_content |= !finished.is_empty();
        self.region.update(&finished, &open, size, out)?;
        self.next_frame = Some(Instant::now() + (started.elapsed() * REST_FACTOR).clamp(MIN_FRAME, MAX_FRAME));
        Ok(())
    }
}
