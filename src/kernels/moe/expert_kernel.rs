//! [`ExpertKernel`]: the choice of the kernel that computes `expert_matmul` on a GPU.

use crate::kernels::SumOrder;

/// The minimum number of (token, expert) pairs for which a GEMM kernel can replace the GEMV kernel.
///
/// A GEMM kernel reads an expert's weights once per tile of pairs. The GEMV kernel reads them once per pair.
/// Not tuned.
const GEMM_FROM_PAIRS: usize = 64;

/// The minimum average number of pairs per expert for which quantized weights are dequantized.
///
/// Dequantizing writes the weights of all experts to memory, and the product reads them again.
/// With fewer pairs, reading the quantized weights once per pair moves fewer bytes.
const DEQUANTIZE_FROM_PAIRS_PER_EXPERT: usize = 4;

/// `grouped_gemm` copies rows of weights in units of this number of 16-bit columns.
const GROUPED_GEMM_COLUMN_UNIT: usize = 8;

/// The format of the weights of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertFormat {
    Mxfp4,
    Dense,
    Quantized,
}

/// What the choice of the kernel depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertProduct {
    pub format: ExpertFormat,
    /// The number of (token, expert) pairs.
    pub pairs: usize,
    pub experts: usize,
    /// The columns of each expert's matrix.
    pub columns: usize,
    /// Whether x is f32, which the GEMM kernels do not support.
    pub is_f32: bool,
    pub sum_order: SumOrder,
}

/// A kind of kernel. Which kernel it is depends on the format of the weights (see the table in [`moe`](super)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertKernel {
    /// Reads an expert's weights once per pair.
    Gemv,
    /// Reads an expert's weights once per tile of pairs. Quantized weights are dequantized first.
    Gemm,
}

impl ExpertKernel {
    pub fn choose(product: ExpertProduct) -> Self {
        let ExpertProduct { format, pairs, experts, columns, is_f32, sum_order } = product;
        // With `SumOrder::Fixed`, a token's results must not depend on the number of tokens in the batch, so the GEMV
        // kernel computes batches of any size.
        let needs_gemv = pairs < GEMM_FROM_PAIRS || is_f32 || sum_order == SumOrder::Fixed;
        let is_gemm_worse = match format {
            ExpertFormat::Mxfp4 => false,
            ExpertFormat::Dense => !columns.is_multiple_of(GROUPED_GEMM_COLUMN_UNIT),
            ExpertFormat::Quantized => pairs < DEQUANTIZE_FROM_PAIRS_PER_EXPERT * experts,
        };
        if needs_gemv || is_gemm_worse { Self::Gemv } else { Self::Gemm }
    }
}

#[cfg(test)]
mod tests {
    use super::ExpertFormat::{Dense, Mxfp4, Quantized};
    use super::ExpertKernel::{Gemm, Gemv};
    use super::*;

    #[test]
    fn many_pairs_are_computed_by_a_gemm_unless_a_condition_excludes_it() {
        const MANY: ExpertProduct = ExpertProduct {
            format: Mxfp4,
            pairs: 64,
            experts: 16,
            columns: 96,
            is_f32: false,
            sum_order: SumOrder::Fastest,
        };
        for format in [Mxfp4, Dense, Quantized] {
            let many = ExpertProduct { format, ..MANY };
            assert_eq!(ExpertKernel::choose(many), Gemm, "{many:?}");
            for few in [
                ExpertProduct { pairs: 63, ..many },
                ExpertProduct { is_f32: true, ..many },
                ExpertProduct { sum_order: SumOrder::Fixed, ..many },
            ] {
                assert_eq!(ExpertKernel::choose(few), Gemv, "{few:?}");
            }
        }
        let kernel =
            |format, columns, experts| ExpertKernel::choose(ExpertProduct { format, columns, experts, ..MANY });
        assert_eq!([Mxfp4, Dense, Quantized].map(|format| kernel(format, 92, 16)), [Gemm, Gemv, Gemm]);
        assert_eq!([Mxfp4, Dense, Quantized].map(|format| kernel(format, 96, 17)), [Gemm, Gemm, Gemv]);
    }
}
