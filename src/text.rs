//! Formats text for display: sizes, counts, paths, error messages and untrusted strings.

use std::fmt::Display;
use std::sync::LazyLock;

use regex::{Captures, Regex};
use textwrap::{Options, WordSplitter, WrapAlgorithm};

/// The maximum number of characters of a string that [`quote`] shows.
const QUOTED_CHARACTERS: usize = 80;

/// The maximum number of characters of a library's message that [`library_error`] shows.
const LIBRARY_CHARACTERS: usize = 300;

/// The maximum number of characters of an error message that [`error_message`] shows.
/// A message can be longer if it lists many models or contains a long untrusted string.
const MESSAGE_CHARACTERS: usize = 4000;

/// Removes control characters and bidirectional embeddings, overrides and isolates from a text.
/// Keeps newlines and tabs.
///
/// Without this function, model output could move the cursor, set the window title, or write to the clipboard.
/// Invisible characters such as joiners are kept, because emoji and many scripts need them.
pub fn without_controls(text: &str) -> String {
    let is_harmless = |c: &char| match c {
        '\n' | '\t' => true,
        '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}' => false,
        c => !c.is_control(),
    };
    text.chars().filter(is_harmless).collect()
}

/// Escapes the characters of a JSON text that [`without_controls`] would remove from the strings in it.
/// The escaped JSON has the same value.
///
/// serde_json escapes only U+0000 to U+001F. Without this function, strings in JSON could control the terminal.
pub fn escaped_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\u{7F}'..='\u{9F}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}' => {
                out.push_str(&format!("\\u{:04x}", c as u32));
            }
            c => out.push(c),
        }
    }
    out
}

/// Escapes control characters and invisible characters in a message. Keeps newlines and tabs.
///
/// Use [`quote`] for each untrusted string in the message. Otherwise, a newline in the string could fake a new message.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => out.push(c),
            c => push_visible(&mut out, c),
        }
    }
    out
}

/// Quotes an untrusted string, such as one from a file or a hub, for use in a message.
///
/// The result is a single line, with at most 80 characters of the string.
/// Single quotes, backslashes, control characters and invisible characters are escaped.
pub fn quote(untrusted: &str) -> String {
    format!("'{}'", excerpt(untrusted).replace('\'', "\\'"))
}

/// Escapes and shortens a string like [`quote`], but does not add or escape quotes.
pub fn excerpt(untrusted: &str) -> String {
    let mut out = String::new();
    for c in untrusted.chars().take(QUOTED_CHARACTERS) {
        match c {
            '\\' => out.push_str("\\\\"),
            c => push_visible(&mut out, c),
        }
    }
    if untrusted.chars().nth(QUOTED_CHARACTERS).is_some() {
        out.push('…');
    }
    out
}

/// Escapes control characters and invisible characters in a name, including newlines and tabs.
///
/// Does not shorten the name, because the user may type or copy it.
pub fn escaped(name: &str) -> String {
    let mut out = String::new();
    name.chars().for_each(|c| push_visible(&mut out, c));
    out
}

/// Returns the message of a library's error as a single line. Shows at most 300 characters of the message.
///
/// The limit is needed because some libraries quote whole strings from a file in their messages.
pub fn library_error(error: &impl Display) -> String {
    let message = error.to_string();
    let mut out = String::new();
    for c in message.chars().take(LIBRARY_CHARACTERS) {
        push_visible(&mut out, c);
    }
    if message.chars().nth(LIBRARY_CHARACTERS).is_some() {
        out.push('…');
    }
    out
}

fn push_visible(out: &mut String, c: char) {
    if c.is_control() || is_invisible(c) {
        out.extend(c.escape_default());
    } else {
        out.push(c);
    }
}

/// Returns whether a character is ignorable by default in Unicode, such as a zero-width or bidirectional control, or
/// is a line separator, paragraph separator or interlinear annotation mark.
/// Returns false for the variation selectors U+FE00 to U+FE0F, because they are part of common emoji.
fn is_invisible(c: char) -> bool {
    matches!(c,
        '\u{AD}' | '\u{34F}' | '\u{61C}' | '\u{115F}' | '\u{1160}' | '\u{17B4}' | '\u{17B5}' | '\u{3164}' | '\u{FFA0}'
        | '\u{180B}'..='\u{180F}'
        | '\u{200B}'..='\u{200F}'
        | '\u{2028}'..='\u{202E}'
        | '\u{2060}'..='\u{206F}'
        | '\u{FEFF}'
        | '\u{FFF0}'..='\u{FFFB}'
        | '\u{1BCA0}'..='\u{1BCA3}'
        | '\u{1D173}'..='\u{1D17A}'
        | '\u{E0000}'..='\u{E0FFF}'
    )
}

