//! The stacked expert matrices of gpt-oss checkpoints: packed MXFP4, or floats in an unpacked fine-tune.

use anyhow::{Result, bail};

use super::loader::Weights;
use crate::kernels::moe::experts::ExpertWeights;
#[cfg(feature = "cuda")]
use crate::kernels::moe::experts_gemm::{Mxfp4Tiles, RowOrder};
use crate::kernels::moe::mxfp4::MXFP4_BLOCK;

/// Loads the matrices [E, R, C] of all experts.
///
/// The checkpoint has them packed, as `{name}_blocks` and `{name}_scales` [E, R,
/// C/32, ..], or as floats: `{name}` [E, C, R], which transformers stores transposed.
pub fn experts(
    weights: &Weights,
    name: &str,
    (experts, rows, columns): (usize, usize, usize),
) -> Result<ExpertWeights> {
    if weights.contains(&format!("{name}_blocks")) {
        if columns % MXFP4_BLOCK != 0 {
            bail!("{name}: {columns} columns are not a multiple of the MXFP4 block of {MXFP4_BLOCK}");
        }
        let groups = columns / MXFP4_BLOCK;
        let blocks = weights.bytes(&format!("{name}_blocks"), &[experts, rows, groups, MXFP4_BLOCK / 2])?;
        let scales = weights.bytes(&format!("{name}_scales"), &[experts, rows, groups])?;
        return Ok(ExpertWeights::Mxfp4 { blocks, scales });
    }
    let dense = weights.float(name, &[experts, columns, rows])?;
    Ok(ExpertWeights::Dense(dense.transpose(1, 2)?.contiguous()?))
}

/// Repacks the matrices of an MLP for a GPU's tensor cores.
///
/// Returns them unchanged if tensor cores cannot use them: on a CPU, in f32, or with extreme scales.
#[cfg(feature = "cuda")]
pub fn for_tensor_cores(
    weights: &Weights,
    gate_up: ExpertWeights,
    down: ExpertWeights,
) -> Result<(ExpertWeights, ExpertWeights)> {
    use candle_core::DType;
    let has_tensor_cores = weights.device().is_cuda() && weights.dtype() != DType::F32;
    if let (ExpertWeights::Mxfp4 { blocks: up, scales: up_scales }, ExpertWeights::Mxfp4 { blocks, scales }) =
        (&gate_up, &down)
        && has_tensor_cores
        && let Some(up) = Mxfp4Tiles::repack(up, up_scales, RowOrder::Paired)?
        && let Some(down) = Mxfp4Tiles::repack(blocks, scales, RowOrder::Plain)?
    {
        return Ok((ExpertWeights::Mxfp4Tiles(up), ExpertWeights::Mxfp4Tiles(down)));
    }
    Ok((gate_up, down))
}

#[cfg(not(feature = "cuda"))]
pub fn for_tensor_cores(
    _: &Weights,
    gate_up: ExpertWeights,
    down: ExpertWeights,
) -> Result<(ExpertWeights, ExpertWeights)> {
    Ok((gate_up, down))
}
