//! Constants shared by the Rust and CUDA code.
//!
//! The build script generates `constants.cuh` from this file.
//! `pub const NAME: usize = 4;` becomes `constexpr int NAME = 4;`.
//! `u32` becomes `unsigned`, `f32` becomes `float`, and `[usize; N]` and `[[usize; N]; M]` become arrays of `int`.
//!
//! Values must be valid in both Rust and C++.
//! A `usize` value or an array element may contain numbers, `+ - * / << >>`, parentheses and constants defined earlier.
//! A `u32` or `f32` value must be a single number, because the build script appends `u` or `f` to it.

#![cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only builds with CUDA use every constant"))]

// Launches (`launch/kernel_launch.rs`).

/// Threads per block in kernels with one thread per element, or with one warp per row or head.
pub const ELEMENT_THREADS: usize = 256;

// Activation functions (`activation.rs`, `headers/activation.cuh`).

/// The `alpha` of gpt-oss's clamped SwiGLU: `gate · sigmoid(alpha · gate) · (up + 1)`.
pub const SWIGLU_ALPHA: f32 = 1.702;
/// The value of a kernel's `activation` parameter for SiLU.
pub const ACTIVATION_SILU: usize = 0;
/// The value of a kernel's `activation` parameter for GELU with the tanh approximation.
pub const ACTIVATION_GELU_TANH: usize = 1;

// Tensor maps (`launch/tensor_map.rs`, `headers/bulk_copy.cuh`).

/// Bytes per element in a tensor map. The dtype of the tensor can have another size.
/// The driver allows at most 256 elements per dimension of a box, so large elements allow large boxes.
pub const TENSOR_MAP_ELEMENT_BYTES: usize = 8;

// Rotary embedding (`attention/rope.rs`, `attention/rope.cu`).

/// Heads per warp in the RoPE kernel `split_qkv`.
/// A warp with several heads has more loads in flight, and reads cosines and sines once for all its heads.
pub const ROPE_HEADS_PER_WARP: usize = 4;
/// Heads per lane in the RoPE kernels `split_qkv_vectorized` and `split_qkv_vectorized_terms`.
/// In these kernels, a lane loads four adjacent elements at once.
pub const ROPE_VECTORIZED_HEADS: usize = 2;
/// Up to this number of tokens, the RoPE kernels run in small thread blocks, because large ones would leave
/// multiprocessors idle. They also run in small thread blocks if the QKV output has several terms.
pub const ROPE_FEW_TOKENS: usize = 64;

// Exchange between ranks (`exchange/*.rs`, `exchange/*.cu`).

/// The maximum number of ranks that can exchange data.
pub const EXCHANGE_MAX_RANKS: usize = 8;
/// Buffers per mailbox. Exchange operation k uses buffer k mod `EXCHANGE_BUFFERS`.
pub const EXCHANGE_BUFFERS: usize = 4;
/// The maximum number of thread blocks of an exchange operation on one GPU.
/// With one rank per GPU, the limit for some kernels is `EXCHANGE_ROW_BLOCKS` times as high.
///
/// In tests, several ranks can share a GPU. The ranks then divide `EXCHANGE_BLOCKS` among themselves, so that all their
/// blocks can run at the same time. With one rank per GPU, this is not necessary: a block waits only for the blocks of
/// other ranks that handle the same data, or, in the `exchange_sent` kernels, for the kernels that send the values.
pub const EXCHANGE_BLOCKS: usize = 128;
/// The maximum number of threads per block in the exchange kernels for sums and columns.
pub const EXCHANGE_THREADS: usize = 512;
/// The maximum number of threads per block in the `exchange_add_norm` kernels, which add partial results to the
/// residual stream and normalize it. The threads of a block divide the columns of a row.
pub const EXCHANGE_ROW_THREADS: usize = 512;
/// The maximum number of segments of a row in the `exchange_add_norm` kernels for wide rows.
/// In the kernels for narrower rows, a row is one segment. A thread has 8 columns of each segment.
pub const EXCHANGE_ROW_SEGMENTS: usize = 4;
/// Blocks per multiprocessor in the `exchange_add_norm` kernels for rows of one segment, except with
/// `PartialResult::ProductTerms`.
/// Two blocks have more rows in flight than one.
pub const EXCHANGE_ROW_BLOCKS: usize = 2;

