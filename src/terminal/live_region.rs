//! The live region: the last rows on the screen, which may still change.
//!
//! Finished lines above the live region stay as they are, unless [`LiveRegion::reopen`] moves them into the region.
//! An update starts at the first changed row, and is a single write, which avoids flicker.

use std::io::{self, Write};

use super::styled_text::{StyledLine, paint, rows, width};

/// The size of the terminal window in character cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSize {
    pub rows: usize,
    pub columns: usize,
}

impl WindowSize {
    /// Returns the size of the terminal on stdout. Unknown sizes default to 24 rows and 80 columns.
    pub fn now() -> WindowSize {
        let (rows, columns) = console::Term::stdout().size_checked().unwrap_or((24, 80));
        // A reported size of 0 means that the size is unknown.
        let known_or = |size: u16, default| if size == 0 { default } else { usize::from(size) };
        WindowSize { rows: known_or(rows, 24), columns: known_or(columns, 80) }
    }

    /// Returns the maximum width of a line, in columns.
    ///
    /// The last column stays free, because terminals differ in where the cursor goes after a character in that column.
    pub fn text_columns(self) -> usize {
        self.columns.saturating_sub(1).max(1)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    painted: String,
    width: usize,
}

impl Row {
    fn new(line: &StyledLine) -> Self {
        Row { painted: paint(line), width: width(line) }
    }
}

/// The open rows below the finished lines. The cursor is at the end of the last open row.
pub struct LiveRegion {
    size: WindowSize,
    shown: Vec<Row>,
}

impl LiveRegion {
    pub fn new(size: WindowSize) -> Self {
        Self { size, shown: Vec::new() }
    }

    /// Prints the finished lines and draws the open lines below them.
    ///
    /// If the open lines do not fit in the window, only their last rows are drawn.
    pub fn update(
        &mut self,
        finished: &[StyledLine],
        open: &[StyledLine],
        size: WindowSize,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let is_resized = size.columns != self.size.columns;
        let (cursor_row, shown) = (self.cursor_row(size), std::mem::take(&mut self.shown));
        self.size = size;

        let mut open: Vec<Row> = open.iter().flat_map(|line| cut(line, size)).collect();
        // Keep one row free for the line break after the last finished line.
        open.drain(..open.len().saturating_sub(size.rows.saturating_sub(1).max(1)));

        // Let the terminal wrap long finished lines, so that the user can copy each of them as one line.
        let finished: Vec<Row> = finished.iter().map(Row::new).collect();
        let next: Vec<&Row> = finished.iter().chain(&open).collect();
        // Skip leading rows that are already on the screen.
        let mut same = shown.iter().zip(&next).take_while(|(a, b)| a == *b).count();
        if is_resized {
            same = 0;
        } else if same == next.len() && same < shown.len() && same > 0 {
            // Only rows at the end were removed. Rewrite the last remaining row to put the cursor at its end.
            same -= 1;
        }
        if same == shown.len() && same == next.len() && finished.is_empty() {
            self.shown = open;
            return Ok(());
        }

        let mut text = String::new();
        // If the last row only grew, write just the added text.
        let is_grown = !is_resized && same + 1 == shown.len() && same < next.len();
        let growth = is_grown.then(|| next[same].painted.strip_prefix(shown[same].painted.as_str())).flatten();
        let mut first = same;
        if let Some(more) = growth {
            text.push_str(more);
            first += 1;
        } else if same < shown.len() {
            let up = if is_resized { cursor_row } else { shown.len() - 1 - same };
            if up > 0 {
                text.push_str(&format!("\x1b[{up}A"));
            }
            text.push('\r');
        }
        // Overwrite each row and then clear only its remainder, so that no row is ever blank.
        // A row that is as wide as the window has no remainder.
        // In that case, and after a resize, first clear everything below and to the right of the cursor.
        let overwrites = same < shown.len() && growth.is_none();
        let clears_first = overwrites && (is_resized || next.iter().skip(first).any(|row| row.width >= size.columns));
        if clears_first {
            text.push_str("\x1b[J");
        }
        for (index, row) in next.iter().enumerate().skip(first) {
            // Start a new line unless the cursor is already at the start of this row.
            if index == first && first > 0 && (growth.is_some() || same == shown.len()) || index > first {
                text.push('\n');
            }
            text.push_str(&row.painted);
            if overwrites && !clears_first && index < shown.len() {
                text.push_str("\x1b[K");
            }
        }
        if overwrites && !clears_first && shown.len() > next.len() {
            text.push_str("\x1b[J");
        }
        // Move the cursor below the last finished line.
        if open.is_empty() && !finished.is_empty() {
            text.push('\n');
        }
        // With synchronized output (mode 2026), supporting terminals show no intermediate state of an update.
        if overwrites {
            text = format!("\x1b[?2026h{text}\x1b[?2026l");
        }
        self.shown = open;
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// Starts a new region at the cursor, which must be at the start of a row.
    pub fn restart(&mut self) {
        self.shown.clear();
    }

    /// Moves the lines at the end of `lines` that are still in the window back into the region. Returns their number.
    ///
    /// `lines` must be the finished lines directly above the region. Each of them must occupy exactly one row.
    pub fn reopen(&mut self, lines: &[StyledLine]) -> usize {
        let count = self.size.rows.saturating_sub(1 + self.shown.len().max(1)).min(lines.len());
        if self.shown.is_empty() && count > 0 {
            // The cursor is below the last line. Represent its position as an empty open row.
            self.shown.push(Row { painted: String::new(), width: 0 });
        }
        self.shown.splice(0..0, lines[lines.len() - count..].iter().map(Row::new));
        count
    }

    /// Returns how many rows the cursor is below the first open row, in a window of `size`.
    ///
    /// Shrinking the window can wrap a row into several rows.
    fn cursor_row(&self, size: WindowSize) -> usize {
        let rows: usize = self.shown.iter().map(|row| row.width.div_ceil(size.columns).max(1)).sum();
        rows.saturating_sub(1).min(size.rows.saturating_sub(1))
    }
}

/// Splits a line into rows that fit in the window.
fn cut(line: &StyledLine, size: WindowSize) -> Vec<Row> {
    rows(line, size.text_columns()).iter().map(Row::new).collect()
}
