//! The parts of a step that run only on a GPU: CUDA graphs, and sampling on the device.

use std::collections::HashMap;

use anyhow::{Error, Result, anyhow, bail};
use candle_core::Tensor;

use crate::kernels::decode::{LogitEdit, RowLogprobs, edit_logits, mask_logits, sample_rows, top_logprobs};
use crate::kernels::token_mask::TokenMask;
use crate::runner::Runner;
use crate::runner::choose_token::{ChooseToken, NO_ALLOWED_TOKEN, NoToken};
use crate::runner::decode::Decode;
use crate::runner::decode_graph::DecodeGraph;
use crate::runner::logprobs::TokenLogprobs;
use crate::runner::ranks::{Followers, GraphCommand};
use crate::runner::route::Route;
use crate::runner::step_sequence::{Chosen, ChosenToken, StepSequence};

/// Chooses the next token of each sequence on the GPU, which avoids copying the logits to the host.
pub(super) fn choose_on_device(sequences: &mut [StepSequence], logits: &Tensor) -> Result<Vec<Chosen>> {
    if sequences.iter().all(|sequence| sequence.sampler.is_none()) {
        return Ok(sequences.iter().map(|_| None).collect());
    }
    let logits = sampled_rows(sequences, logits)?;
    let (masks, mut problems) = allowed_tokens(sequences);
    let scored = ScoredRows::copy(sequences, &logits)?;
    let edits = (0..).zip(samplers(sequences)).flat_map(|(row, sampler)| {
        sampler.logit_edits().into_iter().map(move |(token, value)| LogitEdit { row, token, value })
    });
    edit_logits(&logits, &edits.collect::<Vec<_>>())?;
    mask_logits(&logits, &masks)?;
    let parameters: Vec<_> = samplers(sequences).map(|sampler| sampler.on_device()).collect();
    let tokens = sample_rows(&logits, &parameters)?;
    let logprobs = match scored {
        Some(scored) => scored.logprobs(&tokens)?,
        None => vec![None; tokens.len()],
    };
    let mut choices = (0..).zip(tokens.into_iter().zip(logprobs));
    let chosen = sequences.iter_mut().map(|sequence| {
        let sampler = sequence.sampler.as_deref_mut()?;
        Some(match choices.next() {
            Some((row, (id, logprobs))) => match (problems.remove(&row), id) {
                (Some(problem), _) => Err(problem),
                (None, Some(id)) => {
                    sampler.record(id);
                    Ok(ChosenToken { id, logprobs })
                }
                (None, None) if masks.iter().any(|(masked, _)| *masked == row) => Err(anyhow!(NO_ALLOWED_TOKEN)),
                (None, None) => Err(NoToken.into()),
            },
            None => Err(NoToken.into()),
        })
    });
    Ok(chosen.collect())
}

