//! Matrix products of routed experts, on MXFP4 weights as they are stored (no unpacked copy), on quantized or on dense
//! ones; and MXFP4 weights laid out for tensor cores, which `expert_mlp` and `decode` multiply with.
//!
//! MXFP4 (OCP Microscaling Formats 1.0): 32 E2M1 values share one E8M0 scale. Layout as in openai/gpt-oss-20b: blocks
//! [E, R, C/32, 16], two values a byte, the even element in the low nibble; scales [E, R, C/32], value 2^(byte - 127).

use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use crate::kernels::quantized::InputRounding;
use crate::kernels::quantized::{Matrix, QuantizedMatrix};
use crate::kernels::{bytes, elements, to_f32};

/// Values in one MXFP4 block.
pub const MXFP4_BLOCK: usize = 32;

/// E2M1 by nibble.
pub const E2M1_VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Pairs of token and expert in one call: a grid is at most so high.
pub const MAX_PAIRS: usize = 65_535;

/// From this many (token, expert) pairs on, each expert's weights are read once a tile rather than once a pair.
#[cfg(feature = "cuda")]
const GEMM_FROM_PAIRS: usize = 64;

/// The stacked weight matrices of all experts, each [R, C].
#[derive(Clone, Debug)]
pub enum ExpertWeights {
    /// blocks [E, R, C/32, 16] u8, scales [E, R, C/32] u8.
    Mxfp4 { blocks: Tensor, scales: Tensor },
    /// [E, R, C] of the compute dtype.
    Dense(Tensor),
    /// [E·R, C], and E.
    Quantized(QuantizedMatrix, usize),
    /// MXFP4, laid out anew for tensor cores: what a GPU computes in bf16 or f16 with.
    #[cfg(feature = "cuda")]
    Mxfp4Tiles(Mxfp4Tiles),
}

/// MXFP4 matrices in tiles of 16 rows × 64 columns, each the fragments of a tensor-core product (`experts_gemm.cu`).
#[cfg(feature = "cuda")]
#[derive(Clone, Debug)]
pub struct Mxfp4Tiles {
    /// u8 [E, ceil(R/16), ceil(C/64), 512]
    blocks: Tensor,
    /// u8 [E, ceil(R/16), ceil(C/64), 32]
    scales: Tensor,
    rows: usize,
    columns: usize,
}

/// How the 16 rows of a tile follow each other.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    Plain,
    /// Rows 2g and 2g + 1, a gate and its linear half, at g and g + 8.
    Paired,
}

#[cfg(feature = "cuda")]
impl Mxfp4Tiles {
    /// From blocks [E, R, C/32, 16] and scales [E, R, C/32], on the GPU; waits for it. `None` if a scale is above 2: the
    /// tensor-core kernels cannot compute with such weights, which no known checkpoint has.
    pub fn repack(blocks: &Tensor, scales: &Tensor, order: RowOrder) -> Result<Option<Self>> {
        use crate::kernels::launch::cuda::{Arg, launch, module};
        let weights = ExpertWeights::Mxfp4 { blocks: blocks.clone(), scales: scales.clone() };
        let (experts, rows, columns) = weights.dims()?;
        let Device::Cuda(device) = blocks.device() else {
            return crate::kernels::unsupported("Mxfp4Tiles::repack", blocks);
        };
        let (row_tiles, column_tiles) = (rows.div_ceil(16), columns.div_ceil(64));
        // SAFETY: the kernel writes every byte of every tile.
        let empty =
            |bytes| unsafe { Tensor::empty((experts, row_tiles, column_tiles, bytes), DType::U8, blocks.device()) };
        let tiles = Self { blocks: empty(512)?, scales: empty(32)?, rows, columns };
        let extreme = Tensor::zeros(1, DType::U32, blocks.device())?;
        let args = [
            Arg::tensor(blocks)?,
            Arg::tensor(scales)?,
            Arg::tensor(&tiles.blocks)?,
            Arg::tensor(&tiles.scales)?,
            Arg::tensor(&extreme)?,
            experts.into(),
            rows.into(),
            columns.into(),
            Arg::Int(i32::from(order == RowOrder::Paired)),
        ];
        let grid = ((experts * row_tiles * column_tiles).div_ceil(8), 1, 1);
        // SAFETY: `dims` checked that blocks and scales go together; the tiles have the sizes that the kernel counts.
        unsafe { launch(device, &module!("experts_gemm"), "repack_mxfp4", grid, 256, 0, &args)? };
        Ok((extreme.to_vec1::<u32>()?[0] == 0).then_some(tiles))
    }