// Paged KV cache (`attention/paged.rs`, `attention/paged.cuh`).

/// Positions per block of the KV cache.
pub const BLOCK_TOKENS: usize = 64;

// Attention without tensor cores (`attention/portable_attention.rs`, `attention/portable_attention.cu`).

/// The largest head size that portable attention supports. Each lane of a warp keeps 1/32 of a head in registers.
pub const PORTABLE_MAX_HEAD_DIM: usize = 256;

// Attention on tensor cores (`attention/tile_kernel.rs`, `attention/flash_attention.cu`).
//
// For each head size and dtype, there are six flash attention kernels. The number of query rows per tile is part of a
// kernel's name. Each kernel has a table with one row per head size, in the order of `FLASH_HEAD_DIMS`.
// A row is [keys per tile, warps per block, bytes of shared memory per block].
// The numbers of keys and warps were tuned on an H200. `flash_attention.cu` checks the bytes when it is compiled.

/// The head sizes that the flash attention kernels support.
pub const FLASH_HEAD_DIMS: [usize; 6] = [16, 64, 80, 96, 128, 256];
/// Query rows per tile in the four flash attention kernels for few rows per sequence, as in decode steps.
pub const FLASH_DECODE_ROWS: usize = 16;
/// Query rows per tile in the flash attention kernel for small prefills, and for GPUs with little shared memory.
pub const FLASH_SMALL_PREFILL_ROWS: usize = 64;
/// Query rows per tile in the flash attention kernel for large prefills.
pub const FLASH_LARGE_PREFILL_ROWS: usize = 128;
/// The kernel `16_rows`, for small batches.
pub const FLASH_SMALL_BATCH_TILES: [[usize; 3]; 6] =
    [[32, 8, 49152], [32, 8, 147456], [16, 8, 90112], [16, 8, 106496], [16, 8, 139264], [16, 4, 143616]];
/// The kernel `16_rows_batch`, for large batches.
/// A batch is large if its 16-row tiles, times the number of KV heads, outnumber the multiprocessors of the GPU.
pub const FLASH_LARGE_BATCH_TILES: [[usize; 3]; 6] =
    [[32, 4, 36864], [32, 4, 110592], [16, 4, 67584], [16, 4, 79872], [16, 4, 104448], [16, 4, 211200]];
/// The kernel `16_rows_batch_half`, with about half of the shared memory of `16_rows_batch`.
pub const FLASH_LARGE_BATCH_HALF_TILES: [[usize; 3]; 6] =
    [[16, 4, 18432], [16, 4, 55296], [16, 2, 33792], [16, 2, 39936], [16, 2, 52224], [16, 2, 109824]];
/// The kernel `16_rows_batch_quarter`, with about a quarter of the shared memory of `16_rows_batch`.
pub const FLASH_LARGE_BATCH_QUARTER_TILES: [[usize; 3]; 6] =
    [[32, 1, 9216], [32, 1, 27648], [16, 1, 16896], [16, 1, 19968], [16, 1, 26112], [16, 1, 59136]];
/// The kernel `64_rows`.
pub const FLASH_SMALL_PREFILL_TILES: [[usize; 3]; 6] =
    [[64, 4, 12288], [64, 4, 36864], [64, 4, 45056], [64, 4, 53248], [64, 4, 69632], [16, 4, 67584]];
/// The kernel `128_rows`.
pub const FLASH_LARGE_PREFILL_TILES: [[usize; 3]; 6] =
    [[64, 4, 12288], [48, 4, 27648], [48, 4, 33792], [48, 4, 66560], [48, 4, 87040], [32, 8, 135168]];

// Products of f32 matrices with few weight rows (`matmul/f32_few_rows.rs`, `matmul/f32_few_rows.cuh`).

/// Tokens per tile of a product.
pub const F32_FEW_ROWS_TOKENS: usize = 16;
/// Weight rows per tile of a product.
pub const F32_FEW_ROWS_TILE: usize = 32;
/// Warps per block. The warps divide the columns.
pub const F32_FEW_ROWS_WARPS: usize = 16;
/// Floats from one token's partial sums to the next token's in shared memory. Four of them are padding, which reduces
/// bank conflicts.
pub const F32_FEW_ROWS_STRIDE: usize = F32_FEW_ROWS_TILE + 4;

// Products of dense matrices with few tokens (`matmul/dense_few_tokens.rs`, `matmul/dense_few_tokens.cu`).

