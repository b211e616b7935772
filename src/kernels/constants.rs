//! Constants shared by the Rust and CUDA code.
//!
//! The build script generates `constants.cuh` from this file.
//! `pub const NAME: usize = 4;` becomes `constexpr int NAME = 4;`.
//! `u32` becomes `unsigned`, `f32` becomes `float`, and arrays stay arrays.
//!
//! Values must be valid in both Rust and C++.
//! A value may contain numbers, `+ - * / << >>`, parentheses, and constants defined earlier in this file.

// A build without CUDA does not use every constant.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

// Activations (`activation.rs`, `activation.cuh`).

/// The `alpha` of gpt-oss's clamped SwiGLU: `gate · sigmoid(alpha · gate) · (up + 1)`.
pub const SWIGLU_ALPHA: f32 = 1.702;
/// Selects the SiLU activation in a kernel.
pub const ACTIVATION_SILU: usize = 0;
/// Selects the GELU activation with the tanh approximation in a kernel.
pub const ACTIVATION_GELU_TANH: usize = 1;

// Rotary embedding (`attention/rope.rs`, `attention/rope.cu`).

/// Heads per warp. With several heads, a warp has more loads in flight, and reads cosines and sines once for all heads.
pub const ROPE_HEADS_PER_WARP: usize = 4;
/// The maximum number of tokens for which each head has its own warp.
/// With few tokens, several heads per warp would leave most of the GPU idle.
pub const ROPE_FEW_TOKENS: usize = 64;

// Exchange between ranks (`exchange.rs`, `exchange.cu`).

/// The maximum number of ranks that can exchange data.
pub const EXCHANGE_MAX_RANKS: usize = 8;
/// Slots per mailbox. Operation k uses slot k mod `EXCHANGE_SLOTS`.
pub const EXCHANGE_SLOTS: usize = 4;
/// The maximum number of thread blocks of an operation on one GPU.
/// If several ranks run on one GPU, as in tests, waiting blocks must leave multiprocessors free for other ranks.
pub const EXCHANGE_BLOCKS: usize = 128;

// Paged KV cache (`attention/paged.rs`, `attention/paged.cuh`).

/// Positions per block of the KV cache.
pub const BLOCK_TOKENS: usize = 64;

// Attention without tensor cores (`attention/eager_attention.rs`, `attention/eager_attention.cu`).

/// The largest supported head size. Each lane of a warp keeps 1/32 of a head in registers.
pub const EAGER_MAX_HEAD_DIM: usize = 256;

// Attention on tensor cores (`attention/flash_attention.rs`, `attention/flash_attention.cu`).
//
// Each head size has two kernels with 16 query rows per tile, one with 64 and one with 128.
// Arrays have one value per head size, in the order of `FLASH_HEAD_DIMS`.
// Tile sizes and warp counts were tuned on an H200.

/// The supported head sizes.
pub const FLASH_HEAD_DIMS: [usize; 6] = [16, 64, 80, 96, 128, 256];
/// Query rows per tile in the two kernels for decode steps.
pub const FLASH_FEW_ROWS: usize = 16;
/// Query rows per tile in the kernel for small prefills.
pub const FLASH_MEDIUM_ROWS: usize = 64;
/// Query rows per tile in the kernel for large prefills.
pub const FLASH_MANY_ROWS: usize = 128;
/// Keys per tile in both 16-row kernels, by head size.
pub const FLASH_FEW_KEYS: [usize; 6] = [32, 32, 16, 16, 16, 16];
/// Keys per tile in the 64-row kernel, by head size.
pub const FLASH_MEDIUM_KEYS: [usize; 6] = [64, 64, 64, 64, 64, 16];
/// Keys per tile in the 128-row kernel, by head size.
pub const FLASH_MANY_KEYS: [usize; 6] = [64, 48, 48, 48, 48, 32];
/// Warps per block in the 16-row kernel for small batches, by head size.
/// Each warp is a team that computes all 16 rows for its own key tiles.
pub const FLASH_FEW_TEAMS: [usize; 6] = [8, 8, 8, 8, 8, 4];
/// Warps per block in the 16-row kernel for large batches: more thread blocks than multiprocessors.
pub const FLASH_BATCH_TEAMS: usize = 2;
/// Warps per block in the 64-row kernel.
pub const FLASH_MEDIUM_WARPS: usize = 4;
/// Warps per block in the 128-row kernel, by head size.
pub const FLASH_MANY_WARPS: [usize; 6] = [4, 4, 4, 4, 4, 8];
/// Pipeline stages per team. Each stage has buffers for one key tile and one value tile.
pub const FLASH_STAGES: usize = 2;
/// Padding elements per row in shared memory.
/// Padded rows have an odd number of 16-byte segments, which avoids bank conflicts in `ldmatrix`.
pub const FLASH_ROW_PADDING: usize = 8;
/// A warp with 16·M rows keeps its queries in registers if M times the head size is at most this value.
/// Otherwise, the queries are in shared memory.
pub const FLASH_REGISTER_ELEMENTS: usize = 160;

