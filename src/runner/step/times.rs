//! The mean durations of steps, by the number of sequences and by whether the steps contain chunks of prompts.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::sequence::StepSequence;

/// The mean duration of all steps of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepTime {
    /// The number of sequences in a step of this kind, rounded up to a power of two.
    pub sequences: usize,
    /// Whether steps of this kind contain a sequence with several input tokens, which are a chunk of a prompt.
    pub has_prompts: bool,
    pub steps: u64,
    pub mean_ms: f64,
}

/// The number and the total duration of the steps of each kind, since the last call of [`take`](Self::take).
#[derive(Default)]
pub struct StepTimes(BTreeMap<StepKind, (u64, Duration)>);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepKind {
    has_prompts: bool,
    sequences: usize,
}

impl StepKind {
    pub fn of(sequences: &[StepSequence]) -> Self {
        let has_prompts = sequences.iter().any(|sequence| sequence.ids.len() > 1);
        Self { has_prompts, sequences: sequences.len().next_power_of_two() }
    }
}

impl StepTimes {
    pub fn add(&mut self, kind: StepKind, time: Duration) {
        let (steps, total) = self.0.entry(kind).or_default();
        (*steps, *total) = (*steps + 1, *total + time);
    }

    /// Returns the mean durations of all recorded steps, and clears the record.
    pub fn take(&mut self) -> Vec<StepTime> {
        let steps = std::mem::take(&mut self.0).into_iter();
        let mean = |(StepKind { has_prompts, sequences }, (steps, total)): (StepKind, (u64, Duration))| StepTime {
            sequences,
            has_prompts,
            steps,
            mean_ms: total.as_secs_f64() * 1e3 / steps as f64,
        };
        steps.map(mean).collect()
    }
}
