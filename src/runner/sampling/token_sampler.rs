//! The interface between the runner and a sampler.

use anyhow::Result;

use super::logprobs::TokenLogprobs;
use crate::kernels::sampling::{DeviceSampling, RowEdits, TokenMask};

/// The token that a sampler chose for a sequence, or an error if no token could be chosen.
/// `None` if the sequence had no sampler.
pub type SamplerResult = Option<Result<ChosenToken>>;

/// A token that a sampler chose.
#[derive(Clone, Debug, PartialEq)]
pub struct ChosenToken {
    pub id: u32,
    /// The log probabilities, if the sampler requested any.
    pub logprobs: Option<TokenLogprobs>,
}

/// The error for a sequence if all of its logits in a step are NaN or -inf, and no constraint limits the token.
/// The error ends only this sequence.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot choose a token: every logit is NaN or -inf; the weights are corrupt, or values overflow in this --dtype"
)]
pub struct NoToken;

/// The error message if the logits of all tokens that a constraint allows are NaN or -inf.
pub const NO_ALLOWED_TOKEN: &str = "cannot choose a token: the request's other options rule out every token that its \
                                    constraint allows, or the logits of these tokens are NaN or -inf";

/// Chooses the next token of a sequence.
pub trait TokenSampler {
    /// Returns the next token for `logits`, f32 `[vocab]`, and records the token. May modify the logits in place.
    ///
    /// Before this call, `choose_on_host` adds [`logit_edits`](Self::logit_edits) to the logits,
    /// sets the logits of all tokens outside [`allowed_tokens`](Self::allowed_tokens) to -inf,
    /// and checks that at least one logit is greater than -inf.
    /// `choose` never returns a token whose logit is NaN or -inf.
    fn choose(&mut self, logits: &mut [f32]) -> u32;

    /// Returns the values to add to logits before a token is chosen, at most one per token id.
    fn logit_edits(&self) -> Vec<(u32, f32)> {
        Vec::new()
    }

    /// Returns how many of the most likely tokens are reported with log probabilities, besides the chosen token.
    /// `None` means that no log probabilities are reported, not even the chosen token's.
    fn top_logprobs(&self) -> Option<usize> {
        None
    }

    /// Returns whether a constraint limits the next token.
    fn is_constrained(&self) -> bool {
        false
    }

    /// Returns the tokens that may be chosen next, or `None` if any token may be chosen.
    ///
    /// The runner calls this function at most once per step: after it has launched the pass, and before it adds
    /// [`logit_edits`](Self::logit_edits). On a GPU, the pass may therefore still run during the call.
    /// An error ends only the sampler's sequence.
    fn allowed_tokens(&mut self) -> Result<Option<TokenMask>> {
        Ok(None)
    }

    /// Returns whether the choice needs the whole row of logits for a constraint, for log probabilities or for edits.
    /// The decode graph supports none of these.
    fn needs_logits(&self) -> bool {
        self.is_constrained() || self.top_logprobs().is_some() || !self.logit_edits().is_empty()
    }

    /// Returns whether a queued step can choose the next token before the host has received the previous token.
    /// Returns false if there is a constraint, because the allowed tokens depend on the previous token.
    fn can_queue(&self) -> bool {
        false
    }

    /// Returns the values to add to the logits of a queued step, and the penalties to apply.
    /// `in_flight` is the number of the sequence's tokens from earlier queued steps that are not
    /// [recorded](Self::record) yet. The token counts for the penalties do not include these tokens.
    fn queued_edits(&self, in_flight: u32) -> RowEdits {
        let _ = in_flight;
        RowEdits::default()
    }

    /// Returns the next token for `logits`, f32 `[vocab]`, to which [`queued_edits`](Self::queued_edits) were applied.
    /// `in_flight` has the same meaning as for `queued_edits`.
    /// Does not record the token. As for [`choose`](Self::choose), at least one logit is greater than -inf.
    fn choose_queued(&self, logits: &[f32], in_flight: u32) -> u32;

    /// Records a token that was chosen without [`choose`](Self::choose), so that later choices count the token.
    fn record(&mut self, token: u32);

    /// Returns the parameters and token counts for the sampling kernels.
    /// `None` means greedy sampling without penalties.
    /// The kernels choose the same tokens as `choose`, except for the rare differences that `decode/sample.cu` lists.
    fn on_device(&self) -> Option<DeviceSampling>;
}