// Products of dense matrices with few tokens (`matmul/dense_few.rs`, `matmul/dense_few.cu`).

/// The maximum number of tokens. With more tokens, cuBLAS computes the product.
pub const DENSE_FEW_TOKENS: usize = 8;
/// Weight rows per unit. One or more warps multiply a unit: each warp multiplies some of the columns.
pub const DENSE_FEW_ROWS: usize = 16;
/// Columns per chunk: 128 bytes of each row.
pub const DENSE_FEW_COLUMNS: usize = 64;
/// The maximum number of warps per block.
pub const DENSE_FEW_WARPS: usize = 16;
/// Pipeline stages: the number of weight chunks that each warp has in shared memory at once.
pub const DENSE_FEW_STAGES: usize = 4;
/// Input chunks in each of the two input buffers in shared memory.
pub const DENSE_FEW_INPUT_CHUNKS: usize = 16;

// Mixture of experts (`moe/`).

/// The maximum number of experts in a layer: 32 per lane of a warp.
pub const MAX_EXPERTS: usize = 1024;
/// The maximum number of experts per token: one per lane of a warp.
pub const MAX_CHOSEN_EXPERTS: usize = 32;

// Residual addition and norm (`norm.rs`, `norm.cu`).

/// Threads per block. A block normalizes one row.
pub const ADD_NORM_THREADS: usize = 512;

// Routing of few tokens (`moe/route.rs`, `moe/route.cu`).

/// The maximum number of tokens in one launch.
pub const ROUTE_TOKENS: usize = 256;
/// The maximum number of experts. A block keeps the logits of all experts in shared memory.
pub const ROUTE_EXPERTS: usize = 256;
/// Tokens per thread block, one per warp.
pub const ROUTE_BLOCK_TOKENS: usize = 8;
/// Columns per slice: the part of each row of the router weight that one thread block multiplies.
pub const ROUTE_COLUMNS: usize = 128;

// MXFP4 weights in tiles (`moe/mxfp4_tiles.rs`, `moe/mxfp4_tiles.cuh`, `decode/mxfp4_experts.cu`).

/// Weight rows per tile.
pub const MXFP4_TILE_ROWS: usize = 16;
/// Weight columns per tile: two MXFP4 blocks.
pub const MXFP4_TILE_COLUMNS: usize = 64;
/// Bytes of E2M1 values per tile.
pub const MXFP4_TILE_BYTES: usize = 512;
/// Bytes of scales per tile.
pub const MXFP4_TILE_SCALE_BYTES: usize = 32;

// Matrix products of routed experts with MXFP4 weights in blocks (`moe/experts.rs`, `moe/experts.cu`).

/// Weight rows in each thread block's tile.
pub const EXPERT_GEMM_ROWS: usize = 64;
/// (token, expert) pairs in each thread block's tile.
pub const EXPERT_GEMM_PAIRS: usize = 64;
/// Threads per block: four warps, each with a quarter of the tile.
pub const EXPERT_GEMM_THREADS: usize = 128;

