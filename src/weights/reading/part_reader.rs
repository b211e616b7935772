//! Uses several threads to read large tensors, or parts of them, to a device.
//!
//! Each thread takes the next piece of the tensor, reads it into a staging buffer, and queues the copy to the device.
//! If the part has short runs of bytes in each row, a thread reads whole rows and keeps only these runs.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};

use super::part::{MIN_RUN_BYTES, PartToRead, Slice};
use super::read_ahead::ReadAheadOptions;
use super::shared_reads::{PAGE_BYTES, SharedReads};
use super::source::ByteRange;
use crate::kernels::upload::UploadTarget;

/// Reads tensors, or parts of them, to the device of `target`.
pub struct PartReader<T: UploadTarget> {
    target: T,
    options: ReadAheadOptions,
    /// The staging buffers that no thread is using.
    /// They are kept for reuse, because allocating page-locked memory takes milliseconds.
    staging: Mutex<Vec<T::Staging>>,
}

/// Describes which bytes of a tensor belong to a part: the same runs of bytes in each row.
struct PartRuns {
    /// The number of rows of the tensor. All rows have the same size, and `runs` applies to each of them.
    rows: usize,
    row_bytes: usize,
    /// The byte ranges of each row that belong to the part.
    runs: Vec<Range<usize>>,
}

/// The source of a tensor's bytes: its file, or bytes that a rank has already read to host memory.
enum ByteSource<'b> {
    File(&'b ByteRange),
    /// Consecutive bytes of the tensor. `start` is the offset of the first byte in the tensor.
    Memory {
        start: usize,
        bytes: &'b [u8],
    },
}

/// A piece of a part, which one thread reads at once.
enum PartPiece {
    /// `bytes` bytes at the offset `start` of the tensor. `offset` is their offset in the part.
    Run { start: usize, bytes: usize, offset: usize },
    /// All runs of the rows whose indices are in this range.
    Rows(Range<usize>),
}

/// The bytes of a piece at the start of a staging buffer.
struct ReadPiece {
    bytes: usize,
    /// The offset of the bytes in the part.
    offset: usize,
}

impl<T: UploadTarget> PartReader<T> {
    pub fn new(target: T, options: ReadAheadOptions) -> Self {
        Self { target, options, staging: Mutex::new(Vec::new()) }
    }

    /// Reads the part of a tensor that `slice` selects, or the whole tensor without a slice.
    /// Returns when all copies to the device are queued.
    ///
    /// `tensor` is the location of the whole tensor.
    /// `shape` is the shape of the result. No dimension may be 0.
    pub(super) fn read(
        &self,
        tensor: &ByteRange,
        dtype: DType,
        shape: &[usize],
        slice: Option<&Slice>,
    ) -> Result<Tensor> {
        let part = PartRuns::new(dtype, shape, slice);
        let mut memory = self.target.allocate(part.bytes()).context("cannot allocate memory for a tensor")?;
        self.copy(&part, &part.pieces(self.options.piece_bytes), &ByteSource::File(tensor), &memory)?;
        self.target.complete(&mut memory)?;
        Ok(self.target.tensor(memory, dtype, shape)?)
    }

    /// Like [`read`](Self::read), but reads the tensor together with the other ranks.
    pub(super) fn read_shared(
        &self,
        shared: &SharedReads,
        tensor: &ByteRange,
        &PartToRead { name, dtype, shape, slice }: &PartToRead,
    ) -> Result<Tensor> {
        let part = PartRuns::new(dtype, shape, slice);
        let mut memory = self.target.allocate(part.bytes()).context("cannot allocate memory for a tensor")?;
        let unit = if slice.is_some() { part.row_bytes } else { PAGE_BYTES };
        shared.read(name, tensor, unit, |range, bytes| {
            let pieces = part.pieces_of(range.clone(), self.options.piece_bytes);
            self.copy(&part, &pieces, &ByteSource::Memory { start: range.start, bytes }, &memory)
        })?;
        self.target.complete(&mut memory)?;
        Ok(self.target.tensor(memory, dtype, shape)?)
    }

