//! Launches routed experts with MXFP4 weights for one token (`mxfp4_experts.cu`).

use candle_core::{DType, Result, Tensor};

use super::buffers::{StepBuffers, check, check_f32};
use crate::kernels::constants::{DECODE_DOWN_WARPS, DECODE_UP_THREADS, DECODE_UP_TILES, MXFP4_TILE_ROWS};
use crate::kernels::exchange::{add_sum_of_sent, sender};
use crate::kernels::launch::{Arguments, Launch, LaunchList, LaunchShape, module};
use crate::kernels::moe::mxfp4_tiles::Mxfp4Tiles;

/// The maximum number of experts per token that the decode kernels for MXFP4 weights support.
pub use crate::kernels::constants::DECODE_DOWN_MAX_CHOSEN as MAX_CHOSEN_MXFP4;

/// The maximum intermediate size that the decode kernels for MXFP4 weights support.
///
/// With this size, the inputs of [`MAX_CHOSEN_MXFP4`] down projections take 192 KiB of shared memory.
pub const MAX_MXFP4_INTERMEDIATE_SIZE: usize = 12 << 10;

/// The buffers for intermediate results of a layer with MXFP4 experts.
pub struct ExpertBuffers {
    /// The router logits: f32 `[experts]`.
    pub logits: Tensor,
    /// The normalized input divided by `normed_scale`: f16 `[hidden]`.
    pub(super) normed: Tensor,
    /// A power of two, f32 `[1]`. The normalized input is divided by this value to fit in f16.
    pub(super) normed_scale: Tensor,
    /// The output of SwiGLU for each chosen expert: f16 `[chosen, intermediate]`.
    h: Tensor,
}

impl ExpertBuffers {
    pub fn new(x: &Tensor, experts: usize, chosen: usize, intermediate_size: usize) -> Result<Self> {
        let device = x.device();
        Ok(Self {
            logits: Tensor::zeros(experts, DType::F32, device)?,
            normed: Tensor::zeros(x.dims1()?, DType::F16, device)?,
            normed_scale: Tensor::zeros(1, DType::F32, device)?,
            h: Tensor::zeros((chosen, intermediate_size), DType::F16, device)?,
        })
    }
}

/// Adds a launch that computes the gate and up projections and the clamped SwiGLU of each chosen expert.
///
/// `weights` are `[experts, 2 * intermediate, hidden]` in paired tiles (`RowOrder::Paired`).
/// `bias` is f32 `[experts, 2 * intermediate]`, with gate and up interleaved.
pub fn add_mxfp4_gate_up(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    weights: &Mxfp4Tiles,
    bias: &Tensor,
    limit: f32,
    expert_buffers: &ExpertBuffers,
) -> Result<()> {
    let (chosen, intermediate) = expert_buffers.h.dims2()?;
    let columns = buffers.x.dims1()?;
    let experts = expert_buffers.logits.dims1()?;
    check("the number of chosen experts", chosen <= MAX_CHOSEN_MXFP4.min(experts), &expert_buffers.h)?;
    check("the expert tiles", weights.dims() == (experts, 2 * intermediate, columns), weights.blocks())?;
    check_f32("the expert bias", bias, experts * 2 * intermediate)?;
    let arguments = Arguments::new()
        .tensor(&expert_buffers.normed)?
        .tensor(&expert_buffers.normed_scale)?
        .tensor(&expert_buffers.logits)?
        .tensor(weights.blocks())?
        .tensor(weights.scales())?
        .tensor(bias)?
        .tensor(&expert_buffers.h)?
        .int(experts)
        .int(intermediate)
        .int(columns)
        .float(limit);
    let grid = (intermediate.div_ceil(8).div_ceil(DECODE_UP_TILES), chosen, 1);
    let shape = LaunchShape::new(grid, DECODE_UP_THREADS).with_shared_bytes(columns.next_multiple_of(64) * 4);
    let launch = Launch::new(module!("mxfp4_experts"), "decode_gate_up_mxfp4", shape, arguments);
    let bytes = weights.bytes() / experts as u64 * chosen as u64;
    // SAFETY: the tiles, the bias and the number of chosen experts are checked above, so the kernel chooses only valid
    // expert ids. `ExpertBuffers::new` allocates the other buffers with the sizes of x and of the experts.
    // Overlap: all threads call `pdl_wait` before they access device memory.
    unsafe { launches.add(launch.with_bytes_moved(bytes)) }
}

/// Adds a launch that computes `partial += Σ routing weight · (down(h) + bias)` over the chosen experts.
/// If several ranks run the layer together, a second launch writes the sum over these ranks to `x`.
/// The first launch may then send its result instead of adding it to `partial` (see [`sender`]).
///
/// `weights` are `[experts, hidden, intermediate]` in grouped tiles (`RowOrder::Grouped`).
/// `bias` is f32 `[experts, hidden]`.
pub fn add_mxfp4_down(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    weights: &Mxfp4Tiles,
    bias: &Tensor,
    expert_buffers: &ExpertBuffers,
) -> Result<()> {
    let ((chosen, intermediate), rows) = (expert_buffers.h.dims2()?, buffers.x.dims1()?);
    let experts = expert_buffers.logits.dims1()?;
    check("the expert tiles", weights.dims() == (experts, rows, intermediate), weights.blocks())?;
    check("the SwiGLU output", chosen <= MAX_CHOSEN_MXFP4 && intermediate % 8 == 0, &expert_buffers.h)?;
    check_f32("the expert bias", bias, experts * rows)?;
    let arguments = Arguments::new()
        .tensor(&buffers.partial)?
        .tensor(&expert_buffers.h)?
        .tensor(&expert_buffers.logits)?
        .tensor(weights.blocks())?
        .tensor(weights.scales())?
        .tensor(bias)?
        .int(experts)
        .int(chosen)
        .int(rows)
        .int(intermediate)
        .value(sender(&buffers.layer_world)?, []);
    let warps = chosen * DECODE_DOWN_WARPS;
    let (input_bytes, sum_bytes) = (chosen * intermediate.next_multiple_of(64) * 4, warps * 16 * size_of::<f32>());
    let shape =
        LaunchShape::linear(rows.div_ceil(MXFP4_TILE_ROWS), 32 * warps).with_shared_bytes(input_bytes + sum_bytes);
    let launch = Launch::new(module!("mxfp4_experts"), "decode_down_mxfp4", shape, arguments);
    let bytes = weights.bytes() / experts as u64 * chosen as u64;
    // SAFETY: shapes and dtypes are checked above. The kernel chooses only valid expert ids.
    // Overlap: all threads call `pdl_wait`. Before, they read only the weights, the biases, the router logits and the
    // exchange state. The previous kernel, from `add_mxfp4_gate_up`, writes none of these.
    unsafe { launches.add(launch.with_bytes_moved(bytes))? };
    add_sum_of_sent(launches, &buffers.layer_world, &buffers.partial, &buffers.x)
}
