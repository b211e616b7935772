//! The order in which sequences get tokens and blocks.

use std::cmp::Reverse;
use std::time::Duration;

/// Identifies a sequence. Later sequences have larger ids.
pub type SequenceId = u64;

/// The weight of one level of priority: a priority value higher by 1 has the same effect as an arrival 2 s later.
const AGING: Duration = Duration::from_secs(2);

/// Orders the sequences of one tenant. The sequence with the smallest value is the most senior.
/// The most senior sequence gets tokens and blocks first.
///
/// The value does not depend on the current time, because all sequences age equally.
/// A long enough wait outweighs any difference in priority, so a low priority cannot delay a sequence forever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seniority {
    /// Whether the sequence is protected (see `MAX_PREEMPTIONS`). Reversed, so that protected sequences come first.
    is_protected: Reverse<bool>,
    /// The arrival time in nanoseconds, plus [`AGING`] times the priority. A lower `priority` value is more urgent.
    adjusted_arrival: i128,
    arrival: Duration,
    id: SequenceId,
}

impl Seniority {
    pub fn new(priority: i32, arrival: Duration, id: SequenceId) -> Self {
        let nanoseconds = |time: Duration| time.as_nanos() as i128;
        let adjusted_arrival = nanoseconds(arrival) + i128::from(priority) * nanoseconds(AGING);
        Self { is_protected: Reverse(false), adjusted_arrival, arrival, id }
    }

    /// Returns the seniority that the sequence has once it is protected: before all unprotected sequences.
    pub fn protected(self) -> Self {
        Self { is_protected: Reverse(true), ..self }
    }

    pub fn is_protected(&self) -> bool {
        self.is_protected.0
    }

    pub fn id(&self) -> SequenceId {
        self.id
    }
}

/// Orders the sequences of all tenants. The sequence with the smallest turn gets tokens and blocks first.
///
/// The comparison uses the fields in their order, so protected sequences come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SchedulingTurn {
    is_protected: Reverse<bool>,
    /// The weighted number of tokens that were served to the sequence's tenant.
    served: u64,
    seniority: Seniority,
}

impl SchedulingTurn {
    pub fn new(served: u64, seniority: Seniority) -> Self {
        Self { is_protected: seniority.is_protected, served, seniority }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seniority(priority: i32, arrival_s: u64) -> Seniority {
        Seniority::new(priority, Duration::from_secs(arrival_s), arrival_s)
    }

    #[test]
    fn earlier_sequences_come_first_within_a_priority() {
        assert!(seniority(0, 1) < seniority(0, 2));
        assert!(seniority(-1, 3) < seniority(0, 2), "one second must not outweigh a level of priority");
    }

    #[test]
    fn waiting_outweighs_priority() {
        assert!(seniority(5, 0) > seniority(0, 9));
        assert!(seniority(5, 0) < seniority(0, 10));
        assert!(seniority(i32::MAX, 0) > seniority(i32::MIN, 9));
    }

    #[test]
    fn protected_sequences_come_first() {
        assert!(seniority(9, 9).protected() < seniority(-5, 0));
    }
}
