//! Scores of SentencePiece's BPE as merges.
//!
//! SentencePiece joins, of all neighbors that make a token, those whose token has the highest score. A BPE with a merge
//! for each way to cut each token in two, ranked by the token's score, does the same; so does transformers when it
//! converts such a model. Of tokens of one and the same score SentencePiece takes the leftmost, this the lower id: in Llama's
//! and Mistral's vocabularies these are the runs of spaces, for which both come to the same.

use std::collections::HashMap;

use anyhow::{Context, Result, bail};
use tokenizers::models::bpe::Merges;

use super::{MAX_MERGES, TokenType, Vocabulary};

/// Bound on the squared lengths of all tokens in bytes, which is what finding their parts takes. Llama 2 has 2 million.
const MAX_WORK: usize = 1 << 29;

/// All merges, the first to be applied first.
pub fn merges(vocabulary: &Vocabulary, ids: &HashMap<&str, u32>) -> Result<Merges> {
    let scores = vocabulary.scores.as_ref().context("metadata key tokenizer.ggml.scores is missing")?;
    let normal = |token: &str| ids.get(token).is_some_and(|id| is_normal(vocabulary, *id as usize));
    let mut found = Vec::new();
    let mut work = 0usize;
    for (id, token) in vocabulary.tokens.iter().enumerate().filter(|(id, _)| is_normal(vocabulary, *id)) {
        work = work.saturating_add(token.len().saturating_mul(token.len()));
        if work > MAX_WORK {
            bail!("metadata key tokenizer.ggml.tokens: token {id} and those before it are too long");
        }
        for (cut, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(cut);
            if normal(left) && normal(right) {
                found.push((id, left, right));
            }
        }
        if found.len() > MAX_MERGES {
            bail!("metadata key tokenizer.ggml.tokens: more than {MAX_MERGES} pairs of tokens make tokens");
        }
    }
    // Of equal scores the lower id, and of one token the parts of lower ids, as transformers has it.
    let by_ids = |(id, left, right): &(usize, &str, &str)| (*id, ids.get(left).copied(), ids.get(right).copied());
    found.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then_with(|| by_ids(a).cmp(&by_ids(b))));
    Ok(found.into_iter().map(|(_, left, right)| (left.to_string(), right.to_string())).collect())
}

/// Whether a text can become this token: the others are markers, bytes or user-defined, which are found before.
fn is_normal(vocabulary: &Vocabulary, id: usize) -> bool {
    vocabulary.token_type(id) == TokenType::Normal
}
