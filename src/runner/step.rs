//! Steps of one or more sequences: prefill chunks and decode tokens together.

use anyhow::{Result, bail};
use candle_core::Tensor;

use super::Runner;
use super::host_choice::choose;
use super::step_sequence::{Chosen, StepSequence};
#[cfg(feature = "cuda")]
use super::{Decode, gpu_step::choose_on_device};
use crate::nn::pass::{LogitRows, SequenceSpan, StepBatch};

impl Runner {
    /// Runs one step. Returns the chosen token of each sequence.
    ///
    /// Returns an error if the whole step failed. The cache may then hold some of the step's keys and values.
    /// If no token can be chosen for one sequence, only its [`Chosen`] is an error.
    pub fn step(&mut self, sequences: &mut [StepSequence]) -> Result<Vec<Chosen>> {
        let tokens: usize = sequences.iter().map(|sequence| sequence.ids.len()).sum();
        if tokens > self.limits.chunk {
            bail!("cannot run a step of {tokens} tokens: the limit is {}", self.limits.chunk);
        }
        #[cfg(feature = "cuda")]
        if let Some(chosen) = self.step_on_graph(sequences)? {
            return Ok(chosen);
        }
        let logits = self.forward(sequences)?;
        self.choose(sequences, &logits)
    }

    /// Runs the decoder operation by operation.
    /// Returns the logits of each sequence's last token, f32 `[sequences, vocab]`.
    fn forward(&mut self, sequences: &[StepSequence]) -> Result<Tensor> {
        let ids: Vec<u32> = sequences.iter().flat_map(|sequence| sequence.ids).copied().collect();
        let spans: Vec<SequenceSpan> = sequences
            .iter()
            .map(|&StepSequence { ids, position, tables, .. }| SequenceSpan { tokens: ids.len(), position, tables })
            .collect();
        self.forget_sequences();
        self.decoder.forward(&StepBatch { ids: &ids, sequences: &spans, logits: LogitRows::Last }, &self.cache)
    }

    /// Stops the decode graph and clears the solo sequence, because the next pass may overwrite their blocks.
    pub(super) fn forget_sequences(&mut self) {
        self.stop_graph();
        self.solo.cached.clear();
    }

    /// Stops the decode graph, because another pass may overwrite the blocks of its sequence.
    pub(super) fn stop_graph(&mut self) {
        #[cfg(feature = "cuda")]
        if let Decode::Graph(graph) = &mut self.decode {
            graph.stop();
        }
    }

    /// Chooses the next token of each sequence that has a sampler, from the rows of `logits`.
    fn choose(&mut self, sequences: &mut [StepSequence], logits: &Tensor) -> Result<Vec<Chosen>> {
        #[cfg(feature = "cuda")]
        if logits.device().is_cuda() {
            return match sequences {
                [sequence] => Ok(vec![self.first_graph_token(sequence, logits)?]),
                _ => choose_on_device(sequences, logits),
            };
        }
        let rows = sequences.iter_mut().enumerate();
        rows.map(|(row, sequence)| match &mut sequence.sampler {
            None => Ok(None),
            Some(sampler) => Ok(Some(choose(&mut logits.get(row)?.to_vec1::<f32>()?, *sampler))),
        })
        .collect()
    }
}
