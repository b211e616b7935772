//! Converts SentencePiece's token scores to BPE merges.
//!
//! SentencePiece joins the two neighbors whose joined token has the highest score.
//! A BPE does the same if it has one merge for each way to split each token in two, ranked by the token's score.
//! transformers converts such models in the same way.
//! Among equal scores, SentencePiece takes the leftmost pair, and this code the lower id.
//! In the vocabularies of Llama and Mistral only runs of spaces have equal scores,
//! and for these the result is the same.

use std::collections::HashMap;

use anyhow::{Context, Result, bail};
use tokenizers::models::bpe::Merges;

use super::vocabulary::{MAX_MERGES, TokenType, Vocabulary};

/// The limit on the sum of the squared token lengths in bytes, to which the time is proportional.
/// Llama 2 has 2 million.
const MAX_WORK: usize = 1 << 29;

/// Returns all merges in order of priority.
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
    // Among equal scores the lower id wins,
    // and among splits of one token the parts with lower ids, as in transformers.
    let by_ids = |(id, left, right): &(usize, &str, &str)| (*id, ids.get(left).copied(), ids.get(right).copied());
    found.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then_with(|| by_ids(a).cmp(&by_ids(b))));
    Ok(found.into_iter().map(|(_, left, right)| (left.to_string(), right.to_string())).collect())
}

/// Returns true if merges can produce the token. Control, byte and user-defined tokens are matched in another way.
fn is_normal(vocabulary: &Vocabulary, id: usize) -> bool {
    vocabulary.token_type(id) == TokenType::Normal
}
