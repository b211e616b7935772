//! The tokens of a vocabulary, and the decoder that turns tokens into text.

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::{AddedToken, Decoder, DecoderWrapper, Model};

use super::guard::guarded;

/// The maximum size of a token, in bytes. Tokens of published models are much shorter.
const MAX_TOKEN_BYTES: usize = 4 << 10;
/// The maximum size of all tokens together, in bytes.
const MAX_TABLE_BYTES: usize = 256 << 20;
/// The maximum number of steps in a decoder. The decoder of Llama 2 has four.
const MAX_DECODER_STEPS: usize = 32;
/// The maximum factor by which the `Replace` steps of a decoder may lengthen text.
/// The `Replace` step of SentencePiece decoders shortens text: it replaces `▁` with a space.
const MAX_DECODER_GROWTH: usize = 2;

/// A control token: an added token that is marked special or has the form of a control token (see
/// `looks_like_control`).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ControlToken {
    pub content: String,
    pub id: u32,
    /// Whether the tokenizer's file marks the token as special. Many files do not mark tokens such as `<think>`.
    pub is_special: bool,
}

/// The tokens of a vocabulary by id, its control tokens and its decoder.
///
/// Decoding takes time and memory proportional to the length of the text. To guarantee this, the constructors of the
/// table reject overlong tokens, and decoders that could need more time or memory.
pub struct TokenTable {
    /// All tokens, concatenated in the order of their ids.
    text: String,
    /// The ids of the tokens, sorted.
    ids: Vec<u32>,
    /// The byte offset in `text` at which each token ends.
    ends: Vec<u32>,
    /// The control tokens, longest first.
    controls: Vec<ControlToken>,
    /// The ids of the control tokens, sorted.
    control_ids: Vec<u32>,
    decoder: Option<DecoderWrapper>,
    /// Whether the vocabulary spells every byte as one printable character, as the vocabulary of GPT-2 does.
    is_byte_level: bool,
    normalizes_controls: bool,
}

/// The JSON part of a serialized [`TokenTable`]. The other part is the list of all tokens.
#[derive(Serialize, Deserialize)]
struct TokenTableHeader {
    controls: Vec<ControlToken>,
    decoder: Option<Value>,
    normalizes_controls: bool,
}

impl TokenTable {
    /// Creates a table with copies of a tokenizer's tokens and decoder.
    pub fn new(library: &tokenizers::Tokenizer) -> Result<Self> {
        let (controls, is_any_normalized) = controls(library);
        // If the vocabulary of the tokenizer's model also contains a control token, the model can produce this token
        // from normalized text.
        let is_any_in_model = || controls.iter().any(|c| library.get_model().token_to_id(&c.content).is_some());
        let normalizes_controls = library.get_normalizer().is_some() && (is_any_normalized || is_any_in_model());
        let mut table = Self::empty(TokenTableHeader {
            controls,
            decoder: library.get_decoder().map(serde_json::to_value).transpose()?,
            normalizes_controls,
        })?;
        // Two tokens can have the same id. `id_to_token` decides which of the two the table contains.
        let count = u32::try_from(library.get_vocab_size(true)).unwrap_or(u32::MAX);
        for id in 0..count {
            if let Some(token) = library.id_to_token(id) {
                table.push(id, &token)?;
            }
        }
        // Ids can have gaps, so some ids can be `count` or larger.
        if table.len() < count as usize {
            let larger: BTreeSet<u32> = library.get_vocab(true).into_values().filter(|&id| id >= count).collect();
            for id in larger {
                table.push(id, &library.id_to_token(id).unwrap_or_default())?;
            }
        }
        Ok(table)
    }

    fn empty(header: TokenTableHeader) -> Result<Self> {
        let TokenTableHeader { controls, decoder, normalizes_controls } = header;
        if let Some(decoder) = &decoder {
            check_decoder(decoder)?;
        }
        let mut steps = Vec::new();
        decoder.iter().for_each(|decoder| collect_steps(decoder, &mut steps));
        let is_byte_level = steps.iter().any(|step| step["type"] == "ByteLevel");
        let decoder = guarded("load the decoder of the tokenizer", || decoder.map(serde_json::from_value).transpose())?;
        let mut control_ids: Vec<u32> = controls.iter().map(|control| control.id).collect();
        control_ids.sort_unstable();
        let text = String::new();
        let ids = Vec::new();
        let ends = Vec::new();
        Ok(Self { text, ids, ends, controls, control_ids, decoder, is_byte_level, normalizes_controls })
    }

