//! The live region: the last rows on the screen, which may still change.
//!
//! Finished lines above the live region stay as they are, unless [`LiveRegion::reopen`] moves them into the region.
//! To avoid flicker, an update is a single write that starts at the first changed row.

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

    /// Returns the width to which text is wrapped, in columns.
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

    /// Replaces the region with the finished lines and, below them, the open lines, which become the new region.
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
        let change = ScreenChange::new(&shown, &next, is_resized);
        if change.is_empty() && finished.is_empty() {
            self.shown = open;
            return Ok(());
        }
        // Move the cursor below the last finished line.
        let end = if open.is_empty() && !finished.is_empty() { "\n" } else { "" };
        let text = match change.added_text() {
            Some(text) => text + end,
            // With synchronized output (mode 2026), supporting terminals show no intermediate state of an update.
            None => format!("\x1b[?2026h{}{end}\x1b[?2026l", change.overwriting_text(cursor_row, size.columns)),
        };
        self.shown = open;
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// Starts a new region at the cursor, which must be at the start of a row.
    pub fn restart(&mut self) {
        self.shown.clear();
    }

    /// Moves the last of `lines`, those that are still in the window, back into the region. Returns their number.
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

/// A change of the rows on the screen.
struct ScreenChange<'r> {
    shown: &'r [Row],
    next: &'r [&'r Row],
    /// The number of leading rows that are already on the screen and are not written again.
    same: usize,
    /// Whether the window has a new width, so that the terminal may have wrapped the shown rows.
    is_resized: bool,
}

impl<'r> ScreenChange<'r> {
    fn new(shown: &'r [Row], next: &'r [&'r Row], is_resized: bool) -> Self {
        let mut same = shown.iter().zip(next).take_while(|(a, b)| a == *b).count();
        if is_resized {
            same = 0;
        } else if same == next.len() && same < shown.len() && same > 0 {
            // Only rows at the end were removed. Rewrite the last remaining row to put the cursor at its end.
            same -= 1;
        }
        Self { shown, next, same, is_resized }
    }

    fn is_empty(&self) -> bool {
        self.same == self.shown.len() && self.same == self.next.len()
    }

    /// If the change only adds text at the end, returns the text to write at the cursor. Otherwise returns `None`.
    fn added_text(&self) -> Option<String> {
        let mut text = String::new();
        let mut first = self.same;
        if self.same < self.shown.len() {
            // If the last row only grew, write just the added text.
            let is_last = !self.is_resized && self.same + 1 == self.shown.len();
            let row = self.next.get(self.same).filter(|_| is_last)?;
            text.push_str(row.painted.strip_prefix(self.shown[self.same].painted.as_str())?);
            first += 1;
        }
        for (index, row) in self.next.iter().enumerate().skip(first) {
            // Start a new line unless the cursor is already at the start of this row.
            if index > 0 {
                text.push('\n');
            }
            text.push_str(&row.painted);
        }
        Some(text)
    }

    /// Returns the text that overwrites the shown rows from the first changed row on.
    /// After a resize, the cursor is `cursor_row` rows below the first shown row.
    fn overwriting_text(&self, cursor_row: usize, columns: usize) -> String {
        let mut text = String::new();
        let up = if self.is_resized { cursor_row } else { self.shown.len() - 1 - self.same };
        if up > 0 {
            text.push_str(&format!("\x1b[{up}A"));
        }
        text.push('\r');
        // Overwrite each row and then clear only its remainder, so that no row is ever blank.
        // After a row that fills the width of the window, clearing would erase the last character. A wider row wraps.
        // With such a row, or after a resize, first clear everything from the cursor to the end of the screen.
        let has_wide_row = self.next.iter().skip(self.same).any(|row| row.width >= columns);
        let clears_first = self.is_resized || has_wide_row;
        if clears_first {
            text.push_str("\x1b[J");
        }
        for (index, row) in self.next.iter().enumerate().skip(self.same) {
            if index > self.same {
                text.push('\n');
            }
            text.push_str(&row.painted);
            if !clears_first && index < self.shown.len() {
                text.push_str("\x1b[K");
            }
        }
        if !clears_first && self.shown.len() > self.next.len() {
            text.push_str("\x1b[J");
        }
        text
    }
}

/// Splits a line into rows that fit in the window.
fn cut(line: &StyledLine, size: WindowSize) -> Vec<Row> {
    rows(line, size.text_columns()).iter().map(Row::new).collect()
}
