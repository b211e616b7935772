//! The messages between inferno and a sandbox process, sent over the sandbox process's standard input and output.
//!
//! Each message is sent as a frame with a header (a request or response in JSON) and a body (text or binary data).
//! The frame begins with the lengths of the header and the body (both u32, little-endian).

use std::io::{Read, Write};

use anyhow::{Result, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::chat::{Message, RenderOptions};
use crate::tokenizer::ControlTokens;

/// The command-line argument that starts this program as a sandbox process. Descriptive, because `ps` shows it.
pub const ARGUMENT: &str = "language-sandbox";

/// The maximum size of the header or the body of a frame, in bytes.
const MAX_BYTES: usize = 1 << 30;

#[derive(Serialize, Deserialize)]
pub enum SandboxRequest {
    /// Load the tokenizer, chat format, stop tokens and sampling defaults of the model at the path in the body.
    /// The client sends this request first, and only once per sandbox process.
    Load,
    /// Encode the text in the body.
    Encode(ControlTokens),
    Render(Vec<Message>, RenderOptions),
}

impl SandboxRequest {
    /// Returns the size in bytes of the request's text: the text to encode, or the messages and tools to render.
    /// Returns 0 for [`SandboxRequest::Load`].
    pub fn text_bytes(&self, body: &[u8]) -> usize {
        match self {
            SandboxRequest::Load => 0,
            SandboxRequest::Encode(_) => body.len(),
            SandboxRequest::Render(messages, options) => {
                let tools = options.tools.iter().map(|tool| tool.to_string().len()).sum::<usize>();
                messages.iter().map(Message::text_bytes).sum::<usize>() + tools
            }
        }
    }
}

#[derive(Serialize, Deserialize)]
pub enum SandboxResponse {
    /// The tokenizer is loaded. The body contains all tokens of the vocabulary.
    Loaded(Box<Loaded>),
    /// The text was encoded. The body contains the token ids.
    Encoded,
    /// The text of a rendered conversation. The body contains its token ids.
    Rendered(String),
    /// The error message of a failed request. The sandbox process can still serve further requests.
    Failed(String),
    /// The error message of a request that failed with [`Error::InvalidRequest`](crate::error::Error::InvalidRequest).
    Invalid(String),
}

/// The tokenizer, chat format, sampling defaults and stop tokens of a model.
/// The tokens of the vocabulary are not included, because the body of the response contains them.
#[derive(Serialize, Deserialize)]
pub struct Loaded {
    pub table: Value,
    /// `None` if the model has no chat format.
    pub chat: Option<LoadedChat>,
    pub generation_config: Value,
    pub stop_ids: Vec<u32>,
}

/// What inferno needs to know about a chat format that renders in a sandbox process.
#[derive(Serialize, Deserialize)]
pub struct LoadedChat {
    /// The name of the chat format.
    pub name: String,
    /// Whether prompts can contain tools.
    pub reads_tools: bool,
}

/// A message: a request or a response, with its body.
#[derive(Debug, PartialEq)]
pub struct Frame<T> {
    pub header: T,
    pub body: Vec<u8>,
}

/// Writes a frame. `header` is a request or a response.
pub fn write(out: &mut impl Write, header: &impl Serialize, body: &[u8]) -> Result<()> {
    let header = serde_json::to_vec(header)?;
    if header.len().max(body.len()) > MAX_BYTES {
        bail!("a header or body of {} bytes is too long", header.len().max(body.len()));
    }
    let lengths = [header.len(), body.len()].map(|length| (length as u32).to_le_bytes());
    out.write_all(&lengths.concat())?;
    out.write_all(&header)?;
    out.write_all(body)?;
    Ok(out.flush()?)
}

/// Reads a frame. Returns `None` if the input ends before the frame.
/// Fails if the input ends within the frame, or if the frame is invalid.
pub fn read<T: DeserializeOwned>(input: &mut impl Read) -> Result<Option<Frame<T>>> {
    let mut lengths = Vec::new();
    input.take(8).read_to_end(&mut lengths)?;
    let [header, body] = match lengths.as_chunks() {
        ([], []) => return Ok(None),
        ([header, body], []) => [*header, *body].map(|length| u32::from_le_bytes(length) as usize),
        _ => bail!("the frame is incomplete"),
    };
    let header = read_bytes(input, header)?;
    Ok(Some(Frame { header: serde_json::from_slice(&header)?, body: read_bytes(input, body)? }))
}

/// Reads `length` bytes. Allocates memory only as bytes arrive, because `length` may be wrong.
fn read_bytes(input: &mut impl Read, length: usize) -> Result<Vec<u8>> {
    if length > MAX_BYTES {
        bail!("a header or body of {length} bytes is too long");
    }
    let mut bytes = Vec::new();
    if input.take(length as u64).read_to_end(&mut bytes)? < length {
        bail!("the frame is incomplete");
    }
    Ok(bytes)
}

/// Converts token ids to bytes: 4 little-endian bytes per id.
pub fn ids_to_bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

/// Converts bytes to token ids. The inverse of [`ids_to_bytes`].
pub fn ids_from_bytes(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_input_that_ends_between_frames_is_complete() {
        let mut frame = Vec::new();
        write(&mut frame, &"header", b"body").unwrap();
        for end in 0..frame.len() {
            let result = read::<String>(&mut &frame[..end]);
            match end {
                0 => assert!(result.unwrap().is_none()),
                _ => assert_eq!(result.unwrap_err().to_string(), "the frame is incomplete", "{end} bytes"),
            }
        }
        let mut input = frame.as_slice();
        let frame = Frame { header: "header".to_string(), body: b"body".to_vec() };
        assert_eq!(read(&mut input).unwrap(), Some(frame));
        assert!(read::<String>(&mut input).unwrap().is_none());
    }
}
