//! The buffers through which queued steps get their inputs and return their tokens.
//! The tokens of a step also stay on the device, where the next step reads them as input.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Tensor};

use super::sampling::token_in_word;
use crate::kernels::launch::{HostMailbox, HostWords};
use crate::kernels::sampling::{
    EditedRow, LOGPROBS_ROW_WORDS, LOGPROBS_SLOTS, LogprobsRow, RowLogprobs, SAMPLE_PARAM_WORDS, edit_rows, queue_best,
    queue_rows, send_logprobs, take_logprobs,
};
use crate::kernels::step_inputs::StepInputs;
use crate::runner::limits::MAX_SEQUENCES;
use crate::runner::sampling::{ChosenToken, SamplerResult, TokenLogprobs};
use crate::runner::step::{ExpectedToken, RowSampling, StepSequence};

/// The maximum number of queued steps whose tokens the host has not taken: one that runs and one that waits.
/// The engine loop stays within this limit: it takes the tokens of step n before it queues step n + 2.
const DEPTH: usize = 2;

/// The number of steps that have their own words in host memory. A step reads its words until the step ends.
/// Step n is queued only after the first rank has received the tokens of step n - `DEPTH`.
/// Another rank may still be sampling these tokens, so `DEPTH` slots would not be enough.
const SLOTS: usize = 2 * DEPTH;

/// The number of u32 words in host memory for the inputs of a step.
/// Larger inputs are copied to the device, and the host may then wait for earlier steps.
const INPUT_WORDS: usize = 1 << 17;

/// The number of u32 words in host memory for the sampling parameters of a step's rows.
const PARAM_WORDS: usize = MAX_SEQUENCES * SAMPLE_PARAM_WORDS;

/// The number of u32 words in host memory for the edits of a step's logits.
/// Each row with edits has a header, and needs two words for each added value and each token with a penalty.
/// Larger edits are copied to the device, and the host may then wait for earlier steps.
const EDIT_WORDS: usize = 1 << 18;

/// The number of u32 words in host memory that describe the rows whose log probabilities a step sends.
const LOGPROBS_WORDS: usize = MAX_SEQUENCES * LOGPROBS_ROW_WORDS;

/// The number of u32 words in host memory for one step.
const SLOT_WORDS: usize = INPUT_WORDS + PARAM_WORDS + LOGPROBS_WORDS + EDIT_WORDS;

/// The buffers that the queued steps and the batch graphs of a rank share.
pub struct QueuedStepBuffers {
    /// The tokens of the last queued step, u32 `[MAX_SEQUENCES]`.
    tokens: Tensor,
    /// The chosen tokens: `MAX_SEQUENCES` mailbox slots for each of `DEPTH` steps.
    mailbox: Arc<HostMailbox>,
    /// The log probabilities: `MAX_SEQUENCES` · `LOGPROBS_SLOTS` mailbox slots for each of `DEPTH` steps.
    logprobs: Arc<HostMailbox>,
    /// The inputs, the sampling parameters, the rows with log probabilities and the edits: `SLOT_WORDS` words in host
    /// memory for each of `SLOTS` steps.
    host: Arc<HostWords>,
    /// The number of steps counted so far, which is the index of the next step.
    steps: usize,
    /// The index in `tokens` of each sequence's token, by sequence id.
    rows: HashMap<u64, u32>,
}

impl QueuedStepBuffers {
    pub fn new(device: &CudaDevice) -> Result<Self> {
        Ok(Self {
            tokens: Tensor::zeros(MAX_SEQUENCES, DType::U32, &Device::Cuda(device.clone()))?,
            mailbox: HostMailbox::new(device, MAX_SEQUENCES * DEPTH)?,
            logprobs: HostMailbox::new(device, MAX_SEQUENCES * LOGPROBS_SLOTS * DEPTH)?,
            host: HostWords::new(device, SLOT_WORDS * SLOTS)?,
            steps: 0,
            rows: HashMap::new(),
        })
    }

    /// Returns the index in `tokens` of a sequence's input token, or `None` if the host knows the input token.
    pub fn source(&self, sequence: &StepSequence) -> Result<Option<u32>> {
        self.token_index(sequence.id, sequence.awaits_input)
    }

    /// Returns the index in `tokens` of the token for sequence `id`, or `None` if `awaits_input` is false.
    /// Fails if `awaits_input` is true, but the last step chooses no token for the sequence.
    fn token_index(&self, id: u64, awaits_input: bool) -> Result<Option<u32>> {
        match self.rows.get(&id) {
            _ if !awaits_input => Ok(None),
            Some(&row) => Ok(Some(row)),
            None => Err(anyhow!("internal error: no queued step chooses the input of a sequence")),
        }
    }

    /// Queues a kernel that writes the inputs of the next step to `target`, u32.
    /// Then call [`choose`](Self::choose), [`choose_best`](Self::choose_best) or [`skip`](Self::skip),
    /// which count the step.
    pub fn write_inputs(&mut self, inputs: &StepInputs, target: &Tensor) -> Result<()> {
        let start = self.steps % SLOTS * SLOT_WORDS;
        Ok(inputs.write(target, &self.tokens, self.host.range(start..start + INPUT_WORDS))?)
    }

    /// Counts a step that writes no tokens to `tokens`, so that no later step can read them there.
    pub fn skip(&mut self) {
        self.steps += 1;
        self.rows.clear();
    }

