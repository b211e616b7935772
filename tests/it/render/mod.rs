//! Tests of rendered answers, on a terminal that the `vt100` crate emulates.

use std::num::NonZero;

use inferno::chat::{Channel, Delta};
use inferno::terminal::{TurnView, WindowSize};

const SIZE: WindowSize = WindowSize { rows: 24, columns: 60 };

/// Returns an emulated terminal with a scrollback buffer.
fn terminal(size: WindowSize) -> vt100::Parser {
    let (rows, columns) = cells(size);
    vt100::Parser::new(rows, columns, 5000)
}

fn cells(size: WindowSize) -> (NonZero<u16>, NonZero<u16>) {
    let cells = |count: usize| NonZero::new(count as u16).unwrap();
    (cells(size.rows), cells(size.columns))
}

/// Feeds output to the terminal. Replaces `\n` with `\r\n`, as a terminal driver does.
fn feed(terminal: &mut vt100::Parser, bytes: &[u8]) {
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    terminal.process(text.replace('\n', "\r\n").as_bytes());
}

fn delta(channel: Channel, text: &str) -> Delta {
    Delta { channel, text: text.into() }
}

/// Splits a text into pieces of `length` characters.
fn pieces(text: &str, length: usize) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    chars.chunks(length).map(|piece| piece.iter().collect()).collect()
}

/// Returns the terminal output for an answer that is streamed in pieces of `length` characters.
fn written(text: &str, length: usize, size: WindowSize) -> Vec<u8> {
    let mut view = TurnView::new(size);
    let mut out = Vec::new();
    for piece in pieces(text, length) {
        view.show(&delta(Channel::Answer, &piece), size, &mut out).unwrap();
    }
    view.finish(size, &mut out).unwrap();
    out
}

/// Returns all rows of a terminal that has received `out`, including rows that scrolled off the screen.
/// Each row consists of its text and the same text with its styles as escape sequences.
fn screen(out: &[u8], size: WindowSize) -> Vec<String> {
    let mut terminal = terminal(size);
    feed(&mut terminal, out);
    all_rows(&mut terminal, size)
}

fn all_rows(terminal: &mut vt100::Parser, size: WindowSize) -> Vec<String> {
    terminal.screen_mut().set_scrollback(usize::MAX);
    let back = terminal.screen().scrollback();
    let mut rows = Vec::new();
    let mut offset = back;
    loop {
        terminal.screen_mut().set_scrollback(offset);
        let visible = terminal.screen().rows_formatted(0, size.columns as u16);
        let texts = terminal.screen().rows(0, size.columns as u16);
        let visible: Vec<String> = visible.zip(texts).map(|(looks, text)| format!("{} {}", text, looks)).collect();
        if offset == 0 {
            rows.extend(visible);
            // Drop the empty rows at the end, because their number depends on scrolling.
            while rows.last().is_some_and(|row| row.trim().is_empty()) {
                rows.pop();
            }
            return rows;
        }
        let step = offset.min(size.rows);
        rows.extend(visible.into_iter().take(step));
        offset -= step;
    }
}

fn text(text: &str) -> String {
    texts(&written(text, usize::MAX, SIZE), SIZE)
}

fn texts(out: &[u8], size: WindowSize) -> String {
    let mut terminal = terminal(WindowSize { rows: 500, ..size });
    feed(&mut terminal, out);
    terminal.screen().contents()
}

const ORDINARY: &str = include_str!("ordinary.md");

#[test]
fn markdown_is_laid_out_with_styles() {
    let shown = text(ORDINARY);
    for line in [
        "Moons of Jupiter",
        "1. Io, the closest, with the most volcanoes of all",
        "   • and lava lakes",
        "2. Europa",
        "• [x] seen",
        "│ Quoted words",
        "```rust",
        "fn main() {",
        "Name     │  Distance",
        "─────────┼──────────",
        "Io       │   421,700",
        "• [ ] visited, see a link (https://example.org/)",
    ] {
        assert!(shown.lines().any(|shown| shown.starts_with(line)), "no {line:?} in:\n{shown}");
    }
    assert!(!shown.contains("**") && !shown.contains("# "), "{shown}");
    assert!(shown.lines().all(|line| line.chars().count() < SIZE.columns), "{shown}");
    let looks = String::from_utf8(written(ORDINARY, usize::MAX, SIZE)).unwrap();
    assert!(looks.contains("\u{1b}[1;4mMoons"), "the heading is not bold and underlined");
    assert!(looks.contains("\u{1b}[35mfn"), "the keyword is not colored: {looks}");
}

