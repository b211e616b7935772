//! The methods behind `Runner::step` that run or start CUDA graphs.

use anyhow::{Result, bail};
use candle_core::Tensor;

use crate::runner::Runner;
use crate::runner::decode_graph::GraphCommand;
use crate::runner::gpu::{DecodeGraph, choose_on_device};
use crate::runner::ranks::RankGroup;
use crate::runner::sampling::{ChosenToken, SamplerResult, TokenSampler};
use crate::runner::step::{StepExecutor, StepSequence, samplers};

impl Runner {
    /// Runs a step on the CUDA graph that `executor` names. Returns `None` if the step must run operation by operation.
    pub(super) fn run_graph(
        &mut self,
        executor: StepExecutor,
        sequences: &mut [StepSequence],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Option<Vec<SamplerResult>>> {
        match (executor, &mut *sequences) {
            (StepExecutor::DecodeGraph, [sequence]) => Ok(Some(vec![self.run_decode_graph(sequence, meanwhile)?])),
            (StepExecutor::DecodeGraph, sequences) => {
                bail!("internal error: the decode graph cannot run a step of {} sequences", sequences.len())
            }
            (StepExecutor::BatchGraph, sequences) => self.run_batch_graph(sequences, meanwhile),
            (StepExecutor::Eager, _) => Ok(None),
        }
    }

    /// Runs a decode step on the graph of its padded batch size.
    /// Returns `None` if there is no launcher, or if the graph failed on a single GPU.
    /// The step must then run operation by operation. With several ranks, a failure of the graph is an error.
    fn run_batch_graph(
        &mut self,
        sequences: &mut [StepSequence],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Option<Vec<SamplerResult>>> {
        self.reset();
        let Some(launcher) = &mut self.launcher else { return Ok(None) };
        let run = || launcher.run(&self.decoder, &self.cache, sequences);
        let Some(logits) = self.ranks.run_batch(&self.device, sequences, run)? else { return Ok(None) };
        meanwhile();
        // Reading the chosen tokens waits for the step. Without tokens, wait here: the graph's inputs are in words of
        // `QueuedStepBuffers` that a later step overwrites.
        if sequences.iter().all(|sequence| sequence.sampler.is_none()) {
            self.device.synchronize()?;
        }
        choose_on_device(&mut samplers(sequences), &logits).map(Some)
    }

    /// Runs a decode step of one sequence on the decode graph, and returns the sequence's token.
    /// If no token can be chosen, the [`SamplerResult`] is an error, which ends only this sequence unless a rank has
    /// failed.
    fn run_decode_graph(&mut self, sequence: &mut StepSequence, meanwhile: &mut dyn FnMut()) -> Result<SamplerResult> {
        let (&[input], Some(sampler), Ok(graph)) =
            (sequence.ids, sequence.sampler.as_deref_mut(), &mut self.decode_graph)
        else {
            bail!("internal error: the decode graph cannot run this step");
        };
        self.solo.clear();
        // The input is a generated token or a prompt chunk of one token. The graph processes both in the same way.
        if !graph.continues(sequence.id, sequence.position) {
            let (sampling, tables) = (sampler.on_device(), sequence.tables.clone());
            let (sequence, position) = (sequence.id, sequence.position);
            let start = GraphCommand::Start { sequence, position, token: input, sampling, tables };
            self.ranks.run_graph(graph, start, None)?;
        } else if graph.needs_tables(sequence.tables) {
            self.ranks.run_graph(graph, GraphCommand::SetTables(sequence.tables.clone()), None)?;
        }
        // Unless the graph was just started, the GPU usually runs queued steps meanwhile.
        meanwhile();
        Ok(Some(take_token(graph, &self.ranks, sequence.limit, sampler)))
    }

    /// Chooses the next token of one sequence from the logits of a step that ran operation by operation,
    /// such as the last prefill step. Returns `None` if the sequence has no sampler.
    ///
    /// If there is a decode graph and the sampler does not need the whole row of logits, starts the graph.
    /// The graph then chooses the token, and keeps it on the device as the input of the next step.
    pub(super) fn choose_and_start_graph(
        &mut self,
        sequence: &mut StepSequence,
        logits: &Tensor,
    ) -> Result<SamplerResult> {
        let graph = match &mut self.decode_graph {
            Ok(graph) if !needs_logits(sequence) => graph,
            _ => return Ok(choose_on_device(&mut samplers(std::slice::from_mut(sequence)), logits)?.remove(0)),
        };
        let Some(sampler) = sequence.sampler.as_deref_mut() else { return Ok(None) };
        let end = sequence.position + sequence.ids.len();
        let (sampling, tables) = (sampler.on_device(), sequence.tables.clone());
        let start = GraphCommand::StartFrom { sequence: sequence.id, tokens: end, sampling, tables };
        self.ranks.run_graph(graph, start, Some(logits))?;
        Ok(Some(take_token(graph, &self.ranks, sequence.limit, sampler)))
    }
}

/// Returns whether the sampler of a sequence needs the whole row of logits.
fn needs_logits(sequence: &StepSequence) -> bool {
    sequence.sampler.as_deref().is_some_and(|sampler| sampler.needs_logits())
}

/// Waits for the graph's next token and records it in the sampler. Stops the graph after an error.
fn take_token(
    graph: &mut DecodeGraph,
    ranks: &RankGroup,
    limit: usize,
    sampler: &mut dyn TokenSampler,
) -> Result<ChosenToken> {
    let token = ranks.next_token(graph, limit);
    match token {
        Ok(token) => sampler.record(token),
        Err(_) => graph.stop(),
    }
    token.map(|id| ChosenToken { id, logprobs: None })
}
