//! Matrix products of routed experts with MXFP4, float or quantized weights.

use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use super::expert_operands::ExpertInputs;
#[cfg(feature = "cuda")]
use super::experts_on_gpu;
use super::mxfp4::{E2M1_VALUES, MXFP4_BLOCK, e8m0_to_f32};
use crate::kernels::SumOrder;
use crate::kernels::constants::MAX_EXPERTS;
use crate::kernels::{elements, to_f32, unsupported};

pub use super::expert_operands::ExpertWeights;

/// The maximum number of (token, expert) pairs in one call of [`expert_matmul`]: CUDA's maximum grid size in y.
pub const MAX_PAIRS: usize = 65_535;

/// Returns `out[t, n] = weights[ids[t, n]] · x[t] + bias[ids[t, n]]`.
/// If x has three dimensions, uses `x[t, n]` instead of `x[t]`.
///
/// Does not support MXFP4 tiles, or more than [`MAX_PAIRS`] ids.
/// On a GPU, does not support quantized weights with a bias.
///
/// - x: `[tokens, columns]`, shared by a token's experts, or `[tokens, chosen, columns]`
/// - ids: u32 `[tokens, chosen]`; on a GPU, an id past the last expert selects the last expert
/// - bias: `[experts, rows]` in x's dtype
/// - out: `[tokens, chosen, rows]` in x's dtype
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only builds with CUDA use `sum_order`"))]
pub fn expert_matmul(
    x: &Tensor,
    weights: &ExpertWeights,
    bias: Option<&Tensor>,
    ids: &Tensor,
    sum_order: SumOrder,
) -> Result<Tensor> {
    let (experts, rows, columns) = weights.dims()?;
    let (tokens, chosen) = ids.dims2()?;
    let pairs_per_x = if x.dims() == [tokens, columns] {
        chosen
    } else if x.dims() == [tokens, chosen, columns] {
        1
    } else {
        bail!(
            "cannot multiply expert weights: x {:?} does not match ids {:?} and weights of {columns} columns",
            x.dims(),
            ids.dims()
        )
    };
    if ids.dtype() != DType::U32 || !(1..=MAX_EXPERTS).contains(&experts) || tokens * chosen > MAX_PAIRS {
        let dtype = ids.dtype();
        bail!(
            "cannot multiply expert weights: ids are {dtype:?} [{tokens}, {chosen}] for {experts} experts, expected \
             U32 with at most {MAX_PAIRS} ids, and 1 to {MAX_EXPERTS} experts"
        );
    }
    if let Some(bias) = bias
        && (bias.dims() != [experts, rows] || bias.dtype() != x.dtype())
    {
        let dtype = bias.dtype();
        let dims = bias.dims();
        let expected = x.dtype();
        bail!("cannot multiply expert weights: bias is {dtype:?} {dims:?}, expected {expected:?} [{experts}, {rows}]");
    }
    if let ExpertWeights::Dense(dense) = weights
        && dense.dtype() != x.dtype()
    {
        bail!("cannot multiply expert weights of dtype {:?}: x has dtype {:?}", dense.dtype(), x.dtype());
    }
    match x.device() {
        Device::Cpu => {
            let ids = ids.flatten_all()?.to_vec1::<u32>()?;
            let bias = bias.map(|bias| to_f32(bias)?.flatten_all()?.to_vec1::<f32>()).transpose()?;
            let values = to_f32(x)?;
            let (values, layout) = values.storage_and_layout();
            let out = reference(elements(&values, layout)?, weights, bias.as_deref(), &ids, pairs_per_x)?;
            Tensor::from_vec(out, (tokens, chosen, rows), &Device::Cpu)?.to_dtype(x.dtype())
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            let inputs = ExpertInputs { x, bias, ids, pairs_per_x };
            experts_on_gpu::expert_matmul(device, inputs, weights, sum_order)
        }
        _ => unsupported("expert_matmul", x),
    }
}

