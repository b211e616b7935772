//! Reads streams of server-sent events (SSE).
//!
//! Source: the section "Interpreting an event stream" of the HTML standard.

use std::io::{self, BufRead, Read};

/// An event must be smaller than this many bytes.
const MAX_EVENT_BYTES: u64 = 8 << 20;

/// Reads the next event. Returns the event data, or `None` at the end of the stream. Skips events without data.
///
/// Unlike the standard, also returns the last event of a stream that ends without the event's final blank line,
/// and does not accept a lone carriage return as the end of a line.
pub fn read_event(stream: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut data: Option<String> = None;
    let mut bytes_left = MAX_EVENT_BYTES;
    loop {
        let mut line = Vec::new();
        let count = stream.take(bytes_left).read_until(b'\n', &mut line)? as u64;
        bytes_left -= count;
        let is_end = count == 0;
        if bytes_left == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the server sent an event that is too large"));
        }
        while line.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
            line.pop();
        }
        if line.is_empty() {
            match data.take() {
                Some(data) => return Ok(Some(data)),
                None if is_end => return Ok(None),
                // A blank line ends an event. This event has no data, for example only a comment, so skip it.
                None => bytes_left = MAX_EVENT_BYTES,
            }
            continue;
        }
        let line = String::from_utf8_lossy(&line);
        let Some(value) = line.strip_prefix("data").filter(|rest| rest.is_empty() || rest.starts_with(':')) else {
            continue;
        };
        let value = value.strip_prefix(':').unwrap_or(value);
        let value = value.strip_prefix(' ').unwrap_or(value);
        match &mut data {
            Some(data) => {
                data.push('\n');
                data.push_str(value);
            }
            None => data = Some(value.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(stream: &str) -> Vec<String> {
        let mut stream = stream.as_bytes();
        std::iter::from_fn(|| read_event(&mut stream).unwrap()).collect()
    }

    #[test]
    fn events_are_read_as_the_standard_says() {
        let stream = ": ping\n\ndata: {\"a\":1}\n\nevent: x\nid: 1\ndata:two\r\n\r\n\n\ndata: a\ndata:  b\n\ndata\n\n";
        assert_eq!(read_all(stream), ["{\"a\":1}", "two", "a\n b", ""]);
        assert_eq!(read_all("dataset: 1\n\nretry: 5\n\n"), [""; 0]);
        assert_eq!(read_all("data: cut"), ["cut"]);
        assert_eq!(read_all(""), [""; 0]);
    }

    #[test]
    fn endless_lines_are_an_error() {
        let mut stream = io::BufReader::new(io::repeat(b'x'));
        assert!(read_event(&mut stream).is_err());
    }
}
