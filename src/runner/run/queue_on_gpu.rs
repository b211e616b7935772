//! Queues steps on a GPU, as batch graphs or operation by operation.

use std::time::Instant;

use anyhow::{Result, bail};

use crate::runner::Runner;
use crate::runner::launcher::RowSampling;
use crate::runner::step::{ExpectedToken, QueuedStep, QueuedTokens, StepExecutor, StepKind, StepSequence};

impl Runner {
    /// Implements [`queue`](Self::queue) for a GPU.
    pub(super) fn queue_on_gpu(
        &mut self,
        executor: StepExecutor,
        sequences: &mut [StepSequence],
    ) -> Result<QueuedStep> {
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
}
