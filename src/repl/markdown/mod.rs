//! Markdown as it streams in: which lines are finished, never to change again, and what the open block looks like so far.
//!
//! What is finished depends on the lines of the text alone, not on the pieces that they came in: a text that comes byte by
//! byte ends up as one that comes at once.

mod code;
mod layout;
mod table;
pub mod text;

use std::time::{Duration, Instant};

use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag};

use code::Highlighter;
use text::{Line, Span};

/// A block longer than this is finished where it stands. Its Markdown is read anew with each line, which must not take
/// longer than the model takes to write it.
const LONGEST: usize = 16 * 1024;

/// Coloring a line of code takes a quarter of a millisecond, so an open one is not colored for each frame.
const RECOLOR: Duration = Duration::from_millis(60);

/// Markdown on its way to a window.
pub struct Markdown {
    columns: usize,
    /// Whole lines of the open block.
    open: String,
    /// The line that is still being written.
    line: String,
    code: Option<Code>,
    /// The open block is a list whose first items are finished; for a numbered one, the number of the next.
    list: Option<Option<u64>>,
    /// Something was finished: the next block keeps its distance.
    begun: bool,
}

/// A fenced block of code that is open. Its lines are finished as they come.
struct Code {
    fence: u8,
    length: usize,
    indent: usize,
    highlighter: Highlighter,
    /// The open line as it was last colored, and when.
    colored: Option<(String, Line, Instant)>,
}

impl Markdown {
    /// For a window with this many columns.
    pub fn new(columns: usize) -> Self {
        Self { columns, open: String::new(), line: String::new(), code: None, list: None, begun: false }
    }

    /// From now on the window is this wide.
    pub fn resize(&mut self, columns: usize) {
        self.columns = columns;
    }

    /// Takes more of the text. Returns the lines that this finished.
    pub fn push(&mut self, text: &str) -> Vec<Line> {
        let mut finished = Vec::new();
        for c in text.chars() {
            self.line.push(c);
            if c == '\n' || self.line.len() >= LONGEST {
                self.end_line(&mut finished);
            }
        }
        finished
    }

    /// The open block as far as it has come.
    pub fn open(&mut self) -> Vec<Line> {
        if let Some(code) = &mut self.code {
            let closing = self.line.trim_start().bytes().all(|byte| byte == code.fence);
            return if closing { Vec::new() } else { vec![code.open_line(&self.line)] };
        }
        let source = format!("{}{}", self.open, shown_part(&self.line));
        // Rows of a table look like text until the line below its header has come.
        if source.trim_start().starts_with('|')
            && matches!(Parser::new_ext(&source, layout::options()).next(), Some(Event::Start(Tag::Paragraph)))
        {
            return Vec::new();
        }
        self.laid_out(&with_marks_closed(&source))
    }

    /// Ends the text. Returns what was open.
    pub fn finish(&mut self) -> Vec<Line> {
        let mut finished = Vec::new();
        if !self.line.is_empty() {
            self.end_line(&mut finished);
        }
        if self.code.take().is_some() {
            finished.push(layout::fence(""));
        }
        self.finish_block(&mut finished);
        finished
    }

    fn end_line(&mut self, finished: &mut Vec<Line>) {
        let line = std::mem::take(&mut self.line);
        if let Some(code) = &mut self.code {
            if code.ends_at(&line) {
                self.code = None;
                finished.push(layout::fence(""));
            } else {
                finished.push(code.highlighter.line(unindented(line.trim_end_matches(['\n', '\r']), code.indent)));
            }
            return;
        }
        self.open.push_str(&line);
        if !line.ends_with('\n') {
            self.open.push('\n');
        }
        self.settle(finished);
    }

    /// Finishes all but the last block of what is open, and all but the last item if that is a list.
    fn settle(&mut self, finished: &mut Vec<Line>) {
        let blocks = outline(&self.open);
        let mut taken = 0;
        for next in blocks.iter().skip(1) {
            let rest = self.open.split_off(next.start - taken);
            self.finish_block(finished);
            self.open = rest;
            taken = next.start;
        }
        match blocks.into_iter().next_back().map(|block| block.kind) {
            Some(Kind::List { number, items }) if items.len() > 1 => {
                let first = self.list.flatten().or(number);
                let rest = self.open.split_off(items[items.len() - 1] - taken);
                self.finish_block(finished);
                self.open = rest;
                self.list = Some(first.map(|first| first.saturating_add(items.len() as u64 - 1)));
            }
            Some(Kind::Fenced { language }) => self.open_code(&language, finished),
            _ if self.open.len() >= LONGEST => self.finish_block(finished),
            _ => {}
        }
    }

    fn finish_block(&mut self, finished: &mut Vec<Line>) {
        let lines = self.laid_out(&self.open);
        self.begun |= !lines.is_empty();
        finished.extend(lines);
        self.open.clear();
        self.list = None;
    }

    fn open_code(&mut self, language: &str, finished: &mut Vec<Line>) {
        let opening = self.open.trim_start_matches(['\n', '\r']);
        let fence = opening.trim_start();
        let first = fence.as_bytes().first().copied().unwrap_or(b'`');
        self.code = Some(Code {
            fence: first,
            length: fence.bytes().take_while(|byte| *byte == first).count(),
            indent: opening.len() - fence.len(),
            highlighter: Highlighter::new(language),
            colored: None,
        });
        if self.begun {
            finished.push(Line::new());
        }
        finished.push(layout::fence(language));
        self.begun = true;
        self.open.clear();
    }

