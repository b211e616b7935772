//! Static buffers, norm parameters and argument checks for the kernels of a decode step.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Result, Tensor, bail};

use crate::kernels::constants::{DECODE_MAX_BLOCKS, NO_TOKEN, STATE_POSITION, STATE_STEPS, STATE_TOKEN};
use crate::kernels::launch::multiprocessors;
use crate::kernels::rows::copy_rows;
use crate::world::World;

/// The buffers that the kernels of a decode step share. Their addresses never change, so a CUDA graph can use them.
pub struct StepBuffers {
    /// The residual stream: f32 `[hidden]`.
    pub x: Tensor,
    /// The vector to which kernels add the outputs of attention and of the MLP: f32 `[hidden]`.
    /// If several ranks run a layer together, the sum of their results then replaces `x`.
    /// Outputs with a post-norm are added to `x` instead.
    ///
    /// On the first rank, and on every rank that runs whole layers, `partial` is `x`.
    /// On the other ranks, `partial` is a separate buffer of zeros, so that the sum over the ranks contains `x` once.
    /// The separate buffer is zero again after each sum: either the kernels send their results and leave it unchanged,
    /// or `exchange::add_sum` fills it with zeros.
    pub partial: Tensor,
    /// The ranks that run the step together.
    pub world: World,
    /// The ranks that run each layer together: `world`, or only this rank if each rank runs whole layers.
    pub layer_world: World,
    /// u32 `[4]`: the current position, the current token, the number of finished steps, and an unused word.
    pub state: Tensor,
    /// The logits: f32 `[vocab]`. If there are several ranks, greedy steps write only `own_logits`.
    pub logits: Tensor,
    /// The logits of this rank's part of the vocabulary, f32. The same tensor as `logits` if there is only one rank.
    pub(super) own_logits: Tensor,
    /// The results of the head kernel's thread blocks, u32 `[2 * DECODE_MAX_BLOCKS]`.
    /// Each result consists of two words: the block's largest logit (f32 bits) and the token with this logit.
    /// In unused results, the logit is -inf.
    pub(super) best: Tensor,
    /// The number of multiprocessors, at most `DECODE_MAX_BLOCKS`.
    pub(super) multiprocessors: usize,
}

impl StepBuffers {
    pub fn new(device: &CudaDevice, hidden_size: usize, vocab_size: usize, world: &World) -> Result<Self> {
        let multiprocessors = multiprocessors(device)?.min(DECODE_MAX_BLOCKS);
        let device = &Device::Cuda(device.clone());
        let x = Tensor::zeros(hidden_size, DType::F32, device)?;
        let layer_world = if world.stages().is_some() { World::alone() } else { world.clone() };
        let logits = Tensor::zeros(vocab_size, DType::F32, device)?;
        let own_logits = match world.size() {
            1 => logits.clone(),
            _ => Tensor::zeros(world.share(vocab_size, 1).len(), DType::F32, device)?,
        };
        let no_token = [f32::NEG_INFINITY.to_bits(), NO_TOKEN].repeat(DECODE_MAX_BLOCKS);
        Ok(Self {
            partial: if layer_world.is_first() { x.clone() } else { x.zeros_like()? },
            x,
            world: world.clone(),
            layer_world,
            state: Tensor::zeros(4, DType::U32, device)?,
            logits,
            own_logits,
            best: Tensor::new(no_token, device)?,
            multiprocessors,
        })
    }

    /// Sets `state` to a position and a token, and the number of finished steps to 0.
    pub fn set_state(&self, position: usize, token: u32) -> Result<()> {
        let mut state = [0; 4];
        (state[STATE_POSITION], state[STATE_TOKEN], state[STATE_STEPS]) = (position as u32, token, 0);
        copy_rows(&self.state, &Tensor::new(&state, self.state.device())?, 0)
    }
}

/// The parameters of an RMSNorm.
#[derive(Clone, Copy)]
pub struct RmsNormParams<'t> {
    /// The weight of the norm: f32 `[hidden]`.
    pub weight: &'t Tensor,
    pub eps: f32,
}

/// Fails if `fits` is false. The error message names `what` and the dtype and shape of `tensor`.
pub(super) fn check(what: &str, fits: bool, tensor: &Tensor) -> Result<()> {
    if fits {
        return Ok(());
    }
    bail!("cannot plan a decode step: unsupported dtype or shape for {what}: {:?} {:?}", tensor.dtype(), tensor.dims())
}

/// Fails unless `tensor` has exactly `size` elements of type f32.
pub(super) fn check_f32(what: &str, tensor: &Tensor, size: usize) -> Result<()> {
    check(what, tensor.dtype() == DType::F32 && tensor.elem_count() == size, tensor)
}