#[test]
fn streaming_in_pieces_ends_up_the_same_as_one_piece() {
    let long: String = (0..80).map(|n| format!("- item {n} with `code` and **weight**\n")).collect();
    let table: String = (0..60).map(|n| format!("| {n} | {} |\n", "x".repeat(n))).collect();
    let table = format!("before\n\n| a | b |\n|---|---|\n{table}\nafter\n");
    let code = format!(
        "```py\n{}```\nend",
        "def f(x):  # a line that is by far longer than the window is wide\n    return x\n".repeat(30)
    );
    let nested = "1. one\n\n   ```sh\n   ls -l\n   ```\n2. two\n   > deep\n   > deeper\n10. ten\n\nafter\n---\n***\n";
    let paragraph = "word ".repeat(900);
    let whole = format!("# All\n\n{ORDINARY}\n{long}\n{table}\n{code}\n\n{nested}");
    for text in [ORDINARY, &long, &table, &code, nested, &paragraph, &whole] {
        for size in [SIZE, WindowSize { rows: 8, columns: 33 }] {
            let want = screen(&written(text, usize::MAX, size), size);
            for length in [1, 3, 17] {
                let got = screen(&written(text, length, size), size);
                let differing = want.iter().zip(&got).position(|(want, got)| want != got);
                assert!(
                    want == got,
                    "pieces of {length} characters, {size:?}: row {differing:?} should be {:?}, but is {:?} \
                     (None if only the number of rows differs); text:\n{}",
                    differing.map(|row| &want[row]),
                    differing.map(|row| &got[row]),
                    &text[..text.len().min(300)]
                );
            }
        }
    }
}

/// Returns whether the sequence is of a kind that inferno writes: a style, cursor up, clearing or synchronized output.
fn is_own(sequence: &str) -> bool {
    let Some(rest) = sequence.strip_prefix("\u{1b}[") else { return false };
    let body = &rest[..rest.len() - 1];
    match rest.as_bytes()[rest.len() - 1] {
        b'm' => body
            .split(';')
            .all(|code| ["0", "1", "2", "3", "4", "9"].contains(&code) || (30..38).any(|n| code == n.to_string())),
        b'A' => body.parse::<usize>().is_ok(),
        b'J' | b'K' => body.is_empty(),
        b'h' | b'l' => body == "?2026",
        _ => false,
    }
}

fn assert_harmless(out: &[u8]) {
    let out = String::from_utf8(out.to_vec()).unwrap();
    let mut rest = out.as_str();
    while let Some(at) = rest.find(|c: char| c.is_control() && c != '\n' && c != '\r') {
        assert!(
            rest[at..].starts_with('\u{1b}'),
            "the output contains a control character: {:?}",
            &rest[at..].chars().take(8).collect::<String>()
        );
        let end = rest[at + 2..].find(|c: char| c.is_ascii_alphabetic()).map_or(rest.len(), |end| at + 2 + end + 1);
        assert!(
            is_own(&rest[at..end]),
            "the output contains an escape sequence that inferno never writes: {:?}",
            &rest[at..end]
        );
        rest = &rest[end..];
    }
    assert!(!out.contains(['\u{202e}', '\u{2066}']));
}

