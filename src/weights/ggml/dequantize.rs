//! Dequantizes data of every supported ggml type.

use anyhow::{Result, bail};

use super::blocks;
use super::types::GgmlType;

impl GgmlType {
    /// Dequantizes complete blocks. Fails if the number of bytes does not match the number of values.
    pub fn dequantize(self, bytes: &[u8], values: &mut [f32]) -> Result<()> {
        if self.bytes(values.len() as u64, 1) != Some(bytes.len() as u64) {
            bail!("{} bytes do not match {} elements of {self}", bytes.len(), values.len());
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
