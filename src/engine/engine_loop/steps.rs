//! Runs and queues planned steps, and delivers their tokens.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Result, anyhow, bail};

use super::stats;
use super::{EngineLoop, QueuedWork};
use crate::engine::fault::StepFault;
use crate::engine::requests::{FinishReason, PromptScorer, Sequence};
use crate::engine::scheduler::{Scheduler, SequenceId, SequenceWork, StepPlan};
use crate::error::Error;
use crate::runner::{QueuedStep, SamplerResult, StepSequence, TokenSampler};

/// Whether a step was queued. Decides which function tells the scheduler that the step's positions are computed.
#[derive(Clone, Copy, PartialEq)]
enum StepMode {
    /// The loop waited for the step. [`EngineLoop::deliver`] tells the scheduler.
    Direct,
    /// The step was queued. [`EngineLoop::record_queued`] has already told the scheduler.
    Queued,
}

impl EngineLoop {
    /// Runs or queues one planned step. If the previous step was queued, delivers its tokens.
    pub(super) fn run_plan(&mut self, mut plan: StepPlan) {
        let queued = match self.inject_fault().and_then(|()| self.prepare(&plan)).and_then(|()| self.queue(&plan)) {
            Ok(queued) => queued,
            Err(error) => {
                self.deliver_queued();
                return self.fail(&plan.work, &error);
            }
        };
        if let Some(step) = queued {
            let is_ahead = self.queued_step.is_some();
            stats::add(&self.counters.steps_queued_ahead, u64::from(is_ahead));
            self.deliver_queued();
            self.record_queued(QueuedWork { step, work: plan.work });
            // On a GPU, the queued step is now running, so sending events does not delay the GPU.
            return self.outbox.flush();
        }
        if self.queued_step.is_some() {
            self.deliver_queued();
            self.end_canceled();
            // Drop the work of sequences that these two calls have ended.
            plan.work.retain(|work| self.scheduler.is_running(work.id));
            if plan.work.is_empty() {
                return;
            }
        }
        match self.step(&plan) {
            Ok(chosen) => self.deliver(&plan.work, chosen, StepMode::Direct),
            Err(error) => self.fail(&plan.work, &error),
        }
    }

    /// Injects the fault that a test has planned for the next step, if any.
    fn inject_fault(&mut self) -> Result<()> {
        match self.faults.before_step(&self.runner) {
            Some(StepFault::Step) => bail!("injected fault of a step"),
            Some(StepFault::Device) => {
                self.is_device_broken = true;
                bail!("injected fault of the device")
            }
            None => Ok(()),
        }
    }

    /// Waits for the tokens of the queued step, if there is one, and delivers them.
    /// If the step failed, ends its sequences with the error instead.
    pub(super) fn deliver_queued(&mut self) {
        let Some(QueuedWork { step, work }) = self.queued_step.take() else { return };
        let Self { runner, sequences, .. } = self;
        let chosen = runner.take(step, &mut |index, token| {
            if let Some(sequence) = sequences.get_mut(&work[index].id) {
                sequence.sampler.record(token);
            }
        });
        match chosen {
            Ok(chosen) => self.deliver(&work, chosen, StepMode::Queued),
            Err(error) => self.fail(&work, &error),
        }
    }

    /// Records a queued step in the scheduler, so that the next step can be planned.
    ///
    /// Counts the step's positions as computed, and appends a placeholder for each token that the step will choose.
    fn record_queued(&mut self, queued: QueuedWork) {
        for SequenceWork { id, range, is_last } in &queued.work {
            let Some(sequence) = self.sequences.get(id) else { continue };
            self.scheduler.advance(*id, range.end);
            if *is_last && !sequence.is_prefill_only() {
                self.scheduler.push_pending(*id);
            }
        }
        self.queued_step = Some(queued);
    }

