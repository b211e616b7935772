//! The matrix products of the parent module on a GPU.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Result, Tensor, bail};

use super::matmul_kernel::{MatmulKernel, ProductForm};
use super::{cublas_lt, dense_few_tokens, dense_wgmma, f32_few_rows};
use crate::kernels::SumOrder;
use crate::kernels::activation::Activation;
use crate::kernels::constants::DENSE_WGMMA_MAX_TOKENS;
use crate::kernels::launch::{address, runs_wgmma};
use crate::kernels::scratch;

/// The number of tokens in every product of [`product_of_fixed_tokens`].
/// The number is constant, because cuBLAS and cuBLASLt choose their algorithm based on the number of tokens.
const FIXED_TOKENS: usize = 64;

/// Computes the logits x·wᵀ, and candidates for the largest logit of each token (see [`dense_wgmma::matmul_best`]).
/// Computes nothing and returns false if `dense_wgmma` does not support the product, if `sum_order` is not
/// [`SumOrder::Fastest`], or if x has only one token.
pub fn matmul_best(x: &Tensor, w: &Tensor, sum_order: SumOrder, output: &dense_wgmma::LogitsOutput) -> Result<bool> {
    let Device::Cuda(device) = x.device() else { return Ok(false) };
    let is_supported = |_| dense_wgmma::is_best_supported(device, x, w, output.first_token);
    let kernel = MatmulKernel::choose(ProductForm::Logits, sum_order, x.dim(0)?, is_supported)?;
    if kernel.is_some() {
        dense_wgmma::matmul_best(device, x, w, output)?;
    }
    Ok(kernel.is_some())
}

/// Computes [`matmul_terms`](super::matmul_terms). Returns `None` if `dense_wgmma` does not compute the product.
pub(super) fn matmul_terms(device: &CudaDevice, x: &Tensor, w: &Tensor, sum_order: SumOrder) -> Result<Option<Tensor>> {
    let is_supported = |_| dense_wgmma::is_supported(device, x, w);
    MatmulKernel::choose(ProductForm::Terms, sum_order, x.dim(0)?, is_supported)?
        .map(|_| dense_wgmma::matmul_terms(device, x, w, None))
        .transpose()
}

/// Returns whether [`matmul_terms`] may return several terms for products of `tokens` tokens.
pub(super) fn has_several_terms(device: &CudaDevice, tokens: usize) -> bool {
    tokens <= DENSE_WGMMA_MAX_TOKENS && runs_wgmma(device)
}

/// Computes [`matmul_gated`](super::matmul_gated). Returns `None` if `dense_wgmma` does not compute the product.
pub(super) fn matmul_gated(
    device: &CudaDevice,
    x: &Tensor,
    w: &Tensor,
    activation: Activation,
    sum_order: SumOrder,
) -> Result<Option<Tensor>> {
    let is_supported = |_| dense_wgmma::is_gated_supported(device, x, w);
    MatmulKernel::choose(ProductForm::Gated, sum_order, x.dim(0)?, is_supported)?
        .map(|_| dense_wgmma::matmul_gated(device, x, w, activation))
        .transpose()
}

/// Computes [`matmul_f32_into`](super::matmul_f32_into). The caller has checked the shapes and dtypes of x and w.
pub(super) fn matmul_f32(
    device: &CudaDevice,
    x: &Tensor,
    w: &Tensor,
    sum_order: SumOrder,
    out: Option<&Tensor>,
) -> Result<Tensor> {
    let ((tokens, _), (rows, columns)) = (x.dims2()?, w.dims2()?);
    let is_supported = |kernel| match kernel {
        MatmulKernel::F32FewRows => f32_few_rows::is_supported(x, w),
        MatmulKernel::DenseWgmma => {
            Ok(dense_wgmma::is_supported(device, x, w)? && dense_wgmma::term_count(device, rows, columns)? == 1)
        }
        MatmulKernel::DenseFewTokens => dense_few_tokens::is_supported(device, x, w),
        MatmulKernel::Library | MatmulKernel::FixedTokens => Ok(true),
    };
    match MatmulKernel::choose(ProductForm::F32, sum_order, tokens, is_supported)? {
        Some(MatmulKernel::F32FewRows) => f32_few_rows::matmul_few_rows(device, x, w),
        Some(MatmulKernel::DenseWgmma) => {
            let terms = dense_wgmma::matmul_terms(device, x, w, out.map(|out| out.unsqueeze(0)).transpose()?.as_ref())?;
            // `squeeze` would return a tensor with another id, so the caller would copy the result to `out`.
            out.map_or_else(|| terms.squeeze(0), |out| Ok(out.clone()))
        }
        Some(MatmulKernel::DenseFewTokens) => dense_few_tokens::matmul_few_tokens(device, x, w),
        Some(MatmulKernel::FixedTokens) => product_of_fixed_tokens(device, x, w),
        Some(MatmulKernel::Library) | None => library_product(device, x, w, out),
    }
}

