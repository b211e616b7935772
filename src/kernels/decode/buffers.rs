//! What all kernels of a decode step share: static buffers, norms and shape checks.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Result, Tensor, bail};

use crate::kernels::launch::multiprocessors;

/// The static buffers of a decode step.
pub struct StepBuffers {
    /// The residual stream, f32 \[C\].
    pub x: Tensor,
    /// u32 \[4\]: the position of the token in this step, the token, the number of finished steps, unused.
    pub state: Tensor,
    /// f32 \[V\]
    pub logits: Tensor,
    /// The largest logit and its token for each block of the head, u32 \[2 · blocks\].
    pub(super) best: Tensor,
    pub(super) multiprocessors: usize,
}

impl StepBuffers {
    pub fn new(device: &CudaDevice, hidden_size: usize, vocab_size: usize) -> Result<Self> {
        let multiprocessors = multiprocessors(device)?;
        let device = &Device::Cuda(device.clone());
        Ok(Self {
            x: Tensor::zeros(hidden_size, DType::F32, device)?,
            state: Tensor::zeros(4, DType::U32, device)?,
            logits: Tensor::zeros(vocab_size, DType::F32, device)?,
            best: Tensor::zeros(2 * multiprocessors, DType::U32, device)?,
            multiprocessors,
        })
    }
}

/// An RMSNorm ahead of a projection.
#[derive(Clone, Copy)]
pub struct RmsNorm<'t> {
    /// f32 \[C\]
    pub weight: &'t Tensor,
    pub eps: f32,
}

/// Fails unless `fits`, with the dtype and the shape of `tensor`, which the message calls `what`.
pub(super) fn check(what: &str, fits: bool, tensor: &Tensor) -> Result<()> {
    if fits {
        return Ok(());
    }
    bail!("cannot plan a decode step: {what} has the wrong dtype or shape: {:?} {:?}", tensor.dtype(), tensor.dims())
}

/// Fails unless `tensor` has `size` elements of f32.
pub(super) fn check_f32(what: &str, tensor: &Tensor, size: usize) -> Result<()> {
    check(what, tensor.dtype() == DType::F32 && tensor.elem_count() == size, tensor)
}
