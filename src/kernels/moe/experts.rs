//! Matrix products of routed experts with MXFP4, float or quantized weights.

use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

use super::mxfp4::{E2M1_VALUES, MXFP4_BLOCK, e8m0_to_f32, mxfp4_dims};
#[cfg(feature = "cuda")]
use super::mxfp4_tiles::Mxfp4Tiles;
use crate::kernels::SumOrder;
use crate::kernels::constants::MAX_EXPERTS;
use crate::kernels::matrix::Matrix;
use crate::kernels::quantized::QuantizedMatrix;
use crate::kernels::{bytes, elements, to_f32, unsupported};

/// The maximum number of (token, expert) pairs in one call of [`expert_matmul`]: CUDA's maximum grid size in y.
pub const MAX_PAIRS: usize = 65_535;

/// The weight matrices of all experts, each `[rows, columns]`.
#[derive(Clone, Debug)]
pub enum ExpertWeights {
    /// MXFP4 weights: blocks u8 `[experts, rows, columns / 32, 16]` and scales u8 `[experts, rows, columns / 32]`.
    Mxfp4 { blocks: Tensor, scales: Tensor },
    /// Float weights: `[experts, rows, columns]` in the compute dtype.
    Dense(Tensor),
    /// Quantized weights: one matrix `[experts * rows, columns]`, and the number of experts.
    Quantized(QuantizedMatrix, usize),
    /// MXFP4 weights repacked for tensor cores.
    /// Used on a GPU if the compute dtype is bf16 or f16 and no scale is NaN or exceeds 2.
    #[cfg(feature = "cuda")]
    Mxfp4Tiles(Mxfp4Tiles),
}

impl ExpertWeights {
    /// Returns the dimensions of the weights, `(experts, rows, columns)`.
    pub fn dims(&self) -> Result<(usize, usize, usize)> {
        match self {
            ExpertWeights::Mxfp4 { blocks, scales } => mxfp4_dims(blocks, scales),
            ExpertWeights::Dense(weights) => weights.dims3(),
            ExpertWeights::Quantized(matrix, experts) => {
                let (rows, columns) = matrix.dims();
                Ok((*experts, rows / experts, columns))
            }
            #[cfg(feature = "cuda")]
            ExpertWeights::Mxfp4Tiles(tiles) => Ok(tiles.dims()),
        }
    }

    /// Returns the weights of all experts as one matrix `[experts * rows, columns]`, or `None` for MXFP4 weights.
    pub fn as_matrix(&self) -> Result<Option<Matrix>> {
        Ok(match self {
            ExpertWeights::Dense(weights) => Some(Matrix::Dense(weights.flatten(0, 1)?)),
            ExpertWeights::Quantized(matrix, _) => Some(Matrix::Quantized(vec![matrix.clone()])),
            _ => None,
        })
    }

    /// Returns the size of the weights on the device, in bytes.
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

/// Returns `out[t, n] = weights[ids[t, n]] · x[t] + bias[ids[t, n]]`.
/// If x has three dimensions, uses `x[t, n]` instead of `x[t]`.
///
/// Does not support MXFP4 tiles, or more than [`MAX_PAIRS`] ids.
/// On a GPU, does not support quantized weights with a bias.
///
/// - x: `[tokens, columns]`, shared by a token's experts, or `[tokens, chosen, columns]`
/// - ids: u32 `[tokens, chosen]`; the caller guarantees that each id is less than the number of experts
/// - bias: `[experts, rows]` in x's dtype
/// - out: `[tokens, chosen, rows]` in x's dtype
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
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
    if ids.dtype() != DType::U32 || experts > MAX_EXPERTS || tokens * chosen > MAX_PAIRS {
        let dtype = ids.dtype();
        bail!(
            "cannot multiply expert weights: ids are {dtype:?} [{tokens}, {chosen}] for {experts} experts, expected \
             U32 with at most {MAX_PAIRS} ids and {MAX_EXPERTS} experts"
        );
    }
    if let Some(bias) = bias
        && (bias.dims() != [experts, rows] || bias.dtype() != x.dtype())
    {
        let (dtype, dims, expected) = (bias.dtype(), bias.dims(), x.dtype());
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
            let inputs = on_gpu::ExpertInputs { x, bias, ids, pairs_per_x };
            on_gpu::expert_matmul(device, inputs, weights, sum_order)
        }
        _ => unsupported("expert_matmul", x),
    }
}

