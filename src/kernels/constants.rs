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
