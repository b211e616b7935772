//! Recomputes recorded answers.

use std::time::Instant;

use anyhow::Result;

use super::EngineHandle;
use crate::engine::requests::{AnswerDecoder, GenerateOptions, RecordedAnswer, RequestRecord};

/// A token of a recorded or replayed answer, and its log probability if the request asked for log probabilities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplayedToken {
    pub id: u32,
    pub logprob: Option<f32>,
}

/// The first token at which a replayed answer differs from its record.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divergence {
    /// The number of equal tokens before the difference.
    pub index: usize,
    pub expected: ReplayedToken,
    /// The replayed token. `None` if the replayed answer has no more tokens.
    pub got: Option<ReplayedToken>,
}

impl EngineHandle {
    /// Recomputes a recorded answer. Returns the first token whose id differs from the record, if any.
    ///
    /// `index` is the position of `answer` among the answers to `request`.
    /// Generates no more tokens than the record has. Does not compare log probabilities.
    /// Fails like [`submit`](Self::submit), and if the generation fails.
    pub fn replay(&self, request: &RequestRecord, index: usize, answer: &RecordedAnswer) -> Result<Option<Divergence>> {
        let mut options = GenerateOptions::new(request.sampling.clone());
        options.sampling.seed = options.sampling.seed.wrapping_add(index as u64);
        options.max_tokens = Some(answer.tokens.len());
        options.stop_token_ids = request.stop_token_ids.clone();
        options.min_tokens = request.min_tokens;
        options.logit_bias = request.logit_bias.clone();
        options.logprobs = request.logprobs;
        options.constraint = request.constraint.clone();
        options.ignore_eos = request.ignore_eos;
        options.deterministic = request.deterministic;
        let decoder = AnswerDecoder::raw(self.shared_language(), &request.prompt, &options);
        let chat = request.chat.clone();
        let mut streams = self.submit_ids(request.prompt.clone(), chat, vec![decoder], options, Instant::now())?;
        let mut events = streams.remove(0).into_iter();
        for (index, &id) in answer.tokens.iter().enumerate() {
            let event = events.next().transpose()?;
            let got = event.as_ref().and_then(|event| {
                let logprob = event.logprobs().map(|logprobs| logprobs.chosen);
                Some(ReplayedToken { id: event.token()?, logprob })
            });
            if got.map(|token| token.id) != Some(id) {
                let expected = ReplayedToken { id, logprob: answer.logprobs.get(index).copied() };
                return Ok(Some(Divergence { index, expected, got }));
            }
        }
        Ok(None)
    }
}