    /// Adds a token. `id` must be larger than all ids in the table.
    fn push(&mut self, id: u32, token: &str) -> Result<()> {
        if token.len() > MAX_TOKEN_BYTES {
            bail!("cannot load the tokenizer: token {id} has {} bytes; the limit is {MAX_TOKEN_BYTES}", token.len());
        }
        if self.text.len() + token.len() > MAX_TABLE_BYTES {
            bail!("cannot load the tokenizer: its tokens have more than {MAX_TABLE_BYTES} bytes in total");
        }
        self.text.push_str(token);
        self.ids.push(id);
        self.ends.push(self.text.len() as u32);
        Ok(())
    }

    /// Returns the header as JSON, and the tokens as bytes.
    /// Each token is stored as its id and its length, both little-endian u32, followed by its text.
    pub fn to_parts(&self) -> Result<(Value, Vec<u8>)> {
        let header = TokenTableHeader {
            controls: self.controls.clone(),
            decoder: self.decoder.as_ref().map(serde_json::to_value).transpose()?,
            normalizes_controls: self.normalizes_controls,
        };
        let mut bytes = Vec::with_capacity(self.text.len() + self.len() * 8);
        for (index, id) in self.ids.iter().enumerate() {
            let token = self.at(index).as_bytes();
            bytes.extend_from_slice(&id.to_le_bytes());
            bytes.extend_from_slice(&(token.len() as u32).to_le_bytes());
            bytes.extend_from_slice(token);
        }
        Ok((serde_json::to_value(header)?, bytes))
    }

    /// Rebuilds a table from the result of [`to_parts`](Self::to_parts).
    pub fn from_parts(header: Value, mut bytes: &[u8]) -> Result<Self> {
        fn number(bytes: &mut &[u8]) -> Option<u32> {
            let (number, rest) = bytes.split_first_chunk()?;
            *bytes = rest;
            Some(u32::from_le_bytes(*number))
        }
        let mut table = Self::empty(serde_json::from_value(header)?)?;
        while !bytes.is_empty() {
            let (id, length) = (number(&mut bytes), number(&mut bytes));
            let token = length.and_then(|length| bytes.split_at_checked(length as usize));
            let (Some(id), Some((token, rest))) = (id, token) else { bail!("cannot load the token table: truncated") };
            if table.ids.last().is_some_and(|&last| last >= id) {
                bail!("cannot load the token table: its ids are not in ascending order");
            }
            table.push(id, std::str::from_utf8(token)?)?;
            bytes = rest;
        }
        Ok(table)
    }

    /// Returns the bytes of a token, which may begin or end inside a character.
    /// Returns no bytes for an id that has no token.
    pub fn bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.token(id) else { return Vec::new() };
        if self.is_control(id) {
            return token.as_bytes().to_vec();
        }
        if self.is_byte_level {
            return token.chars().flat_map(bytes_of_char).collect();
        }
        // SentencePiece spells a byte such as 0xE2 as `<0xE2>`, and a space as `▁`.
        let byte = token.strip_prefix("<0x").and_then(|rest| u8::from_str_radix(rest.strip_suffix('>')?, 16).ok());
        byte.map_or_else(|| token.replace('▁', " ").into_bytes(), |byte| vec![byte])
    }

    /// Returns the number of tokens. Ids can be larger than this number, because ids can have gaps.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Returns the control tokens, longest first.
    pub fn controls(&self) -> &[ControlToken] {
        &self.controls
    }

    pub fn is_control(&self, id: u32) -> bool {
        self.control_ids.binary_search(&id).is_ok()
    }

    /// Returns whether normalization may turn other text into a control token.
    pub fn normalizes_controls(&self) -> bool {
        self.normalizes_controls
    }

    pub fn token(&self, id: u32) -> Option<&str> {
        self.ids.binary_search(&id).ok().map(|index| self.at(index))
    }

    fn at(&self, index: usize) -> &str {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.text[start as usize..self.ends[index] as usize]
    }

    /// Returns the id of a token. Searches all tokens one by one.
    pub fn id(&self, token: &str) -> Option<u32> {
        (0..self.len()).find(|&index| self.at(index) == token).map(|index| self.ids[index])
    }

    /// Decodes ids to text. Ignores ids that have no token.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let tokens: Vec<String> = ids.iter().filter_map(|&id| self.token(id).map(str::to_string)).collect();
        match &self.decoder {
            Some(decoder) => guarded("decode the tokens", || decoder.decode(tokens)),
            None => Ok(tokens.join(" ")),
        }
    }
}