/// The maximum number of tokens for the dense_few_tokens kernel.
/// With more tokens, the dense_wgmma kernels or cuBLASLt compute the product (`matmul/mod.rs`).
pub const DENSE_FEW_TOKENS_MAX: usize = 8;
/// Weight rows per row tile of the dense_few_tokens kernel.
/// One or more warps multiply a row tile, and divide its columns among themselves.
pub const DENSE_FEW_TOKENS_ROWS: usize = 16;
/// Columns per weight tile of the dense_few_tokens kernel: 128 bytes of each row.
pub const DENSE_FEW_TOKENS_COLUMNS: usize = 64;
/// The maximum number of warps per block in the dense_few_tokens kernel.
pub const DENSE_FEW_TOKENS_WARPS: usize = 16;
/// Pipeline stages of the dense_few_tokens kernel: the weight tiles that each warp has in shared memory at once.
pub const DENSE_FEW_TOKENS_STAGES: usize = 4;
/// Input tiles in each of the dense_few_tokens kernel's two input buffers in shared memory.
pub const DENSE_FEW_TOKENS_INPUT_TILES: usize = 16;

// Products of dense matrices and several tokens on Hopper (`matmul/dense_wgmma.rs`, `matmul/dense_wgmma.cu`).

/// The maximum number of terms of a product. Each term is the sum over some of the columns.
/// Kernels that add up the terms load all terms at once, so each term takes registers (`headers/sum_terms.cuh`).
pub const MAX_PRODUCT_TERMS: usize = 8;
/// The maximum number of tokens for the dense_wgmma kernels.
pub const DENSE_WGMMA_MAX_TOKENS: usize = 128;
/// The maximum number of tokens of each dense_wgmma kernel.
pub const DENSE_WGMMA_TOKENS: [usize; 5] = [16, 32, 64, 96, DENSE_WGMMA_MAX_TOKENS];
/// The maximum number of weight rows in a tile of a dense_wgmma kernel: two warpgroups with 64 rows each.
pub const DENSE_WGMMA_ROWS: usize = 128;
/// Columns per stage of a dense_wgmma kernel: 128 bytes of each row.
pub const DENSE_WGMMA_COLUMNS: usize = 64;
/// Threads per block of a dense_wgmma kernel: two warpgroups that multiply, and a warp that copies.
pub const DENSE_WGMMA_THREADS: usize = 2 * 128 + 32;
/// The maximum size, in bytes, of a dense_wgmma kernel's ring buffer.
/// With this size, only one block fits on a multiprocessor. Two blocks with ring buffers of half the size were slower.
pub const DENSE_WGMMA_RING_BYTES: usize = 216 << 10;

// Mixture of experts (`moe/`).

/// The maximum number of experts in a layer: 32 for each lane of a warp, one per bit of a word
/// (`moe/routing/routing.cuh`).
pub const MAX_EXPERTS: usize = 1024;
/// The maximum number of experts per token: one per lane of a warp.
pub const MAX_CHOSEN_EXPERTS: usize = 32;

// Residual addition and norm of expert outputs (`expert_mlp.rs` and `expert_mlp.cu` in `moe/mxfp4_tiles/`).

/// Threads per block in `expert_add_norm`, which adds expert outputs to the residual stream and normalizes the sum.
/// A block computes one row.
pub const EXPERT_NORM_THREADS: usize = 384;
/// The maximum number of columns per row in `expert_add_norm`.
/// A row has up to two parts of 8 · `EXPERT_NORM_THREADS` columns. A thread holds 8 columns of each part.
pub const EXPERT_NORM_COLUMNS: usize = 2 * 8 * EXPERT_NORM_THREADS;

// Residual addition and norm (`norm.rs`, `norm.cu`).

/// Threads per block in the add_norm kernels. A block adds and normalizes one row.
pub const ADD_NORM_THREADS: usize = 512;

// Routing with few tokens (`moe/routing/route.rs`, `moe/routing/route.cu`).

/// The maximum number of tokens in one launch of the route kernel.
pub const ROUTE_TOKENS: usize = 256;
/// The maximum number of experts in the route kernel. A block keeps partial logits of all experts in shared memory.
pub const ROUTE_EXPERTS: usize = 256;
/// Thread blocks per cluster in the route kernel. A cluster routes as many tokens as it has blocks.
pub const ROUTE_CLUSTER: usize = 8;
/// Threads per block in the route kernel.
pub const ROUTE_THREADS: usize = 256;

