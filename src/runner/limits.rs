//! The limits of a runner.

/// The limits that all steps of a runner must respect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunnerLimits {
    /// The most positions of a sequence.
    pub context: usize,
    /// The most tokens that one step computes, of all sequences together.
    pub chunk: usize,
}