#[test]
fn escape_sequences_of_a_model_never_reach_the_terminal() {
    let hostile = [
        "\u{1b}[2J\u{1b}]0;title\u{7}\u{9b}31m text",
        "&#27;[2J &#x1b;]52;c;AAAA&#7; &#155;31m &#8238;",
        "# &#27;[31m\n\n`&#27;` \u{1b}[31m`\u{1b}[1m`\n\n    \u{1b}c code &#27;c\n",
        "```\u{1b}]0;x\u{7}\n\u{1b}[31mred\r\u{8}\u{8}\n```\n",
        "```rust \u{1b}[5m\nlet a = \"\u{1b}[31m\"; // \u{1b}[1A\n```",
        "| \u{1b}[1m | &#27;[2m |\n|---|---|\n| \u{9b}1m | \u{202e}x |\n",
        "[link\u{1b}[1m](http://x/\u{1b}]8;;&#27;[31m) ![&#27;](&#27;) <a href=\"\u{1b}\">&#27;</a> <&#27;>",
        "- &#27;[1m\n  1. \u{1b}[1m\n> \u{2066}&#27;\n",
        "<div>\n&#27;\u{1b}[1m\n</div>\n",
    ];
    for text in hostile {
        for length in [1, 2, usize::MAX] {
            let out = written(text, length, SIZE);
            assert_harmless(&out);
            assert_eq!(screen(&out, SIZE), screen(&written(text, usize::MAX, SIZE), SIZE));
        }
    }
    // Control characters in reasoning and in tool call arguments must not reach the terminal, either.
    for channel in [Channel::Reasoning, Channel::ToolCall] {
        let (mut view, mut out) = (TurnView::new(SIZE), Vec::new());
        view.show(&delta(channel, hostile[0]), SIZE, &mut out).unwrap();
        view.finish(SIZE, &mut out).unwrap();
        assert_harmless(&out);
    }
}

#[test]
fn pathological_markdown_is_laid_out_in_time() {
    let texts = [
        ">".repeat(20_000),
        "- ".repeat(10_000),
        "*a **b ".repeat(5_000),
        "[".repeat(20_000),
        "`".repeat(20_001),
        "|a".repeat(5_000) + "\n" + &"|-".repeat(5_000) + "\n" + &"|b".repeat(5_000),
        "a\n".repeat(15_000),
        "<".repeat(20_000),
        "&#0;".repeat(3_000),
        "```rust\n".to_string() + &"{(\"".repeat(7_000) + "\n",
        "1. a\n   ".repeat(3_000),
    ];
    for text in texts {
        let started = std::time::Instant::now();
        assert_harmless(&written(&text, 50, SIZE));
        let name: String = text.chars().take(12).collect();
        // The limit is generous, because a debug build on a busy machine is slow.
        assert!(started.elapsed().as_secs() < 60, "{name:?} took {:?}", started.elapsed());
        println!("{name:?} {:?}", started.elapsed());
    }
}

#[test]
fn redrawing_while_streaming_keeps_the_output_small() {
    let out = String::from_utf8(written(ORDINARY, 1, SIZE)).unwrap();
    // Only the unfinished Markdown block is redrawn, so the output stays small.
    assert!(out.len() < 30 * ORDINARY.len(), "{} bytes of output for {} bytes of Markdown", out.len(), ORDINARY.len());
    let plain =
        "A sentence of ordinary words that is longer than one row of this window and wraps to the next. ".repeat(3);
    let out = String::from_utf8(written(&plain, 4, SIZE)).unwrap();
    assert!(
        out.len() < 4 * plain.len(),
        "plain text was written repeatedly: {} bytes of output for {} bytes of text",
        out.len(),
        plain.len()
    );
}

#[test]
fn a_resized_window_applies_at_once() {
    let (narrow, wide) = (WindowSize { rows: 20, columns: 40 }, WindowSize { rows: 20, columns: 80 });
    let words = "alpha beta gamma delta epsilon zeta eta theta iota kappa ".repeat(3);
    let mut view = TurnView::new(narrow);
    let mut terminal = terminal(narrow);
    let mut show = |text: &str, size: WindowSize, terminal: &mut vt100::Parser| {
        // Wait longer than the maximum pause between two redraws, so the text is drawn immediately.
        std::thread::sleep(std::time::Duration::from_millis(100));
        let mut out = Vec::new();
        view.show(&delta(Channel::Answer, text), size, &mut out).unwrap();
        feed(terminal, &out);
    };
    show(&format!("# First\n\nfinished.\n\n{words}"), narrow, &mut terminal);
    let (rows, columns) = cells(wide);
    terminal.screen_mut().set_size(rows, columns);
    show(&words, wide, &mut terminal);
    let contents = terminal.screen().contents();
    assert!(contents.starts_with("First\n\nfinished.\n\nalpha"), "{contents}");
    let longest = contents.lines().map(str::len).max().unwrap();
    assert!((70..80).contains(&longest), "the unfinished paragraph does not fill the wide window:\n{contents}");
    assert_eq!(contents.matches("kappa").count(), 6, "{contents}");
}