    /// (E, R, C).
    pub fn dims(&self) -> (usize, usize, usize) {
        (self.blocks.dims()[0], self.rows, self.columns)
    }

    pub fn blocks(&self) -> &Tensor {
        &self.blocks
    }

    pub fn scales(&self) -> &Tensor {
        &self.scales
    }

    pub fn bytes(&self) -> u64 {
        bytes(&self.blocks) + bytes(&self.scales)
    }
}

impl ExpertWeights {
    /// (E, R, C).
    pub fn dims(&self) -> Result<(usize, usize, usize)> {
        match self {
            ExpertWeights::Mxfp4 { blocks, scales } => {
                let (experts, rows, groups, bytes) = blocks.dims4()?;
                let u8s = blocks.dtype() == DType::U8 && scales.dtype() == DType::U8;
                if !u8s || bytes != MXFP4_BLOCK / 2 || scales.dims() != [experts, rows, groups] {
                    bail!("MXFP4 blocks {:?} do not go with scales {:?}", blocks.dims(), scales.dims());
                }
                Ok((experts, rows, groups * MXFP4_BLOCK))
            }
            ExpertWeights::Dense(weights) => weights.dims3(),
            ExpertWeights::Quantized(matrix, experts) => {
                let (rows, columns) = matrix.dims();
                Ok((*experts, rows / experts, columns))
            }
            #[cfg(feature = "cuda")]
            ExpertWeights::Mxfp4Tiles(tiles) => Ok(tiles.dims()),
        }
    }

    /// All experts' rows as one matrix [E·R, C]; `None` of MXFP4.
    pub fn as_matrix(&self) -> Result<Option<Matrix>> {
        Ok(match self {
            ExpertWeights::Dense(weights) => Some(Matrix::Dense(weights.flatten(0, 1)?)),
            ExpertWeights::Quantized(matrix, _) => Some(Matrix::Quantized(vec![matrix.clone()])),
            _ => None,
        })
    }

    /// Bytes of all experts.
    pub fn bytes(&self) -> u64 {
        match self {
            ExpertWeights::Mxfp4 { blocks, scales } => bytes(blocks) + bytes(scales),
            ExpertWeights::Dense(weights) => bytes(weights),
            ExpertWeights::Quantized(matrix, _) => matrix.bytes(),
            #[cfg(feature = "cuda")]
            ExpertWeights::Mxfp4Tiles(tiles) => tiles.bytes(),
        }
    }
}

