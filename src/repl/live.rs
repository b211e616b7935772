//! The part of the window that may still change: printed lines stay as they are, and of the rest only rows that differ are
//! written anew, in one go. So nothing flickers, and nothing that has scrolled away is touched.

use std::io::{self, Write};

use super::markdown::text::{Line, paint, rows, width};

/// A window's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub rows: usize,
    pub columns: usize,
}

impl Size {
    /// That of the terminal behind stdout, now.
    pub fn now() -> Size {
        let (rows, columns) = console::Term::stdout().size_checked().unwrap_or((24, 80));
        // A terminal that does not know its size says 0.
        let known = |size: u16, otherwise| if size == 0 { otherwise } else { usize::from(size) };
        Size { rows: known(rows, 24), columns: known(columns, 80) }
    }

    /// What a line may take: the last column stays free, as a terminal may or may not go to the next row after it.
    pub fn text_columns(self) -> usize {
        self.columns.saturating_sub(1).max(1)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    painted: String,
    width: usize,
}

/// What is on the screen below the lines that are finished. The cursor stands behind its last row.
pub struct Live {
    size: Size,
    shown: Vec<Row>,
}

impl Live {
    pub fn new(size: Size) -> Self {
        Self { size, shown: Vec::new() }
    }

    /// Prints lines for good, and below them what is open, of which the last window full is shown.
    pub fn update(&mut self, finished: &[Line], open: &[Line], size: Size, out: &mut dyn Write) -> io::Result<()> {
        let resized = size.columns != self.size.columns;
        let (above, shown) = (self.rows_above(size), std::mem::take(&mut self.shown));
        self.size = size;

        let mut now: Vec<Row> = open.iter().flat_map(|line| cut(line, size)).collect();
        // One row less than there are: the line end behind the last finished line needs one.
        now.drain(..now.len().saturating_sub(size.rows.saturating_sub(1).max(1)));

        // Finished lines that were shown as they are need not be written again. The terminal breaks those that are too long.
        let finished: Vec<Row> = finished.iter().map(|line| Row { painted: paint(line), width: width(line) }).collect();
        let all: Vec<&Row> = finished.iter().chain(&now).collect();
        let mut same = shown.iter().zip(&all).take_while(|(a, b)| a == *b).count();
        if resized {
            same = 0;
        } else if same == all.len() && same < shown.len() && same > 0 {
            // Rows only went away: the last that stays is written again, so that the cursor ends behind it.
            same -= 1;
        }
        if same == shown.len() && same == all.len() && finished.is_empty() {
            self.shown = now;
            return Ok(());
        }

        let mut text = String::new();
        // Only the end of the last row is new: nothing else needs to move.
        let grown = !resized && same + 1 == shown.len() && same < all.len();
        let grown = grown.then(|| all[same].painted.strip_prefix(shown[same].painted.as_str())).flatten();
        let mut first = same;
        if let Some(more) = grown {
            text.push_str(more);
            first += 1;
        } else if same < shown.len() {
            let up = if resized { above } else { shown.len() - 1 - same };
            if up > 0 {
                text.push_str(&format!("\x1b[{up}A"));
            }
            text.push('\r');
        }
        // Rows are written over what was there, and only what sticks out is cleared: no moment without them. That must not
        // be done behind a row that fills the window, so with such a one all is cleared first.
        let over = same < shown.len() && grown.is_none();
        let clear_first = over && (resized || all.iter().skip(first).any(|row| row.width >= size.columns));
        if clear_first {
            text.push_str("\x1b[J");
        }
        for (index, row) in all.iter().enumerate().skip(first) {
            // The line end of the row above, where that was on the screen before.
            if index == first && first > 0 && (grown.is_some() || same == shown.len()) || index > first {
                text.push('\n');
            }
            text.push_str(&row.painted);
            if over && !clear_first && index < shown.len() {
                text.push_str("\x1b[K");
            }
        }
        if over && !clear_first && shown.len() > all.len() {
            text.push_str("\x1b[J");
        }
        // The cursor goes below the last finished line.
        if now.is_empty() && !finished.is_empty() {
            text.push('\n');
        }
        // As one: terminals that know this (mode 2026) do not show what is between.
        if over {
            text = format!("\x1b[?2026h{text}\x1b[?2026l");
        }
        self.shown = now;
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// The cursor stands at the start of a row that is ours; nothing above it is.
    pub fn forget(&mut self) {
        self.shown.clear();
    }

    /// Takes back the last of these finished lines, which fill a row each: they are open again, as far as they are in the
    /// window for sure. Returns how many.
    pub fn reopen(&mut self, lines: &[Line]) -> usize {
        let fit = self.size.rows.saturating_sub(1 + self.shown.len().max(1)).min(lines.len());
        let rows = lines[lines.len() - fit..].iter();
        if self.shown.is_empty() && fit > 0 {
            // The cursor stands below the last of them, as if an empty row were shown.
            self.shown.push(Row { painted: String::new(), width: 0 });
        }
        self.shown.splice(0..0, rows.map(|line| Row { painted: paint(line), width: width(line) }));
        fit
    }

    /// How far the cursor is below the first row. A window that has become narrower has broken rows in two.
    fn rows_above(&self, size: Size) -> usize {
        let taken: usize = self.shown.iter().map(|row| row.width.div_ceil(size.columns).max(1)).sum();
        taken.saturating_sub(1).min(size.rows.saturating_sub(1))
    }
}

fn cut(line: &Line, size: Size) -> Vec<Row> {
    rows(line, size.text_columns()).iter().map(|row| Row { painted: paint(row), width: width(row) }).collect()
}