/// Returns the byte that a character of a byte-level vocabulary stands for, or the UTF-8 bytes of any other character.
///
/// GPT-2 spells a printable byte as the character with the same code. It spells all other bytes, in order, as the
/// characters from U+0100.
fn bytes_of_char(character: char) -> Vec<u8> {
    let is_printable = |byte: &u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let code = character as usize;
    let byte = match u8::try_from(code) {
        Ok(byte) => Some(byte).filter(is_printable),
        Err(_) => (0..=255u8).filter(|byte| !is_printable(byte)).nth(code - 256),
    };
    byte.map_or_else(|| character.to_string().into_bytes(), |byte| vec![byte])
}

/// Returns the control tokens of a tokenizer, longest first, and whether the library searches normalized text for any
/// of them.
fn controls(library: &tokenizers::Tokenizer) -> (Vec<ControlToken>, bool) {
    let mut added = library.get_added_tokens_decoder();
    added.retain(|_, token| token.special || looks_like_control(&token.content));
    let is_any_normalized = added.values().any(|token| token.normalized);
    let control =
        |(id, token): (u32, AddedToken)| ControlToken { content: token.content, id, is_special: token.special };
    let mut controls: Vec<ControlToken> = added.into_iter().map(control).collect();
    controls.sort_by(|a, b| b.content.len().cmp(&a.content.len()).then(a.id.cmp(&b.id)));
    (controls, is_any_normalized)
}

/// The names of HTML tags in the vocabularies of Gemma. Tags such as `<b>` and `</b>` are text, not control tokens.
///
/// The tag `s` of Gemma is not listed, because `<s>` and `</s>` are control tokens in other vocabularies.
const HTML_TAGS: &[&str] = &[
    "table",
    "caption",
    "thead",
    "tbody",
    "tfoot",
    "tr",
    "th",
    "td",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "blockquote",
    "strong",
    "em",
    "b",
    "i",
    "u",
    "sub",
    "sup",
    "code",
];

/// Returns whether a token has the form of a control token, such as `<think>`, `</tool_call>` or `[INST]`:
/// text without whitespace in `<>` or `[]`. HTML tags (`HTML_TAGS`) are excluded.
fn looks_like_control(content: &str) -> bool {
    let html = content.strip_prefix('<').and_then(|rest| rest.strip_suffix('>'));
    if html.is_some_and(|tag| HTML_TAGS.contains(&tag.strip_prefix('/').unwrap_or(tag))) {
        return false;
    }
    let inner = content
        .strip_prefix('<')
        .and_then(|rest| rest.strip_suffix('>'))
        .or_else(|| content.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')));
    inner.is_some_and(|inner| !inner.is_empty() && !inner.contains(char::is_whitespace))
}

/// Fails if a decoder, in the format of tokenizer.json, has too many steps, can lengthen text too much, or replaces
/// matches of a regular expression.
fn check_decoder(decoder: &Value) -> Result<()> {
    let mut steps = Vec::new();
    collect_steps(decoder, &mut steps);
    if steps.len() > MAX_DECODER_STEPS {
        bail!("cannot load the tokenizer: its decoder has {} steps; the limit is {MAX_DECODER_STEPS}", steps.len());
    }
    // BPEDecoder and CTC steps replace a string with a space. An empty string matches before every character, so each
    // step that replaces it could double the length of the text.
    let pattern = |step: &Value| match step["type"].as_str() {
        Some("BPEDecoder") => step["suffix"].as_str().map(str::len),
        Some("CTC") => step["word_delimiter_token"].as_str().map(str::len),
        _ => None,
    };
    if steps.iter().any(|step| pattern(step) == Some(0)) {
        bail!("cannot load the tokenizer: its decoder replaces an empty string");
    }
    let mut growth = 1usize;
    for step in steps.iter().filter(|step| step["type"] == "Replace") {
        let Some(pattern) = step["pattern"]["String"].as_str() else {
            bail!(
                "cannot load the tokenizer: its decoder replaces matches of a regular expression, which is not supported"
            );
        };
        let content = step["content"].as_str().map_or(0, str::len);
        // An empty pattern matches before every character, and a character may be a single byte.
        let factor = if pattern.is_empty() { content + 1 } else { content.div_ceil(pattern.len()) };
        growth = growth.saturating_mul(factor.max(1));
    }
    if growth > MAX_DECODER_GROWTH {
        bail!(
            "cannot load the tokenizer: its decoder can lengthen text {growth}-fold; the limit is {MAX_DECODER_GROWTH}"
        );
    }
    Ok(())
}

/// Appends the steps of a decoder to `steps` in order, including the steps of nested sequences.
fn collect_steps<'d>(decoder: &'d Value, steps: &mut Vec<&'d Value>) {
    match decoder["decoders"].as_array() {
        Some(decoders) => decoders.iter().for_each(|decoder| collect_steps(decoder, steps)),
        None => steps.push(decoder),
    }
}