    /// Runs the block copies of a plan, and adds start events for the plan's new sequences.
    fn prepare(&mut self, plan: &StepPlan) -> Result<()> {
        for copy in &plan.copies {
            self.runner.copy_block(copy.from, copy.to)?;
        }
        for SequenceWork { id, range, .. } in &plan.work {
            if let Some(sequence) = self.sequences.get_mut(id).filter(|sequence| !sequence.has_started()) {
                stats::subtract(&self.counters.waiting, 1);
                stats::add(&self.counters.running, 1);
                sequence.start(range.start, &mut self.outbox);
            }
        }
        Ok(())
    }

    /// Queues a step after [`prepare`](Self::prepare). Returns `None` if the step must run with [`step`](Self::step).
    fn queue(&mut self, plan: &StepPlan) -> Result<Option<QueuedStep>> {
        let Self { runner, scheduler, sequences, .. } = self;
        runner.queue(&mut inputs(plan, scheduler, sequences)?)
    }

    /// Runs a step after [`prepare`](Self::prepare). Returns one [`SamplerResult`] for each sequence in the plan.
    fn step(&mut self, plan: &StepPlan) -> Result<Vec<SamplerResult>> {
        let Self { runner, scheduler, sequences, outbox, .. } = self;
        runner.step(inputs(plan, scheduler, sequences)?, &mut || outbox.flush())
    }

    /// Ends the sequences of a failed step with the step's error.
    /// Forgets all cached prefixes, because the step may have written only some of its keys and values.
    fn fail(&mut self, work: &[SequenceWork], error: &anyhow::Error) {
        let message = format!("{error:#}");
        tracing::error!(error = %message, sequences = work.len(), "a step failed: its requests end with this error");
        for id in work.iter().map(|work| work.id) {
            self.end(id, Err(copy_of(error)));
        }
        self.scheduler.forget_prefixes();
        self.counters.cached_tokens.store(0, Ordering::Relaxed);
        // After an illegal memory access, for example, every later CUDA call fails.
        if let Err(error) = self.runner.device().synchronize() {
            tracing::error!(%error, "the device no longer works: the engine stops");
            self.is_device_broken = true;
        }
    }

    /// Adds the events of a step's tokens to the outbox. Ends the sequences that are complete or have failed.
    fn deliver(&mut self, work: &[SequenceWork], chosen: Vec<SamplerResult>, mode: StepMode) {
        self.counters.publish(&self.scheduler);
        let tokens: usize = work.iter().map(|work| work.range.len()).sum();
        self.counters.histograms.step_tokens.observe(tokens as u64);
        for (work, chosen) in work.iter().zip(chosen) {
            let Some(sequence) = self.sequences.get(&work.id) else { continue };
            let is_prompt = work.range.len() > 1 || !sequence.has_generated();
            if is_prompt {
                stats::add(&self.counters.prompt_tokens, work.range.len() as u64);
            }
            self.deliver_prompt_logprobs(work.id);
            let outcome = self.outcome_of(work, chosen);
            self.record_computed(work, matches!(outcome, Some(Err(_))), mode);
            if let Some(outcome) = outcome {
                self.end(work.id, outcome);
            }
        }
    }

    /// Takes the log probabilities of the prompt tokens that a step scored, and adds them to the outbox.
    /// The waiting forks of the sequence receive these log probabilities too, because they share its prefill.
    fn deliver_prompt_logprobs(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let Some(logprobs) = sequence.prompt_scorer.as_mut().and_then(PromptScorer::take) else { return };
        let logprobs = Arc::new(logprobs);
        sequence.add_prompt_logprobs(&logprobs, &mut self.outbox);
        for fork in self.scheduler.forks(id) {
            if let Some(fork) = self.sequences.get_mut(fork) {
                fork.add_prompt_logprobs(&logprobs, &mut self.outbox);
            }
        }
    }

