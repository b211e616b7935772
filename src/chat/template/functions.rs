//! Defines the functions, filters, tests and string methods that templates can use in transformers, but that minijinja
//! lacks or implements differently.

use anyhow::Result;
use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use crate::chat::python::{self, JsonStyle, Separators};

/// Adds the functions, filters, tests and methods to an environment, except `strftime_now`, which depends on a date.
pub fn install(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
    });
    // As in Jinja for Python, strings are iterable, and strings and mappings are sequences.
    environment.add_test("iterable", |value: &Value| value.kind() == ValueKind::String || value.try_iter().is_ok());
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
    });
}

/// The error that results when a template calls `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// Returns the message that the template passed to `raise_exception`, or `None` for other errors.
pub fn raised(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return Some(message.clone());
        }
        source = cause.source();
    }
    None
}

/// Returns the template function `strftime_now(format)`.
///
/// The function formats midnight on `date`, not the current time, so that prompts with equal dates share a prefix.
pub fn strftime_now(date: String) -> Value {
    Value::from_function(move |format: String| -> Result<String, Error> {
        let failed = |error: jiff::Error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}"));
        let date: jiff::civil::Date = date.parse().map_err(failed)?;
        jiff::fmt::strtime::format(&format, date.at(0, 0, 0, 0)).map_err(failed)
    })
}

/// The template filter `tojson`: formats JSON like `json.dumps` with the defaults of transformers.
///
/// The filter does not escape HTML. By default, it also keeps non-ASCII characters and the order of keys.
fn tojson(value: &Value, ensure_ascii: Option<bool>, options: Kwargs) -> Result<Value, Error> {
    let failed = |error: String| Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}"));
    if value.is_undefined() {
        return Err(failed("the value is undefined".into()));
    }
    let ensure_ascii = ensure_ascii.or(options.get("ensure_ascii")?).unwrap_or(false);
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(value) if value.is_none() => None,
        Some(value) => match value.as_str() {
            Some(text) => Some(text.to_string()),
            None => Some(" ".repeat(usize::try_from(value)?.min(64))),
        },
    };
    let separators = match options.get::<Option<Value>>("separators")? {
        Some(value) if !value.is_none() => {
            let separator = |index| value.get_item_by_index(index).map(|separator| separator.to_string());
            Some(Separators { item: separator(0)?, key: separator(1)? })
        }
        _ => None,
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut json = serde_json::to_value(value).map_err(|error| failed(error.to_string()))?;
    if sort_keys {
        json.sort_all_objects();
    }
    let text = python::dumps(&json, JsonStyle { indent, separators }).map_err(|error| failed(error.to_string()))?;
    Ok(Value::from(if ensure_ascii { escape_non_ascii(&text) } else { text }))
}

fn escape_non_ascii(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        // Keep these noncharacters, because the `injection` module marks control tokens with one of them.
        if c.is_ascii() || matches!(c, '\u{FDD0}'..='\u{FDEF}') {
            out.push(c);
        } else {
            out.extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    out
}

/// Calls a Python method: a string method from this module, or a method from `minijinja_contrib`.
fn method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else { return unknown_method_callback(state, value, method, args) };
    match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "rsplit" => {
            let (separator, limit): (&str, Option<i64>) = from_args(args)?;
            if separator.is_empty() {
                return Err(Error::new(ErrorKind::InvalidOperation, "rsplit: empty separator"));
            }
            // For Python's `rsplit`, a negative limit means no limit.
            let limit = limit.and_then(|limit| usize::try_from(limit).ok());
            let mut parts: Vec<&str> =
                text.rsplitn(limit.map_or(usize::MAX, |limit| limit.saturating_add(1)), separator).collect();
            parts.reverse();
            Ok(parts.into_iter().collect())
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (head, found, tail) = match text.split_once(separator) {
                Some((head, tail)) => (head, separator, tail),
                None => (text, "", ""),
            };
            Ok([head, found, tail].into_iter().collect())
        }
        _ => unknown_method_callback(state, value, method, args),
    }
}

/// Replaces `{% generation %}` blocks, which mark assistant tokens for training, with `{% with %}` blocks.
///
/// The replacement keeps the whitespace control and the line numbers of the template.
pub fn replace_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (text, tag) = rest.split_at(start);
        out.push_str(text);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, remaining) = tag.split_at(end);
        match tag.trim_start_matches(['{', '%', '-', '+']).trim_end_matches(['}', '%', '-', '+']).trim() {
            "generation" => out.push_str(&tag.replace("generation", "with")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endwith")),
            _ => out.push_str(tag),
        }
        rest = remaining;
    }
    out.push_str(rest);
    out
}
