//! `Runner::step`, which runs one step: chunks of prompts, tokens to decode, or both.

use std::ops::Range;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use candle_core::Tensor;

use crate::kernels::SumOrder;
use crate::nn::pass::{PassBatch, RowSelection, SequenceSpan};
use crate::runner::Runner;
use crate::runner::gpu::{choose_on_device, logprobs_on_device};
use crate::runner::limits::PromptSegments;
use crate::runner::sampling::{SamplerResult, TokenLogprobs, TokenSampler, choose_on_host};
use crate::runner::step::{RunnerFacts, StepFacts, StepKind, StepSequence, TokensToScore, route, samplers};

/// The maximum number of prompt tokens to score at once. The logits of these tokens are in memory at the same time.
/// If the engine can run several sequences at once, its memory plan has room for at least `MAX_SEQUENCES` rows of
/// logits, so these logits fit in the plan.
const SCORED_ROWS: usize = 64;

/// The kind of pass that runs the tokens of a sequence. The passes of a step run in the order of the variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PassKind {
    /// One pass for all sequences whose results may depend on other sequences.
    Together,
    /// One pass for all sequences with one input token whose results must not depend on other sequences.
    SingleTokens,
    /// One pass for each segment of each prompt whose results must not depend on other sequences.
    PromptSegments,
}

impl PassKind {
    /// Returns the kind of pass for a sequence. If the sequence has no prompt segments, `segments_of_all` applies.
    fn of(sequence: &StepSequence, segments_of_all: Option<PromptSegments>) -> Self {
        match sequence.prompt_segments.or(segments_of_all) {
            None => Self::Together,
            Some(_) if sequence.ids.len() > 1 => Self::PromptSegments,
            Some(_) => Self::SingleTokens,
        }
    }
}

impl Runner {
    /// Runs one step. Returns the chosen token of each sequence.
    ///
    /// Calls `meanwhile` at least once, unless the step fails:
    /// on a CPU first before the step, and on a GPU usually while the GPU computes.
    ///
    /// Returns an error if the whole step failed. The cache may then hold some of the step's keys and values.
    /// If no token can be chosen for one sequence, only the [`SamplerResult`] of this sequence is an error.
    pub fn step(&mut self, sequences: Vec<StepSequence>, meanwhile: &mut dyn FnMut()) -> Result<Vec<SamplerResult>> {
        let (kind, started) = (StepKind::of(&sequences), Instant::now());
        if !self.device.is_cuda() {
            meanwhile();
        }
        let chosen = self.run_passes(sequences, meanwhile)?;
        self.ranks.check()?;
        self.times.add(kind, started.elapsed());
        Ok(chosen)
    }