    /// What is open, or a part of it, as lines, with the blank one that sets it off from what came before.
    fn laid_out(&self, source: &str) -> Vec<Line> {
        let mut lines = layout::layout(source, self.columns, self.list.flatten());
        if !lines.is_empty() && self.begun && self.list.is_none() {
            lines.insert(0, Line::new());
        }
        lines
    }
}

impl Code {
    /// A line that is being written. What came since it was last colored may be plain for a moment.
    fn open_line(&mut self, line: &str) -> Line {
        let line = unindented(line, self.indent);
        if let Some((before, colored, when)) = &self.colored
            && let Some(more) = line.strip_prefix(before.as_str())
            && when.elapsed() < RECOLOR
        {
            let mut shown = colored.clone();
            if !more.is_empty() {
                shown.push(Span::plain(&crate::text::printable(more)));
            }
            return shown;
        }
        let colored = self.highlighter.clone().line(line);
        self.colored = Some((line.to_string(), colored.clone(), Instant::now()));
        colored
    }

    fn ends_at(&self, line: &str) -> bool {
        let line = line.trim_end();
        let fence = line.trim_start_matches(' ');
        line.len() - fence.len() <= 3 && fence.len() >= self.length && fence.bytes().all(|byte| byte == self.fence)
    }
}

fn unindented(line: &str, indent: usize) -> &str {
    let spaces = line.bytes().take_while(|byte| *byte == b' ').count();
    &line[spaces.min(indent)..]
}

/// A block that is in no other.
struct Block {
    /// Where its first line starts.
    start: usize,
    kind: Kind,
}

enum Kind {
    List {
        number: Option<u64>,
        /// Where the first line of each item starts.
        items: Vec<usize>,
    },
    Fenced {
        language: String,
    },
    Other,
}

/// The outermost blocks of a text.
fn outline(source: &str) -> Vec<Block> {
    let start_of_line = |at: usize| source[..at].rfind('\n').map_or(0, |end| end + 1);
    let mut blocks: Vec<Block> = Vec::new();
    let mut depth = 0;
    for (event, range) in Parser::new_ext(source, layout::options()).into_offset_iter() {
        let start = start_of_line(range.start);
        match event {
            Event::Start(tag) => {
                match (depth, tag) {
                    (0, Tag::List(number)) => {
                        blocks.push(Block { start, kind: Kind::List { number, items: Vec::new() } });
                    }
                    (0, Tag::CodeBlock(CodeBlockKind::Fenced(language))) => {
                        blocks.push(Block { start, kind: Kind::Fenced { language: language.to_string() } });
                    }
                    (0, _) => blocks.push(Block { start, kind: Kind::Other }),
                    (1, Tag::Item) => {
                        if let Some(Block { kind: Kind::List { items, .. }, .. }) = blocks.last_mut() {
                            items.push(start);
                        }
                    }
                    _ => {}
                }
                depth += 1;
            }
            Event::End(_) => depth -= 1,
            Event::Rule if depth == 0 => blocks.push(Block { start, kind: Kind::Other }),
            _ => {}
        }
    }
    blocks
}

/// A line that is being written, or nothing while it could become anything: `-` may start an item, underline a heading,
/// or be a rule.
fn shown_part(line: &str) -> &str {
    let undecided = |c: char| "-=*_#>`~|+:. ".contains(c) || c.is_ascii_digit();
    if line.chars().all(undecided) { "" } else { line }
}

/// The text with marks closed that are open at its end, so that `**bo` looks bold before the rest of it comes.
fn with_marks_closed(source: &str) -> String {
    let fences = source.lines().filter(|line| line.trim_start().starts_with("```")).count();
    if fences % 2 == 1 {
        return source.to_string();
    }
    let paragraph = source.rfind("\n\n").map_or(0, |at| at + 2);
    let bytes = source.as_bytes();
    let run = |from: usize, mark: u8| bytes[from..].iter().take_while(|byte| **byte == mark).count();
    let (mut code, mut bold) = (None, false);
    let mut at = paragraph;
    while at < bytes.len() {
        let mut step = 1;
        match bytes[at] {
            b'\\' if code.is_none() => step = 2,
            b'`' => {
                step = run(at, b'`');
                code = match code {
                    None => Some(step),
                    Some(length) if length == step => None,
                    open => open,
                };
            }
            b'*' if code.is_none() => {
                step = run(at, b'*');
                bold ^= step == 2;
            }
            _ => {}
        }
        at += step;
    }
    let mut closed = source.to_string();
    if let Some(length) = code {
        let marks = "`".repeat(length);
        match closed.strip_suffix(&marks) {
            Some(before) => closed.truncate(before.len()),
            None => closed.push_str(&marks),
        }
    }
    if bold {
        closed.truncate(closed.trim_end().len());
        match closed.strip_suffix("**") {
            Some(before) => closed.truncate(before.len()),
            None => {
                closed.truncate(closed.trim_end_matches('*').len());
                closed.push_str("**");
            }
        }
    }
    closed
}
