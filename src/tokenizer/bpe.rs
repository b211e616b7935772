//! Parses tokenizer.json files that contain a BPE model, faster than the `tokenizers` library.
//!
//! To detect the model type, the `tokenizers` library converts the vocabulary and the merges several times.
//! This is slow for large files, such as the 28 MB tokenizer.json of gpt-oss.

use std::fmt;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use tokenizers::models::bpe::{BpeBuilder, Vocab};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Result, Tokenizer,
};

use super::guard::SilencedPanics;

/// The contents of a tokenizer.json with a BPE model, without the merges ([`MergesFile`]), and without truncation and
/// padding, which are not used.
#[derive(Deserialize)]
struct BpeFile {
    version: Option<String>,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    post_processor: Option<PostProcessorWrapper>,
    decoder: Option<DecoderWrapper>,
    model: Bpe,
}

#[derive(Deserialize)]
struct Bpe {
    /// The type of the model, which must be `BPE`. The oldest files omit this field.
    r#type: Option<String>,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    vocab: Vocab,
}

/// The merges of a tokenizer.json, which are parsed in parallel with the rest of the file.
#[derive(Deserialize)]
struct MergesFile {
    model: Merges,
}

#[derive(Deserialize)]
struct Merges {
    merges: Vec<Merge>,
}

/// A merge, written as `["a", "b"]`, or as `"a b"` in older files.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(MergeVisitor)
    }
}

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = Merge;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("two tokens")
    }

    fn visit_str<E: Error>(self, both: &str) -> std::result::Result<Merge, E> {
        let split = both.split_once(' ').filter(|(_, right)| !right.contains(' '));
        let (left, right) = split.ok_or_else(|| E::custom("a merge must have two tokens"))?;
        Ok(Merge(left.to_string(), right.to_string()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut both: A) -> std::result::Result<Merge, A::Error> {
        let mut next = || both.next_element()?.ok_or_else(|| A::Error::custom("a merge must have two tokens"));
        Ok(Merge(next()?, next()?))
    }
}

/// Parses a tokenizer.json. Fails if the library cannot build the tokenizer.
/// If the model is not BPE or the file is not in the expected format, returns `None`. The caller must then let the
/// library parse the file.
pub fn parse(bytes: &[u8]) -> Result<Option<Tokenizer>> {
    fn read<'b, T: Deserialize<'b>>(bytes: &'b [u8]) -> Option<T> {
        // `read` may run on a rayon thread, where the caller's guard has no effect. Rayon passes panics to the caller.
        let _silenced = SilencedPanics::new();
        serde_json::from_slice(bytes).ok()
    }
    let (file, merges) = rayon::join(|| read::<BpeFile>(bytes), || read::<MergesFile>(bytes));
    let (Some(file), Some(merges)) = (file, merges) else { return Ok(None) };
    let BpeFile { version, added_tokens, normalizer, pre_tokenizer, post_processor, decoder, model } = file;
    if version.is_some_and(|version| version != "1.0") || model.r#type.is_some_and(|name| name != "BPE") {
        return Ok(None);
    }
    let merges = merges.model.merges.into_iter().map(|Merge(left, right)| (left, right)).collect();
    let mut builder = BpeBuilder::new()
        .vocab_and_merges(model.vocab, merges)
        .fuse_unk(model.fuse_unk.unwrap_or(false))
        .byte_fallback(model.byte_fallback.unwrap_or(false))
        .ignore_merges(model.ignore_merges.unwrap_or(false));
    if let Some(dropout) = model.dropout {
        builder = builder.dropout(dropout);
    }
    if let Some(token) = model.unk_token {
        builder = builder.unk_token(token);
    }
    if let Some(prefix) = model.continuing_subword_prefix {
        builder = builder.continuing_subword_prefix(prefix);
    }
    if let Some(suffix) = model.end_of_word_suffix {
        builder = builder.end_of_word_suffix(suffix);
    }
    let mut tokenizer = Tokenizer::new(builder.build()?);
    tokenizer
        .with_normalizer(normalizer)?
        .with_pre_tokenizer(pre_tokenizer)
        .with_post_processor(post_processor)
        .with_decoder(decoder);
    tokenizer.add_tokens(added_tokens)?;
    Ok(Some(tokenizer))
}
