//! Steps that are queued before the host knows the tokens of the previous step.
//!
//! While a GPU runs a step, the host plans and queues the next step, so the GPU need not wait for the host.
//! `queue_on_cpu` contains the code for a CPU.

use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::runner::Runner;
use crate::runner::sampling::SamplerResult;
use crate::runner::step::{
    ExpectedToken, QueuedStep, QueuedTokens, RowSampling, StepExecutor, StepFacts, StepKind, StepSequence, route,
};

impl Runner {
    /// Queues a step without waiting for its tokens, which [`take`](Self::take) returns.
    ///
    /// Before this call, [`take`](Self::take) the tokens of all earlier queued steps except the last one.
    /// Sequences with [`awaits_input`](StepSequence::awaits_input) use the tokens of the last step as input.
    ///
    /// Does nothing and returns `None` if the step must run with [`step`](Self::step) instead.
    /// `runner/step/route.rs` decides which steps are queued.
    pub fn queue(&mut self, sequences: &mut [StepSequence]) -> Result<Option<QueuedStep>> {
        let route = route(self.facts(), StepFacts::of(sequences));
        if !route.is_queued {
            return Ok(None);
        }
        self.check_tokens(sequences)?;
        if self.device.is_cuda() {
            return self.queue_on_gpu(route.executor, sequences).map(Some);
        }
        debug_assert_eq!(route.executor, StepExecutor::Eager);
        self.queue_on_cpu(sequences).map(Some)
    }

    /// Implements [`queue`](Self::queue) for a GPU: launches the step as a batch graph or operation by operation.
    fn queue_on_gpu(&mut self, executor: StepExecutor, sequences: &mut [StepSequence]) -> Result<QueuedStep> {
        self.reset();
        let Some(launcher) = &mut self.launcher else { bail!("internal error: the runner has no step launcher") };
        let (kind, queued_at) = (StepKind::of(sequences), Instant::now());
        let samplings = RowSampling::of_sequences(sequences, self.decoder.vocab_size());
        let index = self.ranks.queue(executor, sequences, &samplings, || {
            launcher.queue(&self.decoder, &self.cache, executor, sequences, &samplings)
        })?;
        let mut expected = vec![None; sequences.len()];
        for &RowSampling { index, logprobs, .. } in &samplings {
            expected[index] = Some(ExpectedToken { logprobs });
        }
        Ok(QueuedStep { kind, queued_at, tokens: QueuedTokens::Sent { index, expected } })
    }

    /// Waits for the tokens of a queued step and returns them. Take steps in the order in which they were queued.
    ///
    /// Calls `record` with the index and the token of each sequence for which the step chose a token.
    pub fn take(&mut self, step: QueuedStep, record: &mut dyn FnMut(usize, u32)) -> Result<Vec<SamplerResult>> {
        let QueuedStep { kind, queued_at, tokens } = step;
        let chosen = match tokens {
            QueuedTokens::Known(chosen) => record_known(chosen, record),
            QueuedTokens::Sent { index, expected } => {
                let launcher = self.launcher.as_ref().context("internal error: the runner has no step launcher")?;
                let chosen = launcher.wait(index, &expected, record)?;
                self.ranks.check()?;
                chosen
            }
        };
        let now = Instant::now();
        let started = queued_at.max(std::mem::replace(&mut self.last_taken, now));
        self.times.add(kind, now - started);
        Ok(chosen)
    }
}

/// Calls `record` with the index and the token of each sequence that has a token. Returns `chosen`.
fn record_known(chosen: Vec<SamplerResult>, record: &mut dyn FnMut(usize, u32)) -> Vec<SamplerResult> {
    for (index, chosen) in chosen.iter().enumerate() {
        if let Some(Ok(token)) = chosen {
            record(index, token.id);
        }
    }
    chosen
}
