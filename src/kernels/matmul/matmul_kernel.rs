//! [`MatmulKernel`]: the choice of the kernel that computes a matrix product on a GPU.

use candle_core::Result;

use crate::kernels::SumOrder;

/// The form in which a function of [`matmul`](super) returns a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProductForm {
    /// f32 `[tokens, rows]`.
    F32,
    /// Several f32 matrices, whose sum is the product.
    Terms,
    /// activation(gate) · up.
    Gated,
    /// Logits, with candidates for the largest logit of each token.
    Logits,
    /// The dtype of x. The kernel does the rounding.
    Rounded,
}

/// A kernel that computes matrix products on a GPU. Most are described in [`matmul`](super).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MatmulKernel {
    F32FewRows,
    DenseWgmma,
    DenseFewTokens,
    /// `cublas_lt` for f16 and bf16, candle for f32.
    Library,
    /// Like `Library`, with the same number of tokens in all products (`product_of_fixed_tokens` in `matmul_on_gpu.rs`).
    FixedTokens,
}

impl MatmulKernel {
    /// Returns the first kernel, in order of preference, for which `is_supported` returns true.
    /// Returns `None` if no kernel should return the product in this form. The caller then converts an f32 product.
    ///
    /// Calls `is_supported` only for kernels that can run in this order of additions and, with one exception, return
    /// the product in this form. The exception is `DenseFewTokens` for [`ProductForm::Rounded`], which results in
    /// `None`.
    pub fn choose(
        form: ProductForm,
        sum_order: SumOrder,
        tokens: usize,
        is_supported: impl Fn(Self) -> Result<bool>,
    ) -> Result<Option<Self>> {
        // `dense_wgmma` and `dense_few_tokens` also support a single token. Such products are left to cuBLASLt.
        // They are rare, because the decode graph uses its own kernels.
        let has_several_tokens = tokens > 1;
        let preferred: &[Self] = match (form, sum_order) {
            // The order of additions in `f32_few_rows` does not depend on the number of tokens.
            (ProductForm::F32, SumOrder::Fixed) => &[Self::F32FewRows, Self::FixedTokens],
            (ProductForm::F32, SumOrder::Fastest) if has_several_tokens => {
                &[Self::F32FewRows, Self::DenseWgmma, Self::DenseFewTokens, Self::Library]
            }
            (ProductForm::F32, SumOrder::Fastest) => &[Self::F32FewRows, Self::Library],
            (ProductForm::Terms | ProductForm::Gated | ProductForm::Logits, SumOrder::Fastest)
                if has_several_tokens =>
            {
                &[Self::DenseWgmma]
            }
            // If `dense_few_tokens` supports the product, `choose` prefers an f32 product that the caller rounds to a
            // product that cuBLASLt rounds.
            (ProductForm::Rounded, SumOrder::Fastest) if is_supported(Self::DenseFewTokens)? => &[],
            (ProductForm::Rounded, SumOrder::Fastest) => &[Self::Library],
            _ => &[],
        };
        for &kernel in preferred {
            if is_supported(kernel)? {
                return Ok(Some(kernel));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::MatmulKernel::{DenseFewTokens, DenseWgmma, F32FewRows, FixedTokens, Library};
    use super::ProductForm::{F32, Gated, Logits, Rounded, Terms};
    use super::*;

    #[test]
    fn the_first_supported_kernel_in_order_of_preference_computes_a_product() {
        const ALL: &[MatmulKernel] = &[FixedTokens, Library, DenseFewTokens, DenseWgmma, F32FewRows];
        const DENSE: &[MatmulKernel] = &[FixedTokens, Library, DenseFewTokens, DenseWgmma];
        const FEW: &[MatmulKernel] = &[FixedTokens, Library, DenseFewTokens];
        const ANY_GPU: &[MatmulKernel] = &[FixedTokens, Library];
        let (fastest, fixed) = (SumOrder::Fastest, SumOrder::Fixed);
        for (form, sum_order, tokens, supported, expected) in [
            (F32, fastest, 2, ALL, Some(F32FewRows)),
            (F32, fastest, 2, DENSE, Some(DenseWgmma)),
            (F32, fastest, 2, FEW, Some(DenseFewTokens)),
            (F32, fastest, 2, ANY_GPU, Some(Library)),
            (F32, fastest, 1, ALL, Some(F32FewRows)),
            (F32, fastest, 1, DENSE, Some(Library)),
            (F32, fixed, 2, ALL, Some(F32FewRows)),
            (F32, fixed, 2, DENSE, Some(FixedTokens)),
            (F32, fixed, 1, DENSE, Some(FixedTokens)),
            (Terms, fastest, 2, ALL, Some(DenseWgmma)),
            (Terms, fastest, 2, FEW, None),
            (Terms, fastest, 1, ALL, None),
            (Terms, fixed, 2, ALL, None),
            (Gated, fastest, 2, ALL, Some(DenseWgmma)),
            (Gated, fastest, 2, FEW, None),
            (Gated, fastest, 1, ALL, None),
            (Gated, fixed, 2, ALL, None),
            (Logits, fastest, 2, ALL, Some(DenseWgmma)),
            (Logits, fastest, 2, FEW, None),
            (Logits, fastest, 1, ALL, None),
            (Logits, fixed, 2, ALL, None),
            (Rounded, fastest, 2, ALL, None),
            (Rounded, fastest, 2, FEW, None),
            (Rounded, fastest, 1, ALL, None),
            (Rounded, fastest, 2, &[DenseWgmma, Library], Some(Library)),
            (Rounded, fastest, 1, ANY_GPU, Some(Library)),
            (Rounded, fastest, 1, &[F32FewRows], None),
            (Rounded, fixed, 2, ALL, None),
        ] {
            let kernel = MatmulKernel::choose(form, sum_order, tokens, |kernel| Ok(supported.contains(&kernel)));
            assert_eq!(kernel.unwrap(), expected, "{form:?}, {sum_order:?}, {tokens} tokens, {supported:?}");
        }
    }
}
