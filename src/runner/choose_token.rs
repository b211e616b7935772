//! The interface between the runner and a sampler.

#[cfg(feature = "cuda")]
use crate::kernels::decode::sample::DeviceSampling;

/// The error message of a decode step in which every logit is NaN or -inf.
pub(super) const NO_TOKEN: &str =
    "cannot choose a token: every logit is NaN or -inf; the weights are corrupt, or values overflow in this --dtype";

/// Chooses the next token of a sequence.
pub trait ChooseToken {
    /// Returns the next token for `logits`, f32 `[vocab]`. May modify the logits in place.
    ///
    /// The caller has applied [`logit_edits`](Self::logit_edits). It guarantees that at least one logit is greater than -inf.
    /// Never chooses a token whose logit is NaN or -inf.
    fn choose(&mut self, logits: &mut [f32]) -> u32;

    /// Returns the values to add to logits before a token is chosen, at most one per token.
    fn logit_edits(&self) -> Vec<(u32, f32)> {
        Vec::new()
    }

    /// Returns how many of the most likely tokens need log probabilities, or `None` if no token needs them.
    fn top_logprobs(&self) -> Option<usize> {
        None
    }

    /// Returns whether the choice needs the whole row of logits. The decode graph then cannot choose the token.
    fn needs_logits(&self) -> bool {
        self.top_logprobs().is_some() || !self.logit_edits().is_empty()
    }

    /// Counts a token that the device chose, for the penalties and the random numbers of later choices.
    fn record(&mut self, token: u32);

    /// Returns the parameters and token counts for the sampling kernel, or `None` for greedy sampling.
    /// The kernel chooses the same tokens as `choose`, except for the rare differences that `sample.cu` lists.
    #[cfg(feature = "cuda")]
    fn on_device(&self) -> Option<DeviceSampling>;
}
