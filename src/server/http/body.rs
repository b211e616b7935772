//! Reads JSON request bodies up to a size limit, takes typed fields from them, and creates JSON responses.

use std::fmt;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::{Map, Value};

use super::error::ApiError;
use crate::files;
use crate::server::options::Timeouts;

/// The maximum size of a request body in bytes.
pub const MAX_BODY_BYTES: usize = 8 << 20;

/// The maximum nesting depth of a JSON body. Limits the stack use of recursive code, such as parsing and rendering.
const MAX_DEPTH: usize = 64;

/// The maximum number of JSON values and object keys in a body. A parsed value can take much more memory than its text.
const MAX_VALUES: usize = 500_000;

/// The maximum number of ignored request fields that the response header `x-inferno-ignored` lists.
pub const MAX_IGNORED: usize = 32;

/// A request field that inferno does not support. It is refused instead of ignored, because the client relies on its
/// effect.
pub struct RefusedField {
    pub name: &'static str,
    /// The JSON of the values that have no effect and are therefore accepted. `null` is always accepted.
    pub neutral: &'static [&'static str],
    /// The end of the error message: what to do instead. Can be empty.
    pub hint: &'static str,
}

/// If this request header is `1`, the server rejects a request with fields that have no effect, or only part of their
/// effect.
const STRICT: &str = "x-inferno-strict";

/// Reads and parses the body of a request, which must be a JSON object.
pub async fn read_json(request: Request, timeouts: &Timeouts) -> Result<Fields, ApiError> {
    let (parts, body) = request.into_parts();
    let fields = parse(&collect(&parts.headers, body, timeouts).await?)?;
    Ok(Fields { is_strict: parts.headers.get(STRICT).is_some_and(|value| value == "1"), ..fields })
}

/// Reads a JSON body without parsing it. Fails if the headers do not declare uncompressed JSON,
/// if the body is larger than [`MAX_BODY_BYTES`], or if it does not arrive completely within the time limit.
pub async fn collect(headers: &HeaderMap, body: Body, timeouts: &Timeouts) -> Result<Bytes, ApiError> {
    check_headers(headers)?;
    match tokio::time::timeout(timeouts.body, Limited::new(body, MAX_BODY_BYTES).collect()).await {
        Err(_) => {
            let message = format!("the body did not arrive within {} s", timeouts.body.as_secs_f64());
            Err(ApiError::client(StatusCode::REQUEST_TIMEOUT, message))
        }
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(error)) => Err(ApiError::bad_request(format!("cannot read the body: {error}"))),
        Ok(Ok(body)) => Ok(body.to_bytes()),
    }
}

