//! [`ChosenToken`]: the token that a sampler chose.

use anyhow::Result;

use super::logprobs::TokenLogprobs;
#[cfg(feature = "cuda")]
use super::token_sampler::NoToken;
#[cfg(feature = "cuda")]
use crate::kernels::sampling::MAILBOX_NO_TOKEN;

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

/// Returns the token id in a word that the GPU has written to a mailbox: the token id plus 1, or [`MAILBOX_NO_TOKEN`].
/// Fails with [`NoToken`] if the word is [`MAILBOX_NO_TOKEN`].
#[cfg(feature = "cuda")]
pub fn token_in_word(word: u32) -> Result<u32> {
    match word {
        MAILBOX_NO_TOKEN => Err(NoToken.into()),
        word => Ok(word - 1),
    }
}
