//! Constants that the Rust code and the CUDA code share.
//!
//! The build script reads this file and writes `constants.cuh` from it: `pub const NAME: usize = 4;` becomes
//! `constexpr int NAME = 4;`, an `f32` becomes a `float`, and an array stays an array. So every value here must be written
//! such that it means the same in C++: numbers, `+ - * / << >>`, parentheses, and constants above it in this file.

// Not every constant is used in a build without CUDA.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

// Activations (`swiglu.rs`, `activation.cuh`).

/// The sharpness of the sigmoid in gpt-oss's clamped SwiGLU.
pub const SWIGLU_ALPHA: f32 = 1.702;
/// The number of the SiLU activation.
pub const ACTIVATION_SILU: usize = 0;
/// The number of the GELU activation, approximated by tanh.
pub const ACTIVATION_GELU_TANH: usize = 1;

// Rotary embedding (`attention/rope.rs`, `attention/rope.cu`).

/// Heads that one warp rotates, so that enough loads are in flight and the angles are read once for all of them.
pub const ROPE_HEADS_PER_WARP: usize = 4;

// Attention without tensor cores (`attention/eager_attention.rs`, `attention/eager_attention.cu`).

/// The largest head size.
pub const EAGER_MAX_HEAD_DIM: usize = 256;

// Attention on tensor cores (`attention/flash_attention.rs`, `attention/flash_attention.cu`). There is one kernel for each
// head size and number of query rows in a tile. The arrays follow the order of the head sizes; their values are the
// fastest of those measured on an H200.

/// The head sizes that have kernels.
pub const FLASH_HEAD_DIMS: [usize; 6] = [16, 64, 80, 96, 128, 256];
/// Query rows in a tile of the kernel for decoding.
pub const FLASH_FEW_ROWS: usize = 16;
/// Query rows in a tile of the kernel for short prompts.
pub const FLASH_MEDIUM_ROWS: usize = 64;
/// Query rows in a tile of the kernel for long prompts.
pub const FLASH_MANY_ROWS: usize = 128;
/// Keys in a tile of the kernel for 16 rows.
pub const FLASH_FEW_KEYS: [usize; 6] = [32, 32, 16, 16, 16, 16];
/// Keys in a tile of the kernel for 64 rows.
pub const FLASH_MEDIUM_KEYS: [usize; 6] = [64, 64, 64, 64, 64, 16];
/// Keys in a tile of the kernel for 128 rows.
pub const FLASH_MANY_KEYS: [usize; 6] = [64, 48, 48, 48, 48, 32];
/// Warps of the kernel for 16 rows. Each warp is a team that has all 16 rows and its own tiles of keys.
pub const FLASH_FEW_TEAMS: [usize; 6] = [8, 8, 8, 8, 8, 4];
/// Warps of the kernel for 64 rows.
pub const FLASH_MEDIUM_WARPS: usize = 4;
/// Warps of the kernel for 128 rows.
pub const FLASH_MANY_WARPS: [usize; 6] = [4, 4, 4, 4, 4, 8];
/// Buffers of key and value tiles that a team has.
pub const FLASH_STAGES: usize = 2;
/// Elements added to a row in shared memory. A row is then an odd number of 16-byte chunks, so that `ldmatrix` never meets
/// one bank twice.
pub const FLASH_ROW_PADDING: usize = 8;
/// Queries stay in registers if a warp has at most this many elements for each of its 16 rows, and lie in shared memory
/// otherwise.
pub const FLASH_REGISTER_ELEMENTS: usize = 160;

// Mixture of experts (`moe/`).

/// The most experts that routing on the GPU can choose from.
pub const MAX_EXPERTS: usize = 1024;
/// The most experts that routing on the GPU can choose for one token: each lane of a warp holds one.
pub const MAX_CHOSEN_EXPERTS: usize = 32;

// MXFP4 weights in tiles (`moe/experts_gemm.rs`, `moe/experts_gemm.cu`, `decode/mxfp4_experts.cu`).

/// Weight rows of a tile.
pub const MXFP4_TILE_ROWS: usize = 16;
/// Weight columns of a tile: two MXFP4 blocks.
pub const MXFP4_TILE_COLUMNS: usize = 64;
/// The bytes of the values of a tile.
pub const MXFP4_TILE_BYTES: usize = 512;
/// The bytes of the scales of a tile.
pub const MXFP4_TILE_SCALE_BYTES: usize = 32;

// Products of routed experts on MXFP4 blocks (`moe/experts.rs`, `moe/experts.cu`).