// Sorting by expert (`moe/routing/sort_by_expert.rs`, `moe/routing/sort_by_expert.cu`).

/// Threads per block in the kernel `sort_by_expert`.
pub const SORT_BY_EXPERT_THREADS: usize = 1024;

// MXFP4 weights in tiles (`moe/mxfp4_tiles/`, `decode/mxfp4_experts.cu`).

/// Weight rows per MXFP4 tile.
pub const MXFP4_TILE_ROWS: usize = 16;
/// Weight columns per MXFP4 tile: the width of two MXFP4 blocks.
pub const MXFP4_TILE_COLUMNS: usize = 64;
/// Bytes of E2M1 values per MXFP4 tile.
pub const MXFP4_TILE_BYTES: usize = 512;
/// Bytes of scales per MXFP4 tile.
pub const MXFP4_TILE_SCALE_BYTES: usize = 32;

// Matrix products of routed experts with MXFP4 weights that are not in tiles (`moe/experts.rs`, `moe/experts.cu`).

/// Weight rows per output tile in expert_gemm. A thread block computes one output tile.
pub const EXPERT_GEMM_ROWS: usize = 64;
/// The maximum number of (token, expert) pairs per output tile in expert_gemm.
pub const EXPERT_GEMM_PAIRS: usize = 64;
/// Threads per block in expert_gemm: four warps, each with a quarter of the output tile.
pub const EXPERT_GEMM_THREADS: usize = 128;

// Matrix products of routed experts with bf16 or f16 weights (`moe/grouped_gemm.rs`, `moe/grouped_gemm.cu`).

/// Weight rows per output tile in grouped_gemm. A thread block computes one output tile.
pub const GROUPED_GEMM_ROWS: usize = 128;
/// Columns per K step of grouped_gemm: 128 bytes of each row.
pub const GROUPED_GEMM_COLUMNS: usize = 64;
/// Pipeline stages of grouped_gemm: the number of K steps whose tiles are in shared memory at once.
pub const GROUPED_GEMM_STAGES: usize = 3;
/// Threads per block in grouped_gemm: eight warps that divide the output tile.
pub const GROUPED_GEMM_THREADS: usize = 256;

// Matrix products of routed experts with MXFP4 tiles (`product_kernel.rs` and `expert_mlp.cu` in `moe/mxfp4_tiles/`).
// The product kernels use either mma.sync (`expert_product_mma.cuh`) or wgmma (`expert_product_wgmma.cuh`).
// There are wgmma kernels for large, medium and small tiles of (token, expert) pairs.
// The average number of pairs per expert determines which wgmma kernel runs.

/// The number of 16-row weight tiles per output tile in `expert_product_mma.cuh`.
pub const EXPERT_MMA_ROW_TILES: usize = 16;
/// Pipeline stages in `expert_product_mma.cuh`.
/// Shared memory holds the tiles of this number of K steps at once.
pub const EXPERT_MMA_STAGES: usize = 4;
/// Threads per block in `expert_product_mma.cuh`.
pub const EXPERT_MMA_THREADS: usize = 256;
/// The number of 16-row weight tiles per output tile in `expert_product_wgmma.cuh`.
/// The expert matrices of gpt-oss have 2880 or 5760 rows. Both numbers are multiples of 12 · 16 = 192.
pub const EXPERT_WGMMA_ROW_TILES: usize = 12;
/// Threads per block in `expert_product_wgmma.cuh`.
pub const EXPERT_WGMMA_THREADS: usize = 512;
/// The size in bytes of an `OutputTile` (`moe/mxfp4_tiles/tiles.cuh`).
/// Each stage of a wgmma kernel's ring buffer has room for one `OutputTile`, besides weights and inputs.
pub const EXPERT_WGMMA_TILE_BYTES: usize = 20;
/// The maximum number of (token, expert) pairs in a large tile.
pub const EXPERT_LARGE_TILE_PAIRS: usize = 160;
/// Stages of the ring buffer for large tiles.
pub const EXPERT_LARGE_TILE_STAGES: usize = 4;
/// K steps of 64 columns per stage for large tiles.
pub const EXPERT_LARGE_TILE_K_STEPS: usize = 2;
/// The maximum number of (token, expert) pairs in a medium tile.
pub const EXPERT_MEDIUM_TILE_PAIRS: usize = 96;
/// Stages of the ring buffer for medium tiles.
pub const EXPERT_MEDIUM_TILE_STAGES: usize = 5;
/// K steps of 64 columns per stage for medium tiles.
pub const EXPERT_MEDIUM_TILE_K_STEPS: usize = 2;
/// The maximum number of (token, expert) pairs in a small tile.
pub const EXPERT_SMALL_TILE_PAIRS: usize = 32;
/// Stages of the ring buffer for small tiles.
pub const EXPERT_SMALL_TILE_STAGES: usize = 3;
/// K steps of 64 columns per stage for small tiles.
pub const EXPERT_SMALL_TILE_K_STEPS: usize = 3;

