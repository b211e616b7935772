//! Markdown to lines: blocks one below the other, text wrapped.

use std::iter::Peekable;

use pulldown_cmark::{CodeBlockKind, Event, HeadingLevel, Options, Parser, Tag};

use super::code::Highlighter;
use super::table;
use super::text::{Line, Span, Style, wrap};

/// Deeper nesting is laid out as if it were this deep: a model may write ten thousand `>` in a row.
const DEEPEST: usize = 16;

/// What is spoken here beside CommonMark.
pub fn options() -> Options {
    Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH | Options::ENABLE_TASKLISTS
}

/// Lines of a piece of Markdown. If it begins with a list that goes on from an earlier piece, `number` is that of its
/// first item.
pub fn layout(source: &str, columns: usize, number: Option<u64>) -> Vec<Line> {
    let mut layout = Layout { events: Parser::new_ext(source, options()).peekable(), number, depth: 0 };
    let mut lines = layout.blocks(columns, Gap::Blank);
    // Never, as long as starts and ends of the parser match: what is left would be lost.
    while layout.events.peek().is_some() {
        layout.events.next();
        lines.extend(layout.blocks(columns, Gap::Blank));
    }
    lines
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Gap {
    Blank,
    /// Items of a list stand close together, however far apart they were written: whether a list is loose shows only at
    /// its end, and its first items are on the screen by then.
    None,
}

struct Layout<'a> {
    events: Peekable<Parser<'a>>,
    number: Option<u64>,
    depth: usize,
}

impl<'a> Layout<'a> {
    /// Blocks up to the end of what holds them, which is left to be taken.
    fn blocks(&mut self, columns: usize, gap: Gap) -> Vec<Line> {
        let mut lines: Vec<Line> = Vec::new();
        // Containers that were too deep to be shown.
        let mut skipped = 0;
        while let Some(event) = self.events.peek() {
            if let Event::End(_) = event {
                if skipped == 0 {
                    break;
                }
                skipped -= 1;
                self.events.next();
                continue;
            }
            if self.depth >= DEEPEST && matches!(event, Event::Start(Tag::BlockQuote(_) | Tag::List(_) | Tag::Item)) {
                skipped += 1;
                self.events.next();
                continue;
            }
            let list = matches!(event, Event::Start(Tag::List(_)));
            let block = self.block(columns);
            let close = list && gap == Gap::None;
            if !lines.is_empty() && !block.is_empty() && !close {
                lines.push(Line::new());
            }
            lines.extend(block);
        }
        lines
    }

    fn block(&mut self, columns: usize) -> Vec<Line> {
        let Some(Event::Start(tag)) = self.events.next_if(|event| starts_block(event)) else {
            if self.events.next_if(|event| matches!(event, Event::Rule)).is_some() {
                return vec![vec![Span::new(&"─".repeat(columns.min(40)), Style::DIM)]];
            }
            // Text without a paragraph around it, as in the items of a tight list.
            let text = self.inlines(Style::default());
            return wrap(&text, columns);
        };
        self.depth += 1;
        let lines = match tag {
            Tag::Heading { level, .. } => {
                let style = Style {
                    bold: true,
                    underline: level == HeadingLevel::H1,
                    italic: level > HeadingLevel::H2,
                    ..Style::default()
                };
                wrap(&self.inlines(style), columns)
            }
            Tag::BlockQuote(_) => {
                let inner = self.blocks(columns.saturating_sub(2), Gap::Blank);
                inner.into_iter().map(|line| behind(Span::new("│ ", Style::DIM), line)).collect()
            }
            Tag::CodeBlock(kind) => self.code(kind),
            Tag::List(start) => self.list(start, columns),
            Tag::Table(alignments) => {
                let rows = self.rows();
                table::layout(&rows, &alignments, columns)
            }
            Tag::HtmlBlock => {
                let text = self.text();
                text.trim_end().lines().map(|line| vec![Span::plain(line)]).collect()
            }
            _ => wrap(&self.inlines(Style::default()), columns),
        };
        self.depth -= 1;
        self.end();
        lines
    }

    /// The end of a block, and before it whatever no one expected there.
    fn end(&mut self) {
        let mut depth = 0;
        for event in self.events.by_ref() {
            match event {
                Event::Start(_) => depth += 1,
                Event::End(_) if depth == 0 => break,
                Event::End(_) => depth -= 1,
                _ => {}
            }
        }
    }

    fn list(&mut self, start: Option<u64>, columns: usize) -> Vec<Line> {
        // Only the first list of a piece goes on from before.
        let mut number = start.map(|start| self.number.take().unwrap_or(start));
        let mut lines = Vec::new();
        while self.events.next_if(|event| matches!(event, Event::Start(Tag::Item))).is_some() {
            let marker = match &mut number {
                Some(number) => {
                    let marker = format!("{number}. ");
                    *number = number.saturating_add(1);
                    marker
                }
                None => "• ".to_string(),
            };
            let indent = marker.chars().count();
            let inner = self.blocks(columns.saturating_sub(indent), Gap::None);
            self.end();
            if inner.is_empty() {
                lines.push(vec![Span::new(marker.trim_end(), Style::DIM)]);
            }
            for (index, line) in inner.into_iter().enumerate() {
                lines.push(match index {
                    0 => behind(Span::new(&marker, Style::DIM), line),
                    _ if line.is_empty() => line,
                    _ => behind(Span::plain(&" ".repeat(indent)), line),
                });
            }
        }
        lines
    }