fn check_headers(headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    // Require the content type of JSON, to protect the server against web pages of other sites:
    // before such a page can send JSON, the browser asks the server for permission (CORS).
    // The browser does not ask before such a page sends plain text.
    let media_type = text(CONTENT_TYPE).unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !media_type.eq_ignore_ascii_case("application/json") {
        let message = "cannot read the body: send JSON with the header 'Content-Type: application/json'";
        return Err(ApiError::client(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    if let Some(encoding) = text(CONTENT_ENCODING).filter(|encoding| !encoding.eq_ignore_ascii_case("identity")) {
        let message = format!("cannot read a body with the content encoding '{encoding}': send it without compression");
        return Err(ApiError::client(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    match text(CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok()) {
        Some(length) if length > MAX_BODY_BYTES as u64 => Err(too_large()),
        _ => Ok(()),
    }
}

fn too_large() -> ApiError {
    let message = format!("the body is too large: the limit is {} MiB", MAX_BODY_BYTES >> 20);
    ApiError::client(StatusCode::PAYLOAD_TOO_LARGE, message)
}

fn parse(bytes: &[u8]) -> Result<Fields, ApiError> {
    if depth(bytes) > MAX_DEPTH {
        return Err(ApiError::bad_request(format!("the body is nested too deeply: the limit is {MAX_DEPTH} levels")));
    }
    let value = files::parse_json_up_to(MAX_VALUES, bytes);
    match value.map_err(|error| ApiError::bad_request(format!("cannot parse the body: {error:#}")))? {
        Value::Object(map) => Ok(Fields::new(map)),
        _ => Err(ApiError::bad_request("cannot parse the body: it is not a JSON object")),
    }
}

/// Returns the maximum nesting depth of arrays and objects in JSON, without parsing it.
fn depth(json: &[u8]) -> usize {
    let mut depth = 0usize;
    let mut deepest = 0;
    let mut bytes = json.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b'"' => loop {
                match bytes.next() {
                    Some(b'\\') => drop(bytes.next()),
                    Some(b'"') | None => break,
                    Some(_) => {}
                }
            },
            _ => {}
        }
    }
    deepest
}

/// A request field that has no effect on the response, or not its full effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IgnoredField {
    /// The path of the field, without array indexes.
    pub name: String,
    /// Which part of the field has no effect, or what the server does instead.
    pub note: Option<String>,
}

impl From<String> for IgnoredField {
    fn from(name: String) -> Self {
        Self { name, note: None }
    }
}

impl fmt::Display for IgnoredField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.note {
            Some(note) => write!(f, "{} ({note})", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// The fields of a JSON object that have not been read yet. Null fields count as absent.
pub struct Fields {
    map: Map<String, Value>,
    /// The path of the object and a dot, such as `messages[0].`, or an empty string for the body.
    prefix: String,
    ignored: Vec<IgnoredField>,
    /// Whether [`finish`](Self::finish) fails if a field is ignored.
    is_strict: bool,
}

impl Fields {
    fn new(map: Map<String, Value>) -> Self {
        Self { map, prefix: String::new(), ignored: Vec::new(), is_strict: false }
    }

    /// Returns the fields of a nested object. Fails if `value` is not an object.
    /// `path` is the path of the object, such as `messages[0]`.
    pub fn nested(path: &str, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { prefix: format!("{path}."), ..Self::new(map) }),
            _ => Err(ApiError::invalid(path, "expected an object")),
        }
    }

    /// Returns the full path of a field, such as `messages[0].content`.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Returns the error for a field with an invalid value.
    pub fn invalid(&self, name: &str, problem: impl std::fmt::Display) -> ApiError {
        ApiError::invalid(self.path(name), problem)
    }

    /// Returns whether a field is present and has not been read yet.
    pub fn has(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(|value| !value.is_null())
    }

    /// Removes and returns a field. Returns `None` if the field is absent or null.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    /// Adds or replaces a field.
    pub fn put(&mut self, name: &str, value: Value) {
        self.map.insert(name.to_string(), value);
    }

    pub fn take_bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        let value = self.take(name);
        value.map(|value| value.as_bool().ok_or_else(|| self.invalid(name, "expected true or false"))).transpose()
    }

    pub fn take_string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.invalid(name, "expected a string")),
        }
    }

    /// Removes and returns a string. Fails if the field is absent.
    pub fn require_string(&mut self, name: &str) -> Result<String, ApiError> {
        self.take_string(name)?.ok_or_else(|| self.invalid(name, "expected a string"))
    }

    /// Removes and returns a whole number. Accepts `5.0` as 5. Fails if the field is not a whole number in `range`.
    pub fn take_integer(&mut self, name: &str, range: std::ops::RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let whole = value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < 9e15);
        let number = value.as_i64().or(whole.map(|number| number as i64)).filter(|number| range.contains(number));
        let (start, end) = (range.start(), range.end());
        number.map(Some).ok_or_else(|| self.invalid(name, format!("expected a whole number from {start} to {end}")))
    }

    pub fn take_array(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(_) => Err(self.invalid(name, "expected an array")),
        }
    }

    /// Removes a nested object and returns its fields. Fails if the field is not an object.
    pub fn take_object(&mut self, name: &str) -> Result<Option<Fields>, ApiError> {
        let path = self.path(name);
        self.take(name).map(|value| Fields::nested(&path, value)).transpose()
    }

    /// Removes a field that inferno does not support.
    /// Fails unless the field is absent or has one of the `neutral` values, which have no effect.
    pub fn refuse(&mut self, name: &str, neutral: &[Value], hint: &str) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !neutral.contains(&value) => Err(ApiError::unsupported(self.path(name), hint)),
            _ => Ok(()),
        }
    }

    /// Refuses each field of a table (see [`refuse`](Self::refuse)).
    pub fn refuse_all(&mut self, table: &[RefusedField]) -> Result<(), ApiError> {
        for field in table {
            let parse = |json: &&str| serde_json::from_str(json).expect("neutral values should be valid JSON");
            let neutral: Vec<Value> = field.neutral.iter().map(parse).collect();
            self.refuse(field.name, &neutral, field.hint)?;
        }
        Ok(())
    }

    /// Records an ignored field, unless it has been recorded before.
    /// Keeps at most [`MAX_IGNORED`] fields, because a body can have hundreds of thousands of unknown fields.
    pub fn ignore(&mut self, field: impl Into<IgnoredField>) {
        let field = field.into();
        if self.ignored.len() < MAX_IGNORED && !self.ignored.contains(&field) {
            self.ignored.push(field);
        }
    }

    /// Records a field that does not have its full effect, with a note about the difference.
    pub fn ignore_with_note(&mut self, name: &str, note: impl Into<String>) {
        self.ignore(IgnoredField { name: name.to_string(), note: Some(note.into()) });
    }

    /// Records the ignored fields of a nested object, from which nothing more is read.
    pub fn ignore_rest(&mut self, nested: Fields) {
        nested.ignored().into_iter().for_each(|field| self.ignore(field));
    }

    /// Returns the ignored fields of a request body, from which nothing more is read.
    /// If the request has the header `x-inferno-strict: 1`, fails with an error about the first ignored field instead.
    pub fn finish(self) -> Result<Vec<IgnoredField>, ApiError> {
        let is_strict = self.is_strict;
        let ignored = self.ignored();
        match ignored.first().filter(|_| is_strict) {
            None => Ok(ignored),
            Some(IgnoredField { name, note: None }) => {
                Err(ApiError::unsupported(name, "without the header x-inferno-strict, the server ignores the field"))
            }
            Some(IgnoredField { name, note: Some(note) }) => {
                let hint = "without the header x-inferno-strict, the server accepts the request";
                Err(ApiError::partly_supported(name, note, hint))
            }
        }
    }

    /// Returns the recorded fields and at most [`MAX_IGNORED`] unread fields.
    /// The paths of the unread fields have no array indexes, as in `messages[].x`.
    pub fn ignored(self) -> Vec<IgnoredField> {
        let Self { map, prefix, mut ignored, .. } = self;
        let prefix = prefix.replace(|c: char| c.is_ascii_digit(), "");
        let left = map.into_iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| format!("{prefix}{name}"));
        ignored.extend(left.take(MAX_IGNORED).map(IgnoredField::from));
        ignored
    }
}