// Matrix products of routed experts with float weights (`moe/grouped_gemm.rs`, `moe/grouped_gemm.cu`).

/// Weight rows in each thread block's tile.
pub const GROUPED_GEMM_ROWS: usize = 128;
/// Columns per step: 128 bytes of each row of 16-bit elements.
pub const GROUPED_GEMM_COLUMNS: usize = 64;
/// Pipeline stages: the number of steps whose tiles are in shared memory at once.
pub const GROUPED_GEMM_STAGES: usize = 3;
/// Threads per block: eight warps that divide the tile.
pub const GROUPED_GEMM_THREADS: usize = 256;

// Matrix products of routed experts with MXFP4 tiles (`moe/product_kernel.rs`, `moe/expert_mlp.cu`).
// Some of these kernels use mma.sync, and others use wgmma.
// The wgmma kernels have wide, narrow and slim tiles, depending on the number of pairs per expert.

/// 16-row weight tiles per thread block in the mma.sync kernels.
pub const EXPERT_MMA_ROW_TILES: usize = 16;
/// Pipeline stages in the mma.sync kernels: the number of steps whose tiles are in shared memory at once.
pub const EXPERT_MMA_STAGES: usize = 4;
/// Threads per block in the mma.sync kernels.
pub const EXPERT_MMA_THREADS: usize = 256;
/// 16-row weight tiles per thread block in the wgmma kernels.
/// gpt-oss has matrices of 2880 and 5760 rows, both multiples of 12 · 16 = 192.
pub const EXPERT_WGMMA_ROW_TILES: usize = 12;
/// Threads per block in the wgmma kernels.
pub const EXPERT_WGMMA_THREADS: usize = 512;
/// Bytes of a `Tile` (`moe/mxfp4_tiles.cuh`) in each stage of the ring buffers of the wgmma kernels.
pub const EXPERT_WGMMA_TILE_BYTES: usize = 20;
/// The maximum number of (token, expert) pairs in a wide tile.
pub const EXPERT_WIDE_PAIRS: usize = 160;
/// Stages of the ring buffer for wide tiles.
pub const EXPERT_WIDE_STAGES: usize = 4;
/// The maximum number of (token, expert) pairs in a narrow tile.
pub const EXPERT_NARROW_PAIRS: usize = 96;
/// Stages of the ring buffer for narrow tiles.
pub const EXPERT_NARROW_STAGES: usize = 5;
/// The maximum number of (token, expert) pairs in a slim tile.
pub const EXPERT_SLIM_PAIRS: usize = 32;
/// Stages of the ring buffer for slim tiles.
pub const EXPERT_SLIM_STAGES: usize = 4;

// Matrix products with MXFP4 tiles for few pairs per expert (`moe/product_kernel.rs`, `moe/expert_few.cu`).

/// Threads per block. Each multiprocessor runs one block.
pub const EXPERT_FEW_THREADS: usize = 512;
/// Column tiles that are loaded together. A gpt-oss matrix has 2880 columns: 45 column tiles, a multiple of 3.
pub const EXPERT_FEW_STEPS: usize = 3;

// Quantized matrices (`quantized/mod.rs`, `quantized/quantized.cuh`).

