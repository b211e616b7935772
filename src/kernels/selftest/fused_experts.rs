//! The check of the fused kernels for routed experts.

use candle_core::{DType, Result, Tensor, bail};

use super::inputs::{CheckTarget, Noise};
use crate::kernels::SumOrder;
use crate::kernels::activation::clamped_swiglu;
use crate::kernels::moe::experts::{ExpertWeights, expert_matmul};
use crate::kernels::moe::mxfp4_tiles::expert_mlp::{ExpertLinear, expert_mlp};
use crate::kernels::moe::mxfp4_tiles::{Mxfp4Tiles, RowOrder};
use crate::kernels::moe::routing::route::RoutedPairs;

#[derive(Clone, Copy)]
pub(super) struct ExpertCase {
    pub tokens: usize,
    pub hidden: usize,
    pub intermediate: usize,
}

/// Computes the MLP of the routed experts: with fused kernels on a GPU, and with separate operations on a CPU.
pub(super) fn fused_experts(target: CheckTarget, noise: &mut Noise, case: ExpertCase) -> Result<Tensor> {
    let ExpertCase { tokens, hidden, intermediate } = case;
    let (experts, chosen) = (5, 3);
    // Halve the inputs, which is exact, so that fewer gate and up values exceed the clamp limit.
    // Clamping would hide errors in these values.
    let x = (noise.tensor(&[tokens, hidden], DType::BF16)? * 0.5)?;
    let ids: Vec<u32> = noise
        .numbers(tokens, experts as u64)
        .flat_map(|first| (0..chosen as u64).map(move |next| ((first + next) % experts as u64) as u32))
        .collect();
    let ids = target.ids(&ids)?.reshape((tokens, chosen))?;
    let shares = (noise.bytes(&[tokens, chosen], 1, 200)?.to_dtype(DType::F32)? / 256.0)?.to_device(target.device)?;
    let mut stack = |rows: usize, columns: usize| -> Result<_> {
        let blocks = noise.bytes(&[experts, rows, columns / 32, 16], 0, 256)?.to_device(target.device)?;
        let scales = noise.bytes(&[experts, rows, columns / 32], 120, 5)?.to_device(target.device)?;
        let bias = target.put(&noise.tensor(&[experts, rows], DType::BF16)?)?;
        Ok((blocks, scales, bias))
    };
    let up = stack(2 * intermediate, hidden)?;
    let down = stack(hidden, intermediate)?;
    if target.device.is_cpu() {
        let weights = |(blocks, scales, _): &(Tensor, Tensor, Tensor)| ExpertWeights::Mxfp4 {
            blocks: blocks.clone(),
            scales: scales.clone(),
        };
        let h = clamped_swiglu(&expert_matmul(&x, &weights(&up), Some(&up.2), &ids, SumOrder::Fastest)?, 7.0)?;
        let y = expert_matmul(&h, &weights(&down), Some(&down.2), &ids, SumOrder::Fastest)?;
        return y.broadcast_mul(&shares.unsqueeze(2)?)?.sum(1);
    }
    let tiles = |(blocks, scales, _): &(Tensor, Tensor, Tensor), order| match Mxfp4Tiles::repack(blocks, scales, order)?
    {
        Some(tiles) => Ok(tiles),
        None => bail!("repack rejected the scales, although none exceeds 2"),
    };
    let up_tiles = tiles(&up, RowOrder::Paired)?;
    let down_tiles = tiles(&down, RowOrder::Grouped)?;
    let gate_up = ExpertLinear { tiles: &up_tiles, bias: &up.2 };
    let down = ExpertLinear { tiles: &down_tiles, bias: &down.2 };
    let routed = RoutedPairs::new(&ids, shares, experts)?;
    expert_mlp(&target.f32(&x)?, &routed, gate_up, down, 7.0, SumOrder::Fastest)?.sum(DType::F32)
}
