//! Formats text for display: sizes, counts, paths and error messages.

use std::sync::LazyLock;

use regex::{Captures, Regex};
use textwrap::{Options, WordSplitter, WrapAlgorithm};

/// Removes control characters and characters that change the text direction. Keeps newlines and tabs.
///
/// Model output must not move the cursor, set the window title, or write to the clipboard.
pub fn printable(text: &str) -> String {
    let is_harmless = |c: &char| match c {
        '\n' | '\t' => true,
        '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}' => false,
        c => !c.is_control(),
    };
    text.chars().filter(is_harmless).collect()
}

/// Wraps lines at word boundaries. Words longer than `columns` are not split.
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

/// Abbreviates a path inside the home directory to `~/x`.
pub fn home_relative(path: &str) -> String {
    let home = std::env::var("HOME").unwrap_or_default();
    match path.strip_prefix(&home) {
        Some(rest) if !home.is_empty() && rest.starts_with('/') => format!("~{rest}"),
        _ => path.to_string(),
    }
}

/// Shortens a commit hash to seven characters.
pub fn short_commit(commit: &str) -> String {
    commit.chars().take(7).collect()
}

/// Returns the message of an error and its causes, formatted for display.
pub fn error_message(error: &anyhow::Error) -> String {
    plain_cuda_errors(&format!("{error:#}"))
}

/// Returns [`error_message`] on a single line.
pub fn one_line(error: &anyhow::Error) -> String {
    let text = error_message(error);
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// Replaces every CUDA error in cudarc's debug format with the description and the name of the error.
///
/// `DriverError(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")` becomes
/// `no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE)`.
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