// Matrix products with MXFP4 tiles and few pairs per expert (`expert_few_pairs.rs` and `expert_few_pairs.cu` in
// `moe/mxfp4_tiles/`).

/// Threads per block in the expert_few_pairs kernels. Each multiprocessor runs one block.
pub const EXPERT_FEW_PAIRS_THREADS: usize = 512;
/// K steps per bundle: the column tiles whose weights a warp of an expert_few_pairs kernel holds in registers at once.
/// The number of column tiles of an expert matrix must be a multiple of this. gpt-oss has 45 (2880 columns).
pub const EXPERT_FEW_PAIRS_K_STEPS: usize = 3;

// Quantized matrices (`quantized/mod.rs`, `quantized/format.cuh`).

/// The maximum number of stacked matrices that one kernel launch multiplies.
pub const MAX_STACKED_MATRICES: usize = 3;
/// The maximum number of warps per block in matrix-vector kernels with quantized weights.
pub const QUANTIZED_WARPS: usize = 16;
/// Threads per block in the kernels of `quantized/quantized_ops.cu` that look up rows, quantize inputs or scale
/// products.
pub const QUANTIZED_ROW_THREADS: usize = 256;
/// Threads per block in products of quantized matrices with few tokens (`quantized/quantized_few_tokens.rs`).
pub const QUANTIZED_FEW_TOKENS_THREADS: usize = 256;
/// Columns per K step in products of quantized matrices with few tokens.
pub const QUANTIZED_FEW_TOKENS_COLUMNS: usize = 128;
/// Pipeline stages in products of quantized matrices with few tokens.
/// Shared memory holds the inputs of this number of K steps at once.
pub const QUANTIZED_FEW_TOKENS_STAGES: usize = 4;
/// Counters of finished thread blocks in products of quantized matrices with few tokens.
/// A launch must not have more thread blocks than there are counters.
pub const QUANTIZED_FEW_TOKENS_COUNTERS: usize = 8192;
/// Codes of quantized formats, for the field `format` of `QuantizedMatrix` in `quantized/format.cuh`.
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
/// The largest finite E4M3 value. `F8E4M3::MAX` in float8 0.7 is 416, which is one step too small.
pub const E4M3_MAX: f32 = 448.0;
/// Codes for the quantization of a kernel's input activations.
pub const QUANTIZATION_NONE: usize = 0;
pub const QUANTIZATION_INT8_PER_TOKEN: usize = 1;
pub const QUANTIZATION_FP8_PER_TOKEN: usize = 2;
pub const QUANTIZATION_FP8_STATIC: usize = 3;
pub const QUANTIZATION_INT8_STATIC: usize = 4;

// Kernels of a decode step (`decode/`).

/// The words of the buffer `state` of the decode graph: the position of the current token, the token, and the number of
/// finished steps. The fourth word is unused.
pub const STATE_POSITION: usize = 0;
pub const STATE_TOKEN: usize = 1;
pub const STATE_STEPS: usize = 2;