/// out[t, n] = W[ids[t, n]] · x + bias[ids[t, n]].
///
/// x [T, C], shared by a token's experts, or [T, N, C]; ids [T, N] u32, each below E (on a GPU this is not checked); bias
/// [E, R] of x's dtype. Returns [T, N, R].
pub fn expert_matmul(x: &Tensor, weights: &ExpertWeights, bias: Option<&Tensor>, ids: &Tensor) -> Result<Tensor> {
    let (experts, rows, columns) = weights.dims()?;
    let (tokens, chosen) = ids.dims2()?;
    let pairs_per_x = if x.dims() == [tokens, columns] {
        chosen
    } else if x.dims() == [tokens, chosen, columns] {
        1
    } else {
        bail!("expert_matmul: x {:?} does not go with ids {:?} and weights of {columns} columns", x.dims(), ids.dims())
    };
    // The sort has room for 1,024 experts.
    if ids.dtype() != DType::U32 || experts > 1024 || tokens * chosen > MAX_PAIRS {
        bail!(
            "expert_matmul: {tokens} x {chosen} ids of {:?} (U32, at most {MAX_PAIRS}), {experts} experts",
            ids.dtype()
        );
    }
    if let Some(bias) = bias
        && (bias.dims() != [experts, rows] || bias.dtype() != x.dtype())
    {
        bail!(
            "expert_matmul: bias is {:?} {:?}, expected {:?} [{experts}, {rows}]",
            bias.dtype(),
            bias.dims(),
            x.dtype()
        );
    }
    if let ExpertWeights::Dense(dense) = weights
        && dense.dtype() != x.dtype()
    {
        bail!("expert_matmul: weights are {:?}, x is {:?}", dense.dtype(), x.dtype());
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
            use crate::kernels::launch::cuda::{Arg, launch, module, suffix};
            let suffix = suffix(x.dtype())?;
            let pairs = tokens * chosen;
            if let ExpertWeights::Quantized(matrix, _) = weights {
                if bias.is_some() {
                    bail!("expert_matmul: quantized experts with a bias");
                }
                // Dequantizing all experts moves some four times as much as a pair of each.
                if pairs < GEMM_FROM_PAIRS.max(4 * experts) || x.dtype() == DType::F32 {
                    return crate::kernels::quantized::cuda::expert_matvec(device, matrix, rows, x, ids, pairs_per_x);
                }
                // What codes stand for, on both sides.
                let rounded = match matrix.input_rounding {
                    InputRounding::None => x.clone(),
                    rounding => {
                        let flat = x.reshape(((), columns))?;
                        crate::kernels::quantized::cuda::round_floats(device, &flat, rounding)?.reshape(x.shape())?
                    }
                };
                let dense = matrix.dequantize(x.dtype())?.reshape((experts, rows, columns))?;
                return expert_matmul(&rounded, &ExpertWeights::Dense(dense), None, ids);
            }
            // SAFETY: both paths write R elements for each of the T·N pairs.
            let out = unsafe { Tensor::empty((tokens, chosen, rows), x.dtype(), x.device())? };
            let (kind, first, second) = match weights {
                ExpertWeights::Mxfp4 { blocks, scales } => ("mxfp4", Arg::tensor(blocks)?, Arg::tensor(scales)?),
                ExpertWeights::Dense(dense) => ("dense", Arg::tensor(dense)?, Arg::optional(None)?),
                ExpertWeights::Mxfp4Tiles(_) | ExpertWeights::Quantized(..) => {
                    bail!("expert_matmul: unexpected weights")
                }
            };
            let (bias, input, output) = (Arg::optional(bias)?, Arg::tensor(x)?, Arg::tensor(&out)?);
            let module = module!("experts");
            let step = if kind == "dense" { 8 } else { MXFP4_BLOCK };
            if pairs < GEMM_FROM_PAIRS || x.dtype() == DType::F32 || !columns.is_multiple_of(step) {
                let sizes = [rows, columns, pairs_per_x].map(Arg::from);
                let args = [[first, second, bias, input, Arg::tensor(ids)?, output].as_slice(), &sizes].concat();
                let name = format!("expert_gemv_{kind}_{suffix}");
                // SAFETY: shapes and dtypes checked above; ids are below E by the contract.
                unsafe { launch(device, &module, &name, (rows.div_ceil(8), pairs, 1), 256, 0, &args)? };
                return Ok(out);
            }
            // SAFETY: sort_by_expert writes all pairs and all E + 1 offsets.
            let sorted = unsafe { Tensor::empty(pairs, ids.dtype(), x.device())? };
            // SAFETY: as above.
            let offsets = unsafe { Tensor::empty(experts + 1, ids.dtype(), x.device())? };
            let args = [Arg::tensor(ids)?, Arg::tensor(&sorted)?, Arg::tensor(&offsets)?, pairs.into(), experts.into()];
            // SAFETY: shapes and E checked above.
            unsafe { launch(device, &module, "sort_by_expert", (1, 1, 1), 1024, 0, &args)? };
            let order = [Arg::tensor(&sorted)?, Arg::tensor(&offsets)?, output];
            let sizes = [rows, columns, pairs_per_x, experts].map(Arg::from);
            // Rows, pairs and threads of a block's tile, and its shared memory.
            let (module, name, tile, shared) = match weights {
                ExpertWeights::Dense(_) => {
                    let most = if pairs > 96 * experts { 128 } else { 64 };
                    let name = format!("grouped_gemm_{most}_{suffix}");
                    (module!("grouped_gemm"), name, (128, most, 256), 3 * (most + 128) * 128)
                }
                _ => (module, format!("expert_gemm_mxfp4_{suffix}"), (64, 64, 128), 0),
            };
            let first = if kind == "dense" { vec![first] } else { vec![first, second] };
            let args = [first.as_slice(), &[bias, input], &order, &sizes].concat();
            let grid = (rows.div_ceil(tile.0), pairs.div_ceil(tile.1) + experts, 1);
            // SAFETY: shapes and dtypes checked above; the grid covers the most tiles there can be.
            unsafe { launch(device, &module, &name, grid, tile.2, shared, &args)? };
            Ok(out)
        }
        #[allow(unreachable_patterns)]
        _ => crate::kernels::unsupported("expert_matmul", x),
    }
}

