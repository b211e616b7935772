//! Products of dense matrices and several tokens with wgmma, on Hopper GPUs (`dense_wgmma.cu`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use super::wgmma_division::{Division, DivisionLimits};
use crate::kernels::activation::Activation;
use crate::kernels::constants::{
    BEST_LOGITS_CANDIDATES, DENSE_WGMMA_COLUMNS, DENSE_WGMMA_MAX_TOKENS, DENSE_WGMMA_RING_BYTES, DENSE_WGMMA_THREADS,
    DENSE_WGMMA_TOKENS, MAX_PRODUCT_TERMS,
};
use crate::kernels::launch::{
    Arguments, BoxOrder, Launch, LaunchShape, TensorMap, address, dtype_suffix, module, multiprocessors, runs_wgmma,
};
use crate::kernels::sampling::{BEST_LOGITS_COLUMNS, TOKEN_LIMIT};
use crate::kernels::scratch;

/// What a kernel computes.
#[derive(Clone, Copy)]
enum ProductKind<'t> {
    Plain,
    /// activation(gate) · up, from one matrix with the gate rows and the up rows.
    Gated(Activation),
    /// Logits, and candidates for the largest logit of each token, which are written to `best`.
    Logits {
        best: &'t Tensor,
        skips_logits: &'t Tensor,
        first_token: usize,
    },
}

/// The outputs of [`matmul_best`], and its inputs besides x and w.
#[derive(Clone, Copy)]
pub struct LogitsOutput<'t> {
    /// The product, f32 `[tokens, rows]`.
    pub logits: &'t Tensor,
    /// Candidates for the largest logit of each token, f32 `[tokens, BEST_LOGITS_COLUMNS]`,
    /// like the result of [`best_logits`](crate::kernels::sampling::best_logits).
    pub best: &'t Tensor,
    /// u32 `[1]`. If the word is not 0 when the kernel runs, the kernel leaves `logits` unchanged.
    pub skips_logits: &'t Tensor,
    /// The token id of the first row of w.
    pub first_token: usize,
}

impl ProductKind<'_> {
    /// Divides w among the thread blocks of the device. `matrix` is (rows, columns) of w.
    fn division(self, device: &CudaDevice, matrix: (usize, usize)) -> Result<Division> {
        // Swizzled rows come eight at a time, and a gated tile has as many gate rows as up rows.
        let limits = match self {
            Self::Plain => DivisionLimits { row_multiple: 8, max_terms: MAX_PRODUCT_TERMS },
            Self::Gated(_) => DivisionLimits { row_multiple: 16, max_terms: 1 },
            Self::Logits { .. } => DivisionLimits { row_multiple: 8, max_terms: 1 },
        };
        Ok(Division::of_matrix(matrix, multiprocessors(device)?, limits))
    }
}

/// Returns whether the dense_wgmma kernels support x·wᵀ on this GPU.
/// x and w must be contiguous, and must have the same dtype and the same number of columns.
///
/// With more than `DENSE_WGMMA_MAX_TOKENS` tokens, cuBLASLt is as fast.
pub fn is_supported(device: &CudaDevice, x: &Tensor, w: &Tensor) -> Result<bool> {
    let ((tokens, _), (rows, columns)) = (x.dims2()?, w.dims2()?);
    Ok(runs_wgmma(device)
        && (1..=DENSE_WGMMA_MAX_TOKENS).contains(&tokens)
        && matches!(w.dtype(), DType::F16 | DType::BF16)
        && rows > 0
        && columns > 0
        // A tensor map needs a row size and an address that are multiples of 16 bytes.
        && columns.is_multiple_of(8)
        && address(x)?.is_multiple_of(16)
        && address(w)?.is_multiple_of(16))
}

/// Returns the number of terms that [`matmul_terms`] computes for w `[rows, columns]`, at least 1.
pub fn term_count(device: &CudaDevice, rows: usize, columns: usize) -> Result<usize> {
    Ok(ProductKind::Plain.division(device, (rows, columns))?.terms)
}

/// Computes x·wᵀ as f32 `[terms, tokens, rows]`. The product is the sum over the [`term_count`] terms.
/// If `out` is given, writes the terms to `out` and returns `out`, which must be f32 and have this shape.
///
/// x `[tokens, columns]` and w `[rows, columns]` have the same dtype. Fails unless [`is_supported`] returns true.
pub fn matmul_terms(device: &CudaDevice, x: &Tensor, w: &Tensor, out: Option<&Tensor>) -> Result<Tensor> {
    let ((tokens, columns), (rows, _)) = (x.dims2()?, w.dims2()?);
    let terms = term_count(device, rows, columns)?;
    let y = match out {
        Some(out) if out.dims() == [terms, tokens, rows] && out.dtype() == DType::F32 => out.clone(),
        Some(out) => {
            bail!(
                "cannot multiply with wgmma: out is {:?} {:?}, expected F32 [{terms}, {tokens}, {rows}]",
                out.dtype(),
                out.dims()
            )
        }
        // SAFETY: the kernel writes every element.
        None => unsafe { scratch::empty((terms, tokens, rows), DType::F32, x.device())? },
    };
    enqueue(device, x, w, &y, ProductKind::Plain)?;
    Ok(y)
}

/// Returns whether [`matmul_best`] supports these inputs. `first_token` is the token id of the first row of w.
pub fn is_best_supported(device: &CudaDevice, x: &Tensor, w: &Tensor, first_token: usize) -> Result<bool> {
    Ok(is_supported(device, x, w)? && first_token + w.dim(0)? <= TOKEN_LIMIT)
}

