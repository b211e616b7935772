//! Styled text: what it looks like, how wide it is, where it breaks.

use unicode_segmentation::UnicodeSegmentation;
use unicode_width::UnicodeWidthStr;

use crate::text::printable;

/// How a span looks. Colors are the terminal's own sixteen, so that they suit its background.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Style {
    pub bold: bool,
    pub dim: bool,
    pub italic: bool,
    pub underline: bool,
    pub strike: bool,
    /// 0 to 7: black, red, green, yellow, blue, magenta, cyan, white.
    pub color: Option<u8>,
}

impl Style {
    pub const DIM: Style =
        Style { bold: false, dim: true, italic: false, underline: false, strike: false, color: None };

    pub fn color(number: u8) -> Style {
        Style { color: Some(number), ..Style::default() }
    }

    fn codes(self) -> Vec<String> {
        let switches = [(self.bold, 1), (self.dim, 2), (self.italic, 3), (self.underline, 4), (self.strike, 9)];
        let mut codes: Vec<String> = switches.iter().filter(|(on, _)| *on).map(|(_, code)| code.to_string()).collect();
        codes.extend(self.color.map(|color| (30 + color).to_string()));
        codes
    }
}

/// Text of one look. Only what may reach a terminal gets in: see [`Span::new`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    text: String,
    style: Style,
}

impl Span {
    /// Control characters are dropped here, the last place before the terminal: Markdown can spell them as entities
    /// (`&#27;`), which a filter on the source would not see. Tabs become spaces: nobody knows how wide they are.
    pub fn new(text: &str, style: Style) -> Span {
        Span { text: printable(text).replace('\t', "    "), style }
    }

    pub fn plain(text: &str) -> Span {
        Span::new(text, Style::default())
    }

    pub fn text(&self) -> &str {
        &self.text
    }
}

/// One line, which may be wider than the window.
pub type Line = Vec<Span>;

/// Columns that a line takes.
pub fn width(line: &[Span]) -> usize {
    line.iter().map(|span| span.text.width()).sum()
}

/// A line as it is written to a terminal.
pub fn paint(line: &[Span]) -> String {
    let mut painted = String::new();
    for span in line {
        let codes = span.style.codes();
        if codes.is_empty() || span.text.is_empty() {
            painted.push_str(&span.text);
        } else {
            painted.push_str(&format!("\x1b[{}m{}\x1b[0m", codes.join(";"), span.text));
        }
    }
    painted
}

/// One character as a person sees it.
#[derive(Clone, Copy)]
struct Cell<'a> {
    text: &'a str,
    style: Style,
    width: usize,
}

fn cells(line: &[Span]) -> impl Iterator<Item = Cell<'_>> {
    line.iter().flat_map(|span| {
        span.text.graphemes(true).map(move |text| Cell { text, style: span.style, width: text.width() })
    })
}

fn push(line: &mut Line, cell: Cell) {
    match line.last_mut() {
        Some(last) if last.style == cell.style => last.text.push_str(cell.text),
        _ => line.push(Span { text: cell.text.to_string(), style: cell.style }),
    }
}

/// Breaks text at spaces, at line breaks, beside wide (East Asian) characters, and inside of words that are wider than
/// `columns`.
pub fn wrap(text: &[Span], columns: usize) -> Vec<Line> {
    let columns = columns.max(1);
    let mut wrapped = Wrapped { columns, lines: Vec::new(), line: Vec::new(), width: 0, space: None };
    let mut word: Vec<Cell> = Vec::new();
    for cell in cells(text) {
        match cell.text {
            "\n" => {
                wrapped.word(&mut word);
                wrapped.end_line();
            }
            " " => {
                wrapped.word(&mut word);
                wrapped.space = Some(cell);
            }
            _ if cell.width > 1 => {
                wrapped.word(&mut word);
                wrapped.word(&mut vec![cell]);
            }
            _ => word.push(cell),
        }
    }
    wrapped.word(&mut word);
    if !wrapped.line.is_empty() {
        wrapped.end_line();
    }
    wrapped.lines
}

struct Wrapped<'a> {
    columns: usize,
    lines: Vec<Line>,
    line: Line,
    width: usize,
    /// Between the last word and the next, if they stay on one line.
    space: Option<Cell<'a>>,
}

impl<'a> Wrapped<'a> {
    /// Takes `word`, which is left empty.
    fn word(&mut self, word: &mut Vec<Cell<'a>>) {
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

/// The rows that a line takes in a window: cut wherever it is full, as a terminal does.
pub fn rows(line: &[Span], columns: usize) -> Vec<Line> {
    let mut rows = vec![Line::new()];
    let mut width = 0;
    for cell in cells(line) {
        if width > 0 && width + cell.width > columns.max(1) {
            rows.push(Line::new());
            width = 0;
        }
        width += cell.width;
        let last = rows.len() - 1;
        push(&mut rows[last], cell);
    }
    rows
}
