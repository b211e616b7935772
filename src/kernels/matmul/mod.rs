//! Matrix products y = x·Wᵀ. Results are f32, except those of [`matmul_gated`] and some of [`matmul_rounded`],
//! which have the dtype of x.
//! Callers add biases in f32. Logits stay f32.
//!
//! These modules compute products on a GPU, the first two only with [`SumOrder::Fastest`]:
//! - `dense_wgmma`: f16 and bf16 on Hopper, for 2 to 128 tokens, in [`matmul_terms`], [`matmul_gated`] and
//!   `matmul_best`, and in [`matmul_f32`] if `dense_wgmma` would not split the product into several terms
//! - `dense_few_tokens`: f16 and bf16, for 2 to 8 tokens, if `dense_wgmma` does not compute the product
//! - `f32_few_rows`: f32, for matrices with few weight rows, such as routers, and any number of tokens
//! - `cublas_lt`: f16 and bf16 in all other cases
//!
//! candle computes the other f32 products, and all products on a CPU.
//! On a GPU, the module `matmul_kernel` chooses the kernel of each product.
//! The module `quantized` computes products of quantized matrices, and `moe` computes products of experts.
//!
//! In [`matmul_rounded`] with [`SumOrder::Fastest`], `cublas_lt` computes all f16 and bf16 products that
//! `dense_few_tokens` does not support, even if `dense_wgmma` supports them.

#[cfg(feature = "cuda")]
pub mod cublas_lt;
#[cfg(feature = "cuda")]
pub mod dense_few_tokens;
#[cfg(feature = "cuda")]
pub mod dense_wgmma;
#[cfg(feature = "cuda")]
pub mod f32_few_rows;
#[cfg(any(feature = "cuda", test))]
mod matmul_kernel;
pub mod size_class;
#[cfg(any(feature = "cuda", test))]
mod wgmma_division;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Result, Tensor, bail};

use super::activation::{Activation, gated_halves};
#[cfg(feature = "cuda")]
use super::constants::DENSE_WGMMA_MAX_TOKENS;
#[cfg(feature = "cuda")]
use super::launch::runs_wgmma;
use super::sum_order::{SumOrder, each_row};
#[cfg(feature = "cuda")]
use matmul_kernel::{MatmulKernel, ProductForm};

/// The number of tokens in every product of [`product_of_fixed_tokens`].
/// The number is constant, because cuBLAS and cuBLASLt choose their algorithm based on the number of tokens.
#[cfg(feature = "cuda")]
const FIXED_TOKENS: usize = 64;

/// Returns x·wᵀ as f32 `[tokens, rows]`.
///
/// x `[tokens, columns]` and w `[rows, columns]` have the same dtype: f32, f16 or bf16.
pub fn matmul_f32(x: &Tensor, w: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
    matmul_f32_into(x, w, sum_order, None)
}

/// Returns x·wᵀ as f32 `[terms, tokens, rows]`. The product is the sum over the terms.
/// There is only one term, unless `dense_wgmma` computes the product with [`SumOrder::Fastest`].
///
/// The arguments are the same as in [`matmul_f32`].
pub fn matmul_terms(x: &Tensor, w: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = x.device() {
        let is_supported = |_| dense_wgmma::is_supported(device, x, w);
        if MatmulKernel::choose(ProductForm::Terms, sum_order, x.dim(0)?, is_supported)?.is_some() {
            return dense_wgmma::matmul_terms(device, x, w, None);
        }
    }
    matmul_f32(x, w, sum_order)?.unsqueeze(0)
}

/// Returns whether [`matmul_terms`] may return several terms for products of `tokens` tokens on a device.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only builds with CUDA use `tokens`"))]
pub fn has_several_terms(device: &Device, tokens: usize) -> bool {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => tokens <= DENSE_WGMMA_MAX_TOKENS && runs_wgmma(device),
        _ => false,
    }
}

/// Returns activation(gate) · up: `[tokens, rows / 2]` in the dtype of x.
/// The first half of the rows of w computes gate, and the second half computes up.
///
/// The other arguments are the same as in [`matmul_f32`].
pub fn matmul_gated(x: &Tensor, w: &Tensor, activation: Activation, sum_order: SumOrder) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = x.device() {
        let is_supported = |_| dense_wgmma::is_gated_supported(device, x, w);
        if MatmulKernel::choose(ProductForm::Gated, sum_order, x.dim(0)?, is_supported)?.is_some() {
            return dense_wgmma::matmul_gated(device, x, w, activation);
        }
    }
    gated_halves(&matmul_f32(x, w, sum_order)?, activation, x.dtype())
}

/// Computes the logits x·wᵀ, and candidates for the largest logit of each token (see [`dense_wgmma::matmul_best`]).
/// Computes nothing and returns false if `dense_wgmma` does not support the product, if `sum_order` is not
/// [`SumOrder::Fastest`], or if x has only one token.
#[cfg(feature = "cuda")]
pub fn matmul_best(x: &Tensor, w: &Tensor, sum_order: SumOrder, output: &dense_wgmma::LogitsOutput) -> Result<bool> {
    let Device::Cuda(device) = x.device() else { return Ok(false) };
    let is_supported = |_| dense_wgmma::is_best_supported(device, x, w, output.first_token);
    let kernel = MatmulKernel::choose(ProductForm::Logits, sum_order, x.dim(0)?, is_supported)?;
    if kernel.is_some() {
        dense_wgmma::matmul_best(device, x, w, output)?;
    }
    Ok(kernel.is_some())
}

