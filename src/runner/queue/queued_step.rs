//! A queued step, whose tokens the host does not know yet.

use std::time::Instant;

use super::step_sequence::Chosen;
use super::step_times::StepKind;

/// A queued step, whose tokens [`Runner::take`](super::Runner::take) returns.
pub struct QueuedStep {
    pub(super) kind: StepKind,
    pub(super) queued_at: Instant,
    pub(super) tokens: QueuedTokens,
}

/// Where the tokens of a queued step are.
pub(super) enum QueuedTokens {
    /// The step ran when it was queued.
    Known(Vec<Chosen>),
    /// The device sends the tokens of step `index`: one token for each sequence that needs one.
    #[cfg(feature = "cuda")]
    Sent { index: usize, needs_token: Vec<bool> },
}
