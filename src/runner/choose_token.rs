//! What the runner asks of a sampler.

/// Chooses the next token of a sequence.
pub trait ChooseToken {
    /// Returns the token to take after `logits` \[V\], which may be changed in place.
    fn choose(&mut self, logits: &mut [f32]) -> u32;

    /// Returns the same choice as parameters for the sampling kernel, and how often each of the `vocab_size` tokens was
    /// seen if that matters. `None` means the likeliest token.
    #[cfg(feature = "cuda")]
    fn on_device(
        &self,
        vocab_size: usize,
    ) -> Option<(crate::kernels::decode::sample::SamplingKernelParams, Option<Vec<u32>>)>;
}
