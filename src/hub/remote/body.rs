//! Reads the bodies of responses that are kept in memory. Fails if they arrive too slowly.

use std::io::{self, ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::Remote;
use crate::text::{counted, library_error};

/// The time allowed for each byte of a metadata response, in addition to the response timeout.
/// This time corresponds to a speed of 16 KiB/s.
const TIME_PER_BYTE: Duration = Duration::from_nanos(1_000_000_000 / (16 << 10));

impl Remote<'_> {
    /// Reads at most `limit` bytes of a metadata response. Allocates memory only for bytes that have arrived.
    ///
    /// Fails if reading fails, or if the bytes arrive too slowly (see [`TIME_PER_BYTE`]).
    pub fn read_body(&self, body: &mut impl Read, limit: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.copy_body(body, limit, &mut bytes)?;
        Ok(bytes)
    }

    /// Discards at most `limit` bytes of a metadata response. Fails like [`read_body`](Self::read_body).
    pub fn skip_body(&self, body: &mut impl Read, limit: u64) -> Result<()> {
        self.copy_body(body, limit, &mut io::sink())
    }

    fn copy_body(&self, body: &mut impl Read, limit: u64, output: &mut impl Write) -> Result<()> {
        let start = Instant::now();
        let mut buffer = vec![0; 64 << 10];
        let mut copied = 0;
        while copied < limit {
            let max_bytes = buffer.len().min(usize::try_from(limit - copied).unwrap_or(usize::MAX));
            match body.read(&mut buffer[..max_bytes]) {
                Ok(0) => break,
                Ok(count) => {
                    output.write_all(&buffer[..count])?;
                    copied += count as u64;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.temporary_error(library_error(&error))),
            }
            let (elapsed, bytes) = (start.elapsed(), u32::try_from(copied).unwrap_or(u32::MAX));
            if elapsed > self.limits().response_timeout.saturating_add(TIME_PER_BYTE.saturating_mul(bytes)) {
                let seconds = elapsed.as_secs_f32();
                return Err(
                    self.permanent_error(format!("the hub sent only {} in {seconds:.1} s", counted(copied, "byte")))
                );
            }
        }
        Ok(())
    }
}
