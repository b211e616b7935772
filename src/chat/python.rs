//! Formats JSON like Python's `json.dumps`, because models were trained on prompts with this format.

use std::io::{self, Write};

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{Formatter, Serializer};

/// Formats JSON like `json.dumps(value, ensure_ascii=False)`, with `", "` and `": "` as separators.
pub fn json_dumps(value: &Value) -> String {
    let default = JsonStyle::default();
    // Writing a `Value` to memory cannot fail, because its keys are strings and the buffer grows.
    dumps(value, default).unwrap_or_else(|_| value.to_string())
}

/// Formats JSON like `json.dumps` with `ensure_ascii=False` and the options in `style`.
pub fn dumps(value: &impl Serialize, style: JsonStyle) -> Result<String> {
    let mut out = Vec::new();
    let formatter = PythonFormatter { style, depth: 0, has_items: false };
    value.serialize(&mut Serializer::with_formatter(&mut out, formatter))?;
    Ok(String::from_utf8(out)?)
}

/// The options `indent` and `separators` of `json.dumps`.
#[derive(Clone, Debug, Default)]
pub struct JsonStyle {
    /// The indentation of one nesting level. `None` writes everything on one line.
    pub indent: Option<String>,
    /// `None` selects Python's defaults, which depend on `indent`.
    pub separators: Option<Separators>,
}

/// The two values of the option `separators` of `json.dumps`.
#[derive(Clone, Debug)]
pub struct Separators {
    /// The separator between the items of a list or an object.
    pub item: String,
    /// The separator between a key and its value.
    pub key: String,
}

struct PythonFormatter {
    style: JsonStyle,
    depth: usize,
    /// Whether the innermost open list or object has an item.
    /// An empty list or object is written as `[]` or `{}`, even with indentation.
    has_items: bool,
}

impl PythonFormatter {
    fn open(&mut self, writer: &mut (impl Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_items = false;
        writer.write_all(bracket)
    }

    fn close(&mut self, writer: &mut (impl Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_items {
            self.newline(writer)?;
        }
        self.has_items = true;
        writer.write_all(bracket)
    }

    fn item(&mut self, writer: &mut (impl Write + ?Sized), first: bool) -> io::Result<()> {
        if !first {
            let default = if self.style.indent.is_some() { "," } else { ", " };
            let separator = self.style.separators.as_ref().map_or(default, |separators| &separators.item);
            writer.write_all(separator.as_bytes())?;
        }
        self.newline(writer)
    }

    fn newline(&self, writer: &mut (impl Write + ?Sized)) -> io::Result<()> {
        match &self.style.indent {
            None => Ok(()),
            Some(indent) => write!(writer, "\n{}", indent.repeat(self.depth)),
        }
    }
}

impl Formatter for PythonFormatter {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        let separator = self.style.separators.as_ref().map_or(": ", |separators| &separators.key);
        writer.write_all(separator.as_bytes())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(float_repr(value).as_bytes())
    }
}

/// Formats a finite float like Python's `repr`, with the fewest digits that round-trip.
///
/// Nonzero values with a magnitude less than 1e-4 or at least 1e16 use an exponent, such as `1e-05`.
fn float_repr(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = value.to_string();
        if plain.contains('.') { plain } else { plain + ".0" }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
    }
}
