//! Converts SentencePiece token scores to BPE merges.
//!
//! With a BPE model (GGUF tokenizer model `llama`), SentencePiece repeatedly joins the adjacent pair whose joined token
//! has the highest score.
//! BPE produces the same result if every split of a token into two tokens is a merge, ranked by the token's score.
//! transformers converts SentencePiece scores in the same way, but may order merges with equal scores differently.
//!
//! For equal scores, SentencePiece joins the leftmost pair, and the converted BPE joins the pair whose joined token
//! has the lowest id. In Llama and Mistral vocabularies, only runs of spaces have equal scores, and both rules join
//! a run of spaces in the same way.

use std::collections::HashMap;

use anyhow::{Context, Result, bail};
use tokenizers::models::bpe::Merges;

use super::vocabulary::{MAX_MERGES, TokenType, Vocabulary};

/// The maximum sum of the squared lengths of normal tokens, in bytes. The run time of the conversion is proportional to
/// this sum. For Llama 2, the sum is about 2 million.
const MAX_WORK: usize = 1 << 29;

/// Returns the BPE merges that are equivalent to the SentencePiece scores, in order of decreasing score.
/// Fails if the vocabulary has no scores, or if the conversion would exceed `MAX_WORK` or `MAX_MERGES`.
pub fn merges(vocabulary: &Vocabulary, ids: &HashMap<&str, u32>) -> Result<Merges> {
    let scores = vocabulary.scores.as_ref().context("metadata key tokenizer.ggml.scores is missing")?;
    let normal = |token: &str| ids.get(token).is_some_and(|id| is_normal(vocabulary, *id as usize));
    let mut found = Vec::new();
    let mut work = 0usize;
    for (id, token) in vocabulary.tokens.iter().enumerate().filter(|(id, _)| is_normal(vocabulary, *id)) {
        work = work.saturating_add(token.len().saturating_mul(token.len()));
        if work > MAX_WORK {
            bail!("metadata key tokenizer.ggml.tokens: the tokens up to id {id} are too long to convert to BPE merges");
        }
        for (cut, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(cut);
            if normal(left) && normal(right) {
                found.push((id, left, right));
            }
        }
        if found.len() > MAX_MERGES {
            bail!("metadata key tokenizer.ggml.tokens: the tokens form more than {MAX_MERGES} merges");
        }
    }
    // As in the tokenizer.json files of Llama 2 and Mistral, merges with equal scores are ordered by the ids of the
    // joined tokens, and merges that produce the same token by the ids of their parts.
    let by_ids = |(id, left, right): &(usize, &str, &str)| (*id, ids.get(left).copied(), ids.get(right).copied());
    found.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then_with(|| by_ids(a).cmp(&by_ids(b))));
    Ok(found.into_iter().map(|(_, left, right)| (left.to_string(), right.to_string())).collect())
}

/// Returns whether a token has the type `Normal`. Both parts and the result of a merge must have this type.
fn is_normal(vocabulary: &Vocabulary, id: usize) -> bool {
    vocabulary.token_type(id) == TokenType::Normal
}
