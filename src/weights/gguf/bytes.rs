//! Little-endian reading that ends in an error where the bytes do.

use anyhow::{Result, anyhow};

#[derive(Clone, Copy)]
pub struct Cursor<'b> {
    bytes: &'b [u8],
    at: usize,
    /// Where the file ends, of which `bytes` may be no more than the beginning.
    end: u64,
}

/// What is wanted lies in the file, but not among the bytes that are here: so many from its beginning are needed.
#[derive(Debug, thiserror::Error)]
#[error("the first {0} bytes are needed")]
pub struct Short(pub u64);

impl<'b> Cursor<'b> {
    /// Begins at a byte, which may be the end or past it.
    pub fn at(bytes: &'b [u8], at: usize) -> Self {
        Self { bytes, at, end: bytes.len() as u64 }
    }

    /// Begins with the head of a file of `end` bytes. Where the head ends too soon the error is [`Short`].
    pub fn of_head(head: &'b [u8], end: u64) -> Self {
        let here = head.len().min(usize::try_from(end).unwrap_or(usize::MAX));
        Self { bytes: &head[..here], at: 0, end }
    }

    pub fn position(&self) -> usize {
        self.at
    }

    pub fn remaining(&self) -> u64 {
        self.end.saturating_sub(self.at as u64)
    }

    #[inline]
    pub fn take(&mut self, bytes: u64) -> Result<&'b [u8]> {
        // It may begin past the end.
        let here = self.bytes.get(self.at..).unwrap_or_default();
        if bytes > here.len() as u64 {
            return Err(self.too_few(bytes));
        }
        self.at += bytes as usize;
        Ok(&here[..bytes as usize])
    }

    #[cold]
    fn too_few(&self, bytes: u64) -> anyhow::Error {
        if bytes > self.remaining() {
            return anyhow!("{bytes} bytes are wanted at byte {}, the file ends after {}", self.at, self.remaining());
        }
        // No more than remains, so the sum is no more than the file.
        Short(self.at as u64 + bytes).into()
    }

    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64)?);
        Ok(array)
    }

    pub fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    #[inline]
    pub fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A length of 64 bits, then so many bytes.
    #[inline]
    pub fn string(&mut self) -> Result<&'b [u8]> {
        let bytes = self.u64()?;
        self.take(bytes)
    }
}
