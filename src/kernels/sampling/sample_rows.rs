//! Samples one token from each row of logits (`sample_rows.cu`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Result, Tensor, bail};

use super::row_edits::apply_penalties;
use super::{DeviceSampling, SamplingKernelParams};
use crate::kernels::constants::{NO_TOKEN, SAMPLE_PARAM_WORDS, SAMPLE_THREADS};
use crate::kernels::launch::{
    Arguments, HostWordRange, Launch, LaunchShape, MailboxSlots, address, module, multiprocessors, runs_hopper_code,
};

/// Samples a token from each row of `logits`, f32 `[rows, vocab]`, and waits for the tokens.
/// Applies penalties to `logits` in place.
///
/// `rows` has the sampling parameters of each row of logits. `None` means greedy sampling without penalties.
/// The result of a row is `None` if every logit in the row is NaN or -inf.
pub fn sample_rows(logits: &Tensor, rows: &[Option<DeviceSampling>]) -> Result<Vec<Option<u32>>> {
    let (device, count, vocab) = check(logits, rows.len())?;
    let params_of = |row: &Option<DeviceSampling>| match row {
        Some(sampling) => sampling.params.words(),
        None => SamplingKernelParams::greedy().words(),
    };
    let words: Vec<u32> = rows.iter().flat_map(params_of).collect();
    let params = Tensor::from_vec(words, (count, SAMPLE_PARAM_WORDS), logits.device())?;
    apply_penalties(logits, &params, rows)?;
    // SAFETY: the kernel writes every element of `tokens`.
    let tokens = unsafe { Tensor::empty(count, DType::U32, logits.device())? };
    let arguments = Arguments::new().tensor(logits)?.tensor(&params)?.tensor(&tokens)?.mailbox_slots(None).int(vocab);
    enqueue_sampling(device, count, arguments)?;
    let tokens: Vec<u32> = tokens.to_vec1()?;
    Ok(tokens.into_iter().map(|token| (token != NO_TOKEN).then_some(token)).collect())
}

/// Queues a kernel that samples a token from each row of `logits`, f32 `[rows, vocab]`. Does not wait for the tokens.
///
/// The kernel writes the tokens to the first elements of `tokens`, which is u32.
/// The kernel also writes each token + 1, or [`MAILBOX_NO_TOKEN`](super::MAILBOX_NO_TOKEN), to the first of `slots`.
///
/// Writes the parameters to `params`. The kernel reads them there.
/// The caller must leave `params` unchanged until the tokens are in their slots.
///
/// Ignores the penalties in `rows`. If a row has penalties, [`edit_rows`](super::edit_rows) must apply them first.
pub fn queue_rows(
    logits: &Tensor,
    rows: &[SamplingKernelParams],
    tokens: &Tensor,
    slots: MailboxSlots,
    params: HostWordRange,
) -> Result<()> {
    let (device, count, vocab) = check(logits, rows.len())?;
    let words: Vec<u32> = rows.iter().flat_map(SamplingKernelParams::words).collect();
    let is_too_small = tokens.dims1()? < count || !slots.has_room_for(count) || !params.has_room_for(words.len());
    if is_too_small || tokens.dtype() != DType::U32 {
        bail!(
            "cannot sample: tokens of shape {:?} are not U32, or a buffer has no room for {count} rows",
            tokens.shape()
        );
    }
    params.write(&words);
    let arguments =
        Arguments::new().tensor(logits)?.host_words(&params).tensor(tokens)?.mailbox_slots(Some(slots)).int(vocab);
    enqueue_sampling(device, count, arguments)
}

/// Queues the kernel that samples `rows` rows. The callers check the arguments.
fn enqueue_sampling(device: &CudaDevice, rows: usize, arguments: Arguments) -> Result<()> {
    let blocks = blocks_per_row(device, rows)?;
    let shape = LaunchShape::linear(rows * blocks, SAMPLE_THREADS);
    // SAFETY: `sample_rows` and `queue_rows` check the shapes and dtypes, and pass the arguments of this kernel.
    unsafe { Launch::new(module!("sample_rows"), format!("sample_rows_{blocks}"), shape, arguments).enqueue(device) }
}

/// Returns the number of thread blocks that sample a row: 1, 2, 4 or 8.
///
/// The kernel is fastest with as many blocks as can run at the same time.
/// The blocks of a row form a cluster, which runs within one group of multiprocessors (GPC).
/// A group may not hold a whole number of clusters of 4 or 8 blocks, and some of its multiprocessors then stay idle.
/// Rows therefore get 4 or 8 blocks only if all blocks together need at most 3/4 of the multiprocessors.
fn blocks_per_row(device: &CudaDevice, rows: usize) -> Result<usize> {
    if !runs_hopper_code(device)? {
        return Ok(1);
    }
    let multiprocessors = multiprocessors(device)?;
    Ok(match multiprocessors / rows {
        0..2 => 1,
        _ if rows * 4 > multiprocessors * 3 / 4 => 2,
        _ if rows * 8 > multiprocessors * 3 / 4 => 4,
        _ => 8,
    })
}

/// Returns the device of `logits` and its shape, `(rows, vocab)`.
/// Fails unless `logits` is f32 `[rows, vocab]` on a GPU and has at least one row.
/// If vocab is a multiple of 4, `logits` must also be aligned to 16 bytes.
fn check(logits: &Tensor, rows: usize) -> Result<(&CudaDevice, usize, usize)> {
    let (count, vocab) = logits.dims2()?;
    match logits.device() {
        Device::Cuda(device) if logits.dtype() == DType::F32 && rows == count && count > 0 => {
            // In this case, the kernel loads four logits at once.
            if vocab.is_multiple_of(4) && !address(logits)?.is_multiple_of(16) {
                bail!("cannot sample: the logits are not aligned to 16 bytes");
            }
            Ok((device, count, vocab))
        }
        Device::Cuda(_) => bail!("cannot sample: expected F32 logits with {rows} rows, got shape {:?}", logits.shape()),
        _ => crate::kernels::unsupported("sample_rows", logits),
    }
}