/// Creates a response with a JSON body.
pub fn json_response(body: &impl serde::Serialize) -> Result<axum::response::Response, ApiError> {
    let text =
        serde_json::to_string(body).map_err(|error| ApiError::internal(format!("cannot write JSON: {error}")))?;
    let mut response = axum::response::Response::new(Body::from(text));
    let json = axum::http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    Ok(response)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn depth_counts_brackets_outside_strings() {
        assert_eq!(depth(br#"{"a": ["[[[\"[[", {"b": []}]}"#), 4);
        assert_eq!(depth(b"]]]][["), 2);
        assert!(parse("[".repeat(1_000_000).as_bytes()).is_err());
        assert!(parse(br#"{"a": "\ud800"}"#).is_err() && parse(b"{\"a\": NaN}").is_err() && parse(b"\xff").is_err());
    }

    #[test]
    fn fields_are_typed_and_unused_ones_are_named() {
        let Value::Object(map) = json!({ "n": 2.0, "x": null, "s": 1, "user": "me", "f": 1.5 }) else { panic!() };
        let mut fields = Fields::new(map);
        assert_eq!(fields.take_integer("n", 1..=8).unwrap(), Some(2));
        assert!(fields.take_integer("f", 1..=8).is_err());
        assert!(fields.take_string("s").unwrap_err().body().contains("expected a string"));
        assert_eq!(fields.take_bool("absent").unwrap(), None);
        let names = |fields: Fields| fields.ignored().iter().map(IgnoredField::to_string).collect::<Vec<_>>();
        fields.ignore("field".to_string());
        fields.ignore_with_note("effort", "max is treated as high");
        assert_eq!(names(fields), ["field", "effort (max is treated as high)", "user"]);
        let nested = Fields::nested("messages[12]", json!({ "a": 1 })).unwrap();
        assert_eq!(names(nested), ["messages[].a"]);
        let many: Map<String, Value> = (0..1000).map(|number| (format!("f{number}"), json!(1))).collect();
        let mut fields = Fields::new(many);
        (0..1000).for_each(|number| fields.ignore(format!("field {number}")));
        assert_eq!(fields.ignored().len(), 2 * MAX_IGNORED);
    }
}
