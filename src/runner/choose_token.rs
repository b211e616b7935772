//! The interface between the runner and a sampler.

#[cfg(feature = "cuda")]
use crate::kernels::decode::sample::SamplingKernelParams;

/// Chooses the next token of a sequence.
pub trait ChooseToken {
    /// Returns the token to take after `logits` \[V\], which may be changed in place.
    fn choose(&mut self, logits: &mut [f32]) -> u32;

    /// Returns the parameters with which the sampling kernel makes the same choices. `None` means the likeliest token.
    ///
    /// With penalties, the second part has an entry for each token of the vocabulary: 0 for a token that was not seen, else
    /// 1 + how often it was generated.
    #[cfg(feature = "cuda")]
    fn on_device(&self, vocab_size: usize) -> Option<(SamplingKernelParams, Option<Vec<u32>>)>;
}
