//! Drawing a token on the device (`sample.cu`): penalties, temperature, top-k, top-p and min-p over a decode step's logits.
//!
//! Its judge is the host's sampler: `tests/it/executor.rs`.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use crate::kernels::bytes;
use crate::kernels::decode::{Embedding, StepBuffers, check, check_embedding, check_f32, dense_table, embed_token};
use crate::kernels::launch::chain::{Arguments, Chain, Mailbox, Shape};
use crate::kernels::launch::cuda::module;
use crate::kernels::rows::copy_rows;

/// How tokens are drawn on the device; the words of `Params` in `sample.cu`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingKernelParams {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    pub seed: u64,
    /// Tokens drawn before the first step.
    pub sampled_before: u32,
}

impl SamplingKernelParams {
    /// The likeliest token, without penalties.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
            sampled_before: 0,
        }
    }
}

/// What drawing needs in device memory.
pub struct SamplingBuffers {
    params: Tensor,
    /// u32 \[V\]: 0, or 1 + how often the token was generated.
    seen: Tensor,
    scratch: Tensor,
}

/// Words of `Scratch` in `sample.cu`.
const SCRATCH_WORDS: usize = 4 + 4 * 256 + 2 * (4 * 256) + 2 * 1024;
/// Logits that a thread of `decode_sample` holds at most.
const IDS_A_THREAD: usize = 8;
const SAMPLE_THREADS: usize = 1024;

impl SamplingBuffers {
    pub fn new(logits: &Tensor) -> Result<Self> {
        let device = logits.device();
        Ok(Self {
            params: Tensor::zeros(10, DType::U32, device)?,
            seen: Tensor::zeros(logits.dims1()?, DType::U32, device)?,
            scratch: Tensor::zeros(SCRATCH_WORDS, DType::U32, device)?,
        })
    }

    /// Sets what the next steps draw by. `seen` \[V\] as above; not looked at unless there is a penalty.
    pub fn set(&self, params: &SamplingKernelParams, seen: Option<Vec<u32>>) -> Result<()> {
        let words = [
            params.temperature.to_bits(),
            params.top_p.to_bits(),
            params.min_p.to_bits(),
            params.repetition_penalty.to_bits(),
            params.frequency_penalty.to_bits(),
            params.presence_penalty.to_bits(),
            params.top_k,
            params.sampled_before,
            params.seed as u32,
            (params.seed >> 32) as u32,
        ];
        copy_rows(&self.params, &Tensor::new(&words, self.params.device())?, 0)?;
        if let Some(seen) = seen {
            copy_rows(&self.seen, &Tensor::new(seen, self.seen.device())?, 0)?;
        }
        Ok(())
    }
}

/// Whether `sample` can hold a vocabulary of this size.
pub fn can_sample(buffers: &StepBuffers) -> bool {
    let vocab = buffers.logits.elem_count();
    vocab <= sample_blocks(vocab, buffers) * SAMPLE_THREADS * IDS_A_THREAD
}

/// All blocks must run at once: they wait for each other.
fn sample_blocks(vocab: usize, buffers: &StepBuffers) -> usize {
    vocab.div_ceil(SAMPLE_THREADS).min(buffers.multiprocessors)
}

/// A token is drawn and becomes the next input; it is told to the host.
pub fn sample(
    chain: &mut Chain,
    buffers: &StepBuffers,
    sampling: &SamplingBuffers,
    embedding: &Embedding,
    mailbox: &Arc<Mailbox>,
) -> Result<()> {
    let (vocab, columns) = check_embedding(buffers, &embedding.table)?;
    check_f32("logits", &buffers.logits, sampling.seen.elem_count())?;
    check("logits", can_sample(buffers), &buffers.logits)?;
    let (table, suffix) = dense_table(&embedding.table)?;
    let blocks = sample_blocks(vocab, buffers);
    let arguments = Arguments::new()
        .tensor(&buffers.logits)?
        .tensor(&sampling.seen)?
        .tensor(&sampling.params)?
        .optional(table)?
        .tensor(&buffers.x)?
        .tensor(&buffers.state)?
        .mailbox(mailbox)
        .tensor(&sampling.scratch)?
        .int(vocab)
        .int(columns)
        .int(mailbox.slots())
        .float(embedding.scale);
    let shape = Shape { grid: (blocks, 1, 1), block: SAMPLE_THREADS, shared_bytes: 0 };
    let name = format!("decode_sample_{suffix}");
    // SAFETY: shapes checked above; the grid is no more than the multiprocessors, one block fits on each.
    unsafe { chain.push(&module!("sample"), &name, shape, bytes(&buffers.logits), arguments)? };
    embed_token(chain, buffers, embedding)
}
