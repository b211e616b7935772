//! Formats a model's reasoning or the text of a tool call as dim, wrapped rows.
//! Also formats the line that replaces folded reasoning.

use super::styled_text::{Span, StyledLine, TextStyle, wrap};

/// The dim text that is currently streaming: reasoning, or the text of a tool call.
pub struct DimText {
    /// Finished rows.
    rows: Vec<StyledLine>,
    /// The number of `rows` that have already been printed.
    printed: usize,
    /// The unwrapped text after the last finished row.
    rest: String,
    words: usize,
    is_in_word: bool,
}

impl DimText {
    pub fn new() -> Self {
        Self { rows: Vec::new(), printed: 0, rest: String::new(), words: 0, is_in_word: false }
    }

    /// Appends text. Finishes all rows except the last row, which may still grow.
    pub fn push(&mut self, text: &str, columns: usize) {
        for c in text.chars() {
            self.words += usize::from(!c.is_whitespace() && !self.is_in_word);
            self.is_in_word = !c.is_whitespace();
        }
        self.rest.push_str(text);
        while let Some((line, rest)) = self.rest.split_once('\n') {
            let rows = wrap_dim(line, columns);
            // Skip empty lines at the start.
            if !rows.is_empty() || !self.rows.is_empty() {
                self.rows.extend(if rows.is_empty() { vec![StyledLine::new()] } else { rows });
            }
            self.rest = rest.to_string();
        }
        let mut rows = wrap_dim(&self.rest, columns);
        if rows.len() > 1
            && let Some(last) = rows.pop()
        {
            let spaces = self.rest.len() - self.rest.trim_end_matches(' ').len();
            self.rest = last.iter().map(Span::text).collect::<String>() + &" ".repeat(spaces);
            self.rows.extend(rows);
        }
    }

    /// Returns the finished rows that have not been printed yet, and marks them as printed.
    pub fn take_finished(&mut self) -> Vec<StyledLine> {
        let finished = self.rows[self.printed..].to_vec();
        self.printed = self.rows.len();
        finished
    }

    /// Returns the text after the last finished row, wrapped to `columns`. This text may still grow.
    pub fn open(&self, columns: usize) -> Vec<StyledLine> {
        wrap_dim(&self.rest, columns)
    }

    /// Finishes the text after the last finished row. Removes empty rows at the end that have not been printed.
    pub fn finish(&mut self, columns: usize) {
        self.rows.extend(wrap_dim(&std::mem::take(&mut self.rest), columns));
        while self.rows.len() > self.printed && self.rows.last().is_some_and(Vec::is_empty) {
            self.rows.pop();
        }
    }

    /// Returns the rows that are marked as printed.
    pub fn printed(&self) -> &[StyledLine] {
        &self.rows[..self.printed]
    }

    /// Marks the last `rows` printed rows as not printed. The caller has moved these rows back into the live region.
    pub fn unprint(&mut self, rows: usize) {
        self.printed -= rows;
    }

    /// Returns the line that replaces folded reasoning while it streams.
    /// If Ctrl-O can unfold the reasoning (`has_keys`), the line says so.
    pub fn thinking_line(&self, has_keys: bool) -> StyledLine {
        let hint = if has_keys { " (Ctrl-O to show)" } else { "" };
        vec![Span::new(&format!("▸ thinking: {}{hint}", self.word_count()), TextStyle::DIM)]
    }

    /// Returns the line that replaces folded reasoning after it has ended.
    pub fn thought_line(&self) -> StyledLine {
        vec![Span::new(&format!("▸ thought: {}", self.word_count()), TextStyle::DIM)]
    }

    fn word_count(&self) -> String {
        format!("{} {}", self.words, if self.words == 1 { "word" } else { "words" })
    }
}

/// Wraps one line of dim text. Indentation becomes no-break spaces, which wrapping preserves.
fn wrap_dim(line: &str, columns: usize) -> Vec<StyledLine> {
    let text = line.trim_start_matches(' ');
    let indented = "\u{a0}".repeat(line.len() - text.len()) + text;
    if text.is_empty() { Vec::new() } else { wrap(&[Span::new(&indented, TextStyle::DIM)], columns) }
}