/// Returns the samplers of the sequences that have one, in order.
fn samplers<'a>(sequences: &'a [StepSequence<'_>]) -> impl Iterator<Item = &'a dyn ChooseToken> {
    sequences.iter().filter_map(|sequence| sequence.sampler.as_deref())
}

/// The rows of logits whose log probabilities are needed. Row i belongs to the sequence with the i-th sampler.
struct ScoredRows {
    /// Each row, and how many of the most likely tokens to report.
    rows: Vec<(u32, usize)>,
    /// f32 `[rows, vocab]`, a copy, because edits and penalties change the logits in place.
    logits: Tensor,
}

impl ScoredRows {
    /// Copies the rows of `logits`, f32 `[samplers, vocab]`. Returns `None` if no log probabilities are needed.
    fn copy(sequences: &[StepSequence], logits: &Tensor) -> Result<Option<Self>> {
        let rows = (0..).zip(samplers(sequences));
        let rows: Vec<(u32, usize)> = rows.filter_map(|(row, sampler)| Some((row, sampler.top_logprobs()?))).collect();
        if rows.is_empty() {
            return Ok(None);
        }
        let indices: Vec<u32> = rows.iter().map(|&(row, _)| row).collect();
        let logits = logits.index_select(&Tensor::new(indices, logits.device())?, 0)?;
        Ok(Some(Self { rows, logits }))
    }

    /// Returns the log probabilities of `tokens`, the token that each sampler chose. The entry of a row that is not
    /// scored is `None`.
    fn logprobs(&self, tokens: &[Option<u32>]) -> Result<Vec<Option<TokenLogprobs>>> {
        let mut logprobs = vec![None; tokens.len()];
        let chosen: Vec<u32> = self.rows.iter().map(|&(row, _)| tokens[row as usize].unwrap_or(0)).collect();
        let most = self.rows.iter().map(|&(_, count)| count).max().unwrap_or(0);
        let scores = top_logprobs(&self.logits, &chosen, most)?;
        for (&(row, count), RowLogprobs { chosen, mut top }) in self.rows.iter().zip(scores) {
            top.truncate(count);
            logprobs[row as usize] = Some(TokenLogprobs { chosen, top });
        }
        Ok(logprobs)
    }
}

/// Returns the rows of `logits`, f32 `[sequences, vocab]`, that belong to sequences with samplers.
fn sampled_rows(sequences: &[StepSequence], logits: &Tensor) -> Result<Tensor> {
    let rows: Vec<u32> = (0..).zip(sequences).filter(|(_, s)| s.sampler.is_some()).map(|(row, _)| row).collect();
    Ok(if rows.len() == sequences.len() {
        logits.clone()
    } else {
        logits.index_select(&Tensor::new(rows, logits.device())?, 0)?
    })
}

/// Returns a mask for each row of logits whose sampler allows only some tokens, and an error for each row whose mask
/// could not be computed. Row i belongs to the sequence with the i-th sampler.
fn allowed_tokens(sequences: &mut [StepSequence]) -> (Vec<(u32, TokenMask)>, HashMap<u32, Error>) {
    let (mut masks, mut problems) = (Vec::new(), HashMap::new());
    let samplers = sequences.iter_mut().filter_map(|sequence| sequence.sampler.as_deref_mut());
    for (row, sampler) in (0..).zip(samplers) {
        match sampler.allowed_tokens() {
            Ok(Some(mask)) => masks.push((row, mask)),
            Ok(None) => {}
            Err(problem) => drop(problems.insert(row, problem)),
        }
    }
    (masks, problems)
}

impl Runner {
    /// Runs a step as the CUDA graph of its route. Returns `None` if the step must run operation by operation.
    pub(super) fn run_graph(
        &mut self,
        route: Route,
        sequences: &mut [StepSequence],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Option<Vec<Chosen>>> {
        match (route, &mut *sequences) {
            (Route::DecodeGraph, [sequence]) => {
                let token = self.run_decode_graph(sequence, meanwhile)?;
                Ok(Some(vec![Some(token.map(|id| ChosenToken { id, logprobs: None }))]))
            }
            (Route::DecodeGraph | Route::BatchGraph, sequences) => self.run_batch_graph(sequences, meanwhile),
            (Route::Operations, _) => Ok(None),
        }
    }

    /// Runs a decode step on the graph of its batch size. Returns `None` if the graph failed and the step must run
    /// operation by operation.
    fn run_batch_graph(
        &mut self,
        sequences: &mut [StepSequence],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Option<Vec<Chosen>>> {
        self.forget_solo_sequence();
        let Some(launcher) = &mut self.launcher else { return Ok(None) };
        let logits = if self.followers.is_empty() {
            launcher.try_run(&self.decoder, &self.cache, sequences)?
        } else {
            let run = || launcher.run(&self.decoder, &self.cache, sequences);
            Some(self.followers.run_batch(&self.device, sequences, run)?)
        };
        let Some(logits) = logits else { return Ok(None) };
        meanwhile();
        choose_on_device(sequences, &logits).map(Some)
    }

    /// Runs a decode step of one sequence on the decode graph.
    fn run_decode_graph(&mut self, sequence: &mut StepSequence, meanwhile: &mut dyn FnMut()) -> Result<Result<u32>> {
        let (&[input], Some(sampler), Decode::Graph(graph)) =
            (sequence.ids, sequence.sampler.as_deref_mut(), &mut self.decode)
        else {
            bail!("internal error: the decode graph cannot run this step");
        };
        self.solo.cached.clear();
        // `input` can also be a prompt of one token, which the graph processes like a generated token.
        if !graph.continues(sequence.id, sequence.position) {
            let (sampling, tables) = (sampler.on_device(), sequence.tables.clone());
            let (sequence, position) = (sequence.id, sequence.position);
            let start = GraphCommand::Start { sequence, position, token: input, sampling, tables };
            self.followers.run_graph(graph, start, None)?;
        } else if graph.needs_tables(sequence.tables) {
            self.followers.run_graph(graph, GraphCommand::SetTables(sequence.tables.clone()), None)?;
        }
        // At this point, the GPU is already running queued steps, except before the first token.
        meanwhile();
        Ok(take_token(graph, &self.followers, sequence.limit, sampler))
    }

    /// Chooses the next token of one sequence from the logits of an eager step, such as the last prefill step.
    /// With a decode graph, the token also stays on the device as the input of the next step.
    pub(super) fn choose_and_start_graph(&mut self, sequence: &mut StepSequence, logits: &Tensor) -> Result<Chosen> {
        let graph = match &mut self.decode {
            Decode::Graph(graph) if !needs_logits(sequence) => graph,
            _ => return Ok(choose_on_device(std::slice::from_mut(sequence), logits)?.remove(0)),
        };
        let Some(sampler) = sequence.sampler.as_deref_mut() else { return Ok(None) };
        let end = sequence.position + sequence.ids.len();
        let (sampling, tables) = (sampler.on_device(), sequence.tables.clone());
        let start = GraphCommand::StartFrom { sequence: sequence.id, tokens: end, sampling, tables };
        self.followers.run_graph(graph, start, Some(logits))?;
        Ok(Some(
            take_token(graph, &self.followers, sequence.limit, sampler).map(|id| ChosenToken { id, logprobs: None }),
        ))
    }
}

/// Returns whether the sampler of a sequence needs the whole row of logits.
fn needs_logits(sequence: &StepSequence) -> bool {
    sequence.sampler.as_deref().is_some_and(|sampler| sampler.needs_logits())
}

/// Waits for the graph's next token and records it in the sampler. Stops the graph after an error.
fn take_token(
    graph: &mut DecodeGraph,
    followers: &Followers,
    limit: usize,
    sampler: &mut dyn ChooseToken,
) -> Result<u32> {
    let token = followers.next_token(graph, limit);
    match token {
        Ok(token) => sampler.record(token),
        Err(_) => graph.stop(),
    }
    token
}
