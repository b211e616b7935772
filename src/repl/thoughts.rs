//! What a model thinks, as plain dim text: wrapped, and folded into one line when the person has seen enough.

use super::markdown::text::{Line, Span, Style, wrap};

pub struct Thoughts {
    /// Rows that will not change.
    rows: Vec<Line>,
    /// How many of them are on the screen.
    printed: usize,
    /// The text behind them.
    rest: String,
    words: usize,
    in_word: bool,
}

impl Thoughts {
    pub fn new() -> Self {
        Self { rows: Vec::new(), printed: 0, rest: String::new(), words: 0, in_word: false }
    }

    /// Takes more text.
    pub fn push(&mut self, text: &str, columns: usize) {
        for c in text.chars() {
            self.words += usize::from(!c.is_whitespace() && !self.in_word);
            self.in_word = !c.is_whitespace();
        }
        self.rest.push_str(text);
        while let Some((line, rest)) = self.rest.split_once('\n') {
            let rows = wrapped(line, columns);
            // Line breaks at the start would only be a gap.
            if !rows.is_empty() || !self.rows.is_empty() {
                self.rows.extend(if rows.is_empty() { vec![Line::new()] } else { rows });
            }
            self.rest = rest.to_string();
        }
        let mut rows = wrapped(&self.rest, columns);
        if rows.len() > 1
            && let Some(last) = rows.pop()
        {
            let spaces = self.rest.len() - self.rest.trim_end_matches(' ').len();
            self.rest = last.iter().map(Span::text).collect::<String>() + &" ".repeat(spaces);
            self.rows.extend(rows);
        }
    }

    /// Rows that are to be printed now, once.
    pub fn finished(&mut self) -> Vec<Line> {
        let finished = self.rows[self.printed..].to_vec();
        self.printed = self.rows.len();
        finished
    }

    /// The row that may still grow.
    pub fn open(&self, columns: usize) -> Vec<Line> {
        wrapped(&self.rest, columns)
    }

    /// The end: nothing grows any more.
    pub fn finish(&mut self, columns: usize) {
        self.rows.extend(wrapped(&std::mem::take(&mut self.rest), columns));
        while self.rows.len() > self.printed && self.rows.last().is_some_and(Vec::is_empty) {
            self.rows.pop();
        }
    }

    /// Those rows that were printed already.
    pub fn printed(&self) -> &[Line] {
        &self.rows[..self.printed]
    }

    /// The last `rows` of those were taken off the screen again.
    pub fn unprint(&mut self, rows: usize) {
        self.printed -= rows;
    }

    /// One line in place of all: `while` it goes on, or at its end.
    pub fn folded(&self, goes_on: bool, keys: bool) -> Line {
        let words = format!("{} {}", self.words, if self.words == 1 { "word" } else { "words" });
        let text = match (goes_on, keys) {
            (true, true) => format!("▸ thinking: {words} (Ctrl-O shows them)"),
            (true, false) => format!("▸ thinking: {words}"),
            (false, _) => format!("▸ thought: {words}"),
        };
        vec![Span::new(&text, Style::DIM)]
    }
}

fn wrapped(line: &str, columns: usize) -> Vec<Line> {
    // Spaces at the start are not to be wrapped away.
    let text = line.trim_start_matches(' ');
    let indented = "\u{a0}".repeat(line.len() - text.len()) + text;
    if text.is_empty() { Vec::new() } else { wrap(&[Span::new(&indented, Style::DIM)], columns) }
}
