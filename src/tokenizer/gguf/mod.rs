//! Builds tokenizers from the vocabularies of GGUF files.
//!
//! Source: llama.cpp's handling of the `tokenizer.ggml.*` keys (ggml-org/llama.cpp, `src/llama-vocab.cpp`).
//! The tests compare token ids with llama.cpp's test vectors and with tokenizer.json.
//! For byte-level BPE, this code follows the model's tokenizer.json where llama.cpp is known to differ from it.
//! For SentencePiece, this code follows llama.cpp.
//!
//! GGUF files are untrusted, and some values make the `tokenizers` library panic. This code rejects the values
//! that are known to do so, and `guarded` converts any other panic to an error.

mod pre;
mod sentencepiece;
mod vocabulary;

use std::collections::{HashMap, HashSet};

use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, BpeBuilder, Merges, Vocab};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, OffsetReferential, OffsetType, PostProcessorWrapper,
    PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
};

use super::guard::guarded;
use crate::text::quote;
use pre::PreTokenizerSpec;
use vocabulary::TokenType;

pub use vocabulary::{MAX_MERGES, MAX_TOKENS, SpecialIds, Vocabulary};

/// Builds a tokenizer of the `tokenizers` library from a vocabulary. Fails if the vocabulary is invalid or unsupported.
pub fn build(vocabulary: &Vocabulary) -> Result<tokenizers::Tokenizer> {
    vocabulary.check_lengths()?;
    let ids = vocabulary.ids()?;
    let special = vocabulary.special_ids()?;
    let parts = match vocabulary.model {
        "gpt2" => byte_level(vocabulary, &ids)?,
        "llama" => sentencepiece(vocabulary, &ids, &special)?,
        other => {
            bail!("metadata key tokenizer.ggml.model: {} is not supported; supported: gpt2, llama", quote(other))
        }
    };
    let post_processor = post_processor(vocabulary, &special)?;
    let tokenizer = guarded("load the tokenizer", || {
        let mut tokenizer = tokenizers::Tokenizer::new(parts.model);
        tokenizer
            .with_normalizer(parts.normalizer)?
            .with_pre_tokenizer(parts.pre_tokenizer)
            .with_post_processor(post_processor)
            .with_decoder(Some(parts.decoder));
        tokenizer.add_tokens(added_tokens(vocabulary))?;
        Ok::<_, tokenizers::Error>(tokenizer)
    })?;
    if let Some((content, id)) =
        tokenizer.get_added_vocabulary().get_vocab().iter().find(|(c, id)| ids.get(c.as_str()) != Some(id))
    {
        bail!("cannot load the tokenizer: the tokenizers library gave token {} the wrong id {id}", quote(content));
    }
    Ok(tokenizer)
}

/// The parts of a tokenizer that depend on the model type, `tokenizer.ggml.model`.
struct Parts {
    model: BPE,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    decoder: DecoderWrapper,
}

/// Builds the parts of a byte-level BPE tokenizer (model type `gpt2`).
fn byte_level(vocabulary: &Vocabulary, ids: &HashMap<&str, u32>) -> Result<Parts> {
    let Some(name) = vocabulary.pre else {
        bail!("metadata key tokenizer.ggml.pre is missing, as in files from before May 2024; convert the model again");
    };
    let Some(pre) = pre::find(name) else {
        let (name, supported) = (quote(name), pre::names().join(", "));
        bail!("metadata key tokenizer.ggml.pre: {name} is not supported; supported: {supported}");
    };
    let pre_tokenizer: PreTokenizerWrapper = component(pre.pre_tokenizer())?;
    let merges = merges(vocabulary, ids)?;
    let whole_words = pre.ignore_merges && !words_make_controls(vocabulary, &pre_tokenizer)?;
    let builder = BpeBuilder::new().vocab_and_merges(owned(ids), merges).ignore_merges(whole_words);
    Ok(Parts {
        model: guarded("load the tokenizer", || builder.build())?,
        normalizer: if pre.nfc { Some(component(json!({"type": "NFC"}))?) } else { None },
        pre_tokenizer: Some(pre_tokenizer),
        decoder: component(byte_level_json())?,
    })
}

/// Returns the merges, except those that produce control tokens.
/// Fails if the file has no merges, or if a merge is malformed or needs a token outside the vocabulary.
fn merges(vocabulary: &Vocabulary, ids: &HashMap<&str, u32>) -> Result<Merges> {
    let lines = vocabulary.merges.as_ref().context("metadata key tokenizer.ggml.merges is missing")?;
    let mut merges = Merges::with_capacity(lines.len());
    for (rank, line) in lines.iter().enumerate() {
        let invalid = |why: &str| anyhow!("metadata key tokenizer.ggml.merges[{rank}]: {} {why}", quote(line));
        let (left, right) = line.split_once(' ').ok_or_else(|| invalid("must be two tokens separated by a space"))?;
        if left.is_empty() || right.is_empty() || right.contains(' ') {
            return Err(invalid("must be two tokens separated by a space"));
        }
        let whole = ids.get([left, right].concat().as_str());
        let (Some(whole), true, true) = (whole, ids.contains_key(left), ids.contains_key(right)) else {
            return Err(invalid("needs a token that is not in the vocabulary"));
        };
        // Skip merges that produce control tokens, because ordinary text must never become a control token.
        if vocabulary.token_type(*whole as usize) != TokenType::Control {
            merges.push((left.to_string(), right.to_string()));
        }
    }
    Ok(merges)
}

