//! The vocabulary of a GGUF file and its special token ids.

use std::collections::HashMap;

use anyhow::{Result, bail};

use super::pre;
use crate::text::{counted, quote};
use crate::tokenizer::stop_tokens::{is_control_stop_token, is_stop_token, stop_ids};

/// The maximum number of tokens in a vocabulary. The vocabulary of Gemma 3, one of the largest, has about 262,000.
pub const MAX_TOKENS: usize = 1 << 21;
/// The maximum number of merges in a vocabulary, which limits the memory for a hostile file.
/// Published vocabularies have far fewer.
pub const MAX_MERGES: usize = 1 << 22;

/// The vocabulary in GGUF metadata. Each field except `architecture` is the value of one `tokenizer.ggml.*` key.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary<'v> {
    /// The value of `general.architecture`.
    pub architecture: Option<&'v str>,
    /// `gpt2` for byte-level BPE, `llama` for SentencePiece.
    pub model: &'v str,
    /// The name of the pre-tokenizer, for byte-level BPE.
    pub pre: Option<&'v str>,
    /// The tokens, indexed by id.
    pub tokens: Vec<&'v str>,
    /// The SentencePiece scores, indexed by id.
    pub scores: Option<Vec<f32>>,
    /// The values of `token_type`, indexed by id.
    pub types: Option<Vec<i32>>,
    /// The merges in order of priority, each as `left right`.
    pub merges: Option<Vec<&'v str>>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>,
    pub eom: Option<u32>,
    pub unk: Option<u32>,
    pub pad: Option<u32>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    pub add_space_prefix: Option<bool>,
}

/// The validated special token ids.
/// In SentencePiece vocabularies, `bos`, `eos` and `unk` default to the ids that llama.cpp uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unk: Option<u32>,
    pub pad: Option<u32>,
    /// The ids of the stop tokens, sorted.
    pub stop: Vec<u32>,
    /// Whether encoding adds `bos` before the text.
    pub add_bos: bool,
    /// Whether encoding adds `eos` after the text.
    pub add_eos: bool,
}

/// The type of a token, from `tokenizer.ggml.token_type`.
/// A token without a type, or with an unknown type number, is `Normal`.
/// As in llama.cpp, a normal token with the text of a known stop token is `Control`, because some converters write the
/// wrong type or no types at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    Normal,
    Unknown,
    Control,
    /// Matched before merges are applied, like a control token. Ordinary text may contain it, unless it looks like a
    /// control token, such as `<think>`.
    UserDefined,
    Unused,
    Byte,
}

/// The added tokens of Phi-3 that do not absorb the whitespace after them.
const KEEP_WHITESPACE: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

impl Vocabulary<'_> {
    /// Returns whether an added token absorbs the whitespace after it in the text.
    ///
    /// GGUF has no key for this property. As in llama.cpp, all added tokens of Phi-3 except `KEEP_WHITESPACE` absorb
    /// whitespace.
    pub(super) fn absorbs_whitespace(&self, token: &str) -> bool {
        self.architecture == Some("phi3") && self.model == "llama" && !KEEP_WHITESPACE.contains(&token)
    }

    pub(super) fn token_type(&self, id: usize) -> TokenType {
        match self.types.as_ref().and_then(|types| types.get(id)) {
            Some(2) => TokenType::Unknown,
            Some(3) => TokenType::Control,
            Some(4) => TokenType::UserDefined,
            Some(5) => TokenType::Unused,
            Some(6) => TokenType::Byte,
            _ if self.tokens.get(id).is_some_and(|token| is_stop_token(token)) => TokenType::Control,
            _ => TokenType::Normal,
        }
    }

    pub(super) fn check_lengths(&self) -> Result<()> {
        let tokens = self.tokens.len();
        if tokens == 0 || tokens > MAX_TOKENS {
            bail!("metadata key tokenizer.ggml.tokens: {tokens} tokens; 1 to {MAX_TOKENS} are allowed");
        }
        let scores = ("scores", self.scores.as_ref().map(Vec::len));
        let types = ("token_type", self.types.as_ref().map(Vec::len));
        for (key, length) in [scores, types] {
            if let Some(length) = length
                && length != tokens
            {
                let tokens = counted(tokens, "token");
                bail!("metadata key tokenizer.ggml.{key}: its length is {length}, but the vocabulary has {tokens}");
            }
        }
        let merges = self.merges.as_ref().map_or(0, Vec::len);
        if merges > MAX_MERGES {
            bail!("metadata key tokenizer.ggml.merges: {merges} merges exceed the limit of {MAX_MERGES}");
        }
        Ok(())
    }

    /// Returns a map from tokens to ids. Omits empty tokens, which only fill gaps in the ids.
    /// Fails if a token occurs twice.
    pub(super) fn ids(&self) -> Result<HashMap<&str, u32>> {
        let mut ids = HashMap::with_capacity(self.tokens.len());
        for (id, token) in self.tokens.iter().enumerate().filter(|(_, token)| !token.is_empty()) {
            if let Some(first) = ids.insert(*token, id as u32) {
                bail!("metadata key tokenizer.ggml.tokens: {} has two ids: {first} and {id}", quote(token));
            }
        }
        Ok(ids)
    }

    /// Returns the special ids from the metadata, and the ids of stop tokens that are found by their text.
    /// In a SentencePiece vocabulary, missing ids of UNK, BOS and EOS are 0, 1 and 2.
    /// Fails if an id in the metadata is invalid, or if encoding must add BOS or EOS but that token has no id.
    pub fn special_ids(&self) -> Result<SpecialIds> {
        let named = |key: &str, id: Option<u32>| match id {
            Some(id) if id as usize >= self.tokens.len() => {
                bail!(
                    "metadata key tokenizer.ggml.{key}: {id} is not a token id: the vocabulary has {}",
                    counted(self.tokens.len(), "token")
                )
            }
            id => Ok(id),
        };
        let sentencepiece = self.model == "llama";
        let default = |id: usize| (sentencepiece && id < self.tokens.len()).then_some(id as u32);
        let bos = named("bos_token_id", self.bos)?.or(default(1));
        let eos = named("eos_token_id", self.eos)?.or(default(2));
        let eot = named("eot_token_id", self.eot)?;
        let eom = named("eom_token_id", self.eom)?;
        let mut stop: Vec<u32> = [eos, eot, eom].into_iter().flatten().collect();
        let is_known_stop = |(token, id): &(&str, u32)| match self.token_type(*id as usize) {
            TokenType::Control => is_control_stop_token(token),
            TokenType::UserDefined => is_stop_token(token),
            _ => false,
        };
        let known: Vec<_> = self.tokens.iter().copied().zip(0u32..).filter(is_known_stop).collect();
        stop.extend(stop_ids(&known));
        stop.sort_unstable();
        stop.dedup();
        let default_bos = sentencepiece || self.pre.and_then(pre::find).is_some_and(|pre| pre.add_bos);
        let is_added = |key: &str, setting: Option<bool>, default: bool, id: Option<u32>| match (setting, id) {
            (Some(true), None) => {
                bail!("metadata key tokenizer.ggml.{key} is true, but the file specifies no id for that token")
            }
            (setting, id) => Ok(setting.unwrap_or(default) && id.is_some()),
        };
        Ok(SpecialIds {
            bos,
            eos,
            unk: named("unknown_token_id", self.unk)?.or(default(0)),
            pad: named("padding_token_id", self.pad)?,
            stop,
            add_bos: is_added("add_bos_token", self.add_bos, default_bos, bos)?,
            add_eos: is_added("add_eos_token", self.add_eos, false, eos)?,
        })
    }
}
