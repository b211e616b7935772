//! A queued step, whose tokens the host does not know yet.

use std::time::Instant;

use crate::runner::step_sequence::Chosen;
use crate::runner::step_times::StepKind;

/// A queued step, whose tokens [`Runner::take`](crate::runner::Runner::take) returns.
pub struct QueuedStep {
    pub(in crate::runner) kind: StepKind,
    pub(in crate::runner) queued_at: Instant,
    pub(in crate::runner) tokens: QueuedTokens,
}

/// Where the tokens of a queued step are.
pub(in crate::runner) enum QueuedTokens {
    /// The step ran when it was queued.
    Known(Vec<Chosen>),
    /// The device sends the tokens of step `index`: one token for each sequence that needs one.
    Sent { index: usize, needs_token: Vec<bool> },
}