/// Computes [`expert_matmul`] on a GPU. [`expert_matmul`] has checked all shapes and dtypes.
#[cfg(feature = "cuda")]
pub(super) mod on_gpu {
    use candle_core::cuda_backend::CudaDevice;
    use candle_core::{DType, Result, Tensor, bail};

    use super::ExpertWeights;
    use crate::kernels::constants::{EXPERT_GEMM_PAIRS, EXPERT_GEMM_ROWS, EXPERT_GEMM_THREADS};
    use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};
    use crate::kernels::moe::grouped_gemm::grouped_gemm;
    use crate::kernels::moe::mxfp4::mxfp4_dims;
    use crate::kernels::moe::sort_by_expert::{SortedPairs, sort_by_expert};
    use crate::kernels::quantized::{InputQuantization, QuantizedMatrix, fake_quantize, quantized_ops};
    use crate::kernels::{SumOrder, scratch};

    /// The minimum number of (token, expert) pairs for which a GEMM kernel can replace the GEMV kernel.
    ///
    /// A GEMM kernel reads an expert's weights once per tile of pairs. The GEMV kernel reads them once per pair.
    /// `docs/benchmark-history.md` has no measurement of other values.
    const GEMM_FROM_PAIRS: usize = 64;

    /// The inputs of [`expert_matmul`](super::expert_matmul()) without the weights.
    #[derive(Clone, Copy)]
    pub struct ExpertInputs<'t> {
        pub x: &'t Tensor,
        pub bias: Option<&'t Tensor>,
        pub ids: &'t Tensor,
        /// The number of consecutive ids that share a row of x: `chosen`, or 1 if x has three dimensions.
        pub pairs_per_x: usize,
    }

    impl ExpertInputs<'_> {
        /// Returns the shape of the product with weights of `rows` rows, `(tokens, chosen, rows)`.
        pub fn output_shape(&self, rows: usize) -> Result<(usize, usize, usize)> {
            let (tokens, chosen) = self.ids.dims2()?;
            Ok((tokens, chosen, rows))
        }
    }

    pub fn expert_matmul(
        device: &CudaDevice,
        inputs: ExpertInputs,
        weights: &ExpertWeights,
        sum_order: SumOrder,
    ) -> Result<Tensor> {
        let ExpertInputs { x, bias, ids, .. } = inputs;
        let (_, rows, columns) = weights.dims()?;
        // The GEMM kernels do not support f32.
        // With `SumOrder::Fixed`, a token's results must not depend on the number of tokens in the batch, so the GEMV
        // kernel is used for batches of any size.
        let needs_gemv = ids.elem_count() < GEMM_FROM_PAIRS || x.dtype() == DType::F32 || sum_order == SumOrder::Fixed;
        match weights {
            ExpertWeights::Quantized(..) if bias.is_some() => {
                bail!("cannot multiply expert weights: quantized weights do not support a bias on a GPU")
            }
            // Dequantizing writes the weights of all experts to memory, and the product reads them again.
            // With fewer than 4 pairs per expert on average, reading the quantized weights once per pair moves fewer
            // bytes.
            ExpertWeights::Quantized(matrix, experts) if needs_gemv || ids.elem_count() < 4 * experts => {
                quantized_ops::expert_matvec(device, matrix, rows, x, ids, inputs.pairs_per_x)
            }
            ExpertWeights::Quantized(matrix, experts) => dequantized_gemm(device, matrix, *experts, inputs),
            ExpertWeights::Mxfp4 { blocks, scales } if needs_gemv => {
                let weights = Arguments::new().tensor(blocks)?.tensor(scales)?;
                gemv(device, "mxfp4", weights, rows, columns, inputs)
            }
            ExpertWeights::Mxfp4 { blocks, scales } => mxfp4_gemm(device, blocks, scales, inputs),
            ExpertWeights::Dense(dense) if needs_gemv || !columns.is_multiple_of(8) => {
                let weights = Arguments::new().tensor(dense)?.optional(None)?;
                gemv(device, "dense", weights, rows, columns, inputs)
            }
            // SAFETY: `super::expert_matmul` checked shapes and dtypes; its caller guarantees valid ids.
            ExpertWeights::Dense(dense) => unsafe { grouped_gemm(device, dense, inputs) },
            ExpertWeights::Mxfp4Tiles(_) => {
                bail!("cannot multiply expert weights: expert_matmul does not support MXFP4 tiles")
            }
        }
    }

    /// Dequantizes the weights of all experts to the dtype of x, and computes the product as for float weights.
    fn dequantized_gemm(
        device: &CudaDevice,
        matrix: &QuantizedMatrix,
        experts: usize,
        inputs: ExpertInputs,
    ) -> Result<Tensor> {
        let ((all_rows, columns), x) = (matrix.dims(), inputs.x);
        let rounded = match matrix.input_quantization {
            InputQuantization::None => x.clone(),
            rounding => {
                let flat = x.reshape(((), columns))?;
                fake_quantize(device, &flat, rounding)?.reshape(x.shape())?
            }
        };
        let dense = matrix.dequantize(x.dtype())?.reshape((experts, all_rows / experts, columns))?;
        super::expert_matmul(&rounded, &ExpertWeights::Dense(dense), inputs.bias, inputs.ids, SumOrder::Fastest)
    }

    /// Launches a GEMV kernel with one warp per element of the output.
    /// `weights` holds the kernel's first two arguments.
    fn gemv(
        device: &CudaDevice,
        kind: &str,
        weights: Arguments,
        rows: usize,
        columns: usize,
        inputs: ExpertInputs,
    ) -> Result<Tensor> {
        let ExpertInputs { x, bias, ids, pairs_per_x } = inputs;
        // SAFETY: the kernel writes every element of `out`.
        let out = unsafe { scratch::empty(inputs.output_shape(rows)?, x.dtype(), x.device())? };
        let arguments =
            weights.optional(bias)?.tensor(x)?.tensor(ids)?.tensor(&out)?.int(rows).int(columns).int(pairs_per_x);
        let kernel = format!("expert_gemv_{kind}_{}", dtype_suffix(x.dtype())?);
        let shape = LaunchShape::one_warp_each(rows).with_grid_y(ids.elem_count());
        // SAFETY: `super::expert_matmul` checked shapes and dtypes; its caller guarantees valid ids.
        unsafe { Launch::new(module!("experts"), kernel, shape, arguments).enqueue(device)? };
        Ok(out)
    }

    fn mxfp4_gemm(device: &CudaDevice, blocks: &Tensor, scales: &Tensor, inputs: ExpertInputs) -> Result<Tensor> {
        let ExpertInputs { x, bias, ids, pairs_per_x } = inputs;
        let (experts, rows, columns) = mxfp4_dims(blocks, scales)?;
        // SAFETY: the kernel writes every element of `out`.
        let out = unsafe { scratch::empty(inputs.output_shape(rows)?, x.dtype(), x.device())? };
        let SortedPairs { sorted, offsets, .. } = sort_by_expert(device, ids, experts)?;
        let arguments = Arguments::new()
            .tensor(blocks)?
            .tensor(scales)?
            .optional(bias)?
            .tensor(x)?
            .tensor(&sorted)?
            .tensor(&offsets)?
            .tensor(&out)?
            .int(rows)
            .int(columns)
            .int(pairs_per_x)
            .int(experts);
        let kernel = format!("expert_gemm_mxfp4_{}", dtype_suffix(x.dtype())?);
        let tiles = ids.elem_count().div_ceil(EXPERT_GEMM_PAIRS) + experts;
        let shape = LaunchShape::new((rows.div_ceil(EXPERT_GEMM_ROWS), tiles, 1), EXPERT_GEMM_THREADS);
        // SAFETY: `super::expert_matmul` checked shapes and dtypes; its caller guarantees valid ids.
        // The grid covers the maximum number of tiles.
        unsafe { Launch::new(module!("experts"), kernel, shape, arguments).enqueue(device)? };
        Ok(out)
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
            let (blocks, scales) = (elements::<u8>(&blocks, b)?, elements::<u8>(&scales, s)?);
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
