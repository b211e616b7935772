//! Words for people: amounts, names, and what a terminal may show.

use unicode_width::UnicodeWidthStr;

/// Text without control characters other than line break and tab: a model's output must not move the cursor, set the
/// window's title, or write to the clipboard. Characters that reorder what is seen go too.
pub fn printable(text: &str) -> String {
    let harmless = |c: &char| match c {
        '\n' | '\t' => true,
        '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}' => false,
        c => !c.is_control(),
    };
    text.chars().filter(harmless).collect()
}

/// Lines that are longer than a window, broken between words. A window of unknown width breaks them by itself.
pub fn wrapped(text: &str, columns: Option<usize>) -> String {
    let Some(columns) = columns.filter(|columns| *columns > 0) else { return text.to_string() };
    let mut wrapped = String::with_capacity(text.len());
    for (number, line) in text.split('\n').enumerate() {
        if number > 0 {
            wrapped.push('\n');
        }
        // Whether there are words in the row yet, or only what indents it.
        let (mut used, mut words) = (0, false);
        for piece in line.split_inclusive(' ') {
            let word = piece.trim_end_matches(' ').width();
            if words && word > 0 && used + word > columns {
                wrapped.truncate(wrapped.trim_end_matches(' ').len());
                wrapped.push('\n');
                used = 0;
            }
            words |= word > 0;
            wrapped.push_str(piece);
            used += word + piece.len() - piece.trim_end_matches(' ').len();
        }
    }
    wrapped
}

/// 20.9B, 137M, 5.1M
pub fn count(parameters: u64) -> String {
    let (value, unit) = match parameters {
        0..1_000_000 => (parameters as f64 / 1e3, "K"),
        1_000_000..1_000_000_000 => (parameters as f64 / 1e6, "M"),
        _ => (parameters as f64 / 1e9, "B"),
    };
    if value < 100.0 { format!("{value:.1}{unit}") } else { format!("{value:.0}{unit}") }
}

/// 13.8 GB, 7.6 MB, 1.2 KB, 12 B
pub fn size(bytes: u64) -> String {
    let scaled = |unit: f64| bytes as f64 / unit;
    match bytes {
        0..1000 => format!("{bytes} B"),
        1000..1_000_000 => format!("{:.1} KB", scaled(1e3)),
        1_000_000..1_000_000_000 => format!("{:.1} MB", scaled(1e6)),
        _ => format!("{:.1} GB", scaled(1e9)),
    }
}

/// `~/x` for what lies below the home.
pub fn home_relative(path: &str) -> String {
    let home = std::env::var("HOME").unwrap_or_default();
    match path.strip_prefix(&home) {
        Some(rest) if !home.is_empty() && rest.starts_with('/') => format!("~{rest}"),
        _ => path.to_string(),
    }
}

/// A commit as people write it.
pub fn short(commit: &str) -> String {
    commit.chars().take(7).collect()
}

/// An error with its causes and its advice.
pub fn one_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// How many letters have to be put in, taken out or changed to turn one word into the other (Levenshtein).
pub fn edits(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, letter) in from.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, other) in to.iter().enumerate() {
            let changed = diagonal + usize::from(letter != *other);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_broken_between_words() {
        let text = "one two three\nfour  fünf";
        assert_eq!(wrapped(text, None), text);
        assert_eq!(wrapped(text, Some(13)), text);
        assert_eq!(wrapped(text, Some(7)), "one two\nthree\nfour\nfünf");
        assert_eq!(wrapped("  a word", Some(4)), "  a\nword");
        assert_eq!(wrapped("unbreakable ü or so", Some(4)), "unbreakable\nü or\nso");
        assert_eq!(wrapped("木星の 衛星", Some(7)), "木星の\n衛星");
        assert_eq!(wrapped("", Some(7)), "");
    }
}
