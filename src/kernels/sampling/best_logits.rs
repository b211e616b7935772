//! Greedy sampling of several sequences from candidates for the largest logit (`best_logits.cu`).

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::kernels::constants::{BEST_LOGITS_BLOCKS, BEST_LOGITS_CANDIDATES, BEST_LOGITS_THREADS};
use crate::kernels::launch::{Arguments, HostMailbox, Launch, LaunchShape, module};
use crate::kernels::scratch;

/// The number of columns that [`best_logits`] returns: a logit and a token id for each candidate.
pub const BEST_LOGITS_COLUMNS: usize = 2 * BEST_LOGITS_CANDIDATES;

/// Token ids below this limit are exact in f32.
pub const TOKEN_LIMIT: usize = 1 << 24;

/// Returns candidates for the largest logit of each row, f32 `[rows, BEST_LOGITS_COLUMNS]`.
/// Each even column has a logit, and the next column has its token id.
/// Candidates are the largest logits of parts of the row, so the largest logit of the row is among them.
/// A candidate's logit is -inf if its part has no logit above -inf, or if the row has fewer parts than candidates.
/// The candidate's token id is then meaningless.
///
/// `logits` is f32 `[rows, columns]`, the logits of the tokens from `first_token` on. There may be no columns.
pub fn best_logits(logits: &Tensor, first_token: usize) -> Result<Tensor> {
    let (rows, columns) = logits.dims2()?;
    let Device::Cuda(device) = logits.device() else {
        return crate::kernels::unsupported("best_logits", logits);
    };
    if logits.dtype() != DType::F32 || rows == 0 || first_token + columns > TOKEN_LIMIT {
        bail!(
            "cannot find the largest logits: unsupported logits {:?} {:?} of tokens from {first_token} on",
            logits.dtype(),
            logits.shape()
        );
    }
    // SAFETY: the kernel writes every element.
    let best = unsafe { scratch::empty((rows, BEST_LOGITS_COLUMNS), DType::F32, logits.device())? };
    // A tensor without elements has no address.
    let arguments = if columns > 0 { Arguments::new().tensor(logits)? } else { Arguments::new().address(0) };
    let arguments = arguments.tensor(&best)?.int(columns).int(first_token);
    let shape = LaunchShape::new((rows, BEST_LOGITS_BLOCKS, 1), BEST_LOGITS_THREADS);
    // SAFETY: the dtypes and shapes are checked above, and the kernel reads only the `rows · columns` logits.
    unsafe { Launch::new(module!("best_logits"), "best_logits", shape, arguments).enqueue(device)? };
    Ok(best)
}

/// Queues the choice of the token with the largest logit in each row. Does not wait for the tokens.
/// If several tokens have the largest logit, chooses the lowest token id.
///
/// `best` has the columns of one or more results of [`best_logits`] or
/// [`matmul_best`](crate::kernels::matmul::matmul_best) side by side.
/// The kernel writes the tokens to `tokens` and `mailbox`, like [`queue_rows`](super::queue_rows).
pub fn queue_best(best: &Tensor, tokens: &Tensor, (mailbox, first_slot): (&Arc<HostMailbox>, usize)) -> Result<()> {
    let (rows, columns) = best.dims2()?;
    let Device::Cuda(device) = best.device() else {
        return crate::kernels::unsupported("queue_best", best);
    };
    let is_valid = best.dtype() == DType::F32 && rows > 0 && columns.is_multiple_of(2);
    let fits = tokens.dims1()? >= rows && mailbox.slots() >= first_slot + rows && tokens.dtype() == DType::U32;
    if !is_valid || !fits {
        bail!(
            "cannot choose tokens: expected F32 rows of logits and token ids, and U32 tokens and buffers for each row, \
             got {:?} {:?} and tokens of shape {:?}",
            best.dtype(),
            best.shape(),
            tokens.shape()
        );
    }
    let arguments = Arguments::new().tensor(best)?.tensor(tokens)?.mailbox_from(Some((mailbox, first_slot)));
    let launch =
        Launch::new(module!("best_logits"), "choose_best", LaunchShape::linear(rows, 32), arguments.int(columns / 2));
    // SAFETY: the dtypes are checked above, and `tokens` and `mailbox` have room for all rows.
    unsafe { launch.enqueue(device) }
}
