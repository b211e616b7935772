//! Products of dense matrices and several tokens with wgmma, on Hopper GPUs (`dense_wgmma.cu`).

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor, bail};

use crate::kernels::constants::{
    DENSE_WGMMA_COLUMNS, DENSE_WGMMA_MAX_TOKENS, DENSE_WGMMA_RING_BYTES, DENSE_WGMMA_ROWS, DENSE_WGMMA_THREADS,
    MAX_PRODUCT_PARTS,
};
use crate::kernels::launch::{
    Arguments, BoxOrder, Launch, LaunchShape, TensorMap, address, dtype_suffix, module, multiprocessors, runs_wgmma,
};
use crate::kernels::scratch;

/// Returns whether the dense_wgmma kernels support x·wᵀ on this GPU.
/// x must have the same dtype and the same number of columns as w.
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

/// Returns the number of parts of a product with a matrix of `rows` rows and `columns` columns, at least 1.
/// Several parts are used only if the GPU then has at most one thread block per multiprocessor.
pub fn part_count(device: &CudaDevice, rows: usize, columns: usize) -> Result<usize> {
    let blocks = multiprocessors(device)? / rows.div_ceil(DENSE_WGMMA_ROWS).max(1);
    Ok(blocks.min(MAX_PRODUCT_PARTS).min(columns / DENSE_WGMMA_COLUMNS).max(1))
}

/// Computes x·wᵀ as f32 `[parts, tokens, rows]`. The product is the sum over the [`part_count`] parts.
/// If `out` is given, writes the parts to `out` and returns `out`, which must be f32 and have this shape.
///
/// x `[tokens, columns]` and w `[rows, columns]` have the same dtype. Fails unless [`is_supported`] returns true.
pub fn matmul_parts(device: &CudaDevice, x: &Tensor, w: &Tensor, out: Option<&Tensor>) -> Result<Tensor> {
    let ((tokens, columns), (rows, w_columns)) = (x.dims2()?, w.dims2()?);
    if columns != w_columns || x.dtype() != w.dtype() || !is_supported(device, x, w)? {
        bail!(
            "cannot multiply with wgmma: unsupported inputs: x {:?} {:?}, w {:?} {:?}",
            x.dtype(),
            x.dims(),
            w.dtype(),
            w.dims()
        );
    }
    let parts = part_count(device, rows, columns)?;
    let y = match out {
        Some(out) if out.dims() == [parts, tokens, rows] && out.dtype() == DType::F32 => out.clone(),
        Some(out) => {
            bail!(
                "cannot multiply with wgmma: out is {:?} {:?}, expected F32 [{parts}, {tokens}, {rows}]",
                out.dtype(),
                out.dims()
            )
        }
        // SAFETY: the kernel writes every element.
        None => unsafe { scratch::empty((parts, tokens, rows), DType::F32, x.device())? },
    };
    // There are kernels for up to 16 and for up to 32 tokens.
    let box_tokens = tokens.next_power_of_two().max(16);
    let row_bytes = columns * x.dtype().size_in_bytes();
    let box_bytes = DENSE_WGMMA_COLUMNS * x.dtype().size_in_bytes();
    let w_map = TensorMap::new(w, [1, rows, row_bytes], [DENSE_WGMMA_ROWS, box_bytes], BoxOrder::Swizzled)?;
    let x_map = TensorMap::new(x, [1, tokens, row_bytes], [box_tokens, box_bytes], BoxOrder::Swizzled)?;
    let arguments = Arguments::new().value(w_map, [w]).value(x_map, [x]).tensor(&y)?.int(rows).int(columns).int(tokens);
    // The kernel aligns the start of the ring buffer to 1024 bytes.
    let shape = LaunchShape::new((parts, rows.div_ceil(DENSE_WGMMA_ROWS), 1), DENSE_WGMMA_THREADS)
        .with_shared_bytes(DENSE_WGMMA_RING_BYTES + 1024);
    let kernel = format!("dense_wgmma_{}_{box_tokens}", dtype_suffix(x.dtype())?);
    let launch = Launch::new(module!("dense_wgmma"), kernel, shape, arguments).overlapping();
    // SAFETY: the shapes are checked above. The tensor maps limit all reads to w and x.
    unsafe { launch.enqueue(device)? };
    Ok(y)
}
