//! Limits on what a GGUF file may contain.

/// The maximum number of metadata keys. Real files have about 50.
pub const MAX_KEYS: u64 = 1 << 16;
/// The maximum number of tensors in one file. The largest models, with one tensor per expert, have about 50,000.
pub const MAX_TENSORS: u64 = 1 << 17;
/// The longest metadata key that the format allows.
pub const MAX_KEY_BYTES: usize = (1 << 16) - 1;
/// The longest tensor name that the format allows.
pub const MAX_NAME_BYTES: usize = 64;
/// The maximum number of dimensions that the format allows.
pub const MAX_DIMENSIONS: u32 = 4;
/// The maximum number of layers. The deepest models have about 130.
pub const MAX_BLOCKS: u32 = 1024;