/// Returns whether the pre-tokenizer keeps the text of at least one control token as a single word.
///
/// `ignore_merges` looks up whole words, so such a word in ordinary text could become a control token.
fn words_make_controls(vocabulary: &Vocabulary, pre_tokenizer: &PreTokenizerWrapper) -> Result<bool> {
    for (id, token) in vocabulary.tokens.iter().enumerate() {
        if vocabulary.token_type(id) != TokenType::Control || token.is_empty() {
            continue;
        }
        let mut text = PreTokenizedString::from(*token);
        guarded("load the tokenizer", || pre_tokenizer.pre_tokenize(&mut text))?;
        if text.get_splits(OffsetReferential::Normalized, OffsetType::Byte).len() == 1 {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Builds the parts of a SentencePiece tokenizer (model type `llama`).
fn sentencepiece(vocabulary: &Vocabulary, ids: &HashMap<&str, u32>, special: &SpecialIds) -> Result<Parts> {
    let merges = sentencepiece::merges(vocabulary, ids)?;
    let mut builder = BpeBuilder::new().vocab_and_merges(owned(ids), merges).byte_fallback(true).fuse_unk(true);
    if let Some(unk) = special.unk.map(|unk| vocabulary.tokens[unk as usize]).filter(|unk| !unk.is_empty()) {
        builder = builder.unk_token(unk.to_string());
    }
    let space = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let unspace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
    let (mut normalizers, mut decoders) =
        (vec![space], vec![unspace, json!({"type": "ByteFallback"}), json!({"type": "Fuse"})]);
    if vocabulary.add_space_prefix.unwrap_or(true) {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(Parts {
        model: guarded("load the tokenizer", || builder.build())?,
        normalizer: Some(component(json!({"type": "Sequence", "normalizers": normalizers}))?),
        pre_tokenizer: None,
        decoder: component(json!({"type": "Sequence", "decoders": decoders}))?,
    })
}

fn owned(ids: &HashMap<&str, u32>) -> Vocab {
    ids.iter().map(|(token, id)| (token.to_string(), *id)).collect()
}

fn added_tokens(vocabulary: &Vocabulary) -> Vec<AddedToken> {
    let added = |(id, token): (usize, &&str)| {
        let added = match vocabulary.token_type(id) {
            TokenType::Control | TokenType::Unknown => AddedToken::from(*token, true),
            TokenType::UserDefined => AddedToken::from(*token, false).normalized(false),
            TokenType::Normal | TokenType::Unused | TokenType::Byte => return None,
        };
        Some(added.rstrip(vocabulary.absorbs_whitespace(token)))
    };
    vocabulary.tokens.iter().enumerate().filter_map(added).collect()
}

/// Returns the post-processor that adds BOS and EOS, or `None` if encoding adds neither.
fn post_processor(vocabulary: &Vocabulary, special: &SpecialIds) -> Result<Option<PostProcessorWrapper>> {
    let bos = special.bos.filter(|_| special.add_bos);
    let eos = special.eos.filter(|_| special.add_eos);
    if bos.is_none() && eos.is_none() {
        return Ok(None);
    }
    let token = |id: u32| vocabulary.tokens[id as usize];
    let mark = |id: u32| json!({"SpecialToken": {"id": token(id), "type_id": 0}});
    let sequence = |name: &str| json!({"Sequence": {"id": name, "type_id": 0}});
    let template = |names: &[&str]| -> Vec<Value> {
        let text = names.iter().map(|name| sequence(name));
        bos.map(mark).into_iter().chain(text).chain(eos.map(mark)).collect()
    };
    let ids: HashSet<u32> = [bos, eos].into_iter().flatten().collect();
    let special_tokens: serde_json::Map<String, Value> = ids
        .into_iter()
        .map(|id| (token(id).into(), json!({"id": token(id), "ids": [id], "tokens": [token(id)]})))
        .collect();
    let processor = json!({
        "type": "TemplateProcessing",
        "single": template(&["A"]),
        "pair": template(&["A", "B"]),
        "special_tokens": special_tokens,
    });
    component(processor).map(Some)
}

/// Parses a tokenizer component from JSON in the format of tokenizer.json.
fn component<T: DeserializeOwned>(json: Value) -> Result<T> {
    guarded("load the tokenizer", || serde_json::from_value(json))
}

/// Returns the JSON of the byte-level pre-tokenizer, which maps bytes to characters. The decoder uses the same JSON.
///
/// The built-in regex of the byte-level pre-tokenizer is off, because separate `Split` steps apply the patterns.
fn byte_level_json() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false})
}

impl PreTokenizerSpec {
    fn pre_tokenizer(&self) -> Value {
        let split = |pattern: &&str| -> Value {
            json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
        };
        let bytes = byte_level_json();
        let steps: Vec<Value> = self.patterns.iter().map(split).chain([bytes]).collect();
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}
