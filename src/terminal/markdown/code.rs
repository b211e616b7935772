//! Line-by-line syntax highlighting in the terminal's own colors.

use std::sync::LazyLock;

use syntect::parsing::{ParseState, Scope, ScopeStack, SyntaxSet};

use super::super::styled_text::{Span, StyledLine, TextStyle};

/// The grammars of all supported languages. Unpacking takes milliseconds, so the grammars are unpacked on first use.
static SYNTAXES: LazyLock<SyntaxSet> = LazyLock::new(SyntaxSet::load_defaults_newlines);

/// The styles of scopes and their subscopes. If several entries match a scope, the first one applies.
static COLORS: LazyLock<Vec<(Scope, TextStyle)>> = LazyLock::new(|| {
    let (green, yellow, blue, magenta, cyan) =
        (TextStyle::color(2), TextStyle::color(3), TextStyle::color(4), TextStyle::color(5), TextStyle::color(6));
    [
        ("comment", TextStyle::DIM),
        ("punctuation.definition.comment", TextStyle::DIM),
        ("string", green),
        ("constant", cyan),
        ("entity.name.function", blue),
        ("support.function", blue),
        ("variable.function", blue),
        ("entity.name", yellow),
        ("support", yellow),
        ("storage.type", magenta),
        ("storage", magenta),
        ("keyword.operator", TextStyle::default()),
        ("keyword", magenta),
    ]
    .into_iter()
    .filter_map(|(name, style)| Some((Scope::new(name).ok()?, style)))
    .collect()
});

/// The longest line to highlight, in bytes. Highlighting a long line of minified code can take seconds.
const MAX_LINE_BYTES: usize = 1000;

/// A highlighter for one code block. The caller must pass the lines in order.
#[derive(Clone)]
pub struct Highlighter {
    /// The parser and scope state. `None` if the language is not given or has no grammar.
    state: Option<(ParseState, ScopeStack)>,
}

impl Highlighter {
    /// Creates a highlighter for the language of a code fence, such as `rust` or `py`.
    pub fn new(language: &str) -> Self {
        let name = language.split([' ', ',', '{']).next().unwrap_or("");
        let syntax = if name.is_empty() { None } else { SYNTAXES.find_syntax_by_token(name) };
        Self { state: syntax.map(|syntax| (ParseState::new(syntax), ScopeStack::new())) }
    }

    /// Highlights the next line, which must not include its line break.
    /// Lines of unknown languages and lines over `MAX_LINE_BYTES` stay plain.
    pub fn highlight(&mut self, text: &str) -> StyledLine {
        // Drop control characters before parsing, so that the parser's offsets match the displayed text.
        let text = crate::text::without_controls(text).replace('\n', "");
        let highlighted = match &mut self.state {
            Some((parse, scopes)) if text.len() <= MAX_LINE_BYTES => highlight(parse, scopes, &text),
            _ => None,
        };
        highlighted.unwrap_or_else(|| vec![Span::plain(&text)])
    }
}

fn highlight(parse: &mut ParseState, scopes: &mut ScopeStack, text: &str) -> Option<StyledLine> {
    let line_with_break = format!("{text}\n");
    let mut line = StyledLine::new();
    let mut start = 0;
    for (end, change) in parse.parse_line(&line_with_break, &SYNTAXES).ok()? {
        line.extend(span(text, start, end, scopes));
        start = end.min(text.len());
        scopes.apply(&change).ok()?;
    }
    line.extend(span(text, start, text.len(), scopes));
    Some(line)
}

/// Returns bytes `start..end` of `text` in the style of the innermost scope that matches an entry of [`COLORS`].
/// Returns `None` if the range is empty.
fn span(text: &str, start: usize, end: usize, scopes: &ScopeStack) -> Option<Span> {
    let part = text.get(start..end.min(text.len())).filter(|part| !part.is_empty())?;
    let style_of = |scope: &Scope| COLORS.iter().find(|(name, _)| name.is_prefix_of(*scope)).map(|(_, style)| *style);
    Some(Span::new(part, scopes.as_slice().iter().rev().find_map(style_of).unwrap_or_default()))
}