/// Weight rows of a block's tile.
pub const EXPERT_GEMM_ROWS: usize = 64;
/// Pairs of token and expert in a block's tile.
pub const EXPERT_GEMM_PAIRS: usize = 64;
/// Threads of a block.
pub const EXPERT_GEMM_THREADS: usize = 128;

// Products of routed experts on float weights (`moe/grouped_gemm.rs`, `moe/grouped_gemm.cu`).

/// Weight rows of a block's tile.
pub const GROUPED_GEMM_ROWS: usize = 128;
/// Columns of a step. In 16 bits they are 128 bytes of a row.
pub const GROUPED_GEMM_COLUMNS: usize = 64;
/// Steps that a block keeps in shared memory.
pub const GROUPED_GEMM_STAGES: usize = 3;
/// Threads of a block.
pub const GROUPED_GEMM_THREADS: usize = 256;

// Products of routed experts on MXFP4 tiles (`moe/experts_gemm.rs`, `moe/experts_gemm.cu`): kernels that use mma.sync, and
// kernels that use wgmma. A wide tile is for many pairs per expert, a narrow one for few.

/// Tiles of 16 weight rows in a block's tile, with mma.sync.
pub const EXPERT_MMA_ROW_TILES: usize = 16;
/// Steps that a block keeps in shared memory, with mma.sync.
pub const EXPERT_MMA_STAGES: usize = 4;
/// Threads of a block, with mma.sync.
pub const EXPERT_MMA_THREADS: usize = 256;
/// Tiles of 16 weight rows in a block's tile, with wgmma. Their 192 rows divide the 2880 and 5760 rows of gpt-oss.
pub const EXPERT_WGMMA_ROW_TILES: usize = 12;
/// Threads of a block, with wgmma.
pub const EXPERT_WGMMA_THREADS: usize = 512;
/// The most pairs in a wide tile.
pub const EXPERT_WIDE_PAIRS: usize = 160;
/// Stages of the ring buffer for wide tiles.
pub const EXPERT_WIDE_STAGES: usize = 4;
/// The most pairs in a narrow tile.
pub const EXPERT_NARROW_PAIRS: usize = 96;
/// Stages of the ring buffer for narrow tiles.
pub const EXPERT_NARROW_STAGES: usize = 5;

// Quantized matrices (`quantized/mod.rs`, `quantized/quantized.cuh`).

/// The most matrices that one kernel multiplies with as one stack.
pub const MAX_STACKED_MATRICES: usize = 3;
/// Warps of a block that multiplies with a quantized matrix.
pub const QUANTIZED_WARPS: usize = 16;
/// The numbers of the formats.
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
/// The numbers of the ways to round the input of a product.
pub const ROUNDING_NONE: usize = 0;
pub const ROUNDING_INT8_PER_TOKEN: usize = 1;
pub const ROUNDING_FP8_PER_TOKEN: usize = 2;
pub const ROUNDING_FP8_STATIC: usize = 3;
pub const ROUNDING_INT8_STATIC: usize = 4;

// Kernels of a decode step (`decode/`).

/// The most warps of a block that multiplies with float weights. One large block per multiprocessor is best: all blocks
/// read the same input vector, and fewer blocks queue less for it.
pub const DECODE_MAX_WARPS: usize = 24;
/// Tiles of gate and up rows in a block of `decode_gate_up_mxfp4`.
pub const DECODE_UP_TILES: usize = 3;
/// Warps that share the columns of one tile in `decode_gate_up_mxfp4`.
pub const DECODE_UP_WARPS: usize = 5;
/// Threads of a block of `decode_gate_up_mxfp4`.
pub const DECODE_UP_THREADS: usize = 32 * DECODE_UP_TILES * DECODE_UP_WARPS;
/// Warps that share the columns of one expert's tile in `decode_down_mxfp4`.
pub const DECODE_DOWN_SPLITS: usize = 3;
/// The most experts per token in `decode_down_mxfp4`.
pub const DECODE_DOWN_MAX_CHOSEN: usize = 4;

// Sampling on the GPU (`decode/sample.rs`, `decode/sample.cu`).

/// Threads of a block.
pub const SAMPLE_THREADS: usize = 1024;
/// The most logits that one thread holds.
pub const SAMPLE_IDS_PER_THREAD: usize = 8;
/// Rounds of the search for a threshold.
pub const SAMPLE_ROUNDS: usize = 4;
/// Bins of a round: eight bits of the key.
pub const SAMPLE_BINS: usize = 256;
/// The most blocks of a launch.
pub const SAMPLE_MAX_BLOCKS: usize = 1024;