/// The maximum number of warps per block in decode kernels that multiply by bf16 or f16 weights.
/// Every block reads the whole input vector. Few large blocks therefore read less in total than many small blocks.
pub const DECODE_MAX_WARPS: usize = 24;
/// The maximum number of blocks in decode kernels that have at most one block per multiprocessor.
/// All current NVIDIA GPUs have fewer multiprocessors.
pub const DECODE_MAX_BLOCKS: usize = 256;
/// Threads per block in decode kernels that run in a single block.
pub const DECODE_SINGLE_BLOCK_THREADS: usize = 1024;
/// Threads per block in the router kernel. A block computes the logit of one expert.
pub const DECODE_ROUTER_THREADS: usize = 256;
/// Tiles of gate and up rows per block in `decode_gate_up_mxfp4`.
pub const DECODE_UP_TILES: usize = 3;
/// Warps that share the columns of one tile in `decode_gate_up_mxfp4`.
pub const DECODE_UP_WARPS: usize = 5;
/// Threads per block in `decode_gate_up_mxfp4`.
pub const DECODE_UP_THREADS: usize = 32 * DECODE_UP_TILES * DECODE_UP_WARPS;
/// Warps that share the columns of one expert's tile in `decode_down_mxfp4`.
pub const DECODE_DOWN_WARPS: usize = 3;
/// The maximum number of experts per token in `decode_down_mxfp4`.
pub const DECODE_DOWN_MAX_CHOSEN: usize = 4;

// Chosen tokens (`decode`, `sampling`, `step_inputs.cu`).

/// The token id that means "no token", for example for a row in which every logit is NaN or -inf.
pub const NO_TOKEN: u32 = 0xffffffff;

// Edits to rows of logits (`sampling/row_edits.cu`).

/// Threads per block in the edit_rows kernel. A block edits one row of logits.
pub const ROW_EDITS_THREADS: usize = 256;
/// The number of u32 words that describe the edits to one row of logits, without the lists of values and counts.
pub const ROW_EDITS_WORDS: usize = 8;

// The mailbox for chosen tokens (`decode`, `sampling`, `runner`).

/// The mailbox word for a row of logits that are all NaN or -inf. For other rows, the word is the token id + 1.
pub const MAILBOX_NO_TOKEN: u32 = 0xffffffff;

// Log probabilities of generated and prompt tokens (`sampling/logits.rs`, `sampling/logits.cu`).

/// The maximum number of most likely tokens to report for each generated or prompt token.
/// This is the maximum of `top_logprobs` in OpenAI's API.
pub const MAX_LOGPROBS: usize = 20;
/// The number of u32 words that describe a row of logits to `send_logprobs`.
pub const LOGPROBS_ROW_WORDS: usize = 3;
/// The number of mailbox slots for the log probabilities of one row of logits.
/// The slots hold the chosen token's log probability, then the id and the log probability of each most likely token.
pub const LOGPROBS_SLOTS: usize = 1 + 2 * MAX_LOGPROBS;

// Sampling on the GPU (`decode/sample.rs`, `decode/sample.cu`, `sampling`).

/// The maximum number of candidates for the largest logit of a row: one for each thread block that searches the row.
/// Hopper GPUs have up to 132 multiprocessors, and each runs one block of `matmul/dense_wgmma.cu`.
pub const BEST_LOGITS_CANDIDATES: usize = 132;
/// Blocks per row in `best_logits`.
pub const BEST_LOGITS_BLOCKS: usize = 8;
/// Threads per block in `best_logits`.
pub const BEST_LOGITS_THREADS: usize = 256;
/// Threads per block in the kernels that sample or compute log probabilities: the maximum in CUDA.
pub const SAMPLE_THREADS: usize = 1024;
/// The maximum number of logits per thread in `decode/sample.cu`.
pub const SAMPLE_IDS_PER_THREAD: usize = 8;
/// Rounds of the radix search for the cutoff of top-k or top-p.
pub const SAMPLE_ROUNDS: usize = 4;
/// Histogram bins per round of the radix search. A round determines eight bits of the cutoff.
pub const SAMPLE_BINS: usize = 256;
/// The number of thread blocks for which `SampleScratch` (`decode/sample.cu`) has room.
pub const SAMPLE_MAX_BLOCKS: usize = 1024;
/// The size of `SamplingKernelParams` (`sampling/sampling.cuh`) in 32-bit words.
pub const SAMPLE_PARAM_WORDS: usize = 10;
/// The size of `SampleScratch` (`decode/sample.cu`) in 32-bit words.
/// `SampleScratch` consists of four words, a count and a mass per round and bin, and a mass per block.
/// A count takes one word, and a mass takes two words.
pub const SAMPLE_SCRATCH_WORDS: usize = 4 + 3 * SAMPLE_ROUNDS * SAMPLE_BINS + 2 * SAMPLE_MAX_BLOCKS;