/// Computes the logits x·wᵀ, and candidates for the largest logit of each token.
///
/// x `[tokens, columns]` and w `[rows, columns]` have the same dtype. Fails unless [`is_best_supported`] returns true.
pub fn matmul_best(device: &CudaDevice, x: &Tensor, w: &Tensor, output: &LogitsOutput) -> Result<()> {
    let LogitsOutput { logits, best, skips_logits, first_token } = *output;
    let (tokens, rows) = (x.dim(0)?, w.dim(0)?);
    let are_f32 = logits.dtype() == DType::F32 && best.dtype() == DType::F32;
    let are_results = logits.dims() == [tokens, rows] && best.dims() == [tokens, BEST_LOGITS_COLUMNS];
    let is_flag = skips_logits.dtype() == DType::U32 && skips_logits.elem_count() == 1;
    if !are_f32 || !are_results || !is_flag || !is_best_supported(device, x, w, first_token)? {
        bail!(
            "cannot compute logits with wgmma: unsupported inputs or buffers: \
             logits {:?} {:?}, best {:?} {:?}, flag {:?} {:?}",
            logits.dtype(),
            logits.dims(),
            best.dtype(),
            best.dims(),
            skips_logits.dtype(),
            skips_logits.dims()
        );
    }
    enqueue(device, x, w, logits, ProductKind::Logits { best, skips_logits, first_token })
}

/// Returns whether [`matmul_gated`] supports these inputs.
pub fn is_gated_supported(device: &CudaDevice, x: &Tensor, w: &Tensor) -> Result<bool> {
    Ok(is_supported(device, x, w)? && w.dim(0)?.is_multiple_of(16))
}

/// Computes activation(gate) · up: `[tokens, rows / 2]` in the dtype of x.
/// The first half of the rows of w computes gate, and the second half computes up.
///
/// x `[tokens, columns]` and w `[rows, columns]` have the same dtype. Fails unless [`is_gated_supported`] returns true.
pub fn matmul_gated(device: &CudaDevice, x: &Tensor, w: &Tensor, activation: Activation) -> Result<Tensor> {
    // SAFETY: the kernel writes every element.
    let y = unsafe { scratch::empty((x.dim(0)?, w.dim(0)? / 2), x.dtype(), x.device())? };
    enqueue(device, x, w, &y, ProductKind::Gated(activation))?;
    Ok(y)
}

/// Queues the kernel that writes y: `[terms, tokens, rows]` for a plain product, `[tokens, rows / 2]` for a gated
/// product, and `[tokens, rows]` for logits.
fn enqueue(device: &CudaDevice, x: &Tensor, w: &Tensor, y: &Tensor, kind: ProductKind) -> Result<()> {
    let ((tokens, columns), (rows, w_columns)) = (x.dims2()?, w.dims2()?);
    let is_gated = matches!(kind, ProductKind::Gated(_));
    let has_kernel = if is_gated { is_gated_supported(device, x, w)? } else { is_supported(device, x, w)? };
    if columns != w_columns || x.dtype() != w.dtype() || !has_kernel {
        let (x_type, w_type) = (x.dtype(), w.dtype());
        bail!(
            "cannot multiply with wgmma: unsupported inputs: x {x_type:?} {:?}, w {w_type:?} {:?}",
            x.dims(),
            w.dims()
        );
    }
    let box_tokens = DENSE_WGMMA_TOKENS.into_iter().find(|&most| tokens <= most).unwrap_or(DENSE_WGMMA_MAX_TOKENS);
    let Division { terms, tile_rows } = kind.division(device, (rows, columns))?;
    let (row_bytes, box_bytes) = (columns * 2, DENSE_WGMMA_COLUMNS * 2);
    let x_map = TensorMap::new(x, [1, tokens, row_bytes], [box_tokens, box_bytes], BoxOrder::Swizzled)?;
    let w_map = if is_gated {
        TensorMap::of_gate_up(w, [rows, row_bytes], [tile_rows, box_bytes], BoxOrder::Swizzled)?
    } else {
        TensorMap::new(w, [1, rows, row_bytes], [tile_rows, box_bytes], BoxOrder::Swizzled)?
    };
    let (y_rows, y_tile_rows) = if is_gated { (rows / 2, tile_rows / 2) } else { (rows, tile_rows) };
    let blocks = rows.div_ceil(tile_rows).min(multiprocessors(device)?);
    let arguments = Arguments::new().value(w_map, [w]).value(x_map, [x]).tensor(y)?;
    let arguments = arguments.int(y_rows).int(columns).int(tokens).int(y_tile_rows);
    let (name, blocks, arguments) = match kind {
        ProductKind::Plain => ("", blocks, arguments),
        ProductKind::Gated(activation) => ("gated_", blocks, arguments.int(activation.code())),
        ProductKind::Logits { best, skips_logits, first_token } => {
            let arguments = arguments.tensor(best)?.tensor(skips_logits)?.int(first_token);
            ("logits_", blocks.min(BEST_LOGITS_CANDIDATES), arguments)
        }
    };
    // The kernel aligns the start of the ring buffer to 1024 bytes.
    let shape =
        LaunchShape::new((terms, blocks, 1), DENSE_WGMMA_THREADS).with_shared_bytes(DENSE_WGMMA_RING_BYTES + 1024);
    let kernel = format!("dense_wgmma_{name}{}_{box_tokens}", dtype_suffix(x.dtype())?);
    let launch = Launch::new(module!("dense_wgmma"), kernel, shape, arguments);
    // SAFETY: the shapes are checked above and by the callers. The tensor maps limit the reads of w and x.
    // Overlap: before `pdl_wait`, the copying warp reads only w, which no kernel writes after loading. That warp calls
    // `pdl_wait` before it copies x, and the other warps call it before they access device memory.
    unsafe { launch.overlapping().enqueue(device) }
}
