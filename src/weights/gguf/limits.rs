//! Limits on the contents of a GGUF file.

/// The maximum number of metadata keys. Real files have about 50.
pub const MAX_KEYS: u64 = 1 << 16;
/// The maximum number of tensors in one file. Models with one tensor per expert have up to about 50,000 tensors.
pub const MAX_TENSORS: u64 = 1 << 17;
/// The maximum number of tensors in all parts of a split model.
pub const MAX_SPLIT_TENSORS: usize = 1 << 19;
/// The format's limit on the length of a metadata key, in bytes.
pub const MAX_KEY_BYTES: usize = (1 << 16) - 1;
/// The format's limit on the length of a tensor name, in bytes.
pub const MAX_NAME_BYTES: usize = 64;
/// The maximum number of values in an array. The longest arrays in real files are lists of up to 450,000 BPE merges.
pub const MAX_ARRAY_VALUES: u64 = 1 << 22;
/// The format's limit on the number of dimensions of a tensor.
pub const MAX_DIMENSIONS: u32 = 4;
/// The maximum size of a header, in bytes. A header with a vocabulary of 260,000 tokens takes about 16 MB.
pub const MAX_HEADER_BYTES: u64 = 64 << 20;
/// The maximum total size of the headers of a split model, in bytes. Only the first part's header has a vocabulary.
pub const MAX_SPLIT_HEADER_BYTES: u64 = 256 << 20;
/// RoPE factors are read only up to this number of rotated dims per head. The kernels support up to 256 dims.
pub const MAX_HEAD_DIM: u64 = 1024;
/// The maximum number of layers. The deepest models have about 130 layers.
pub const MAX_BLOCKS: u32 = 1024;
