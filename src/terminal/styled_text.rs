//! Styled text: spans, their display width, and line wrapping.

use unicode_segmentation::UnicodeSegmentation;
use unicode_width::UnicodeWidthStr;

use crate::text::without_controls;

/// The style of a span. Colors come from the terminal's own palette, so they suit the terminal's background.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextStyle {
    pub bold: bool,
    pub dim: bool,
    pub italic: bool,
    pub underline: bool,
    pub strike: bool,
    /// An ANSI color from 0 to 7: black, red, green, yellow, blue, magenta, cyan, white.
    /// `None` is the default color of the terminal.
    pub color: Option<u8>,
}

impl TextStyle {
    pub const DIM: TextStyle =
        TextStyle { bold: false, dim: true, italic: false, underline: false, strike: false, color: None };

    pub fn color(number: u8) -> TextStyle {
        TextStyle { color: Some(number), ..TextStyle::default() }
    }

    /// Returns the SGR parameters that turn this style on.
    fn sgr_codes(self) -> Vec<String> {
        let switches = [(self.bold, 1), (self.dim, 2), (self.italic, 3), (self.underline, 4), (self.strike, 9)];
        let mut codes: Vec<String> = switches.iter().filter(|(on, _)| *on).map(|(_, code)| code.to_string()).collect();
        codes.extend(self.color.map(|color| (30 + color).to_string()));
        codes
    }
}

/// Text in one style, without control characters other than newlines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    text: String,
    style: TextStyle,
}

impl Span {
    /// Creates a span of `text` without its control characters. Keeps newlines.
    /// Replaces each tab with four spaces, because the width of a tab depends on its position.
    ///
    /// Filtering the Markdown source is not enough, because entities such as `&#27;` can encode control characters.
    pub fn new(text: &str, style: TextStyle) -> Span {
        Span { text: without_controls(text).replace('\t', "    "), style }
    }

    /// Creates a span without a style.
    pub fn plain(text: &str) -> Span {
        Span::new(text, TextStyle::default())
    }

    pub fn text(&self) -> &str {
        &self.text
    }
}

/// A line of styled text, which may be wider than the window. Text for [`wrap`] may also contain newlines.
pub type StyledLine = Vec<Span>;

/// Returns the width of a line in columns.
pub fn width(line: &[Span]) -> usize {
    line.iter().map(|span| span.text.width()).sum()
}

/// Returns a styled line as text with ANSI escape sequences.
pub fn paint(line: &[Span]) -> String {
    let mut painted = String::new();
    for span in line {
        let codes = span.style.sgr_codes();
        if codes.is_empty() || span.text.is_empty() {
            painted.push_str(&span.text);
        } else {
            painted.push_str(&format!("\x1b[{}m{}\x1b[0m", codes.join(";"), span.text));
        }
    }
    painted
}

/// One grapheme cluster: a character as the user sees it.
#[derive(Clone, Copy)]
struct Cell<'a> {
    text: &'a str,
    style: TextStyle,
    width: usize,
}

fn cells(line: &[Span]) -> impl Iterator<Item = Cell<'_>> {
    line.iter().flat_map(|span| {
        span.text.graphemes(true).map(move |text| Cell { text, style: span.style, width: text.width() })
    })
}

fn push(line: &mut StyledLine, cell: Cell) {
    match line.last_mut() {
        Some(last) if last.style == cell.style => last.text.push_str(cell.text),
        _ => line.push(Span { text: cell.text.to_string(), style: cell.style }),
    }
}

/// Wraps text at spaces, at newlines and next to wide characters (East Asian text and emoji).
/// Drops spaces at both ends of a line and merges runs of spaces. Splits words wider than `columns`.
///
/// The `textwrap` crate is not used here, because it wraps strings, not spans with styles.
pub fn wrap(text: &[Span], columns: usize) -> Vec<StyledLine> {
    let columns = columns.max(1);
    let mut wrapper = Wrapper { columns, lines: Vec::new(), line: Vec::new(), width: 0, space: None };
    let mut word: Vec<Cell> = Vec::new();
    for cell in cells(text) {
        match cell.text {
            "\n" => {
                wrapper.push_word(&mut word);
                wrapper.end_line();
            }
            " " => {
                wrapper.push_word(&mut word);
                wrapper.space = Some(cell);
            }
            _ if cell.width > 1 => {
                wrapper.push_word(&mut word);
                wrapper.push_word(&mut vec![cell]);
            }
            _ => word.push(cell),
        }
    }
    wrapper.push_word(&mut word);
    if !wrapper.line.is_empty() {
        wrapper.end_line();
    }
    wrapper.lines
}

struct Wrapper<'a> {
    columns: usize,
    lines: Vec<StyledLine>,
    line: StyledLine,
    width: usize,
    /// The space before the next word, which is dropped if the word starts a new line.
    space: Option<Cell<'a>>,
}

impl<'a> Wrapper<'a> {
    /// Appends a word, on a new line if needed. Leaves `word` empty.
    fn push_word(&mut self, word: &mut Vec<Cell<'a>>) {
        if word.is_empty() {
            return;
        }
        let width: usize = word.iter().map(|cell| cell.width).sum();
        let space = usize::from(self.space.is_some() && self.width > 0);
        if self.width > 0 && self.width + space + width > self.columns {
            self.end_line();
        } else if let Some(cell) = self.space.take()
            && space == 1
        {
            push(&mut self.line, cell);
            self.width += 1;
        }
        self.space = None;
        for cell in word.drain(..) {
            if self.width > 0 && self.width + cell.width > self.columns {
                self.end_line();
            }
            push(&mut self.line, cell);
            self.width += cell.width;
        }
    }

    fn end_line(&mut self) {
        self.lines.push(std::mem::take(&mut self.line));
        (self.width, self.space) = (0, None);
    }
}

/// Splits a line into rows of at most `columns` columns, even inside words, as a terminal does.
pub fn rows(line: &[Span], columns: usize) -> Vec<StyledLine> {
    let mut rows = vec![StyledLine::new()];
    let mut width = 0;
    for cell in cells(line) {
        if width > 0 && width + cell.width > columns.max(1) {
            rows.push(StyledLine::new());
            width = 0;
        }
        width += cell.width;
        let last = rows.len() - 1;
        push(&mut rows[last], cell);
    }
    rows
}
