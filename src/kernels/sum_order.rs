//! [`SumOrder`]: whether the order of additions in matrix products and attention may depend on the number of tokens.

use candle_core::{Result, Tensor};

/// The order in which kernels add the terms of the sums in matrix products and attention.
///
/// Because of rounding, a floating-point sum depends on the order of the additions.
/// The fastest order depends on the number of tokens and, in MoE layers, on the experts that these tokens use.
/// With `Fastest`, the other tokens in the pass can change the last bits of a token's result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SumOrder {
    /// The order that is fastest for the pass.
    #[default]
    Fastest,
    /// The same order for any number of tokens. Can be slower than `Fastest`.
    /// A forward pass with this order can have only one token per sequence.
    Fixed,
}

/// Calls `product` on each row of x separately, so that no result depends on the number of rows.
/// Concatenates the results.
pub(crate) fn each_row(x: &Tensor, product: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let tokens = x.dim(0)?;
    if tokens == 1 {
        return product(x);
    }
    let rows = (0..tokens).map(|token| product(&x.narrow(0, token, 1)?.contiguous()?)).collect::<Result<Vec<_>>>()?;
    Tensor::cat(&rows, 0)
}
