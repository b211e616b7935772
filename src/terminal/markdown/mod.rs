//! Formats Markdown while it streams. Finished lines never change. The last block is open: it may still change.
//!
//! The finished lines do not depend on how the streamed text is split into pieces.

mod code;
mod layout;
mod table;

use std::time::{Duration, Instant};

use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag};

use super::styled_text::{Span, StyledLine};
use code::Highlighter;

/// The maximum length of an open block in bytes. A longer block is finished early.
///
/// The open block is parsed again after each new line, and parsing must stay faster than generation.
const MAX_BLOCK_BYTES: usize = 16 * 1024;

/// The minimum time between two passes that highlight the same incomplete line of code.
/// Each pass highlights the whole line again.
const HIGHLIGHT_INTERVAL: Duration = Duration::from_millis(60);

/// A streaming Markdown formatter.
pub struct Markdown {
    columns: usize,
    /// Complete lines of the open block.
    open: String,
    /// The incomplete last line.
    line: String,
    code: Option<OpenCode>,
    /// `Some` if the open block is a list whose first items are finished.
    /// For a numbered list, contains the number of the next list item.
    list: Option<Option<u64>>,
    /// Whether any line is finished. If so, the next block needs a blank line before it.
    has_content: bool,
}

/// An open fenced code block. Each line is finished as soon as it is complete.
struct OpenCode {
    fence: u8,
    length: usize,
    indent: usize,
    highlighter: Highlighter,
    /// The most recent highlighting of the incomplete line: its text, the styled result, and the time.
    highlighted: Option<(String, StyledLine, Instant)>,
}

impl Markdown {
    /// Creates a formatter that wraps text to `columns`.
    pub fn new(columns: usize) -> Self {
        Self { columns, open: String::new(), line: String::new(), code: None, list: None, has_content: false }
    }

    /// Sets the width to which later lines are wrapped.
    pub fn resize(&mut self, columns: usize) {
        self.columns = columns;
    }

    /// Appends text. Returns the lines that this text finished.
    pub fn push(&mut self, text: &str) -> Vec<StyledLine> {
        let mut finished = Vec::new();
        for c in text.chars() {
            self.line.push(c);
            if c == '\n' || self.line.len() >= MAX_BLOCK_BYTES {
                self.end_line(&mut finished);
            }
        }
        finished
    }

    /// Lays out the part of the open block that has arrived so far, except text whose meaning is still ambiguous.
    /// In a code block, only the incomplete line is open.
    pub fn open(&mut self) -> Vec<StyledLine> {
        if let Some(code) = &mut self.code {
            let closing = self.line.trim_start().bytes().all(|byte| byte == code.fence);
            return if closing { Vec::new() } else { vec![code.open_line(&self.line)] };
        }
        let source = format!("{}{}", self.open, shown_part(&self.line));
        // A table header looks like a paragraph until the line below it arrives, so do not show the header yet.
        if source.trim_start().starts_with('|')
            && matches!(Parser::new_ext(&source, layout::options()).next(), Some(Event::Start(Tag::Paragraph)))
        {
            return Vec::new();
        }
        self.lay_out(&with_marks_closed(&source))
    }

    /// Ends the text and returns the lines of the open block.
    pub fn finish(&mut self) -> Vec<StyledLine> {
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

    fn end_line(&mut self, finished: &mut Vec<StyledLine>) {
        let line = std::mem::take(&mut self.line);
        if let Some(code) = &mut self.code {
            if code.is_closed_by(&line) {
                self.code = None;
                finished.push(layout::fence(""));
            } else {
                finished.push(code.highlighter.highlight(unindented(line.trim_end_matches(['\n', '\r']), code.indent)));
            }
            return;
        }
        self.open.push_str(&line);
        if !line.ends_with('\n') {
            self.open.push('\n');
        }
        self.finish_blocks(finished);
    }

    /// Finishes all blocks in `open` except the last block.
    /// Also finishes a part of the last block: all items of a list except the last item, or the opening fence of a code
    /// block. Finishes any other block of at least [`MAX_BLOCK_BYTES`].
    fn finish_blocks(&mut self, finished: &mut Vec<StyledLine>) {
        let blocks = top_level_blocks(&self.open);
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
            _ if self.open.len() >= MAX_BLOCK_BYTES => self.finish_block(finished),
            _ => {}
        }
    }

    fn finish_block(&mut self, finished: &mut Vec<StyledLine>) {
        let lines = self.lay_out(&self.open);
        self.has_content |= !lines.is_empty();
        finished.extend(lines);
        self.open.clear();
        self.list = None;
    }

