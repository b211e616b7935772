//! Loads the stacked expert matrices of gpt-oss. MXFP4 matrices stay packed. All others are loaded as floats.

use anyhow::{Result, bail};

use super::weights::Weights;
use crate::kernels::moe::experts::ExpertWeights;
use crate::kernels::moe::mxfp4::MXFP4_BLOCK;
#[cfg(feature = "cuda")]
use crate::kernels::moe::mxfp4_tiles::{Mxfp4Tiles, RowOrder};
use crate::weights::reading::DimOrder;

/// Loads the stacked matrices of all experts. `shape` is `[experts, rows, columns]`.
/// If a rank loads only some of the columns, these columns must form whole MXFP4 blocks.
///
/// A packed checkpoint has two tensors:
/// - `{name}_blocks` with shape `[experts, rows, columns / 32, 16]`
/// - `{name}_scales` with shape `[experts, rows, columns / 32]`
///
/// An unpacked checkpoint has `{name}` with shape `[experts, columns, rows]`, transposed as in transformers.
pub fn experts(weights: &Weights, name: &str, shape: [usize; 3]) -> Result<ExpertWeights> {
    let [experts, rows, columns] = shape;
    if weights.contains(&format!("{name}_blocks")) {
        if columns % MXFP4_BLOCK != 0 {
            bail!("{name}: {columns} columns are not a multiple of the MXFP4 block length {MXFP4_BLOCK}");
        }
        let groups = columns / MXFP4_BLOCK;
        // Both tensors have one entry per group of columns where a dense tensor has columns.
        let slice = weights.slice(DimOrder::StackedRowsColumns).map(|slice| match slice.dim {
            2 => slice.in_units(MXFP4_BLOCK),
            _ => slice,
        });
        let blocks_shape = [experts, rows, groups, MXFP4_BLOCK / 2];
        let blocks = weights.bytes_slice(&format!("{name}_blocks"), &blocks_shape, slice.clone())?;
        let scales = weights.bytes_slice(&format!("{name}_scales"), &[experts, rows, groups], slice)?;
        return Ok(ExpertWeights::Mxfp4 { blocks, scales });
    }
    let slice = weights.slice(DimOrder::StackedColumnsRows);
    let dense = weights.float_slice(name, &[experts, columns, rows], weights.dtype(), slice)?;
    Ok(ExpertWeights::Dense(dense.transpose(1, 2)?.contiguous()?))
}

/// Repacks the expert matrices of an MLP for the tensor cores of a GPU.
///
/// Returns the matrices unchanged in these cases: the device is a CPU, the compute dtype is f32,
/// the matrices are not packed, or a scale is NaN or greater than 2.
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
        && let Some(down) = Mxfp4Tiles::repack(blocks, scales, RowOrder::Grouped)?
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