/// Wraps lines at spaces. Words longer than `columns` are not split.
///
/// Returns the text unchanged if `columns` is `None` or 0. The terminal then wraps long lines itself.
pub fn wrapped(text: &str, columns: Option<usize>) -> String {
    let Some(columns) = columns.filter(|columns| *columns > 0) else { return text.to_string() };
    let options = Options::new(columns)
        .break_words(false)
        .word_splitter(WordSplitter::NoHyphenation)
        .wrap_algorithm(WrapAlgorithm::FirstFit);
    textwrap::fill(text, options)
}

/// Formats a parameter count, such as 20.9B, 137M or 5.1M.
pub fn parameter_count(parameters: u64) -> String {
    let (value, unit) = match parameters {
        0..1_000_000 => (parameters as f64 / 1e3, "K"),
        1_000_000..1_000_000_000 => (parameters as f64 / 1e6, "M"),
        _ => (parameters as f64 / 1e9, "B"),
    };
    if value < 100.0 { format!("{value:.1}{unit}") } else { format!("{value:.0}{unit}") }
}

/// Formats a size in bytes, such as 13.8 GB, 7.6 MB, 1.2 KB or 12 B.
pub fn size(bytes: u64) -> String {
    let scaled = |unit: f64| bytes as f64 / unit;
    match bytes {
        0..1000 => format!("{bytes} B"),
        1000..1_000_000 => format!("{:.1} KB", scaled(1e3)),
        1_000_000..1_000_000_000 => format!("{:.1} MB", scaled(1e6)),
        _ => format!("{:.1} GB", scaled(1e9)),
    }
}

/// Formats a count and the noun that it counts, such as `1 file` or `3 files`. The plural is `noun` plus `s`.
pub fn counted<N: Display + PartialEq + From<u8>>(count: N, noun: &str) -> String {
    let ending = if count == N::from(1) { "" } else { "s" };
    format!("{count} {noun}{ending}")
}

/// Replaces the home directory at the start of a path with `~`, as in `~/models`.
pub fn home_relative(path: &str) -> String {
    let home = std::env::var("HOME").unwrap_or_default();
    match path.strip_prefix(&home) {
        Some(rest) if !home.is_empty() && rest.starts_with('/') => format!("~{rest}"),
        _ => path.to_string(),
    }
}

/// Returns the first seven characters of a commit hash.
pub fn short_commit(commit: &str) -> String {
    commit.chars().take(7).collect()
}

/// Returns the message of an error and its causes, with CUDA errors as in [`plain_cuda_errors`].
/// Omits the middle of a message with more than 4000 characters.
pub fn error_message(error: &anyhow::Error) -> String {
    let message = plain_cuda_errors(&format!("{error:#}"));
    let length = message.chars().count();
    if length <= MESSAGE_CHARACTERS {
        return message;
    }
    let part = MESSAGE_CHARACTERS / 2;
    let (start, end) = (message.chars().take(part), message.chars().skip(length - part));
    start.chain(['…']).chain(end).collect()
}