    /// Runs the passes of a step one after the other. Returns the chosen tokens in the order of `sequences`.
    pub(super) fn run_passes(
        &mut self,
        mut sequences: Vec<StepSequence>,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Vec<SamplerResult>> {
        let segments_of_all = self.options.prompt_segments;
        let kind = |sequence: &StepSequence| PassKind::of(sequence, segments_of_all);
        // Both sorts are stable, so sequence i of the sorted slice was at index `order[i]`.
        let mut order: Vec<usize> = (0..sequences.len()).collect();
        order.sort_by_key(|&index| kind(&sequences[index]));
        sequences.sort_by_key(kind);
        let mut results = Vec::with_capacity(sequences.len());
        for group in sequences.chunk_by_mut(|a, b| kind(a) == kind(b)) {
            match kind(&group[0]) {
                PassKind::Together => {
                    // The passes of the other kinds are small enough: one token per sequence, or one prompt segment.
                    self.check_tokens(group)?;
                    results.extend(self.run_pass(group, meanwhile, SumOrder::Fastest)?);
                }
                PassKind::SingleTokens => results.extend(self.run_pass(group, meanwhile, SumOrder::Fixed)?),
                PassKind::PromptSegments => {
                    meanwhile();
                    for sequence in group {
                        results.push(self.run_prompt_segments(sequence)?);
                    }
                }
            }
        }
        let mut chosen: Vec<SamplerResult> = results.iter().map(|_| None).collect();
        for (index, result) in order.into_iter().zip(results) {
            chosen[index] = result;
        }
        Ok(chosen)
    }

    /// Runs one pass on the CUDA graph that [`route`] selects.
    /// If `route` selects no graph, or if a batch graph fails on a single GPU,
    /// runs the pass operation by operation, with additions in `sum_order`.
    fn run_pass(
        &mut self,
        sequences: &mut [StepSequence],
        meanwhile: &mut dyn FnMut(),
        sum_order: SumOrder,
    ) -> Result<Vec<SamplerResult>> {
        // The pass runs now, so select an executor as for a step that cannot be queued.
        let facts = RunnerFacts { can_queue: false, ..self.facts() };
        let executor = route(facts, StepFacts::of(sequences)).executor;
        if let Some(chosen) = self.run_graph(executor, sequences, meanwhile)? {
            return Ok(chosen);
        }
        let logits = self.forward(sequences, sum_order)?;
        meanwhile();
        self.choose_tokens(sequences, &logits)
    }

    /// Fails if the sequences have more than `limits.chunk` input tokens in total.
    pub(super) fn check_tokens(&self, sequences: &[StepSequence]) -> Result<()> {
        let tokens: usize = sequences.iter().map(|sequence| sequence.ids.len()).sum();
        if tokens > self.limits.chunk {
            bail!("cannot run a step of {tokens} tokens: the limit is {}", self.limits.chunk);
        }
        Ok(())
    }

    /// Runs a chunk of a prompt, with one pass for each prompt segment in the chunk.
    /// A segment with a single token uses the fixed order of additions, like the sequence's decode steps.
    fn run_prompt_segments(&mut self, sequence: &mut StepSequence) -> Result<SamplerResult> {
        let StepSequence { ids, position, prompt_segments, .. } = *sequence;
        let segments = prompt_segments.or(self.options.prompt_segments);
        let segments = segments.context("internal error: a sequence has no prompt segments")?;
        let mut start = position;
        let end = position + ids.len();
        let mut scores = sequence.scores.take();
        loop {
            let segment_end = segments.next(start).min(end);
            let is_last = segment_end == end;
            let sampler = sequence.sampler.take_if(|_| is_last).map(|sampler| sampler as &mut dyn TokenSampler);
            let range = start - position..segment_end - position;
            let scores = scores.as_mut().and_then(|scores| scores.in_range(range.clone()));
            let ids = &ids[range];
            let mut segment = [StepSequence { sampler, scores, ..sequence.with_input(ids, start) }];
            let sum_order = if ids.len() == 1 { SumOrder::Fixed } else { SumOrder::Fastest };
            let logits = self.forward(&mut segment, sum_order)?;
            if is_last {
                return Ok(self.choose_tokens(&mut segment, &logits)?.remove(0));
            }
            start = segment_end;
        }
    }

    /// Runs the decoder operation by operation. Also computes the log probabilities of the prompt tokens in `scores`.
    /// Returns the logits of each sequence's last token, f32 `[sequences, vocab]`.
    fn forward(&mut self, sequences: &mut [StepSequence], sum_order: SumOrder) -> Result<Tensor> {
        let ids: Vec<u32> = sequences.iter().flat_map(|sequence| sequence.ids).copied().collect();
        let spans: Vec<SequenceSpan> = sequences.iter().map(StepSequence::span).collect();
        self.reset();
        let batch = PassBatch { ids: &ids, sequences: &spans, rows: RowSelection::Last, sum_order };
        if !has_scores(sequences) {
            return self.ranks.forward(&self.decoder, &batch, &self.cache);
        }
        // The ranges of tokens in the batch whose logits are needed for scores.
        let mut ranges = Vec::new();
        // For each entry of `ranges`, the index of its sequence and the range in `scores.tokens`.
        let mut scored = Vec::new();
        let mut start = 0;
        for (index, sequence) in sequences.iter().enumerate() {
            if let Some(scores) = &sequence.scores {
                let first = start + scores.first;
                for at in (0..scores.tokens.len()).step_by(SCORED_ROWS) {
                    let end = scores.tokens.len().min(at + SCORED_ROWS);
                    ranges.push(first + at..first + end);
                    scored.push((index, at..end));
                }
            }
            start += sequence.ids.len();
        }
        let on_logits = |index: usize, logits: &Tensor| {
            let (sequence, tokens) = &scored[index];
            sequences[*sequence].scores.as_mut().map_or(Ok(()), |scores| score(logits, tokens.clone(), scores))
        };
        self.ranks.forward_scored(&self.decoder, &batch, &self.cache, &ranges, on_logits)
    }

    /// Stops the decode graph. Call this function before another pass, which may overwrite the blocks of the graph's
    /// sequence.
    pub(super) fn stop_graph(&mut self) {
        if let Ok(graph) = &mut self.decode_graph {
            graph.stop();
        }
    }

    /// Chooses the next token of each sequence that has a sampler, on the device of `logits`.
    /// On a GPU, also starts the decode graph if it can continue the only sequence.
    fn choose_tokens(&mut self, sequences: &mut [StepSequence], logits: &Tensor) -> Result<Vec<SamplerResult>> {
        if logits.device().is_cuda() {
            return match sequences {
                // A sequence with prompt segments is deterministic: all its decode steps add in the order
                // `SumOrder::Fixed`. The decode graph adds in another order.
                [sequence] if sequence.prompt_segments.is_none() => {
                    Ok(vec![self.choose_and_start_graph(sequence, logits)?])
                }
                _ => choose_on_device(&mut samplers(sequences), logits),
            };
        }
        let rows = sequences.iter_mut().enumerate();
        rows.map(|(row, sequence)| match &mut sequence.sampler {
            None => Ok(None),
            Some(sampler) => Ok(Some(choose_on_host(&mut logits.get(row)?.to_vec1::<f32>()?, *sampler))),
        })
        .collect()
    }
}

fn has_scores(sequences: &[StepSequence]) -> bool {
    sequences.iter().any(|sequence| sequence.scores.is_some())
}

/// Computes the log probabilities of the tokens `scores.tokens[range]`, and appends them to `scores.logprobs`.
/// Row i of `logits`, f32 `[tokens, vocab]`, is the prediction of token i of the range from the tokens before it.
fn score(logits: &Tensor, range: Range<usize>, scores: &mut TokensToScore) -> Result<()> {
    let tokens = &scores.tokens[range];
    if logits.device().is_cuda() {
        scores.logprobs.extend(logprobs_on_device(logits, tokens, scores.top)?);
        return Ok(());
    }
    for (row, &token) in tokens.iter().enumerate() {
        let logits = logits.get(row)?.to_vec1::<f32>()?;
        scores.logprobs.push(TokenLogprobs::from_logits(&logits, token, scores.top));
    }
    Ok(())
}
