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
//! On a GPU, the module `matmul_on_gpu` computes each product with the kernel that `matmul_kernel` chooses.
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
#[cfg(feature = "cuda")]
mod matmul_on_gpu;
pub mod size_class;
#[cfg(any(feature = "cuda", test))]
mod wgmma_division;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::activation::{Activation, gated_halves};
use super::sum_order::{SumOrder, each_row};

#[cfg(feature = "cuda")]
pub use matmul_on_gpu::matmul_best;

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
    if let Device::Cuda(device) = x.device()
        && let Some(terms) = matmul_on_gpu::matmul_terms(device, x, w, sum_order)?
    {
        return Ok(terms);
    }
    matmul_f32(x, w, sum_order)?.unsqueeze(0)
}

/// Returns whether [`matmul_terms`] may return several terms for products of `tokens` tokens on a device.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only builds with CUDA use `tokens`"))]
pub fn has_several_terms(device: &Device, tokens: usize) -> bool {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => matmul_on_gpu::has_several_terms(device, tokens),
        _ => false,
    }
}

/// Returns activation(gate) · up: `[tokens, rows / 2]` in the dtype of x.
/// The first half of the rows of w computes gate, and the second half computes up.
///
/// The other arguments are the same as in [`matmul_f32`].
pub fn matmul_gated(x: &Tensor, w: &Tensor, activation: Activation, sum_order: SumOrder) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = x.device()
        && let Some(product) = matmul_on_gpu::matmul_gated(device, x, w, activation, sum_order)?
    {
        return Ok(product);
    }
    gated_halves(&matmul_f32(x, w, sum_order)?, activation, x.dtype())
}

/// Like [`matmul_f32`], but may write the product to `out`, f32 `[tokens, rows]`, and return `out`.
/// Only `dense_wgmma` and cuBLASLt with [`SumOrder::Fastest`] write to `out`. Otherwise, returns a new tensor.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only builds with CUDA write to `out`"))]
pub fn matmul_f32_into(x: &Tensor, w: &Tensor, sum_order: SumOrder, out: Option<&Tensor>) -> Result<Tensor> {
    let ((_, columns), (_, w_columns)) = (x.dims2()?, w.dims2()?);
    if columns != w_columns || x.dtype() != w.dtype() {
        bail!("cannot multiply: x {:?} {:?} and w {:?} {:?} do not match", x.dtype(), x.dims(), w.dtype(), w.dims());
    }
    match x.device() {
        Device::Cpu if sum_order == SumOrder::Fixed => each_row(x, |row| product(row, w)),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => matmul_on_gpu::matmul_f32(device, x, w, sum_order, out),
        _ => product(x, w),
    }
}

/// Computes x·wᵀ, `[tokens, rows]`, for a caller that rounds the product to the dtype of x.
/// On a GPU with `SumOrder::Fastest`, cuBLASLt rounds f16 and bf16 products that `dense_few_tokens` does not support.
/// In all other cases, the result is the same as that of [`matmul_f32`].
pub fn matmul_rounded(x: &Tensor, w: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = x.device()
        && let Some(product) = matmul_on_gpu::matmul_rounded(device, x, w, sum_order)?
    {
        return Ok(product);
    }
    matmul_f32(x, w, sum_order)
}

/// Computes x·wᵀ as f32 `[tokens, rows]` with candle.
fn product(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::F32 => x.matmul(&w.t()?),
        _ => x.to_dtype(DType::F32)?.matmul(&w.to_dtype(DType::F32)?.t()?),
    }
}
