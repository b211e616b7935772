//! Edits rows of logits before tokens are chosen (`row_edits.cu`): adds values such as biases, then applies penalties.
//!
//! The host can prepare a queued step before it knows the tokens of the previous step. These tokens are *in flight*.
//! The token counts from the host leave out each row's token in flight, so the kernel counts it.

#[cfg(feature = "cuda")]
pub(super) use with_cuda::apply_penalties;
#[cfg(feature = "cuda")]
pub use with_cuda::{EditedRow, edit_rows};

/// The penalties on the logits of tokens that have appeared in the prompt or the completion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Divides positive logits and multiplies all other logits. Also applies to tokens that occur only in the prompt.
    pub repetition: f32,
    /// Subtracted from the logit once for each time that the token was generated.
    pub frequency: f32,
    /// Subtracted from the logit once if the token was generated at least once.
    pub presence: f32,
}

impl Penalties {
    /// Penalties that change no logits.
    pub const NONE: Self = Self { repetition: 1.0, frequency: 0.0, presence: 0.0 };

    /// Returns the penalized logit of a token. `generated` is the number of times that the token was generated,
    /// which is 0 if only the prompt contains the token.
    pub fn apply(&self, logit: f32, generated: u32) -> f32 {
        let logit = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        match generated {
            0 => logit,
            _ => logit - (self.frequency * generated as f32 + self.presence),
        }
    }
}

/// The edits of one row of logits. Tokens outside the vocabulary are ignored.
#[derive(Clone, Debug, PartialEq)]
pub struct RowEdits {
    /// (token, value) pairs, at most one per token. The value is added to the token's logit.
    pub values: Vec<(u32, f32)>,
    pub penalties: Penalties,
    /// (token, count) pairs, at most one per token, for the tokens that get penalties.
    /// The count is the number of times that the token was generated, not counting the token in flight.
    pub seen: Vec<(u32, u32)>,
}

impl Default for RowEdits {
    fn default() -> Self {
        Self { values: Vec::new(), penalties: Penalties::NONE, seen: Vec::new() }
    }
}

impl RowEdits {
    /// Returns whether there are no values and no penalties, so that the edits change no logits.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty() && self.penalties == Penalties::NONE
    }

    /// Applies the penalties to `logits`, f32 `[vocab]`. Does not add the values of the edits.
    /// `in_flight` is a generated token that the counts in `seen` do not include.
    pub fn penalize(&self, logits: &mut [f32], in_flight: Option<u32>) {
        let mut is_seen = false;
        for &(token, generated) in &self.seen {
            let is_in_flight = Some(token) == in_flight;
            is_seen |= is_in_flight;
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = self.penalties.apply(*logit, generated + u32::from(is_in_flight));
            }
        }
        if let Some(token) = in_flight
            && !is_seen
            && let Some(logit) = logits.get_mut(token as usize)
        {
            *logit = self.penalties.apply(*logit, 1);
        }
    }

    /// Adds the values to `logits`, f32 `[vocab]`, and then applies the penalties.
    /// The results of `edit_rows` can differ by rounding errors, because nvcc fuses multiplications and additions.
    pub fn apply(&self, logits: &mut [f32], in_flight: Option<u32>) {
        for &(token, value) in &self.values {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += value;
            }
        }
        self.penalize(logits, in_flight);
    }
}

#[cfg(feature = "cuda")]
mod with_cuda {
    use std::collections::HashSet;

    use candle_core::{DType, Device, Result, Tensor, bail};

    use super::{Penalties, RowEdits};
    use crate::kernels::constants::{ROW_EDITS_THREADS, ROW_EDITS_WORDS, SAMPLE_PARAM_WORDS};
    use crate::kernels::launch::{Arguments, HostWordRange, Launch, LaunchShape, module};
    use crate::kernels::sampling::DeviceSampling;

