//! Edits and masks logits before a token is chosen, and computes log probabilities (`logits.cu`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Result, Tensor, bail};

use super::token_mask::TokenMask;
use crate::kernels::constants::{ELEMENT_THREADS, LOGPROBS_ROW_WORDS, LOGPROBS_SLOTS, MAX_LOGPROBS, SAMPLE_THREADS};
use crate::kernels::launch::{Arguments, HostMailbox, HostWordRange, Launch, LaunchShape, MailboxSlots, module};

/// A value to add to one logit, such as a logit bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitEdit {
    pub row: u32,
    pub token: u32,
    pub value: f32,
}

/// Adds the values of `edits` to `logits`, f32 `[rows, vocab]`, in place. Ignores tokens outside the vocabulary.
///
/// `edits` must contain each token at most once per row.
pub fn edit_logits(logits: &Tensor, edits: &[LogitEdit]) -> Result<()> {
    let (device, rows, vocab) = check(logits)?;
    if let Some(edit) = edits.iter().find(|edit| edit.row as usize >= rows) {
        bail!("cannot edit logits: row {} is out of range for {rows} rows", edit.row);
    }
    let words: Vec<u32> = edits
        .iter()
        .filter(|edit| (edit.token as usize) < vocab)
        .flat_map(|edit| [edit.row, edit.token, edit.value.to_bits()])
        .collect();
    if words.is_empty() {
        return Ok(());
    }
    let count = words.len() / 3;
    let edits = Tensor::from_vec(words, (count, 3), logits.device())?;
    let arguments = Arguments::new().tensor(logits)?.tensor(&edits)?.int(count).int(vocab);
    let launch = Launch::new(module!("logits"), "edit_logits", LaunchShape::one_thread_each(count), arguments);
    // SAFETY: the row and the token of every edit are within the bounds of `logits`.
    unsafe { launch.enqueue(device) }
}

/// Sets a token's logit to -inf, in place, if the row's mask does not allow the token.
/// [`TokenMask::apply`] is the CPU reference of this function.
///
/// `logits` is f32 `[rows, vocab]`. `masks` are (row, mask) pairs, at most one per row.
pub fn mask_logits(logits: &Tensor, masks: &[(u32, TokenMask)]) -> Result<()> {
    let (device, rows, vocab) = check(logits)?;
    let words = vocab.div_ceil(32);
    if let Some((row, mask)) = masks.iter().find(|(row, mask)| *row as usize >= rows || mask.words().len() != words) {
        bail!(
            "cannot mask logits: expected a row in 0..{rows} with {words} mask words, got row {row} with {}",
            mask.words().len()
        );
    }
    if masks.is_empty() || vocab == 0 {
        return Ok(());
    }
    let masked: Vec<u32> = masks.iter().map(|(row, _)| *row).collect();
    let masked = Tensor::new(masked, logits.device())?;
    let bits: Vec<u32> = masks.iter().flat_map(|(_, mask)| mask.words()).copied().collect();
    let bits = Tensor::from_vec(bits, (masks.len(), words), logits.device())?;
    let arguments = Arguments::new().tensor(logits)?.tensor(&masked)?.tensor(&bits)?.int(vocab);
    let shape = LaunchShape::new((vocab.div_ceil(ELEMENT_THREADS), masks.len(), 1), ELEMENT_THREADS);
    let launch = Launch::new(module!("logits"), "mask_logits", shape, arguments);
    // SAFETY: every masked row is within the bounds of `logits`, and every mask has a bit for each token.
    unsafe { launch.enqueue(device) }
}

/// The log probabilities of the chosen token and the most likely tokens of one row.
#[derive(Clone, Debug, PartialEq)]
pub struct RowLogprobs {
    /// The log probability of the chosen token.
    pub chosen: f32,
    /// The most likely tokens with their log probabilities, in order of decreasing probability.
    pub top: Vec<(u32, f32)>,
}

/// Returns the log probabilities of each row's `chosen` token and of the row's `count` most likely tokens.
/// If `count` exceeds the vocabulary size, returns all tokens.
/// Waits until the device has computed the log probabilities.
///
/// `logits` is f32 `[rows, vocab]`. NaN logits count as -inf.
/// If tokens have equal logits, the token with the lower id comes first.
pub fn top_logprobs(logits: &Tensor, chosen: &[u32], count: usize) -> Result<Vec<RowLogprobs>> {
    let (device, rows, vocab) = check(logits)?;
    let count = count.min(vocab);
    if chosen.len() != rows || chosen.iter().any(|&id| id as usize >= vocab) || rows == 0 || vocab == 0 {
        bail!("cannot compute log probabilities: chosen tokens {chosen:?} do not match logits {:?}", logits.shape());
    }
    let chosen = Tensor::new(chosen, logits.device())?;
    let ids = Tensor::zeros((rows, count.max(1)), DType::U32, logits.device())?;
    let logprobs = Tensor::zeros((rows, 1 + count), DType::F32, logits.device())?;
    let arguments =
        Arguments::new().tensor(logits)?.tensor(&chosen)?.tensor(&ids)?.tensor(&logprobs)?.int(vocab).int(count);
    let launch = Launch::new(module!("logits"), "top_logprobs", LaunchShape::linear(rows, SAMPLE_THREADS), arguments);
    // SAFETY: the tensors have the shapes that the kernel expects, and every chosen token is in the vocabulary.
    unsafe { launch.enqueue(device)? };
    let rows = ids.to_vec2::<u32>()?.into_iter().zip(logprobs.to_vec2::<f32>()?);
    let row = |(ids, logprobs): (Vec<u32>, Vec<f32>)| RowLogprobs {
        chosen: logprobs[0],
        top: ids.into_iter().zip(logprobs[1..].iter().copied()).collect(),
    };
    Ok(rows.map(row).collect())
}

