//! An upper bound on the activation memory per token of a chunk.

use candle_core::DType;

/// The minimum result of [`workspace_bytes_per_token`]. Models with wide MLPs need more.
pub(super) const MIN_WORKSPACE_BYTES_PER_TOKEN: u64 = 448 << 10;

/// Returns an upper bound on the activation memory per token of a chunk, in bytes.
///
/// Activation memory peaks in the MLP. With b bytes per element of `dtype`, the bound is the sum of these sizes, or
/// `MIN_WORKSPACE_BYTES_PER_TOKEN` if that is more:
///
/// - the outputs of gate_proj and up_proj in f32: 8 · intermediate
/// - activation(gate) · up in `dtype`, and a quantized copy for some weight formats: 2b · intermediate
/// - three versions of the residual stream and three outputs of attention or MLPs, all in f32: 24 · hidden
/// - the normed inputs of attention and of the MLP in `dtype`: 2b · hidden
/// - a reserve for 8-bit matrix products, which need accumulators and a quantized input: 8 · hidden
///
/// The true peak is lower, because these tensors are not all in memory at the same time.
/// The difference leaves room for other temporaries, such as the accumulators of an 8-bit up projection.
///
/// With up to 128 tokens on a Hopper GPU, a matrix product can have several f32 partial sums that are added up later
/// (`kernels/matmul/dense_wgmma.rs`). On an H200, the partial sums take up to 66 KiB per token, which the bound covers.
///
/// Attention and the experts of all supported families need less memory per token than this bound.
/// Example: for Llama 3 70B in bf16, the bound is 624 KiB.
pub(super) fn workspace_bytes_per_token(hidden_size: usize, intermediate_size: usize, dtype: DType) -> u64 {
    let bytes = dtype.size_in_bytes() as u64;
    let intermediate = (intermediate_size as u64).saturating_mul(8 + 2 * bytes);
    let needed = intermediate.saturating_add((hidden_size as u64).saturating_mul(32 + 2 * bytes));
    needed.max(MIN_WORKSPACE_BYTES_PER_TOKEN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_mlps_need_more_memory_per_token() {
        let kib = |hidden, intermediate, dtype| workspace_bytes_per_token(hidden, intermediate, dtype) >> 10;
        assert_eq!(kib(4096, 14_336, DType::BF16), 448, "Llama 3 8B");
        assert_eq!(kib(2880, 2880, DType::BF16), 448, "gpt-oss");
        assert_eq!(kib(8192, 28_672, DType::BF16), 624, "Llama 3 70B");
        assert_eq!(kib(4608, 36_864, DType::BF16), 594, "Gemma 2 27B");
        assert_eq!(kib(8192, 28_672, DType::F32), 768, "Llama 3 70B in f32");
    }
}
