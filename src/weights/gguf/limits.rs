//! Limits on what a GGUF file may contain.

/// The most metadata keys that are read. Real files have some fifty.
pub const MAX_KEYS: u64 = 1 << 16;
/// The most tensors that are read from one file. The largest models, with one tensor per expert, have some 50,000.
pub const MAX_TENSORS: u64 = 1 << 17;
/// The longest metadata key that the format allows.
pub const MAX_KEY_BYTES: usize = (1 << 16) - 1;
/// The longest tensor name that the format allows.
pub const MAX_NAME_BYTES: usize = 64;
/// The most dimensions that the format allows.
pub const MAX_DIMENSIONS: u32 = 4;
/// The most layers that a model may have. The deepest models have some 130.
pub const MAX_BLOCKS: u32 = 1024;