/// A row of logits whose log probabilities a queued step sends to the host.
#[derive(Clone, Copy, Debug)]
pub struct LogprobsRow {
    /// The index of the row in the logits.
    pub row: usize,
    /// The index of the chosen token among the tokens of the step.
    pub token: usize,
    /// The number of most likely tokens to report, at most [`MAX_LOGPROBS`] and at most the vocabulary size.
    pub count: usize,
}

/// Queues a kernel that computes log probabilities as [`top_logprobs`] does, and sends them to a mailbox.
/// Does not wait for the kernel.
///
/// `logits` is f32 and has one column per token of the vocabulary. `tokens`, u32, holds the chosen tokens.
/// Each entry of `rows`, in order, takes the next `LOGPROBS_SLOTS` slots of `slots`. [`take_logprobs`] reads them.
///
/// Writes a description of `rows` to `description`. The kernel reads it there.
/// The caller must leave `description` unchanged until all log probabilities have arrived.
pub fn send_logprobs(
    logits: &Tensor,
    rows: &[LogprobsRow],
    tokens: &Tensor,
    slots: MailboxSlots,
    description: HostWordRange,
) -> Result<()> {
    let (device, count, vocab) = check(logits)?;
    let available = tokens.dims1()?;
    let is_valid =
        |row: &LogprobsRow| row.row < count && row.token < available && row.count <= vocab && row.count <= MAX_LOGPROBS;
    let words_of =
        |row: &LogprobsRow| -> [u32; LOGPROBS_ROW_WORDS] { [row.row as u32, row.token as u32, row.count as u32] };
    let words: Vec<u32> = rows.iter().flat_map(words_of).collect();
    let fits = slots.has_room_for(rows.len() * LOGPROBS_SLOTS) && description.has_room_for(words.len());
    if !rows.iter().all(is_valid) || !fits || tokens.dtype() != DType::U32 || vocab == 0 {
        bail!(
            "cannot compute log probabilities: {rows:?} do not match logits {:?} or do not fit in the buffers",
            logits.shape()
        );
    }
    if rows.is_empty() {
        return Ok(());
    }
    description.write(&words);
    let arguments =
        Arguments::new().tensor(logits)?.host_words(&description).tensor(tokens)?.mailbox_slots(Some(slots)).int(vocab);
    let shape = LaunchShape::linear(rows.len(), SAMPLE_THREADS);
    // SAFETY: rows, tokens and counts are checked above, and the buffers have room for all rows.
    unsafe { Launch::new(module!("logits"), "send_logprobs", shape, arguments).enqueue(device) }
}

/// Waits for the log probabilities that [`send_logprobs`] sends for one row, and returns them.
///
/// `slot` is the row's first slot. `count` must equal [`LogprobsRow::count`] of the row.
pub fn take_logprobs(mailbox: &HostMailbox, slot: usize, count: usize) -> Result<RowLogprobs> {
    let logprob = |slot: usize| mailbox.wait(slot).map(|word| f32::from_bits(!word));
    let chosen = logprob(slot)?;
    let entry = |rank: usize| Ok((mailbox.wait(slot + 1 + 2 * rank)? - 1, logprob(slot + 2 + 2 * rank)?));
    let top = (0..count).map(entry).collect::<Result<_>>()?;
    Ok(RowLogprobs { chosen, top })
}

/// Returns the device of `logits` and its shape, `(rows, vocab)`.
/// Fails unless `logits` is f32 `[rows, vocab]` on a GPU.
fn check(logits: &Tensor) -> Result<(&CudaDevice, usize, usize)> {
    let (rows, vocab) = logits.dims2()?;
    match logits.device() {
        Device::Cuda(device) if logits.dtype() == DType::F32 => Ok((device, rows, vocab)),
        Device::Cuda(_) => bail!("cannot process logits: they have dtype {:?}, expected F32", logits.dtype()),
        _ => crate::kernels::unsupported("the logits kernels", logits),
    }
}
