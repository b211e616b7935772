//! Mixture of experts: routing, the matrix products of the experts, and the sums of their outputs.
//!
//! A *pair* is a token and one of its `chosen` experts, so there are tokens · `chosen` pairs.
//!
//! The table lists the kernels that compute the matrix products of the experts on a GPU.
//! The first row of the table that applies determines the kernel. "Fixed" means `SumOrder::Fixed`.
//! "Per expert" means the average over all experts of the layer.
//!
//! | weights | condition | kernel |
//! | --- | --- | --- |
//! | MXFP4 tiles | step of the decode graph | `decode/mxfp4_experts` |
//! | float, quantized | step of the decode graph | `decode/routed_experts` |
//! | MXFP4 tiles | at most 3 pairs per expert (5 without wgmma), not fixed | `mxfp4_tiles/expert_few_pairs` |
//! | MXFP4 tiles | all others | `mxfp4_tiles/expert_mlp` |
//! | MXFP4 | fewer than 64 pairs, f32, or fixed | `experts`: `expert_gemv_mxfp4` |
//! | MXFP4 | all others | `experts`: `expert_gemm_mxfp4` |
//! | float | fewer than 64 pairs, f32, fixed, or columns not a multiple of 8 | `experts`: `expert_gemv_dense` |
//! | float | all others | `grouped_gemm` |
//! | quantized | fewer than 64 pairs, fewer than 4 per expert, f32, or fixed | `quantized_ops`: `quantized_experts` |
//! | quantized | all others | dequantized to the compute dtype, then as float |
//!
//! - The decode graph runs the decode steps of a single sequence.
//! - With bf16 or f16 on a GPU, `weights::mxfp4` repacks MXFP4 weights into tiles unless a scale is NaN or exceeds 2.
//! - `expert_few_pairs` also requires hidden and intermediate sizes that are multiples of 192, and tiles of at least
//!   8 pairs that fit in shared memory. Without wgmma, if no larger tiles fit, it is used for at most 4 pairs per
//!   expert.
//! - `expert_mlp` uses wgmma on GPUs of compute capability 9.0, if the build has machine code for them.
//!   Otherwise, `expert_mlp` uses mma.sync. In both cases, there are kernels for three tile sizes (pairs per tile).
//!   `product_kernel` chooses the tile size by the number of pairs per expert.
//!
//! `expert_kernel` chooses the kernels of `experts`, `grouped_gemm` and `quantized_ops`.
//!
//! On a CPU, `experts::reference` computes the matrix products of the experts.

pub mod combine;
#[cfg(any(feature = "cuda", test))]
mod expert_kernel;
mod expert_operands;
pub mod experts;
#[cfg(feature = "cuda")]
mod experts_on_gpu;
#[cfg(feature = "cuda")]
mod grouped_gemm;
pub mod mxfp4;
#[cfg(feature = "cuda")]
pub mod mxfp4_tiles;
pub mod routing;
