//! Code in the terminal's own colors, line by line.

use std::sync::LazyLock;

use syntect::parsing::{ParseState, Scope, ScopeStack, SyntaxSet};

use super::text::{Line, Span, Style};

/// Unpacked when the first block of code comes: some ten milliseconds that other answers do not pay.
static SYNTAXES: LazyLock<SyntaxSet> = LazyLock::new(SyntaxSet::load_defaults_newlines);

/// What is colored how; the innermost scope that is listed here decides.
static COLORS: LazyLock<Vec<(Scope, Style)>> = LazyLock::new(|| {
    let (green, yellow, blue, magenta, cyan) =
        (Style::color(2), Style::color(3), Style::color(4), Style::color(5), Style::color(6));
    [
        ("comment", Style::DIM),
        ("punctuation.definition.comment", Style::DIM),
        ("string", green),
        ("constant", cyan),
        ("entity.name.function", blue),
        ("support.function", blue),
        ("variable.function", blue),
        ("entity.name", yellow),
        ("support", yellow),
        ("storage.type", magenta),
        ("storage", magenta),
        ("keyword.operator", Style::default()),
        ("keyword", magenta),
    ]
    .into_iter()
    .filter_map(|(name, style)| Some((Scope::new(name).ok()?, style)))
    .collect()
});

/// Lines longer than this stay plain: grammars are regular expressions, and a minified file would take seconds.
const LONGEST: usize = 1000;

/// Colors the lines of one block of code, in their order.
#[derive(Clone)]
pub struct Highlighter {
    /// None for languages that there is no grammar for.
    state: Option<(ParseState, ScopeStack)>,
}

impl Highlighter {
    /// `language` is what stands after a fence, such as `rust` or `py`.
    pub fn new(language: &str) -> Self {
        let name = language.split([' ', ',', '{']).next().unwrap_or("");
        let syntax = if name.is_empty() { None } else { SYNTAXES.find_syntax_by_token(name) };
        Self { state: syntax.map(|syntax| (ParseState::new(syntax), ScopeStack::new())) }
    }

    /// One line, given without its line break.
    pub fn line(&mut self, text: &str) -> Line {
        // What the terminal must not see is dropped first, so that positions in the text stay true.
        let text = crate::text::printable(text).replace('\n', "");
        let colored = match &mut self.state {
            Some((parse, scopes)) if text.len() <= LONGEST => colored(parse, scopes, &text),
            _ => None,
        };
        colored.unwrap_or_else(|| vec![Span::plain(&text)])
    }
}

fn colored(parse: &mut ParseState, scopes: &mut ScopeStack, text: &str) -> Option<Line> {
    let with_break = format!("{text}\n");
    let mut line = Line::new();
    let mut from = 0;
    for (at, change) in parse.parse_line(&with_break, &SYNTAXES).ok()? {
        line.extend(span(text, from, at, scopes));
        from = at.min(text.len());
        scopes.apply(&change).ok()?;
    }
    line.extend(span(text, from, text.len(), scopes));
    Some(line)
}

fn span(text: &str, from: usize, to: usize, scopes: &ScopeStack) -> Option<Span> {
    let part = text.get(from..to.min(text.len())).filter(|part| !part.is_empty())?;
    let listed = |scope: &Scope| COLORS.iter().find(|(name, _)| name.is_prefix_of(*scope)).map(|(_, style)| *style);
    Some(Span::new(part, scopes.as_slice().iter().rev().find_map(listed).unwrap_or_default()))
}