/// The maximum number of stacked matrices that one kernel launch multiplies.
pub const MAX_STACKED_MATRICES: usize = 3;
/// Warps per block in kernels that multiply by a quantized matrix.
pub const QUANTIZED_WARPS: usize = 16;
/// Threads per block in products with few tokens (`quantized/quantized_few.rs`, `quantized/quantized_few.cu`).
pub const QUANTIZED_FEW_THREADS: usize = 256;
/// Columns per step in products with few tokens.
pub const QUANTIZED_FEW_COLUMNS: usize = 128;
/// Pipeline stages in products with few tokens: the number of steps whose inputs are in shared memory at once.
pub const QUANTIZED_FEW_STAGES: usize = 4;
/// The number of counters of finished blocks in products with few tokens.
pub const QUANTIZED_FEW_COUNTERS: usize = 8192;
/// Codes of the formats of quantized matrices. Kernels take a code as an argument.
pub const FORMAT_Q4_0: usize = 0;
pub const FORMAT_Q4_1: usize = 1;
pub const FORMAT_Q5_0: usize = 2;
pub const FORMAT_Q5_1: usize = 3;
pub const FORMAT_Q8_0: usize = 4;
pub const FORMAT_Q2_K: usize = 5;
pub const FORMAT_Q3_K: usize = 6;
pub const FORMAT_Q4_K: usize = 7;
pub const FORMAT_Q5_K: usize = 8;
pub const FORMAT_Q6_K: usize = 9;
pub const FORMAT_INT8: usize = 10;
pub const FORMAT_FP8: usize = 11;
/// Codes for the quantization of a kernel's input activations.
pub const ROUNDING_NONE: usize = 0;
pub const ROUNDING_INT8_PER_TOKEN: usize = 1;
pub const ROUNDING_FP8_PER_TOKEN: usize = 2;
pub const ROUNDING_FP8_STATIC: usize = 3;
pub const ROUNDING_INT8_STATIC: usize = 4;

// Kernels of a decode step (`decode/`).

/// The maximum number of warps per block in kernels that multiply by float weights.
/// Every block reads the whole input vector, so few large blocks read less in total than many small blocks.
pub const DECODE_MAX_WARPS: usize = 24;
/// Tiles of gate and up rows per block in `decode_gate_up_mxfp4`.
pub const DECODE_UP_TILES: usize = 3;
/// Warps that share the columns of one tile in `decode_gate_up_mxfp4`.
pub const DECODE_UP_WARPS: usize = 5;
/// Threads per block in `decode_gate_up_mxfp4`.
pub const DECODE_UP_THREADS: usize = 32 * DECODE_UP_TILES * DECODE_UP_WARPS;
/// Warps that share the columns of one expert's tile in `decode_down_mxfp4`.
pub const DECODE_DOWN_SPLITS: usize = 3;
/// The maximum number of experts per token in `decode_down_mxfp4`.
pub const DECODE_DOWN_MAX_CHOSEN: usize = 4;

// Sampling one token from each of many rows of logits (`sampling/sample_rows.cu`, `step_inputs.cu`).

/// The token id that means "no token", for example for a row in which every logit is NaN or -inf.
pub const NO_TOKEN: u32 = 0xffffffff;

// Edits of rows of logits (`row_edits.cu`).

/// Threads per block. A block edits one row.
pub const ROW_EDITS_THREADS: usize = 256;
/// The number of u32 words that describe a row, not counting the row's values and counts.
pub const ROW_EDITS_WORDS: usize = 8;

// The mailbox (`decode/head.cu`, `decode/sample.cu`, `sampling/sample_rows.cu`, `runner`).

/// The mailbox word of a failed step, in which every logit is NaN or -inf. Other steps write token + 1.
pub const MAILBOX_NO_TOKEN: u32 = 0xffffffff;

// Sampling on the GPU (`decode/sample.rs`, `decode/sample.cu`).

/// Threads per block: the most that a GPU supports.
pub const SAMPLE_THREADS: usize = 1024;
/// The maximum number of logits per thread.
pub const SAMPLE_IDS_PER_THREAD: usize = 8;
/// Rounds of the radix search for the logit threshold of top-k or top-p.
pub const SAMPLE_ROUNDS: usize = 4;
/// Histogram bins per round. A round determines eight bits of the threshold.
pub const SAMPLE_BINS: usize = 256;
/// The maximum number of blocks per launch.
pub const SAMPLE_MAX_BLOCKS: usize = 1024;
/// The size of `SamplingKernelParams` in 32-bit words.
pub const SAMPLE_PARAM_WORDS: usize = 10;
/// The size of `Scratch` in 32-bit words: four words, a count and a mass per round and bin, and a mass per block.
/// A count takes one word, and a mass takes two words.
pub const SAMPLE_SCRATCH_WORDS: usize = 4 + 3 * SAMPLE_ROUNDS * SAMPLE_BINS + 2 * SAMPLE_MAX_BLOCKS;