    /// The edits of one row of logits, and the row's token in flight.
    #[derive(Clone, Copy, Debug)]
    pub struct EditedRow<'e> {
        pub row: usize,
        pub edits: &'e RowEdits,
        /// The index of the token in flight among the tokens of the previous step. `None` if no token is in flight.
        pub in_flight: Option<u32>,
    }

    /// Queues a kernel that edits `rows` of `logits` in place.
    /// Fails if a row occurs twice, or if a row or an `in_flight` index is out of range.
    /// `logits` is f32 and has one column per token of the vocabulary.
    ///
    /// `tokens`, u32, holds the tokens of the previous step.
    /// [`NO_TOKEN`](crate::kernels::constants::NO_TOKEN) at a row's `in_flight` index means that no token is in flight.
    ///
    /// If the encoded edits fit in `range`, the call writes them there without waiting for earlier steps,
    /// and the kernel reads them there. The caller must leave the range unchanged until the kernel has ended.
    /// If they do not fit, the call copies them to the device, and may wait for earlier steps.
    pub fn edit_rows(logits: &Tensor, rows: &[EditedRow], tokens: &Tensor, range: HostWordRange) -> Result<()> {
        let (count, vocab) = logits.dims2()?;
        let Device::Cuda(device) = logits.device() else { return crate::kernels::unsupported("edit_rows", logits) };
        let available = tokens.dims1()?;
        let mut edited = HashSet::new();
        let is_valid = |row: &EditedRow| {
            row.row < count
                && row.in_flight.is_none_or(|source| (source as usize) < available)
                && edited.insert(row.row)
        };
        if !rows.iter().all(is_valid) || (logits.dtype(), tokens.dtype()) != (DType::F32, DType::U32) {
            bail!(
                "cannot edit logits {:?} {:?} with tokens {:?} {:?}: wrong dtypes, a repeated row, \
                 or a row or in-flight index out of range",
                logits.dtype(),
                logits.shape(),
                tokens.dtype(),
                tokens.shape()
            );
        }
        if rows.is_empty() {
            return Ok(());
        }
        let description = description(rows, vocab);
        let arguments = Arguments::new().tensor(logits)?.tensor(tokens)?;
        let arguments = if range.has_room_for(description.len()) {
            range.write(&description);
            arguments.host_words(&range)
        } else {
            arguments.tensor(&Tensor::new(description, logits.device())?)?
        };
        let shape = LaunchShape::linear(rows.len(), ROW_EDITS_THREADS);
        let launch = Launch::new(module!("row_edits"), "edit_rows", shape, arguments.int(vocab));
        // SAFETY: the dtypes and shapes are checked above.
        // `is_valid` has checked every row and its index into `tokens`.
        // `description` contains only tokens of the vocabulary, and the kernel ignores a token in flight outside it.
        // The caller does not change the words of `range` until the kernel has ended.
        unsafe { launch.enqueue(device) }
    }

    /// Encodes the edits as u32 words for the kernel, in the layout of `description` in `row_edits.cu`.
    fn description(rows: &[EditedRow], vocab: usize) -> Vec<u32> {
        let mut words = vec![0; rows.len() * ROW_EDITS_WORDS];
        for (index, EditedRow { row, edits, in_flight }) in rows.iter().enumerate() {
            let is_token = |token: u32| (token as usize) < vocab;
            let values_start = words.len();
            let values = edits.values.iter().filter(|(token, _)| is_token(*token));
            words.extend(values.flat_map(|&(token, value)| [token, value.to_bits()]));
            let seen_start = words.len();
            let seen = edits.seen.iter().filter(|(token, _)| is_token(*token));
            words.extend(seen.flat_map(|&(token, generated)| [token, generated]));
            let Penalties { repetition, frequency, presence } = edits.penalties;
            let header: [u32; ROW_EDITS_WORDS] = [
                *row as u32,
                in_flight.map_or(0, |source| source + 1),
                values_start as u32,
                seen_start as u32,
                words.len() as u32,
                repetition.to_bits(),
                frequency.to_bits(),
                presence.to_bits(),
            ];
            words[index * ROW_EDITS_WORDS..][..ROW_EDITS_WORDS].copy_from_slice(&header);
        }
        words
    }

    /// Queues a kernel that applies the penalties of `rows` to `logits`, f32 `[rows, vocab]`, in place.
    /// Ignores tokens outside the vocabulary.
    ///
    /// `params`, u32, has one row of words for each of `rows`: those of its `SamplingKernelParams`.
    pub fn apply_penalties(logits: &Tensor, params: &Tensor, rows: &[Option<DeviceSampling>]) -> Result<()> {
        let (count, vocab) = logits.dims2()?;
        let Device::Cuda(device) = logits.device() else {
            return crate::kernels::unsupported("apply_penalties", logits);
        };
        let is_valid = rows.len() == count && params.dims() == [count, SAMPLE_PARAM_WORDS];
        if !is_valid || (logits.dtype(), params.dtype()) != (DType::F32, DType::U32) {
            bail!("cannot apply penalties: logits {:?} do not match parameters {:?}", logits.shape(), params.shape());
        }
        let mut seen = Vec::new();
        for (row, sampling) in rows.iter().enumerate() {
            for &(token, generated) in
                sampling.iter().flat_map(|sampling| &sampling.seen).filter(|seen| (seen.0 as usize) < vocab)
            {
                seen.extend([row as u32, token, generated]);
            }
        }
        if seen.is_empty() {
            return Ok(());
        }
        let entries = seen.len() / 3;
        let seen = Tensor::from_vec(seen, (entries, 3), logits.device())?;
        let arguments = Arguments::new().tensor(logits)?.tensor(params)?.tensor(&seen)?.int(entries).int(vocab);
        let shape = LaunchShape::one_thread_each(entries);
        // SAFETY: shapes and dtypes are checked above. The row and the token of every entry are within the bounds of
        // `logits`.
        unsafe { Launch::new(module!("row_edits"), "apply_penalties", shape, arguments).enqueue(device) }
    }
}
