//! Reads little-endian values. Checks that each value ends within the file.

use anyhow::{Result, anyhow};

use crate::text::counted;

/// A read position in the bytes of a file.
#[derive(Clone, Copy)]
pub struct Cursor<'b> {
    bytes: &'b [u8],
    position: usize,
    /// The size of the file in bytes. `bytes` may contain only the beginning of the file.
    file_bytes: u64,
}

/// The error for reading a value that lies in the file but beyond the fetched bytes.
/// Holds the number of bytes to fetch from the beginning of the file.
#[derive(Debug, thiserror::Error)]
#[error("the first {0} bytes of the file are needed")]
pub struct NeedsMoreBytes(pub u64);

impl<'b> Cursor<'b> {
    /// Creates a cursor at offset `position` of `bytes`, which count as a whole file. Reading past their end fails.
    pub fn at(bytes: &'b [u8], position: usize) -> Self {
        Self { bytes, position, file_bytes: bytes.len() as u64 }
    }

    /// Creates a cursor at the start of a file with `file_bytes` bytes. `head` is the fetched beginning of the file.
    /// Reading past `head`, but not past the end of the file, fails with [`NeedsMoreBytes`].
    pub fn from_head(head: &'b [u8], file_bytes: u64) -> Self {
        let fetched = head.len().min(usize::try_from(file_bytes).unwrap_or(usize::MAX));
        Self { bytes: &head[..fetched], position: 0, file_bytes }
    }

    pub fn position(&self) -> usize {
        self.position
    }

    pub fn remaining(&self) -> u64 {
        self.file_bytes.saturating_sub(self.position as u64)
    }

    /// Returns the next `bytes` bytes and moves the cursor past them.
    #[inline]
    pub fn take(&mut self, bytes: u64) -> Result<&'b [u8]> {
        // `at` accepts a position past the end of `bytes`.
        let rest = self.bytes.get(self.position..).unwrap_or_default();
        if bytes > rest.len() as u64 {
            return Err(self.too_short(bytes));
        }
        self.position += bytes as usize;
        Ok(&rest[..bytes as usize])
    }

    #[cold]
    fn too_short(&self, bytes: u64) -> anyhow::Error {
        if bytes > self.remaining() {
            return anyhow!(
                "expected {} at offset {}, found {}",
                counted(bytes, "byte"),
                self.position,
                self.remaining()
            );
        }
        // The sum cannot overflow: `bytes` is at most `remaining()`, so the sum is at most the file size.
        NeedsMoreBytes(self.position as u64 + bytes).into()
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

    /// Reads a string and returns its bytes, which may not be UTF-8. The file stores their 64-bit length before them.
    #[inline]
    pub fn string(&mut self) -> Result<&'b [u8]> {
        let bytes = self.u64()?;
        self.take(bytes)
    }
}
