//! The interface between the runner and a sampler.

#[cfg(feature = "cuda")]
use crate::kernels::decode::sample::DeviceSampling;

/// The error of a step whose logits are all NaN.
pub(super) const NAN_LOGITS: &str =
    "cannot choose a token: the logits are NaN; the weights are corrupt or overflow in this --dtype";

/// Chooses the next token of a sequence.
pub trait ChooseToken {
    /// Returns the next token for `logits`, f32 `[vocab]`. May modify the logits in place.
    fn choose(&mut self, logits: &mut [f32]) -> u32;

    /// Returns the state with which the sampling kernel chooses the same tokens, or `None` for greedy sampling.
    #[cfg(feature = "cuda")]
    fn on_device(&self, vocab_size: usize) -> Option<DeviceSampling>;
}
