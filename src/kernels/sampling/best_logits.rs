//! Greedy sampling from candidates for the largest logit of each row (`best_logits.cu`).

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::kernels::constants::{BEST_LOGITS_BLOCKS, BEST_LOGITS_CANDIDATES, BEST_LOGITS_THREADS};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, MailboxSlots, module};
use crate::kernels::scratch;

/// The number of columns that [`best_logits`] returns: a logit and a token id for each candidate.
pub const BEST_LOGITS_COLUMNS: usize = 2 * BEST_LOGITS_CANDIDATES;

/// Token ids of candidates must be below this limit, because candidates store them as f32.
pub const TOKEN_LIMIT: usize = 1 << 24;

/// Returns candidates for the largest logit of each row, f32 `[rows, BEST_LOGITS_COLUMNS]`.
/// Each even column has a logit, and the next column has the id of the token with this logit.
///
/// Each row is divided into parts. The largest logit of each part is a candidate, so the largest logit of the row is
/// among the candidates. The logit of a candidate is -inf if its part has no logit above -inf.
/// A row has fewer parts than candidates, and the logits of the remaining candidates are -inf.
/// If a candidate's logit is -inf, its token id is meaningless.
///
/// `logits` is f32 `[rows, columns]`. Column i belongs to token `first_token` + i. `columns` can be 0.
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
    // Without columns, the kernel does not read the logits, so it needs no address.
    let arguments = if columns > 0 { Arguments::new().tensor(logits)? } else { Arguments::new().address(0) };
    let arguments = arguments.tensor(&best)?.int(columns).int(first_token);
    let shape = LaunchShape::new((rows, BEST_LOGITS_BLOCKS, 1), BEST_LOGITS_THREADS);
    // SAFETY: the dtype of `logits` is checked above, and the kernel reads only the `rows · columns` logits.
    unsafe { Launch::new(module!("best_logits"), "best_logits", shape, arguments).enqueue(device)? };
    Ok(best)
}

/// Queues a kernel that chooses the token with the largest logit in each row of `best`. Does not wait for the tokens.
/// If several tokens have the largest logit, chooses the lowest token id.
///
/// `best` contains candidates from [`best_logits`] or [`matmul_best`](crate::kernels::matmul::matmul_best).
/// If several GPUs found candidates, the columns of all GPUs are side by side.
/// The kernel writes the tokens to `tokens` and `slots`, like [`queue_rows`](super::queue_rows).
pub fn queue_best(best: &Tensor, tokens: &Tensor, slots: MailboxSlots) -> Result<()> {
    let (rows, columns) = best.dims2()?;
    let Device::Cuda(device) = best.device() else {
        return crate::kernels::unsupported("queue_best", best);
    };
    let is_valid = best.dtype() == DType::F32 && rows > 0 && columns.is_multiple_of(2);
    let fits = tokens.dims1()? >= rows && slots.has_room_for(rows) && tokens.dtype() == DType::U32;
    if !is_valid || !fits {
        bail!(
            "cannot choose tokens: expected F32 rows of logits and token ids, and U32 tokens and buffers for each row, \
             got {:?} {:?} and tokens of shape {:?}",
            best.dtype(),
            best.shape(),
            tokens.shape()
        );
    }
    let arguments = Arguments::new().tensor(best)?.tensor(tokens)?.mailbox_slots(Some(slots));
    let launch =
        Launch::new(module!("best_logits"), "choose_best", LaunchShape::linear(rows, 32), arguments.int(columns / 2));
    // SAFETY: the dtypes are checked above, and `tokens` and `slots` have room for all rows.
    unsafe { launch.enqueue(device) }
}