    fn open_code(&mut self, language: &str, finished: &mut Vec<StyledLine>) {
        let opening = self.open.trim_start_matches(['\n', '\r']);
        let fence = opening.trim_start();
        let first = fence.as_bytes().first().copied().unwrap_or(b'`');
        self.code = Some(OpenCode {
            fence: first,
            length: fence.bytes().take_while(|byte| *byte == first).count(),
            indent: opening.len() - fence.len(),
            highlighter: Highlighter::new(language),
            highlighted: None,
        });
        if self.has_content {
            finished.push(StyledLine::new());
        }
        finished.push(layout::fence(language));
        self.has_content = true;
        self.open.clear();
    }

    /// Lays out `source`, the open block or a part of it.
    /// Adds a blank line before the block, unless the block is the first one or continues a list.
    fn lay_out(&self, source: &str) -> Vec<StyledLine> {
        let mut lines = layout::layout(source, self.columns, self.list.flatten());
        if !lines.is_empty() && self.has_content && self.list.is_none() {
            lines.insert(0, StyledLine::new());
        }
        lines
    }
}

impl OpenCode {
    /// Returns the incomplete line, styled. The newest text may not be highlighted yet.
    fn open_line(&mut self, line: &str) -> StyledLine {
        let line = unindented(line, self.indent);
        if let Some((before, highlighted, when)) = &self.highlighted
            && let Some(more) = line.strip_prefix(before.as_str())
            && when.elapsed() < HIGHLIGHT_INTERVAL
        {
            let mut shown = highlighted.clone();
            if !more.is_empty() {
                shown.push(Span::plain(&crate::text::without_controls(more)));
            }
            return shown;
        }
        let highlighted = self.highlighter.clone().highlight(line);
        self.highlighted = Some((line.to_string(), highlighted.clone(), Instant::now()));
        highlighted
    }

    /// Returns whether a line closes this code block. The closing fence may be longer than the opening fence.
    fn is_closed_by(&self, line: &str) -> bool {
        let line = line.trim_end();
        let fence = line.trim_start_matches(' ');
        line.len() - fence.len() <= 3 && fence.len() >= self.length && fence.bytes().all(|byte| byte == self.fence)
    }
}

fn unindented(line: &str, indent: usize) -> &str {
    let spaces = line.bytes().take_while(|byte| *byte == b' ').count();
    &line[spaces.min(indent)..]
}

/// A top-level block.
struct TopLevelBlock {
    /// The byte offset of the block's first line.
    start: usize,
    kind: Kind,
}

enum Kind {
    List {
        number: Option<u64>,
        /// The byte offset of the first line of each item.
        items: Vec<usize>,
    },
    Fenced {
        language: String,
    },
    Other,
}

/// Returns the top-level blocks of a text.
fn top_level_blocks(source: &str) -> Vec<TopLevelBlock> {
    let start_of_line = |at: usize| source[..at].rfind('\n').map_or(0, |end| end + 1);
    let mut blocks: Vec<TopLevelBlock> = Vec::new();
    let mut depth = 0;
    for (event, range) in Parser::new_ext(source, layout::options()).into_offset_iter() {
        let start = start_of_line(range.start);
        match event {
            Event::Start(tag) => {
                match (depth, tag) {
                    (0, Tag::List(number)) => {
                        blocks.push(TopLevelBlock { start, kind: Kind::List { number, items: Vec::new() } });
                    }
                    (0, Tag::CodeBlock(CodeBlockKind::Fenced(language))) => {
                        blocks.push(TopLevelBlock { start, kind: Kind::Fenced { language: language.to_string() } });
                    }
                    (0, _) => blocks.push(TopLevelBlock { start, kind: Kind::Other }),
                    (1, Tag::Item) => {
                        if let Some(TopLevelBlock { kind: Kind::List { items, .. }, .. }) = blocks.last_mut() {
                            items.push(start);
                        }
                    }
                    _ => {}
                }
                depth += 1;
            }
            Event::End(_) => depth -= 1,
            Event::Rule if depth == 0 => blocks.push(TopLevelBlock { start, kind: Kind::Other }),
            _ => {}
        }
    }
    blocks
}

/// Returns an incomplete line, or an empty string while the Markdown meaning of the line is ambiguous.
///
/// For example, `-` may start a list item, underline a heading or be part of a rule.
fn shown_part(line: &str) -> &str {
    let undecided = |c: char| "-=*_#>`~|+:. ".contains(c) || c.is_ascii_digit();
    if line.chars().all(undecided) { "" } else { line }
}

/// Closes the code or bold marks that are still open in the last paragraph, so that `**bo` is bold before the closing
/// mark arrives.
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
