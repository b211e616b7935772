//! The largest sequence and the largest step of a runner.

/// The maximum sizes of a sequence and of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunnerLimits {
    /// The maximum number of positions in one sequence.
    pub context: usize,
    /// The maximum number of tokens in one step, over all sequences.
    pub chunk: usize,
}
