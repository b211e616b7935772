//! Faults that tests inject into an engine.
//!
//! Tests in the same process use [`EngineHandle::inject_fault`](super::EngineHandle::inject_fault).
//! Tests that start `inferno` as another process set the environment variable `INFERNO_FAULT`.
//! See [`PlannedFault::from_env`].

use anyhow::Result;

use crate::runner::{RankFault, Runner};

/// A fault. All faults except [`Rank`](Self::Rank) strike in the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The step fails. Later steps are not affected.
    Step,
    /// The step fails, and the engine stops, as after an illegal memory access on a GPU.
    Device,
    /// The engine thread panics.
    Panic,
    /// A rank fails at the time in the [`PlannedFault`]. With [`FaultTime::Step`], the rank receives the fault then:
    /// the first rank fails in its next pass or use of the decode graph, and any other rank fails after the commands
    /// that it has already received. A single rank ignores the fault.
    Rank(PlannedFault),
}

/// A fault that strikes a rank at a given time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedFault {
    pub rank: usize,
    pub fault: RankFault,
    pub time: FaultTime,
}

/// When a planned fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultTime {
    /// Before the rank loads its part of the model.
    Load,
    /// Before the step with this number, or at once if that step has already begun. Steps are counted from 1.
    /// With step 0, the fault does not wait for a step: it is injected even if the engine is idle.
    Step(u64),
}

impl PlannedFault {
    /// Returns the fault that the environment variable `INFERNO_FAULT` describes as `RANK:FAULT:TIME`.
    /// FAULT is `error`, `panic` or `hang`. TIME is `load` or the number of a step.
    /// Examples are `1:hang:20` (before step 20) and `0:panic:load`.
    /// Returns `None` if the variable is not set or is invalid.
    pub fn from_env() -> Option<Self> {
        Self::parse(&std::env::var("INFERNO_FAULT").ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let [rank, fault, time] = text.split(':').collect::<Vec<_>>().try_into().ok()?;
        let fault = match fault {
            "error" => RankFault::Error,
            "panic" => RankFault::Panic,
            "hang" => RankFault::Hang,
            _ => return None,
        };
        let time = if time == "load" { FaultTime::Load } else { FaultTime::Step(time.parse().ok()?) };
        Some(Self { rank: rank.parse().ok()?, fault, time })
    }

    /// If the fault is planned for rank `rank` and for [`FaultTime::Load`], makes the calling rank fail.
    pub fn inject_while_loading(self, rank: usize) -> Result<()> {
        if (self.rank, self.time) == (rank, FaultTime::Load) { self.fault.inject() } else { Ok(()) }
    }
}

/// A fault that makes the next step fail.
pub enum StepFault {
    /// See [`Fault::Step`].
    Step,
    /// See [`Fault::Device`].
    Device,
}

/// The fault that a test has planned for an engine, if any.
pub struct FaultPlan {
    fault: Option<Fault>,
    /// The number of steps that have begun.
    steps: u64,
}

impl FaultPlan {
    /// Plans the fault in the environment variable `INFERNO_FAULT`. See [`PlannedFault::from_env`].
    pub fn from_env(runner: &Runner) -> Self {
        let mut plan = Self { fault: None, steps: 0 };
        if let Some(planned) = PlannedFault::from_env() {
            plan.set(Fault::Rank(planned), runner);
        }
        plan
    }

    /// Plans `fault` in place of any earlier fault.
    /// If the fault is planned for a rank and for a step that has already begun, injects it at once.
    pub fn set(&mut self, fault: Fault, runner: &Runner) {
        self.fault = Some(fault);
        self.inject_into_rank(runner);
    }

    /// Counts the step that is about to run, and injects the fault if it is due.
    ///
    /// Panics for [`Fault::Panic`]. For [`Fault::Step`] and [`Fault::Device`], the caller must let the step fail.
    pub fn before_step(&mut self, runner: &Runner) -> Option<StepFault> {
        self.steps += 1;
        self.inject_into_rank(runner);
        match self.fault.take_if(|fault| !matches!(fault, Fault::Rank(_))) {
            Some(Fault::Step) => Some(StepFault::Step),
            Some(Fault::Device) => Some(StepFault::Device),
            Some(Fault::Panic) => panic!("injected panic of the engine thread"),
            Some(Fault::Rank(_)) | None => None,
        }
    }

    /// Injects the fault of a rank if it is planned for the current step or an earlier step.
    fn inject_into_rank(&mut self, runner: &Runner) {
        if let Some(Fault::Rank(PlannedFault { rank, fault, time: FaultTime::Step(step) })) = self.fault
            && step <= self.steps
        {
            self.fault = None;
            runner.inject(rank, fault);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planned_faults_are_parsed() {
        let planned = |rank, fault, time| Some(PlannedFault { rank, fault, time });
        assert_eq!(PlannedFault::parse("1:hang:20"), planned(1, RankFault::Hang, FaultTime::Step(20)));
        assert_eq!(PlannedFault::parse("0:panic:load"), planned(0, RankFault::Panic, FaultTime::Load));
        for invalid in ["", "1", "1:hang", "1:stop:3", "x:hang:3", "1:error:x", "1:error:3:4"] {
            assert_eq!(PlannedFault::parse(invalid), None, "{invalid}");
        }
    }
}
