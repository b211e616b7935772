//! Tests of tokenizers that are built from GGUF metadata.
//!
//! - `published`: tokenizers of published models. These tests need `INFERNO_FIXTURES`.
//! - `synthetic`: small vocabularies that the tests make up
//! - `invalid`: vocabularies that are errors

mod invalid;
mod published;
mod synthetic;

use inferno::tokenizer::Tokenizer;
use inferno::weights::gguf::{GgufHeader, vocabulary};

use crate::support::gguf::vocabulary::{Converted, NORMAL};
use crate::support::gguf::writer::Writer;

/// Builds a tokenizer from the metadata of a GGUF file.
fn tokenizer(writer: &Writer) -> Tokenizer {
    let bytes = writer.bytes();
    let header = GgufHeader::parse(&bytes).unwrap();
    Tokenizer::from_gguf(&vocabulary(&header.metadata(&bytes)).unwrap()).unwrap()
}

/// Returns a vocabulary with one token per byte value, plus the tokens and merges that `case` adds.
fn small(case: impl FnOnce(&mut Vec<String>, &mut Vec<i32>, &mut Vec<String>)) -> Converted {
    let byte = |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        // Bytes without a printable character map to U+0100 and the following code points, in order.
        0..=0x20 => char::from_u32(0x100 + u32::from(byte)).unwrap(),
        0x7f..=0xa0 => char::from_u32(0x121 + u32::from(byte - 0x7f)).unwrap(),
        0xad => '\u{143}',
    };
    let mut tokens: Vec<String> = (0..=255).map(|b| byte(b).to_string()).collect();
    let (mut types, mut merges) = (vec![NORMAL; 256], Vec::new());
    case(&mut tokens, &mut types, &mut merges);
    Converted { tokens, types, merges }
}

fn push(tokens: &mut Vec<String>, types: &mut Vec<i32>, token: &str, kind: i32) {
    tokens.push(token.into());
    types.push(kind);
}