/// Like [`matmul_f32`], but may write the product to `out`, f32 `[tokens, rows]`, and return `out`.
/// Only `dense_wgmma` and cuBLASLt with [`SumOrder::Fastest`] write to `out`. Otherwise, returns a new tensor.
pub fn matmul_f32_into(x: &Tensor, w: &Tensor, sum_order: SumOrder, out: Option<&Tensor>) -> Result<Tensor> {
    let ((_, columns), (_, w_columns)) = (x.dims2()?, w.dims2()?);
    if columns != w_columns || x.dtype() != w.dtype() {
        bail!("cannot multiply: x {:?} {:?} and w {:?} {:?} do not match", x.dtype(), x.dims(), w.dtype(), w.dims());
    }
    match x.device() {
        Device::Cpu if sum_order == SumOrder::Fixed => each_row(x, |row| product(row, w, None)),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => matmul_f32_on_gpu(device, x, w, sum_order, out),
        _ => product(x, w, out),
    }
}

/// Computes [`matmul_f32_into`] on a GPU. The caller has checked the shapes and dtypes of x and w.
#[cfg(feature = "cuda")]
fn matmul_f32_on_gpu(
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
        Some(MatmulKernel::FixedTokens) => product_of_fixed_tokens(x, w),
        Some(MatmulKernel::Library) | None => product(x, w, out),
    }
}

/// Computes x·wᵀ, `[tokens, rows]`, for a caller that rounds the product to the dtype of x.
/// On a GPU with `SumOrder::Fastest`, cuBLASLt rounds f16 and bf16 products that `dense_few_tokens` does not support.
/// In all other cases, the result is the same as that of [`matmul_f32`].
pub fn matmul_rounded(x: &Tensor, w: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = x.device() {
        let is_supported = |kernel| match kernel {
            MatmulKernel::DenseFewTokens => dense_few_tokens::is_supported(device, x, w),
            _ => Ok(x.dtype() != DType::F32),
        };
        if MatmulKernel::choose(ProductForm::Rounded, sum_order, x.dim(0)?, is_supported)?.is_some() {
            // SAFETY: the product writes every element of `out`.
            let out = unsafe { crate::kernels::scratch::empty((x.dim(0)?, w.dim(0)?), x.dtype(), x.device())? };
            // SAFETY: `out` is `[tokens, rows]` in the dtype of x. `gemm` checks x and w.
            unsafe { cublas_lt::gemm(device, x, w, crate::kernels::launch::address(&out)?, w.dim(0)?, x.dtype())? };
            return Ok(out);
        }
    }
    matmul_f32(x, w, sum_order)
}

/// Computes [`matmul_f32_into`] with candle or cuBLASLt. The caller has checked the shapes and dtypes of x and w.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only builds with CUDA write to `out`"))]
fn product(x: &Tensor, w: &Tensor, out: Option<&Tensor>) -> Result<Tensor> {
    match x.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) if x.dtype() != DType::F32 => cublas_lt_f32(device, x, w, out),
        Device::Cpu if x.dtype() != DType::F32 => x.to_dtype(DType::F32)?.matmul(&w.to_dtype(DType::F32)?.t()?),
        _ => x.matmul(&w.t()?),
    }
}

/// Computes x·wᵀ in batches of [`FIXED_TOKENS`] tokens. The last batch is padded with zeros.
///
/// All products with one matrix then have the same size, so cuBLAS or cuBLASLt always runs the same algorithm.
/// The algorithm uses the same summation order for every token of a batch.
/// A GPU test compares the results for one token in two rows of a batch.
#[cfg(feature = "cuda")]
fn product_of_fixed_tokens(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let tokens = x.dim(0)?;
    let padded = x.pad_with_zeros(0, 0, tokens.next_multiple_of(FIXED_TOKENS) - tokens)?;
    let batches = (0..padded.dim(0)?).step_by(FIXED_TOKENS);
    let products =
        batches.map(|first| product(&padded.narrow(0, first, FIXED_TOKENS)?, w, None)).collect::<Result<Vec<_>>>()?;
    match products.as_slice() {
        [one] => one.narrow(0, 0, tokens),
        several => Tensor::cat(several, 0)?.narrow(0, 0, tokens),
    }
}

/// Computes x·wᵀ as f32 with cuBLASLt. The matmul of candle would round the result to the dtype of the inputs.
#[cfg(feature = "cuda")]
fn cublas_lt_f32(device: &CudaDevice, x: &Tensor, w: &Tensor, out: Option<&Tensor>) -> Result<Tensor> {
    let (tokens, rows) = (x.dim(0)?, w.dim(0)?);
    let out = match out {
        Some(out) if out.dims() == [tokens, rows] && out.dtype() == DType::F32 => out.clone(),
        Some(out) => {
            bail!("cannot write a product: out is {:?} {:?}, expected F32 [{tokens}, {rows}]", out.dtype(), out.dims())
        }
        // SAFETY: the product below writes every element of `out`, and reads none of them.
        None => unsafe { crate::kernels::scratch::empty((tokens, rows), DType::F32, x.device())? },
    };
    // SAFETY: `out` holds tokens · rows floats.
    unsafe { cublas_lt::gemm(device, x, w, crate::kernels::launch::address(&out)?, rows, DType::F32)? };
    Ok(out)
}
