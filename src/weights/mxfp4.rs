//! Stacked expert matrices as gpt-oss checkpoints store them: packed MXFP4, or dense where a fine-tune was unpacked.

use anyhow::{Result, bail};

use super::Weights;
use crate::kernels::experts::{BLOCK, ExpertWeights};

/// `{name}_blocks` and `{name}_scales` [E, R, C/32, ..], or else the dense `{name}` [E, C, R], which transformers keeps
/// transposed; kept here as [E, R, C] either way.
pub fn experts(
    weights: &Weights,
    name: &str,
    (experts, rows, columns): (usize, usize, usize),
) -> Result<ExpertWeights> {
    if weights.contains(&format!("{name}_blocks")) {
        if columns % BLOCK != 0 {
            bail!("{name}: {columns} columns are no multiple of the MXFP4 block of {BLOCK}");
        }
        let groups = columns / BLOCK;
        let blocks = weights.bytes(&format!("{name}_blocks"), &[experts, rows, groups, BLOCK / 2])?;
        let scales = weights.bytes(&format!("{name}_scales"), &[experts, rows, groups])?;
        return Ok(ExpertWeights::Mxfp4 { blocks, scales });
    }
    let dense = weights.float(name, &[experts, columns, rows])?;
    Ok(ExpertWeights::Dense(dense.transpose(1, 2)?.contiguous()?))
}
