//! Limits on the steps of a runner.

/// The limits that all steps of a runner must respect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunnerLimits {
    /// The maximum number of positions in one sequence.
    pub context: usize,
    /// The maximum number of tokens in one step, over all sequences.
    pub chunk: usize,
}
