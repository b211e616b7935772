//! Sampling on the GPU, with penalties, temperature, top-k, top-p and min-p (`sample.cu`).
//!
//! Tests compare the kernel with the sampler on the host (`tests/it/runner/decode_graph.rs`).
//! The comment at the top of `sample.cu` lists the known differences.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::buffers::{StepBuffers, check, check_f32};
use super::head::{Embedding, add_quantized_embedding, check_embedding, dense_table};
use crate::kernels::bytes;
use crate::kernels::constants::{SAMPLE_IDS_PER_THREAD, SAMPLE_PARAM_WORDS, SAMPLE_SCRATCH_WORDS, SAMPLE_THREADS};
use crate::kernels::launch::{Arguments, HostMailbox, Launch, LaunchList, LaunchShape, module};
use crate::kernels::rows::copy_rows;
use crate::kernels::sampling::DeviceSampling;

/// The device buffers of the sampling kernel.
pub struct SamplingBuffers {
    /// The contents of `SamplingKernelParams` in `sampling.cuh`, as u32 words.
    params: Tensor,
    /// u32 `[vocab]`: 0 if no penalty applies to the token yet, otherwise 1 + the number of times it was generated.
    /// Unused if no penalty is set.
    seen: Tensor,
    /// The contents of `SampleScratch` in `sample.cu`, as u32 words.
    scratch: Tensor,
}

impl SamplingBuffers {
    pub fn new(logits: &Tensor) -> Result<Self> {
        let device = logits.device();
        Ok(Self {
            params: Tensor::zeros(SAMPLE_PARAM_WORDS, DType::U32, device)?,
            seen: Tensor::zeros(logits.dims1()?, DType::U32, device)?,
            scratch: Tensor::zeros(SAMPLE_SCRATCH_WORDS, DType::U32, device)?,
        })
    }

    /// Copies the sampling parameters to the device and, if a penalty is set, the token counts.
    pub fn set(&self, sampling: DeviceSampling) -> Result<()> {
        copy_rows(&self.params, &Tensor::new(&sampling.params.words(), self.params.device())?, 0)?;
        if sampling.params.has_penalties() {
            let mut seen = vec![0u32; self.seen.dims1()?];
            for (token, generated) in sampling.seen {
                if let Some(seen) = seen.get_mut(token as usize) {
                    *seen = 1 + generated;
                }
            }
            copy_rows(&self.seen, &Tensor::new(seen, self.seen.device())?, 0)?;
        }
        Ok(())
    }
}

/// Returns whether the threads of one [`add_sample`] launch can hold all logits.
pub fn can_sample(buffers: &StepBuffers) -> bool {
    let vocab = buffers.logits.elem_count();
    vocab <= sample_blocks(vocab, buffers) * SAMPLE_THREADS * SAMPLE_IDS_PER_THREAD
}

/// Returns the number of thread blocks of the sampling launch: at most one per multiprocessor.
/// The blocks wait for each other, so all of them must run at the same time.
fn sample_blocks(vocab: usize, buffers: &StepBuffers) -> usize {
    vocab.div_ceil(SAMPLE_THREADS).min(buffers.multiprocessors)
}

/// Adds a launch that samples a token from `buffers.logits` and sends the token to the mailbox.
/// The token's embedding becomes the input of the next step.
/// If the embedding is quantized, adds a second launch that looks up the embedding.
pub fn add_sample(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    sampling: &SamplingBuffers,
    embedding: &Embedding,
    mailbox: &Arc<HostMailbox>,
) -> Result<()> {
    let (vocab, columns) = check_embedding(buffers, &embedding.table)?;
    check_f32("the logits", &buffers.logits, sampling.seen.elem_count())?;
    check("the logits", can_sample(buffers), &buffers.logits)?;
    let (table, suffix) = dense_table(&embedding.table)?;
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
    let shape = LaunchShape::linear(sample_blocks(vocab, buffers), SAMPLE_THREADS);
    let launch = Launch::new(module!("sample"), format!("decode_sample_{suffix}"), shape, arguments);
    // SAFETY: shapes are checked above.
    // The grid has at most one block per multiprocessor, so all blocks can run at the same time.
    // Overlap: all threads call `pdl_wait` before they access device memory.
    unsafe { launches.add(launch.with_bytes_moved(bytes(&buffers.logits)))? };
    add_quantized_embedding(launches, buffers, embedding)
}