    fn code(&mut self, kind: CodeBlockKind) -> Vec<Line> {
        let text = self.text();
        let CodeBlockKind::Fenced(language) = kind else {
            return text.trim_end().lines().map(|line| vec![Span::plain(&format!("    {line}"))]).collect();
        };
        let mut highlighter = Highlighter::new(&language);
        let mut lines = vec![fence(&language)];
        lines.extend(text.lines().map(|line| highlighter.line(line)));
        lines.push(fence(""));
        lines
    }

    /// Cells, row by row, the header's first.
    fn rows(&mut self) -> Vec<Vec<Line>> {
        let mut rows = Vec::new();
        while let Some(Event::Start(row)) =
            self.events.next_if(|event| matches!(event, Event::Start(Tag::TableHead | Tag::TableRow)))
        {
            let style = Style { bold: row == Tag::TableHead, ..Style::default() };
            let mut cells = Vec::new();
            while self.events.next_if(|event| matches!(event, Event::Start(Tag::TableCell))).is_some() {
                cells.push(self.inlines(style));
                self.end();
            }
            self.end();
            rows.push(cells);
        }
        rows
    }

    /// The bare text of code or HTML, up to its end.
    fn text(&mut self) -> String {
        let mut text = String::new();
        while let Some(event) = self.events.next_if(|event| !matches!(event, Event::End(_) | Event::Start(_))) {
            if let Event::Text(part) | Event::Html(part) | Event::InlineHtml(part) | Event::Code(part) = event {
                text.push_str(&part);
            }
        }
        text
    }

    /// Text up to the end of what holds it, or up to the next block.
    fn inlines(&mut self, style: Style) -> Line {
        let mut spans = Line::new();
        let mut skipped = 0;
        while let Some(event) = self.events.peek() {
            if starts_block(event) || matches!(event, Event::Rule) || (skipped == 0 && matches!(event, Event::End(_))) {
                break;
            }
            let Some(event) = self.events.next() else { break };
            match event {
                Event::Start(_) if self.depth >= DEEPEST => skipped += 1,
                Event::End(_) => skipped -= 1,
                Event::Start(tag) => {
                    self.depth += 1;
                    spans.extend(self.inside(tag, style));
                    self.depth -= 1;
                    self.end();
                }
                Event::Code(text) => spans.push(Span::new(&text.replace('\n', " "), Style { color: Some(6), ..style })),
                Event::SoftBreak => spans.push(Span::new(" ", style)),
                Event::HardBreak => spans.push(Span::new("\n", style)),
                Event::InlineHtml(tag) if is_line_break(&tag) => spans.push(Span::new("\n", style)),
                Event::TaskListMarker(done) => spans.push(Span::new(if done { "[x] " } else { "[ ] " }, style)),
                Event::Text(text)
                | Event::Html(text)
                | Event::InlineHtml(text)
                | Event::FootnoteReference(text)
                | Event::InlineMath(text)
                | Event::DisplayMath(text) => spans.push(Span::new(&text, style)),
                Event::Rule => {}
            }
        }
        spans
    }

    fn inside(&mut self, tag: Tag<'a>, style: Style) -> Line {
        match tag {
            Tag::Emphasis => self.inlines(Style { italic: true, ..style }),
            Tag::Strong => self.inlines(Style { bold: true, ..style }),
            Tag::Strikethrough => self.inlines(Style { strike: true, ..style }),
            Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. } => {
                let mut text = self.inlines(Style { underline: true, ..style });
                // Where a link leads is seen, always: the text may say something else.
                let shown: String = text.iter().map(Span::text).collect();
                if !dest_url.is_empty() && shown != *dest_url {
                    text.push(Span::new(&format!(" ({dest_url})"), Style { dim: true, ..style }));
                }
                text
            }
            _ => self.inlines(style),
        }
    }
}

fn starts_block(event: &Event) -> bool {
    let Event::Start(tag) = event else { return false };
    !matches!(
        tag,
        Tag::Emphasis
            | Tag::Strong
            | Tag::Strikethrough
            | Tag::Superscript
            | Tag::Subscript
            | Tag::Link { .. }
            | Tag::Image { .. }
    )
}

fn is_line_break(tag: &str) -> bool {
    let tag = tag.trim_start_matches('<').trim_end_matches('>').trim_end_matches('/').trim();
    tag.eq_ignore_ascii_case("br")
}

/// The line above or below a block of code, as it would be typed.
pub fn fence(language: &str) -> Line {
    vec![Span::new(&format!("```{}", language.replace('\n', " ")), Style::DIM)]
}

fn behind(first: Span, line: Line) -> Line {
    let mut all = vec![first];
    all.extend(line);
    all
}
