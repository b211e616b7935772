//! [`QueuedStep`]: a step whose tokens the engine has not taken yet.

use std::time::Instant;

use super::times::StepKind;
use crate::runner::sampling::SamplerResult;

/// A queued step. [`Runner::take`](crate::runner::Runner::take) returns its tokens.
pub struct QueuedStep {
    pub(in crate::runner) kind: StepKind,
    pub(in crate::runner) queued_at: Instant,
    pub(in crate::runner) tokens: QueuedTokens,
}

/// The tokens of a queued step, or where the host receives them.
pub(in crate::runner) enum QueuedTokens {
    /// The tokens of a step that has already run on a CPU.
    Known(Vec<SamplerResult>),
    /// The device will send a token for each sequence that needs one. `index` is the result of `StepLauncher::queue`.
    /// `expected` has an entry for each sequence, which is `None` if the sequence needs no token.
    Sent { index: usize, expected: Vec<Option<ExpectedToken>> },
}

/// A token that the device will send to the host.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedToken {
    /// How many of the most likely tokens the device will send with log probabilities, besides the chosen token.
    /// `None` if the device sends no log probabilities.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only builds with CUDA read it"))]
    pub logprobs: Option<usize>,
}