    /// Queues in-place edits of `logits`, f32 `[rows, vocab]`, and then the sampling of a token from each row.
    /// Also queues the computation of the log probabilities that `samplings` ask for.
    /// Row i belongs to entry i of `samplings`. Returns the index of the step.
    pub fn choose(&mut self, samplings: &[RowSampling], logits: &Tensor) -> Result<usize> {
        let params: Vec<_> = samplings.iter().map(|row| row.params).collect();
        let (slot, word) = (self.steps % DEPTH * MAX_SEQUENCES, self.steps % SLOTS * SLOT_WORDS + INPUT_WORDS);
        let mut edited = Vec::new();
        for (row, sampling) in samplings.iter().enumerate().filter(|(_, sampling)| !sampling.edits.is_empty()) {
            let in_flight = self.token_index(sampling.id, sampling.awaits_input)?;
            edited.push(EditedRow { row, edits: &sampling.edits, in_flight });
        }
        let (unedited, logprobs) = rows_with_logprobs(samplings, logits)?;
        let (logprobs_word, edit_word) = (word + PARAM_WORDS, word + PARAM_WORDS + LOGPROBS_WORDS);
        edit_rows(logits, &edited, &self.tokens, self.host.range(edit_word..edit_word + EDIT_WORDS))?;
        let param_range = self.host.range(word..logprobs_word);
        queue_rows(logits, &params, &self.tokens, self.mailbox.slots_from(slot), param_range)?;
        let logprobs_range = self.host.range(logprobs_word..edit_word);
        let logprobs_slots = self.logprobs.slots_from(slot * LOGPROBS_SLOTS);
        send_logprobs(&unedited, &logprobs, &self.tokens, logprobs_slots, logprobs_range)?;
        Ok(self.count(samplings))
    }

    /// Queues the choice of the token with the largest logit in each row of `best` (see [`queue_best`]).
    /// Row i belongs to entry i of `samplings`. Returns the index of the step.
    pub fn choose_best(&mut self, samplings: &[RowSampling], best: &Tensor) -> Result<usize> {
        queue_best(best, &self.tokens, self.mailbox.slots_from(self.steps % DEPTH * MAX_SEQUENCES))?;
        Ok(self.count(samplings))
    }

    /// Counts a step whose token i belongs to entry i of `samplings`. Returns the index of the step.
    fn count(&mut self, samplings: &[RowSampling]) -> usize {
        self.rows = (0..).zip(samplings).map(|(row, sampling)| (sampling.id, row)).collect();
        self.steps += 1;
        self.steps - 1
    }

    /// Waits for the tokens of step `index`, and for their log probabilities.
    /// `expected` has an entry for each sequence, which is `None` if the sequence needs no token.
    /// Calls `record` with the index and the token of each sequence for which the step chose a token.
    pub fn wait(
        &self,
        index: usize,
        expected: &[Option<ExpectedToken>],
        record: &mut dyn FnMut(usize, u32),
    ) -> Result<Vec<SamplerResult>> {
        let mut slot = index % DEPTH * MAX_SEQUENCES;
        let mut logprobs_slot = slot * LOGPROBS_SLOTS;
        let mut chosen = Vec::with_capacity(expected.len());
        for (sequence, expected) in expected.iter().enumerate() {
            let Some(ExpectedToken { logprobs }) = *expected else {
                chosen.push(None);
                continue;
            };
            let mut token = token_in_word(self.mailbox.wait(slot)?).map(|id| ChosenToken { id, logprobs: None });
            slot += 1;
            if let Some(count) = logprobs {
                // Take the log probabilities even if no token could be chosen, so that the slots are empty again.
                let RowLogprobs { chosen, top } = take_logprobs(&self.logprobs, logprobs_slot, count)?;
                logprobs_slot += LOGPROBS_SLOTS;
                token = token.map(|token| ChosenToken { logprobs: Some(TokenLogprobs { chosen, top }), ..token });
            }
            if let Ok(token) = &token {
                record(sequence, token.id);
            }
            chosen.push(Some(token));
        }
        Ok(chosen)
    }
}

/// Returns a tensor with the unedited logits of all rows that report log probabilities, and a list of these rows.
/// The tensor is `logits` itself, or a copy of these rows if at least one of them has edits.
/// Row i of `logits`, f32 `[rows, vocab]`, belongs to entry i of `samplings`.
fn rows_with_logprobs(samplings: &[RowSampling], logits: &Tensor) -> Result<(Tensor, Vec<LogprobsRow>)> {
    let rows = samplings.iter().enumerate();
    let mut rows: Vec<LogprobsRow> =
        rows.filter_map(|(row, sampling)| Some(LogprobsRow { row, token: row, count: sampling.logprobs? })).collect();
    // Edits change the logits in place, and log probabilities must not depend on edits.
    if rows.iter().all(|row| samplings[row.row].edits.is_empty()) {
        return Ok((logits.clone(), rows));
    }
    let indices: Vec<u32> = rows.iter().map(|row| row.row as u32).collect();
    let copy = logits.index_select(&Tensor::new(indices, logits.device())?, 0)?;
    for (index, row) in rows.iter_mut().enumerate() {
        row.row = index;
    }
    Ok((copy, rows))
}