    /// Copies `pieces` of a tensor to `memory` with several threads. Returns when all copies are queued.
    fn copy(&self, part: &PartRuns, pieces: &[PartPiece], tensor: &ByteSource, memory: &T::Memory) -> Result<()> {
        let next = AtomicUsize::new(0);
        let work = || -> Result<()> {
            let mut staging = self.take_staging(part.longest_piece(self.options.piece_bytes))?;
            let mut rows = Vec::new();
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                let buffer = self.target.buffer(&mut staging)?;
                let read = part.read(tensor, piece, buffer, &mut rows)?;
                self.target.copy(&mut staging, read.bytes, memory, read.offset)?;
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
        })
    }

    /// Returns staging buffers of at least `bytes` bytes each. Reuses free ones if `bytes` is at most `piece_bytes`.
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

impl PartRuns {
    /// Computes which bytes of a tensor belong to the part that `slice` selects. `shape` is the shape of the part.
    /// Without a slice, the part is the whole tensor.
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
        // Single runs can be shorter than the limit of `Slice::has_short_runs`, which applies to the average over all
        // ranks. Accept runs of half the limit.
        self.rows == 1 || self.runs.iter().all(|run| run.len() >= MIN_RUN_BYTES / 2)
    }

    /// Returns the maximum number of bytes that a piece copies to the device.
    fn longest_piece(&self, piece_bytes: usize) -> usize {
        if self.has_long_runs() { piece_bytes } else { piece_bytes.max(self.kept_bytes()) }
    }

    fn pieces(&self, piece_bytes: usize) -> Vec<PartPiece> {
        let mut pieces = Vec::new();
        if self.has_long_runs() {
            let mut offset = 0;
            for row in 0..self.rows {
                for run in &self.runs {
                    for start in run.clone().step_by(piece_bytes) {
                        let bytes = piece_bytes.min(run.end - start);
                        pieces.push(PartPiece::Run { start: row * self.row_bytes + start, bytes, offset });
                        offset += bytes;
                    }
                }
            }
        } else {
            let rows = (piece_bytes / self.kept_bytes()).max(1);
            pieces.extend((0..self.rows).step_by(rows).map(|row| PartPiece::Rows(row..(row + rows).min(self.rows))));
        }
        pieces
    }

    /// Cuts a byte range of the tensor into pieces.
    /// If the part has only some bytes of each row, `range` must consist of whole rows.
    fn pieces_of(&self, range: Range<usize>, piece_bytes: usize) -> Vec<PartPiece> {
        if self.kept_bytes() == self.row_bytes {
            let starts = range.clone().step_by(piece_bytes);
            let piece = |start| PartPiece::Run { start, bytes: piece_bytes.min(range.end - start), offset: start };
            return starts.map(piece).collect();
        }
        let rows = range.start / self.row_bytes..range.end / self.row_bytes;
        let step = (piece_bytes / self.kept_bytes()).max(1);
        rows.clone().step_by(step).map(|row| PartPiece::Rows(row..(row + step).min(rows.end))).collect()
    }

    /// Reads a piece to the start of `buffer`.
    /// `rows` is a reusable buffer for reading whole rows.
    fn read(&self, tensor: &ByteSource, piece: &PartPiece, buffer: &mut [u8], rows: &mut Vec<u8>) -> Result<ReadPiece> {
        match piece {
            PartPiece::Run { start, bytes, offset } => {
                match tensor {
                    ByteSource::File(file) => file.source.read(&mut buffer[..*bytes], file.start + *start as u64)?,
                    ByteSource::Memory { start: first, bytes: all } => {
                        buffer[..*bytes].copy_from_slice(&all[start - first..][..*bytes]);
                    }
                }
                Ok(ReadPiece { bytes: *bytes, offset: *offset })
            }
            PartPiece::Rows(range) => {
                let (start, length) = (range.start * self.row_bytes, range.len() * self.row_bytes);
                let whole_rows = match tensor {
                    ByteSource::File(file) => {
                        rows.resize(length, 0);
                        file.source.read(rows, file.start + start as u64)?;
                        &rows[..]
                    }
                    ByteSource::Memory { start: first, bytes } => &bytes[start - first..][..length],
                };
                let runs = whole_rows
                    .chunks_exact(self.row_bytes)
                    .flat_map(|row| self.runs.iter().map(|run| &row[run.clone()]));
                let mut end = 0;
                for run in runs {
                    buffer[end..end + run.len()].copy_from_slice(run);
                    end += run.len();
                }
                Ok(ReadPiece { bytes: end, offset: range.start * self.kept_bytes() })
            }
        }
    }
}
