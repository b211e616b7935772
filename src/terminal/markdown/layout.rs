//! Lays out Markdown as wrapped, styled lines.

use std::iter::Peekable;

use pulldown_cmark::{CodeBlockKind, Event, HeadingLevel, Options, Parser, Tag};

use super::super::styled_text::{Span, StyledLine, TextStyle, wrap};
use super::code::Highlighter;
use super::table;

/// The maximum nesting depth of blocks and inline styles. Deeper levels are flattened,
/// so that ten thousand `>` in a row cannot overflow the stack.
const MAX_DEPTH: usize = 16;

/// Returns the supported CommonMark extensions.
pub fn options() -> Options {
    Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH | Options::ENABLE_TASKLISTS
}

/// Lays out a piece of Markdown.
///
/// If the piece starts with the continuation of a numbered list, `number` is the number of the next item.
pub fn layout(source: &str, columns: usize, number: Option<u64>) -> Vec<StyledLine> {
    let mut layout = Layout { events: Parser::new_ext(source, options()).peekable(), number, depth: 0 };
    let mut lines = layout.blocks(columns, Gap::Blank);
    // If events remain, `blocks` stopped at an end event without a start event. Skip it, and show the remaining text.
    while layout.events.peek().is_some() {
        layout.events.next();
        lines.extend(layout.blocks(columns, Gap::Blank));
    }
    lines
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Gap {
    Blank,
    /// No blank line before a nested list. Other blocks of a list item still have a blank line before them.
    ///
    /// Loose lists are shown like tight lists, because only later items may reveal that a list is loose.
    None,
}

struct Layout<'a> {
    events: Peekable<Parser<'a>>,
    number: Option<u64>,
    depth: usize,
}