/// Σ shares[t, n] · y[t, n]: y [T, N, C], shares [T, N] f32. Returns [T, C] f32.
pub fn combine(y: &Tensor, shares: &Tensor) -> Result<Tensor> {
    let (tokens, chosen, _) = y.dims3()?;
    if shares.dims() != [tokens, chosen] || shares.dtype() != DType::F32 {
        bail!("combine: {:?} {:?} for y {:?}", shares.dtype(), shares.dims(), y.dims());
    }
    match y.device() {
        Device::Cpu => y.to_dtype(DType::F32)?.broadcast_mul(&shares.unsqueeze(2)?)?.sum(1),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::cuda::{Arg, launch, module, suffix};
            let columns = y.dim(2)?;
            let n = tokens * columns;
            // SAFETY: the kernel writes every element.
            let out = unsafe { Tensor::empty((tokens, columns), DType::F32, y.device())? };
            let sizes = [n, columns, chosen].map(Arg::from);
            let args = [[Arg::tensor(y)?, Arg::tensor(shares)?, Arg::tensor(&out)?].as_slice(), &sizes].concat();
            let name = format!("mix_{}", suffix(y.dtype())?);
            // SAFETY: shapes and dtypes checked above.
            unsafe { launch(device, &module!("grouped_gemm"), &name, (n.div_ceil(256), 1, 1), 256, 0, &args)? };
            Ok(out)
        }
        #[allow(unreachable_patterns)]
        _ => crate::kernels::unsupported("combine", y),
    }
}

/// [`expert_matmul`] in plain Rust; x has one row for each `pairs_per_x` entries of `ids`.
pub fn reference(
    x: &[f32],
    weights: &ExpertWeights,
    bias: Option<&[f32]>,
    ids: &[u32],
    pairs_per_x: usize,
) -> Result<Vec<f32>> {
    let (_, rows, columns) = weights.dims()?;
    let mut out = vec![0f32; ids.len() * rows];
    let each = |compute: &(dyn Fn(usize, &[f32]) -> f32 + Sync), out: &mut [f32]| {
        out.par_iter_mut().enumerate().for_each(|(index, out)| {
            let (pair, row) = (index / rows, index % rows);
            let expert_row = ids[pair] as usize * rows + row;
            let x = &x[pair / pairs_per_x * columns..][..columns];
            *out = compute(expert_row, x) + bias.map_or(0.0, |bias| bias[expert_row]);
        });
    };
    match weights {
        ExpertWeights::Mxfp4 { blocks, scales } => {
            let ((blocks, b), (scales, s)) = (blocks.storage_and_layout(), scales.storage_and_layout());
            let (blocks, scales) = (elements::<u8>(&blocks, b)?, elements::<u8>(&scales, s)?);
            let groups = columns / MXFP4_BLOCK;
            let dot = |row: usize, x: &[f32]| {
                let blocks = blocks[row * groups * 16..][..groups * 16].chunks_exact(16);
                let scales = &scales[row * groups..][..groups];
                let groups = blocks.zip(scales).zip(x.chunks_exact(MXFP4_BLOCK));
                groups.map(|((block, scale), x)| block_dot(block, x) * e8m0_to_f32(*scale)).sum()
            };
            each(&dot, &mut out);
        }
        ExpertWeights::Dense(dense) => {
            let dense = to_f32(dense)?;
            let (dense, layout) = dense.storage_and_layout();
            let dense = elements::<f32>(&dense, layout)?;
            let dot = |row: usize, x: &[f32]| {
                dense[row * columns..][..columns].iter().zip(x).map(|(weight, x)| weight * x).sum()
            };
            each(&dot, &mut out);
        }
        ExpertWeights::Quantized(matrix, _) => {
            let columns = x.len() / (ids.len() / pairs_per_x).max(1);
            let x = Tensor::from_slice(x, (x.len() / columns.max(1), columns), &Device::Cpu)?;
            for (pair, (id, out)) in ids.iter().zip(out.chunks_exact_mut(rows)).enumerate() {
                let expert = matrix.rows(*id as usize * rows, rows)?;
                let product = expert.matmul(&x.narrow(0, pair / pairs_per_x, 1)?)?.flatten_all()?.to_vec1::<f32>()?;
                let bias = |row: usize| bias.map_or(0.0, |bias| bias[*id as usize * rows + row]);
                out.iter_mut().zip(product).enumerate().for_each(|(row, (out, y))| *out = y + bias(row));
            }
        }
        #[cfg(feature = "cuda")]
        ExpertWeights::Mxfp4Tiles(_) => bail!("expert_matmul: tiles are for a GPU"),
    }
    Ok(out)
}

fn block_dot(block: &[u8], x: &[f32]) -> f32 {
    let pairs = block.iter().zip(x.chunks_exact(2));
    pairs.map(|(byte, x)| E2M1_VALUES[(byte & 15) as usize] * x[0] + E2M1_VALUES[(byte >> 4) as usize] * x[1]).sum()
}

/// The value of an E8M0 scale: 2^(byte - 127), NaN for 255.
pub fn e8m0_to_f32(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        _ => f32::from_bits((byte as u32) << 23),
    }
}
