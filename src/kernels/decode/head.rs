//! The end of a decode step: logits, the argmax, and the next input (`head.cu`).

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};

use super::buffers::{RmsNorm, StepBuffers, check_f32};
use super::matvec::{check_weight, matvec_kernel, matvec_shape};
use crate::kernels::launch::{Arguments, Launch, LaunchSequence, LaunchShape, Mailbox, dtype_suffix, module};
use crate::kernels::quantized::Matrix;

/// The embedding that turns a token into the input of the next step.
#[derive(Clone)]
pub struct Embedding {
    /// \[V, C\]
    pub table: Matrix,
    /// Multiplies the rows of the table.
    pub scale: f32,
}

/// Adds the logits of norm(x), and the largest of them for each block.
///
/// weight \[V, C\]; a dense one has the dtype `dtype`. With a soft cap, l becomes cap · tanh(l / cap).
pub fn add_head(
    sequence: &mut LaunchSequence,
    buffers: &StepBuffers,
    norm: RmsNorm,
    weight: &Matrix,
    dtype: DType,
    softcap: Option<f32>,
) -> Result<()> {
    let (vocab, columns) = (buffers.logits.dims1()?, buffers.x.dims1()?);
    check_weight(weight, vocab, columns, dtype)?;
    check_f32("a norm", norm.weight, columns)?;
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(norm.weight)?
        .weight(weight)?
        .tensor(&buffers.logits)?
        .tensor(&buffers.best)?
        .int(vocab)
        .int(columns)
        .float(norm.eps)
        .float(softcap.unwrap_or(0.0))
        .rounding(weight)?;
    let kernel = match weight {
        Matrix::Dense(_) => matvec_kernel(weight, &format!("head_{}", dtype_suffix(dtype)?)),
        _ => matvec_kernel(weight, "head"),
    };
    let launch = Launch::new(module!("head"), kernel, head_shape(buffers, weight)?, arguments);
    // SAFETY: shapes and dtypes are checked above;
    // `best` has an entry for each multiprocessor, the most blocks there are.
    unsafe { sequence.add(launch.with_bytes_moved(weight.bytes())) }
}

/// Returns the shape of the head's launch. A unit is two rows.
fn head_shape(buffers: &StepBuffers, weight: &Matrix) -> Result<LaunchShape> {
    Ok(matvec_shape(buffers, buffers.logits.dims1()?.div_ceil(2), weight))
}

/// Adds greedy sampling: the token with the largest logit becomes the next input and goes to the mailbox.
///
/// head \[V, C\]
pub fn add_argmax(
    sequence: &mut LaunchSequence,
    buffers: &StepBuffers,
    embedding: &Embedding,
    head: &Matrix,
    mailbox: &Arc<Mailbox>,
) -> Result<()> {
    let (_, columns) = check_embedding(buffers, &embedding.table)?;
    let (table, suffix) = dense_table(&embedding.table)?;
    let arguments = Arguments::new()
        .tensor(&buffers.best)?
        .int(head_shape(buffers, head)?.grid.0)
        .optional(table)?
        .tensor(&buffers.x)?
        .tensor(&buffers.state)?
        .mailbox(mailbox)
        .int(mailbox.slots())
        .int(columns)
        .float(embedding.scale);
    let kernel = format!("decode_next_{suffix}");
    // SAFETY: shapes are checked above; tokens are rows of the head, which has as many as the embedding.
    unsafe { sequence.add(Launch::new(module!("head"), kernel, LaunchShape::linear(1, 1024), arguments))? };
    add_quantized_embedding(sequence, buffers, embedding)
}

/// Returns (V, C); fails unless the embedding has these dimensions.
pub(super) fn check_embedding(buffers: &StepBuffers, embedding: &Matrix) -> Result<(usize, usize)> {
    let dims = (buffers.logits.dims1()?, buffers.x.dims1()?);
    if embedding.dims() == dims {
        return Ok(dims);
    }
    bail!("cannot plan a decode step: an embedding is {:?}, expected {dims:?}", embedding.dims())
}

/// Returns the table from which a sampling kernel reads the next input, and the suffix of that kernel.
/// For a quantized embedding there is no table, and [`add_quantized_embedding`] must follow.
pub(super) fn dense_table(embedding: &Matrix) -> Result<(Option<&Tensor>, &'static str)> {
    match embedding {
        Matrix::Dense(table) => Ok((Some(table), dtype_suffix(table.dtype())?)),
        _ => Ok((None, "bf16")),
    }
}

/// Adds the lookup of the sampled token if the embedding is quantized.
pub(super) fn add_quantized_embedding(
    sequence: &mut LaunchSequence,
    buffers: &StepBuffers,
    embedding: &Embedding,
) -> Result<()> {
    let Matrix::Quantized(parts) = &embedding.table else { return Ok(()) };
    let (_, columns) = embedding.table.dims();
    let arguments =
        Arguments::new().stack(parts)?.tensor(&buffers.state)?.tensor(&buffers.x)?.int(columns).float(embedding.scale);
    let shape = LaunchShape::one_thread_each(columns.div_ceil(8));
    // SAFETY: the token is a row of the embedding, which has as many columns as x.
    unsafe { sequence.add(Launch::new(module!("head"), "quantized_next", shape, arguments)) }
}
