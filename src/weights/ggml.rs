//! The element types of GGUF files: sizes of their blocks, and what a block's bytes mean, in plain Rust. A kernel that
//! computes on blocks is judged by this.
//!
//! Source: the block layouts of ggml (ggml-org/llama.cpp, `ggml/src/ggml-common.h`) and the arithmetic of
//! `gguf-py/gguf/quants.py`, whose order of roundings is kept, so that results agree bit by bit.

mod blocks;
mod quantize;

pub use blocks::split;
pub use quantize::quantize;

use std::fmt;

use anyhow::{Result, bail};

/// How a tensor's elements are stored. A row is a whole number of blocks.
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

/// Elements in a block of the K types.
const SUPER_BLOCK: usize = 256;

/// Types that are not read, named for the error that says so.
const OTHERS: &[(u32, &str)] = &[
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

    /// The type that a file names by this number.
    pub fn from_id(id: u32) -> Result<Self> {
        if let Some(found) = Self::ALL.into_iter().find(|candidate| candidate.id() == id) {
            return Ok(found);
        }
        let supported = Self::ALL.map(Self::name).join(", ");
        match OTHERS.iter().find(|(other, _)| *other == id) {
            Some((_, name)) => bail!("type {id} ({name}) is not supported; supported: {supported}"),
            None => bail!("type {id} is unknown; supported: {supported}"),
        }
    }

    /// The number that files name it by.
    pub fn id(self) -> u32 {
        self.facts().0
    }

    /// ggml's name.
    pub fn name(self) -> &'static str {
        self.facts().1
    }

    /// Elements in a block.
    pub fn block_length(self) -> usize {
        self.facts().2
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.facts().3
    }

    fn facts(self) -> (u32, &'static str, usize, usize) {
        match self {
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
        }
    }

    /// Bytes of a tensor with rows of `columns` elements; none if a row is no whole number of blocks, or the product
    /// does not fit into 64 bits.
    pub fn bytes(self, columns: u64, rows: u64) -> Option<u64> {
        let length = self.block_length() as u64;
        if !columns.is_multiple_of(length) {
            return None;
        }
        (columns / length).checked_mul(rows)?.checked_mul(self.block_bytes() as u64)
    }

    /// Whole blocks as values.
    pub fn dequantize(self, bytes: &[u8], values: &mut [f32]) -> Result<()> {
        if self.bytes(values.len() as u64, 1) != Some(bytes.len() as u64) {
            bail!("{} bytes are no {} elements of {self}", bytes.len(), values.len());
        }
        let block = match self {
            Self::F32 => blocks::f32,
            Self::F16 => blocks::f16,
            Self::Bf16 => blocks::bf16,
            Self::Q4_0 => blocks::q4_0,
            Self::Q4_1 => blocks::q4_1,
            Self::Q5_0 => blocks::q5_0,
            Self::Q5_1 => blocks::q5_1,
            Self::Q8_0 => blocks::q8_0,
            Self::Q2K => blocks::q2_k,
            Self::Q3K => blocks::q3_k,
            Self::Q4K => blocks::q4_k,
            Self::Q5K => blocks::q5_k,
            Self::Q6K => blocks::q6_k,
            Self::Mxfp4 => blocks::mxfp4,
        };
        let blocks = bytes.chunks_exact(self.block_bytes());
        blocks.zip(values.chunks_exact_mut(self.block_length())).for_each(|(bytes, values)| block(bytes, values));
        Ok(())
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}