impl<'a> Layout<'a> {
    /// Lays out blocks up to the end event of their container, without consuming that event.
    fn blocks(&mut self, columns: usize, gap: Gap) -> Vec<StyledLine> {
        let mut lines: Vec<StyledLine> = Vec::new();
        // The number of open containers that are nested too deeply and are therefore flattened.
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
            if self.depth >= MAX_DEPTH && matches!(event, Event::Start(Tag::BlockQuote(_) | Tag::List(_) | Tag::Item)) {
                skipped += 1;
                self.events.next();
                continue;
            }
            let is_list = matches!(event, Event::Start(Tag::List(_)));
            let block = self.block(columns);
            let is_tight = is_list && gap == Gap::None;
            if !lines.is_empty() && !block.is_empty() && !is_tight {
                lines.push(StyledLine::new());
            }
            lines.extend(block);
        }
        lines
    }

    fn block(&mut self, columns: usize) -> Vec<StyledLine> {
        let Some(Event::Start(tag)) = self.events.next_if(|event| starts_block(event)) else {
            if self.events.next_if(|event| matches!(event, Event::Rule)).is_some() {
                return vec![vec![Span::new(&"─".repeat(columns.min(40)), TextStyle::DIM)]];
            }
            // The next events are text outside a paragraph, such as the text of an item in a tight list.
            let text = self.inlines(TextStyle::default());
            return wrap(&text, columns);
        };
        self.depth += 1;
        let lines = match tag {
            Tag::Heading { level, .. } => {
                let style = TextStyle {
                    bold: true,
                    underline: level == HeadingLevel::H1,
                    italic: level > HeadingLevel::H2,
                    ..TextStyle::default()
                };
                wrap(&self.inlines(style), columns)
            }
            Tag::BlockQuote(_) => {
                let inner = self.blocks(columns.saturating_sub(2), Gap::Blank);
                inner.into_iter().map(|line| prefixed(Span::new("│ ", TextStyle::DIM), line)).collect()
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
            _ => wrap(&self.inlines(TextStyle::default()), columns),
        };
        self.depth -= 1;
        self.skip_to_end();
        lines
    }

    /// Consumes events up to and including the end event of the innermost open tag.
    fn skip_to_end(&mut self) {
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

    fn list(&mut self, start: Option<u64>, columns: usize) -> Vec<StyledLine> {
        // Only the first list of a piece can continue a list from an earlier piece.
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
            self.skip_to_end();
            if inner.is_empty() {
                lines.push(vec![Span::new(marker.trim_end(), TextStyle::DIM)]);
            }
            for (index, line) in inner.into_iter().enumerate() {
                lines.push(match index {
                    0 => prefixed(Span::new(&marker, TextStyle::DIM), line),
                    _ if line.is_empty() => line,
                    _ => prefixed(Span::plain(&" ".repeat(indent)), line),
                });
            }
        }
        lines
    }

    fn code(&mut self, kind: CodeBlockKind) -> Vec<StyledLine> {
        let text = self.text();
        let CodeBlockKind::Fenced(language) = kind else {
            return text.trim_end().lines().map(|line| vec![Span::plain(&format!("    {line}"))]).collect();
        };
        let mut highlighter = Highlighter::new(&language);
        let mut lines = vec![fence(&language)];
        lines.extend(text.lines().map(|line| highlighter.highlight(line)));
        lines.push(fence(""));
        lines
    }

    /// Returns the cells of a table, row by row, starting with the header.
    fn rows(&mut self) -> Vec<Vec<StyledLine>> {
        let mut rows = Vec::new();
        while let Some(Event::Start(row)) =
            self.events.next_if(|event| matches!(event, Event::Start(Tag::TableHead | Tag::TableRow)))
        {
            let style = TextStyle { bold: row == Tag::TableHead, ..TextStyle::default() };
            let mut cells = Vec::new();
            while self.events.next_if(|event| matches!(event, Event::Start(Tag::TableCell))).is_some() {
                cells.push(self.inlines(style));
                self.skip_to_end();
            }
            self.skip_to_end();
            rows.push(cells);
        }
        rows
    }

    /// Returns the text of a code or HTML block.
    fn text(&mut self) -> String {
        let mut text = String::new();
        while let Some(event) = self.events.next_if(|event| !matches!(event, Event::End(_) | Event::Start(_))) {
            if let Event::Text(part) | Event::Html(part) | Event::InlineHtml(part) | Event::Code(part) = event {
                text.push_str(&part);
            }
        }
        text
    }

    /// Returns the inline text up to the next block or the end of the container.
    fn inlines(&mut self, style: TextStyle) -> StyledLine {
        let mut spans = StyledLine::new();
        let mut skipped = 0;
        while let Some(event) = self.events.peek() {
            if starts_block(event) || matches!(event, Event::Rule) || (skipped == 0 && matches!(event, Event::End(_))) {
                break;
            }
            let Some(event) = self.events.next() else { break };
            match event {
                Event::Start(_) if self.depth >= MAX_DEPTH => skipped += 1,
                Event::End(_) => skipped -= 1,
                Event::Start(tag) => {
                    self.depth += 1;
                    spans.extend(self.styled_inlines(tag, style));
                    self.depth -= 1;
                    self.skip_to_end();
                }
                Event::Code(text) => {
                    spans.push(Span::new(&text.replace('\n', " "), TextStyle { color: Some(6), ..style }))
                }
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

    /// Returns the text inside an inline tag, in the style of that tag.
    fn styled_inlines(&mut self, tag: Tag<'a>, style: TextStyle) -> StyledLine {
        match tag {
            Tag::Emphasis => self.inlines(TextStyle { italic: true, ..style }),
            Tag::Strong => self.inlines(TextStyle { bold: true, ..style }),
            Tag::Strikethrough => self.inlines(TextStyle { strike: true, ..style }),
            Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. } => {
                let mut text = self.inlines(TextStyle { underline: true, ..style });
                // Show the URL of a link unless the text is the URL, because the text alone may be misleading.
                let shown: String = text.iter().map(Span::text).collect();
                if !dest_url.is_empty() && shown != *dest_url {
                    text.push(Span::new(&format!(" ({dest_url})"), TextStyle { dim: true, ..style }));
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

/// Returns the line above a code block: three backticks and the language.
/// For the line below the block, `language` is empty.
pub fn fence(language: &str) -> StyledLine {
    vec![Span::new(&format!("```{}", language.replace('\n', " ")), TextStyle::DIM)]
}

fn prefixed(first: Span, line: StyledLine) -> StyledLine {
    let mut all = vec![first];
    all.extend(line);
    all
}