/// Computes [`matmul_rounded`](super::matmul_rounded) with cuBLASLt, `[tokens, rows]` in the dtype of x.
/// Returns `None` if another kernel computes the product.
pub(super) fn matmul_rounded(
    device: &CudaDevice,
    x: &Tensor,
    w: &Tensor,
    sum_order: SumOrder,
) -> Result<Option<Tensor>> {
    let is_supported = |kernel| match kernel {
        MatmulKernel::DenseFewTokens => dense_few_tokens::is_supported(device, x, w),
        _ => Ok(x.dtype() != DType::F32),
    };
    if MatmulKernel::choose(ProductForm::Rounded, sum_order, x.dim(0)?, is_supported)?.is_none() {
        return Ok(None);
    }
    // SAFETY: the product writes every element of `out`.
    let out = unsafe { scratch::empty((x.dim(0)?, w.dim(0)?), x.dtype(), x.device())? };
    // SAFETY: `out` is `[tokens, rows]` in the dtype of x. `gemm` checks x and w.
    unsafe { cublas_lt::gemm(device, x, w, address(&out)?, w.dim(0)?, x.dtype())? };
    Ok(Some(out))
}

/// Computes x·wᵀ in batches of [`FIXED_TOKENS`] tokens. The last batch is padded with zeros.
///
/// All products with one matrix then have the same size, so cuBLAS or cuBLASLt always runs the same algorithm.
/// The algorithm uses the same summation order for every token of a batch.
/// A GPU test compares the results for one token in two rows of a batch.
fn product_of_fixed_tokens(device: &CudaDevice, x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let tokens = x.dim(0)?;
    let padded = x.pad_with_zeros(0, 0, tokens.next_multiple_of(FIXED_TOKENS) - tokens)?;
    let batches = (0..padded.dim(0)?).step_by(FIXED_TOKENS);
    let products = batches
        .map(|first| library_product(device, &padded.narrow(0, first, FIXED_TOKENS)?, w, None))
        .collect::<Result<Vec<_>>>()?;
    match products.as_slice() {
        [one] => one.narrow(0, 0, tokens),
        several => Tensor::cat(several, 0)?.narrow(0, 0, tokens),
    }
}

/// Computes x·wᵀ as f32 `[tokens, rows]`: f32 products with candle, and f16 and bf16 products with cuBLASLt.
/// The matmul of candle would round f16 and bf16 products to the dtype of the inputs.
/// cuBLASLt writes to `out` if it is given.
fn library_product(device: &CudaDevice, x: &Tensor, w: &Tensor, out: Option<&Tensor>) -> Result<Tensor> {
    if x.dtype() == DType::F32 {
        return x.matmul(&w.t()?);
    }
    let (tokens, rows) = (x.dim(0)?, w.dim(0)?);
    let out = match out {
        Some(out) if out.dims() == [tokens, rows] && out.dtype() == DType::F32 => out.clone(),
        Some(out) => {
            bail!("cannot write a product: out is {:?} {:?}, expected F32 [{tokens}, {rows}]", out.dtype(), out.dims())
        }
        // SAFETY: the product below writes every element of `out`, and reads none of them.
        None => unsafe { scratch::empty((tokens, rows), DType::F32, x.device())? },
    };
    // SAFETY: `out` holds tokens · rows floats.
    unsafe { cublas_lt::gemm(device, x, w, address(&out)?, rows, DType::F32)? };
    Ok(out)
}
