//! The interface between the runner and a sampler.

#[cfg(feature = "cuda")]
use crate::kernels::decode::sample::SamplingKernelParams;

/// Chooses the next token of a sequence.
pub trait ChooseToken {
    /// Returns the next token for `logits` \[V\]. May modify the logits in place.
    fn choose(&mut self, logits: &mut [f32]) -> u32;

    /// Returns the parameters that make the sampling kernel choose the same tokens, or `None` for greedy sampling.
    ///
    /// With penalties, the second part has one entry per vocabulary token.
    /// An entry is 0 if the token was never seen, and otherwise 1 + the number of times it was generated.
    #[cfg(feature = "cuda")]
    fn on_device(&self, vocab_size: usize) -> Option<(SamplingKernelParams, Option<Vec<u32>>)>;
}
