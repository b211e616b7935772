//! Limits on the contents of GGUF files and sharded models.

/// The maximum number of metadata keys in one file. For comparison: GGUF files usually have fewer than 100.
pub const MAX_KEYS: u64 = 1 << 16;
/// The maximum number of tensors in one file.
/// For comparison: 60 layers with 256 experts each, stored as one tensor per expert matrix, have 46,080 expert tensors.
pub const MAX_TENSORS: u64 = 1 << 17;
/// The maximum number of tensors in all shards of a sharded model.
pub const MAX_TOTAL_TENSORS: usize = 1 << 19;
/// The format's limit on the length of a metadata key, in bytes.
pub const MAX_KEY_BYTES: usize = (1 << 16) - 1;
/// The format's limit on the length of a tensor name, in bytes.
pub const MAX_NAME_BYTES: usize = 64;
/// The maximum number of values in an array. For comparison: gpt-oss has an array of about 450,000 BPE merges.
pub const MAX_ARRAY_VALUES: u64 = 1 << 22;
/// The format's limit on the number of dimensions of a tensor.
pub const MAX_DIMENSIONS: u32 = 4;
/// The maximum size of a header, in bytes. A header with 260,000 tokens and their BPE merges takes about 16 MB.
pub const MAX_HEADER_BYTES: u64 = 64 << 20;
/// The maximum total size of the headers of a sharded model, in bytes.
/// llama.cpp's `gguf-split` writes the vocabulary only to the first shard, so the other headers are short.
/// For shards on a hub, all bytes that were fetched to parse the headers count.
/// These are at least 1 MiB per shard, or the whole shard if it is smaller.
pub const MAX_TOTAL_HEADER_BYTES: u64 = 256 << 20;
/// The maximum number of rotated elements per head for which RoPE factors are read.
/// For comparison: attention supports head sizes up to 256.
pub const MAX_HEAD_DIM: u64 = 1024;
/// The maximum number of layers. For comparison: Llama 3.1 405B has 126 layers.
pub const MAX_BLOCKS: u32 = 1024;