    /// Appends the token that the step chose, if any, to its sequence, and adds the token's event to the outbox.
    /// Returns the finish reason or the error that ends the sequence, or `None` if the sequence continues.
    fn outcome_of(&mut self, work: &SequenceWork, chosen: SamplerResult) -> Option<Result<FinishReason>> {
        let sequence = self.sequences.get_mut(&work.id)?;
        match chosen.map(|chosen| chosen.and_then(|token| sequence.accept(token))) {
            // The request generates no tokens, and the step computed the last prompt token.
            None if work.is_last => Some(Ok(FinishReason::Length)),
            None => None,
            Some(Ok(token)) => {
                stats::add(&self.counters.generated_tokens, 1);
                // Do not count the first token after a cancellation: its step may have begun before the cancellation.
                if sequence.is_canceled() && sequence.note_canceled() {
                    stats::add(&self.counters.tokens_after_cancel, 1);
                }
                self.scheduler.push(work.id, token.id);
                sequence.push(token, self.runner.limits().context, &mut self.outbox).map(Ok)
            }
            Some(Err(error)) => Some(Err(error)),
        }
    }

    /// Records that a step has computed the positions of a sequence.
    /// If the sequence has failed, ensures instead that no other sequence reuses its keys and values.
    fn record_computed(&mut self, work: &SequenceWork, has_failed: bool, mode: StepMode) {
        match (mode, has_failed) {
            (StepMode::Direct, false) => self.scheduler.advance(work.id, work.range.end),
            // `record_queued` has already recorded the positions as computed, so forget all prefixes.
            (StepMode::Queued, true) => self.scheduler.forget_prefixes(),
            (StepMode::Direct, true) | (StepMode::Queued, false) => {}
        }
        // Each sequence of a step overwrites the value, so the value of the last sequence remains.
        let cached = if has_failed { 0 } else { work.range.end };
        self.counters.cached_tokens.store(cached as u64, Ordering::Relaxed);
    }
}

/// Returns a copy of the error of a step, for one of its sequences. A copy of an [`Error`] is also an [`Error`].
fn copy_of(error: &anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<Error>() {
        Some(error) => error.clone().into(),
        None => anyhow!("{error:#}"),
    }
}

/// Returns the step input of each sequence in a plan. Fails if a planned sequence has not started or has no blocks.
fn inputs<'s>(
    plan: &StepPlan,
    scheduler: &'s Scheduler,
    sequences: &'s mut HashMap<SequenceId, Sequence>,
) -> Result<Vec<StepSequence<'s>>> {
    let mut inputs = Vec::with_capacity(plan.work.len());
    // Skip sequences that have not started. There can be hundreds, and `prepare` has started all planned sequences.
    let started = sequences.iter_mut().filter(|(_, sequence)| sequence.has_started());
    let mut borrowed: HashMap<SequenceId, &mut Sequence> = HashMap::with_capacity(plan.work.len());
    borrowed.extend(started.map(|(&id, sequence)| (id, sequence)));
    for SequenceWork { id, range, is_last } in &plan.work {
        let (Some(sequence), Some(tables)) = (borrowed.remove(id), scheduler.tables(*id)) else {
            bail!("internal error: the scheduler planned sequence {id}, which has not started or has no blocks");
        };
        let limit = sequence.remaining();
        let samples = *is_last && !sequence.is_prefill_only();
        let tokens = scheduler.tokens(*id);
        inputs.push(StepSequence {
            id: *id,
            ids: &tokens[range.clone()],
            awaits_input: *is_last && scheduler.is_pending(*id),
            position: range.start,
            tables,
            sampler: samples.then_some(&mut sequence.sampler),
            limit,
            prompt_segments: scheduler.prompt_segments(*id),
            scores: sequence.prompt_scorer.as_mut().and_then(|scorer| scorer.of_step(tokens, range.clone())),
        });
    }
    Ok(inputs)
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn copies_of_an_error_keep_its_type_and_its_message() {
        let error = Error::GpuFailed("GPU 2 of 2 failed".to_string()).into();
        let copy = copy_of(&error);
        assert!(matches!(copy.downcast_ref(), Some(Error::GpuFailed(reason)) if reason == "GPU 2 of 2 failed"));
        let other = Err::<(), _>(anyhow!("out of memory")).context("cannot run a step").unwrap_err();
        assert_eq!(copy_of(&other).to_string(), "cannot run a step: out of memory");
    }
}