/// Computes [`expert_matmul`] in f32 on the CPU. `pairs_per_x` consecutive ids share one row of x.
pub fn reference(
    x: &[f32],
    weights: &ExpertWeights,
    bias: Option<&[f32]>,
    ids: &[u32],
    pairs_per_x: usize,
) -> Result<Vec<f32>> {
    let (_, rows, columns) = weights.dims()?;
    let mut out = vec![0f32; ids.len() * rows];
    // `dot(row, x)` returns the dot product of a weight row and x. `row` is an index into the rows of all experts.
    let fill = |dot: &(dyn Fn(usize, &[f32]) -> f32 + Sync), out: &mut [f32]| {
        out.par_iter_mut().enumerate().for_each(|(index, out)| {
            let (pair, row) = (index / rows, index % rows);
            let expert_row = ids[pair] as usize * rows + row;
            let x = &x[pair / pairs_per_x * columns..][..columns];
            *out = dot(expert_row, x) + bias.map_or(0.0, |bias| bias[expert_row]);
        });
    };
    match weights {
        ExpertWeights::Mxfp4 { blocks, scales } => {
            let ((blocks, b), (scales, s)) = (blocks.storage_and_layout(), scales.storage_and_layout());
            let blocks = elements::<u8>(&blocks, b)?;
            let scales = elements::<u8>(&scales, s)?;
            let groups = columns / MXFP4_BLOCK;
            // Plain loops over arrays are fast even in dev builds (opt-level 1), which do not inline all iterators.
            let dot = |row: usize, x: &[f32]| {
                let (blocks, _) = blocks[row * groups * 16..][..groups * 16].as_chunks::<16>();
                let (x, _) = x.as_chunks::<MXFP4_BLOCK>();
                let scales = &scales[row * groups..][..groups];
                let mut sum = 0.0;
                for group in 0..groups {
                    sum += block_dot(&blocks[group], &x[group]) * e8m0_to_f32(scales[group]);
                }
                sum
            };
            fill(&dot, &mut out);
        }
        ExpertWeights::Dense(dense) => {
            let dense = to_f32(dense)?;
            let (dense, layout) = dense.storage_and_layout();
            let dense = elements::<f32>(&dense, layout)?;
            let dot = |row: usize, x: &[f32]| {
                dense[row * columns..][..columns].iter().zip(x).map(|(weight, x)| weight * x).sum()
            };
            fill(&dot, &mut out);
        }
        ExpertWeights::Quantized(matrix, _) => {
            let x = Tensor::from_slice(x, (x.len() / columns.max(1), columns), &Device::Cpu)?;
            for (pair, (id, out)) in ids.iter().zip(out.chunks_exact_mut(rows)).enumerate() {
                let expert = matrix.rows(*id as usize * rows, rows)?;
                let product = expert.matmul(&x.narrow(0, pair / pairs_per_x, 1)?)?.flatten_all()?.to_vec1::<f32>()?;
                let bias = |row: usize| bias.map_or(0.0, |bias| bias[*id as usize * rows + row]);
                out.iter_mut().zip(product).enumerate().for_each(|(row, (out, y))| *out = y + bias(row));
            }
        }
        #[cfg(feature = "cuda")]
        ExpertWeights::Mxfp4Tiles(_) => bail!("cannot multiply expert weights: MXFP4 tiles are not supported on a CPU"),
    }
    Ok(out)
}

/// Returns the dot product of the 32 unscaled values of an MXFP4 block and 32 elements of x.
fn block_dot(block: &[u8; 16], x: &[f32; MXFP4_BLOCK]) -> f32 {
    let mut sum = 0.0;
    for (i, byte) in block.iter().enumerate() {
        sum += E2M1_VALUES[(byte & 15) as usize] * x[2 * i] + E2M1_VALUES[(byte >> 4) as usize] * x[2 * i + 1];
    }
    sum
}
