//! Launches the last kernels of a decode step, which compute the logits, the argmax and the next input (`head.cu`).

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};

use super::buffers::{RmsNormParams, StepBuffers, check_f32};
use super::matvec::{check_weight, matvec_kernel, matvec_shape};
use crate::kernels::constants::DECODE_SINGLE_BLOCK_THREADS;
use crate::kernels::exchange::add_columns;
use crate::kernels::launch::{Arguments, HostMailbox, Launch, LaunchList, LaunchShape, dtype_suffix, module};
use crate::kernels::matrix::Matrix;

/// The token embedding. The embedding of the chosen token is the input of the next step.
#[derive(Clone)]
pub struct Embedding {
    /// The embedding table: `[vocab, hidden]`.
    pub table: Matrix,
    /// The factor by which each embedding is multiplied. It is 1 in most models.
    pub scale: f32,
}

/// Adds a launch that computes the logits of `norm(x)`, and finds the largest among each thread block's logits.
///
/// `weight` is `[vocab, hidden]`, or this rank's share of the rows.
/// `dtype` is bf16 or f16, and a dense weight must have this dtype.
/// With a `softcap`, each logit `l` becomes `softcap · tanh(l / softcap)`.
pub fn add_head(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    norm: RmsNormParams,
    weight: &Matrix,
    dtype: DType,
    softcap: Option<f32>,
) -> Result<()> {
    let columns = buffers.x.dims1()?;
    // A rank computes the logits of its own part of the vocabulary.
    let own = buffers.world.share(buffers.logits.dims1()?, 1);
    check_weight(weight, own.len(), columns, dtype)?;
    check_f32("the norm weight", norm.weight, columns)?;
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(norm.weight)?
        .weight(weight)?
        .tensor(&buffers.own_logits)?
        .tensor(&buffers.best)?
        .int(own.len())
        .int(own.start)
        .int(columns)
        .float(norm.eps)
        .float(softcap.unwrap_or(0.0))
        .quantization_of(weight)?;
    let kernel = match weight {
        Matrix::Dense(_) => matvec_kernel(weight, &format!("head_{}", dtype_suffix(dtype)?)),
        _ => matvec_kernel(weight, "head"),
    };
    let launch = Launch::new(module!("head"), kernel, head_shape(buffers, weight), arguments);
    // SAFETY: shapes and dtypes are checked above.
    // The grid has at most one block per multiprocessor, and `best` has room for one result per multiprocessor.
    // Overlap: all threads call `pdl_wait`. Before, they read only weights, which no kernel writes after loading.
    unsafe { launches.add(launch.with_bytes_moved(weight.bytes())) }
}

/// Adds a launch that writes the logits of all ranks to `buffers.logits`. Adds nothing if there is only one rank.
pub fn add_logits_of_ranks(launches: &mut LaunchList, buffers: &StepBuffers) -> Result<()> {
    match buffers.world.size() {
        1 => Ok(()),
        _ => add_columns(launches, &buffers.world, &buffers.own_logits.unsqueeze(0)?, &buffers.logits.unsqueeze(0)?),
    }
}

/// Returns the launch shape of the head kernel, for which a strip is two rows of the weight.
fn head_shape(buffers: &StepBuffers, weight: &Matrix) -> LaunchShape {
    matvec_shape(buffers, weight.dims().0.div_ceil(2), weight)
}

/// Adds a launch for greedy sampling, which sends the token with the largest logit to the mailbox.
/// The token's embedding becomes the input of the next step.
/// If there are several ranks, first adds a launch that exchanges their best logits.
/// If the embedding is quantized, then adds a launch that looks up the embedding.
///
/// [`add_head`] must have added the launch that finds the best logits: the candidates for the largest logit.
pub fn add_greedy_sampling(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    embedding: &Embedding,
    mailbox: &Arc<HostMailbox>,
) -> Result<()> {
    let (_, columns) = check_embedding(buffers, &embedding.table)?;
    let (table, suffix) = dense_table(&embedding.table)?;
    let (ranks, own) = (buffers.world.size(), &buffers.best);
    let best = match ranks {
        1 => own.clone(),
        _ => Tensor::zeros(ranks * own.dims1()?, own.dtype(), own.device())?,
    };
    if ranks > 1 {
        add_columns(launches, &buffers.world, &own.unsqueeze(0)?, &best.unsqueeze(0)?)?;
    }
    let arguments = Arguments::new()
        .tensor(&best)?
        .int(best.dims1()? / 2)
        .optional(table)?
        .tensor(&buffers.x)?
        .tensor(&buffers.state)?
        .mailbox(mailbox)
        .int(mailbox.slots())
        .int(columns)
        .float(embedding.scale);
    let kernel = format!("decode_greedy_{suffix}");
    // SAFETY: shapes are checked above. The embedding has a row for each token that the head can choose.
    // Overlap: all threads call `pdl_wait` before they access device memory.
    unsafe {
        launches.add(Launch::new(
            module!("head"),
            kernel,
            LaunchShape::linear(1, DECODE_SINGLE_BLOCK_THREADS),
            arguments,
        ))?
    };
    add_quantized_embedding(launches, buffers, embedding)
}

/// Returns `(vocab, hidden)`, the shape that the embedding must have. Fails if the embedding has another shape.
pub(super) fn check_embedding(buffers: &StepBuffers, embedding: &Matrix) -> Result<(usize, usize)> {
    let dims = (buffers.logits.dims1()?, buffers.x.dims1()?);
    if embedding.dims() == dims {
        return Ok(dims);
    }
    bail!("cannot plan a decode step: the embedding has shape {:?}, expected {dims:?}", embedding.dims())
}

/// Returns the embedding table for a sampling kernel and the dtype suffix of the kernel's name.
///
/// The table is `None` if the embedding is quantized. The caller must then call [`add_quantized_embedding`].
pub(super) fn dense_table(embedding: &Matrix) -> Result<(Option<&Tensor>, &'static str)> {
    match embedding {
        Matrix::Dense(table) => Ok((Some(table), dtype_suffix(table.dtype())?)),
        // Without a table, the dtype in the kernel's name makes no difference.
        Matrix::Quantized(_) => Ok((None, "bf16")),
        Matrix::Concatenated(_) => bail!("internal error: the embedding consists of several matrices"),
    }
}

/// Adds a launch that looks up the chosen token's embedding in a quantized table.
/// Adds nothing for a dense table, because the sampling kernel itself looks up the embedding.
pub(super) fn add_quantized_embedding(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    embedding: &Embedding,
) -> Result<()> {
    let Matrix::Quantized(parts) = &embedding.table else { return Ok(()) };
    let (_, columns) = embedding.table.dims();
    let arguments =
        Arguments::new().stack(parts)?.tensor(&buffers.state)?.tensor(&buffers.x)?.int(columns).float(embedding.scale);
    let shape = LaunchShape::one_thread_each(columns.div_ceil(8));
    // SAFETY: the callers have checked the shape of the embedding: one row per token of the vocabulary, and one column
    // per element of `x`.
    // Overlap: all threads call `pdl_wait` before they access device memory.
    unsafe { launches.add(Launch::new(module!("head"), "quantized_next", shape, arguments)) }
}
