//! [`ChosenToken`]: the token that a sampler chose.

use anyhow::Result;

use super::logprobs::TokenLogprobs;

/// The token that a sampler chose for a sequence, or an error if no token could be chosen.
/// `None` if the sequence had no sampler.
pub type Chosen = Option<Result<ChosenToken>>;

/// A token that a sampler chose.
#[derive(Clone, Debug, PartialEq)]
pub struct ChosenToken {
    pub id: u32,
    /// The log probabilities, if the sampler requested any.
    pub logprobs: Option<TokenLogprobs>,
}
