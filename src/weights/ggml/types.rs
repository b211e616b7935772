//! The element types of GGUF files and the sizes of their blocks.

use std::fmt;

use anyhow::{Result, bail};

/// The type in which a GGUF file stores the elements of a tensor. Each row consists of complete blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GgmlType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Mxfp4,
}

/// The number of elements in a K-quant block.
pub const SUPER_BLOCK: usize = 256;

/// The ids of ggml types that inferno does not support, with their names for error messages.
const UNSUPPORTED: &[(u32, &str)] = &[
    (4, "Q4_2, removed in 2023"),
    (5, "Q4_3, removed in 2023"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4, removed in 2024"),
    (32, "Q4_0_4_8, removed in 2024"),
    (33, "Q4_0_8_8, removed in 2024"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4, removed in 2024"),
    (37, "IQ4_NL_4_8, removed in 2024"),
    (38, "IQ4_NL_8_8, removed in 2024"),
    (40, "NVFP4"),
    (41, "Q1_0"),
    (42, "Q2_0"),
];

impl GgmlType {
    pub const ALL: [Self; 14] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Mxfp4,
    ];

    /// Returns the ggml type with the given id. Fails if the type is unknown or not supported.
    pub fn from_id(id: u32) -> Result<Self> {
        if let Some(found) = Self::ALL.into_iter().find(|candidate| candidate.id() == id) {
            return Ok(found);
        }
        let supported = Self::ALL.map(Self::name).join(", ");
        match UNSUPPORTED.iter().find(|(other, _)| *other == id) {
            Some((_, name)) => bail!("type {id} ({name}) is not supported; supported: {supported}"),
            None => bail!("unknown type {id}; supported: {supported}"),
        }
    }

    /// Returns the number that stands for the type in GGUF files.
    pub fn id(self) -> u32 {
        self.properties().id
    }

    /// Returns the name that llama.cpp uses, such as `Q4_K`.
    pub fn name(self) -> &'static str {
        self.properties().name
    }

    /// Returns the number of elements in a block: 1 for F32, F16 and BF16.
    pub fn block_length(self) -> usize {
        self.properties().block_length
    }

    /// Returns the size of a block, which includes its scales, in bytes.
    pub fn block_bytes(self) -> usize {
        self.properties().block_bytes
    }

    fn properties(self) -> Properties {
        let (id, name, block_length, block_bytes) = match self {
            Self::F32 => (0, "F32", 1, 4),
            Self::F16 => (1, "F16", 1, 2),
            Self::Bf16 => (30, "BF16", 1, 2),
            Self::Q4_0 => (2, "Q4_0", 32, 2 + 16),
            Self::Q4_1 => (3, "Q4_1", 32, 4 + 16),
            Self::Q5_0 => (6, "Q5_0", 32, 2 + 4 + 16),
            Self::Q5_1 => (7, "Q5_1", 32, 4 + 4 + 16),
            Self::Q8_0 => (8, "Q8_0", 32, 2 + 32),
            Self::Q2K => (10, "Q2_K", SUPER_BLOCK, 16 + 64 + 4),
            Self::Q3K => (11, "Q3_K", SUPER_BLOCK, 32 + 64 + 12 + 2),
            Self::Q4K => (12, "Q4_K", SUPER_BLOCK, 4 + 12 + 128),
            Self::Q5K => (13, "Q5_K", SUPER_BLOCK, 4 + 12 + 32 + 128),
            Self::Q6K => (14, "Q6_K", SUPER_BLOCK, 128 + 64 + 16 + 2),
            Self::Mxfp4 => (39, "MXFP4", 32, 1 + 16),
        };
        Properties { id, name, block_length, block_bytes }
    }

    /// Returns the size in bytes of a tensor with shape `[rows, columns]`.
    /// Returns `None` if `columns` is not a multiple of the block length, or if the size overflows 64 bits.
    pub fn bytes(self, columns: u64, rows: u64) -> Option<u64> {
        let length = self.block_length() as u64;
        if !columns.is_multiple_of(length) {
            return None;
        }
        (columns / length).checked_mul(rows)?.checked_mul(self.block_bytes() as u64)
    }
}

/// The properties of a type. [`GgmlType`] has one method for each property.
struct Properties {
    id: u32,
    name: &'static str,
    block_length: usize,
    block_bytes: usize,
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}