#[test]
fn reasoning_folds_and_unfolds() {
    let mut view = TurnView::new(SIZE).with_keys(true);
    let mut terminal = terminal(SIZE);
    let draw = |out: Vec<u8>, terminal: &mut vt100::Parser| {
        feed(terminal, &out);
        terminal.screen().contents()
    };
    let think = |view: &mut TurnView, text: &str| {
        // Wait longer than the maximum pause between two redraws, so the text is drawn immediately.
        std::thread::sleep(std::time::Duration::from_millis(100));
        let mut out = Vec::new();
        view.show(&delta(Channel::Reasoning, text), SIZE, &mut out).unwrap();
        out
    };
    let reasoning = "The user asks for moons.\nThere are many of them.\nWhich ones? ";
    let shown = draw(think(&mut view, reasoning), &mut terminal);
    assert_eq!(shown.trim_end(), reasoning.trim_end());

    let mut out = Vec::new();
    view.fold_reasoning(true, SIZE, &mut out).unwrap();
    let shown = draw(out, &mut terminal);
    assert_eq!(shown.trim_end(), "▸ thinking: 12 words (Ctrl-O to show)");
    let shown = draw(think(&mut view, "Io, say.\nAnd Europa."), &mut terminal);
    assert_eq!(shown.trim_end(), "▸ thinking: 16 words (Ctrl-O to show)");

    let mut out = Vec::new();
    view.fold_reasoning(false, SIZE, &mut out).unwrap();
    let shown = draw(out, &mut terminal);
    assert_eq!(shown.trim_end(), format!("{reasoning}Io, say.\nAnd Europa."));

    let mut out = Vec::new();
    view.fold_reasoning(true, SIZE, &mut out).unwrap();
    view.show(&delta(Channel::Answer, "Io."), SIZE, &mut out).unwrap();
    view.finish(SIZE, &mut out).unwrap();
    let shown = draw(out, &mut terminal);
    assert_eq!(shown.trim_end(), "▸ thought: 16 words\n\nIo.");
}

#[test]
fn a_table_too_wide_for_the_window_becomes_lines() {
    let table =
        "| one | two | three | four | five |\n|---|---|---|---|---|\n| a | b | **c** | d | |\n| f | g | h | i | j |\n";
    let narrow = WindowSize { rows: 24, columns: 25 };
    let shown = texts(&written(table, usize::MAX, narrow), narrow);
    assert_eq!(shown.trim_end(), "one: a\ntwo: b\nthree: c\nfour: d\n\none: f\ntwo: g\nthree: h\nfour: i\nfive: j");
    // The window that `text` uses is wide enough for a table.
    assert!(text(table).contains("─┼─"));
}

#[test]
fn a_table_of_narrow_columns_stays_a_table_in_a_narrow_window() {
    let table = "| a | b | c | d | e | f | note |\n|--|--|--|--|--|--|--|\n| 1 | 2 | 3 | 4 | 5 | 6 | see above |\n";
    // Six columns of 1 cell, one column of 4 cells, six separators of 3 cells, and the window's last column, which
    // stays free.
    let narrow = WindowSize { rows: 24, columns: 29 };
    let shown = texts(&written(table, usize::MAX, narrow), narrow);
    let rows = [
        "a │ b │ c │ d │ e │ f │ note",
        "──┼───┼───┼───┼───┼───┼─────",
        "1 │ 2 │ 3 │ 4 │ 5 │ 6 │ see",
        "  │   │   │   │   │   │ abov",
        "  │   │   │   │   │   │ e",
    ];
    assert_eq!(shown.trim_end(), rows.join("\n"));
    let narrower = WindowSize { columns: 28, ..narrow };
    let shown = texts(&written(table, usize::MAX, narrower), narrower);
    assert_eq!(shown.trim_end(), "a: 1\nb: 2\nc: 3\nd: 4\ne: 5\nf: 6\nnote: see above");
}
