//! Uses several threads to read parts of large tensors to a device.
//!
//! Each thread takes the next piece of the part, reads it into a staging buffer, and queues the copy to the device.
//! If the part consists of columns of a matrix, only a short run of the bytes of each row belongs to the part.
//! A thread then reads whole rows, and keeps only the columns of the part.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};

use super::part::Slice;
use super::read_ahead::ReadAheadOptions;
use super::source::ByteRange;
use crate::kernels::upload::Target;

/// Runs of at least this many bytes are read one by one. Shorter runs are read together with the bytes between them.
const MIN_RUN_BYTES: usize = 64 << 10;

/// Reads parts of tensors to the device of `target`.
pub struct PartReader<T: Target> {
    target: T,
    options: ReadAheadOptions,
    /// The staging buffers that no thread is using. They are reused, because creating page-locked memory takes
    /// milliseconds.
    staging: Mutex<Vec<T::Staging>>,
}

/// The bytes of a part of a tensor in its file.
struct PartBytes {
    /// The number of rows of the tensor. All rows have the same size, and `runs` applies to each of them.
    rows: usize,
    row_bytes: usize,
    /// The byte ranges of each row that belong to the part.
    runs: Vec<Range<usize>>,
}

/// A piece of a part that one thread reads.
enum Piece {
    /// `bytes` bytes at the offset `start` of the tensor, and their offset in the part.
    Run { start: usize, bytes: usize, offset: usize },
    /// All runs of the rows with these indices.
    Rows(Range<usize>),
}

impl<T: Target> PartReader<T> {
    pub fn new(target: T, options: ReadAheadOptions) -> Self {
        Self { target, options, staging: Mutex::new(Vec::new()) }
    }

    /// Reads the part of a tensor that `slice` selects, or the whole tensor. Returns when all copies are queued.
    ///
    /// `tensor` is the location of the whole tensor.
    /// `shape` is the shape of the result, which must not be empty.
    pub(super) fn read(
        &self,
        tensor: &ByteRange,
        dtype: DType,
        shape: &[usize],
        slice: Option<&Slice>,
    ) -> Result<Tensor> {
        let part = PartBytes::new(dtype, shape, slice);
        let mut memory = self.target.allocate(part.bytes()).context("cannot allocate memory for a tensor")?;
        let pieces = part.pieces(self.options.piece_bytes);
        let next = AtomicUsize::new(0);
        let work = || -> Result<()> {
            let mut staging = self.take_staging(part.longest_piece(self.options.piece_bytes))?;
            let mut rows = Vec::new();
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                let buffer = self.target.buffer(&mut staging)?;
                let (bytes, offset) = part.read(tensor, piece, buffer, &mut rows)?;
                self.target.copy(&mut staging, bytes, &memory, offset)?;
            }
            self.staging.lock().unwrap_or_else(PoisonError::into_inner).push(staging);
            Ok(())
        };
        thread::scope(|scope| {
            let threads = self.options.threads.min(pieces.len());
            let threads: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let own = work();
            let others = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            others.fold(own, |result, other| result.and(other))
        })?;
        self.target.complete(&mut memory)?;
        Ok(self.target.tensor(memory, dtype, shape)?)
    }

    /// Returns staging buffers of `piece_bytes` bytes, or of `bytes` bytes if a piece is longer.
    fn take_staging(&self, bytes: usize) -> Result<T::Staging> {
        let kept = self.staging.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match kept {
            Some(staging) if bytes <= self.options.piece_bytes => Ok(staging),
            _ => Ok(self
                .target
                .staging(bytes.max(self.options.piece_bytes))
                .context("cannot allocate staging buffers")?),
        }
    }
}

impl PartBytes {
    /// `shape` is the shape of the part.
    fn new(dtype: DType, shape: &[usize], slice: Option<&Slice>) -> Self {
        let size = dtype.size_in_bytes();
        let Some(slice) = slice else {
            let bytes = shape.iter().product::<usize>() * size;
            return Self { rows: 1, row_bytes: bytes, runs: std::iter::once(0..bytes).collect() };
        };
        let rows = shape[..slice.dim].iter().product();
        let inner = shape[slice.dim + 1..].iter().product::<usize>() * size;
        let runs = slice.ranges.iter().filter(|range| !range.is_empty());
        Self {
            rows,
            row_bytes: slice.total * inner,
            runs: runs.map(|range| range.start * inner..range.end * inner).collect(),
        }
    }

    /// Returns the number of bytes of each row that belong to the part.
    fn kept_bytes(&self) -> usize {
        self.runs.iter().map(Range::len).sum()
    }

    fn bytes(&self) -> usize {
        self.rows * self.kept_bytes()
    }

    fn has_long_runs(&self) -> bool {
        self.runs.iter().all(|run| run.len() >= MIN_RUN_BYTES)
    }

    /// Returns the maximum number of bytes that a piece copies to the device.
    fn longest_piece(&self, piece_bytes: usize) -> usize {
        if self.has_long_runs() { piece_bytes } else { piece_bytes.max(self.kept_bytes()) }
    }

    fn pieces(&self, piece_bytes: usize) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if self.has_long_runs() {
            let mut offset = 0;
            for row in 0..self.rows {
                for run in &self.runs {
                    for start in run.clone().step_by(piece_bytes) {
                        let bytes = piece_bytes.min(run.end - start);
                        pieces.push(Piece::Run { start: row * self.row_bytes + start, bytes, offset });
                        offset += bytes;
                    }
                }
            }
        } else {
            let rows = (piece_bytes / self.kept_bytes()).max(1);
            pieces.extend((0..self.rows).step_by(rows).map(|row| Piece::Rows(row..(row + rows).min(self.rows))));
        }
        pieces
    }

    /// Reads a piece to the start of `buffer`. Returns the number of its bytes and its offset in the part.
    /// `rows` is a buffer for whole rows.
    fn read(&self, tensor: &ByteRange, piece: &Piece, buffer: &mut [u8], rows: &mut Vec<u8>) -> Result<(usize, usize)> {
        let (source, first) = (&tensor.source, tensor.start);
        match piece {
            Piece::Run { start, bytes, offset } => {
                source.read(&mut buffer[..*bytes], first + *start as u64)?;
                Ok((*bytes, *offset))
            }
            Piece::Rows(range) => {
                rows.resize(range.len() * self.row_bytes, 0);
                source.read(rows, first + (range.start * self.row_bytes) as u64)?;
                let runs =
                    rows.chunks_exact(self.row_bytes).flat_map(|row| self.runs.iter().map(|run| &row[run.clone()]));
                let mut end = 0;
                for run in runs {
                    buffer[end..end + run.len()].copy_from_slice(run);
                    end += run.len();
                }
                Ok((end, range.start * self.kept_bytes()))
            }
        }
    }
}