/// Returns the text of [`error_message`] as a single line, with `; ` between the original lines.
pub fn one_line(error: &anyhow::Error) -> String {
    let text = error_message(error);
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// Replaces every CUDA error in cudarc's debug format with the description and the name of the error.
///
/// `DriverError(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")` becomes
/// `no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE)`.
/// For an error without a description, names the library instead: `cuBLAS failed (CUBLAS_STATUS_ALLOC_FAILED)`.
pub fn plain_cuda_errors(text: &str) -> String {
    static ERROR: LazyLock<Regex> = LazyLock::new(|| {
        let pattern = r#"(Driver|Runtime|Cublas|Curand|Nccl|Nvrtc)Error\((\w+)(?:, "([^"]*)")?\)"#;
        Regex::new(pattern).expect("the pattern is valid")
    });
    let plain = |error: &Captures| {
        let (library, name) = (&error[1], &error[2]);
        // If the driver has no description, cudarc puts a placeholder in angle brackets.
        match error.get(3).map(|description| description.as_str()).filter(|description| !description.starts_with('<')) {
            Some(description) => format!("{description} ({name})"),
            None => format!("{} failed ({name})", library_name(library)),
        }
    };
    ERROR.replace_all(text, plain).into_owned()
}

fn library_name(library: &str) -> &str {
    match library {
        "Driver" => "the NVIDIA driver",
        "Runtime" => "the CUDA runtime",
        "Cublas" => "cuBLAS",
        "Curand" => "cuRAND",
        "Nccl" => "NCCL",
        "Nvrtc" => "NVRTC",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn untrusted_strings_are_quoted_on_one_line() {
        assert_eq!(quote("llama"), "'llama'");
        assert_eq!(quote("木星 é 👍"), "'木星 é 👍'");
        assert_eq!(quote("x\nerror: run\tcurl\r"), r"'x\nerror: run\tcurl\r'");
        assert_eq!(quote("it's \\"), r"'it\'s \\'");
        assert_eq!(quote("\u{1b}[2J\u{9b}\0"), r"'\u{1b}[2J\u{9b}\u{0}'");
        assert_eq!(
            quote("a\u{200b}\u{202e}\u{2028}\u{feff}\u{e0041}"),
            r"'a\u{200b}\u{202e}\u{2028}\u{feff}\u{e0041}'"
        );
        assert_eq!(excerpt("model.layers.0\nit's"), r"model.layers.0\nit's");
        assert_eq!(quote(&"é".repeat(80)), format!("'{}'", "é".repeat(80)));
        assert_eq!(quote(&"é".repeat(81)), format!("'{}…'", "é".repeat(80)));
    }

    #[test]
    fn messages_show_invisible_characters_and_answers_keep_them() {
        let text = "a\tb\nc\u{1b}[2J \u{200d} \u{202e} \u{61c}";
        assert_eq!(printable(text), "a\tb\nc\\u{1b}[2J \\u{200d} \\u{202e} \\u{61c}");
        assert_eq!(without_controls(text), "a\tb\nc[2J \u{200d}  \u{61c}");
        assert_eq!(printable("❤\u{fe0f}"), "❤\u{fe0f}");
        let json = serde_json::json!({ "text": "a\u{1b}\u{7f}\u{9b}2J \u{202e}é" });
        let escaped = escaped_json(&json.to_string());
        assert_eq!(escaped, r#"{"text":"a\u001b\u007f\u009b2J \u202eé"}"#);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).unwrap(), json);
    }

    #[test]
    fn long_messages_are_shortened() {
        assert_eq!(library_error(&"a\nb"), r"a\nb");
        assert_eq!(library_error(&"x".repeat(1000)).chars().count(), 301);
        let message = error_message(&anyhow::anyhow!("a{}z", "é".repeat(1 << 20)));
        assert!(message.starts_with("aé") && message.ends_with("éz") && message.chars().count() == 4001);
    }

    #[test]
    fn lines_are_wrapped_between_words() {
        let text = "one two three\nfour  fünf";
        assert_eq!(wrapped(text, None), text);
        assert_eq!(wrapped(text, Some(13)), text);
        assert_eq!(wrapped(text, Some(7)), "one two\nthree\nfour\nfünf");
        assert_eq!(wrapped("  a word", Some(4)), "  a\nword");
        assert_eq!(wrapped("unbreakable ü or so", Some(4)), "unbreakable\nü or\nso");
        assert_eq!(wrapped("木星の 衛星", Some(7)), "木星の\n衛星");
        assert_eq!(wrapped("a-b-c d", Some(4)), "a-b-c\nd");
        assert_eq!(wrapped("", Some(7)), "");
    }

    #[test]
    fn only_a_count_of_one_has_a_singular_noun() {
        assert_eq!(
            [0, 1, 2, 11].map(|count: usize| counted(count, "file")).join(" "),
            "0 files 1 file 2 files 11 files"
        );
        assert_eq!(counted(1u64, "KV head"), "1 KV head");
    }

    #[test]
    fn cuda_errors_show_a_description_and_a_name() {
        let no_device = r#"DriverError(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")"#;
        assert_eq!(plain_cuda_errors(no_device), "no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE)");
        let unknown = r#"DriverError(CUDA_ERROR_UNKNOWN, "<Failure when calling cuGetErrorString()>")"#;
        assert_eq!(plain_cuda_errors(unknown), "the NVIDIA driver failed (CUDA_ERROR_UNKNOWN)");
        let cublas = "CublasError(CUBLAS_STATUS_NOT_INITIALIZED)";
        assert_eq!(plain_cuda_errors(cublas), "cuBLAS failed (CUBLAS_STATUS_NOT_INITIALIZED)");
        let memory = r#"DriverError(CUDA_ERROR_OUT_OF_MEMORY, "out of memory") when loading k"#;
        let error = anyhow::anyhow!("{memory}").context("cannot load layer 3");
        let message = "cannot load layer 3: out of memory (CUDA_ERROR_OUT_OF_MEMORY) when loading k";
        assert_eq!(error_message(&error), message);
        assert_eq!(plain_cuda_errors("ParseError(3)"), "ParseError(3)");
    }
}
