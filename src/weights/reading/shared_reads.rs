//! Divides the reads of a tensor among the ranks, so that bytes that several ranks need are read only once.
//!
//! All ranks need some tensors whole, such as embeddings and norms.
//! If a matrix is divided by columns, each rank may need only a short run of bytes in each row, and reading only these
//! runs from the file would cost one system call per row.
//! In both cases, each rank reads a part of the tensor to host memory, and all ranks copy what they need from there.
//!
//! If N ranks share the reads of a matrix, and each rank needs 1/N of the columns, each rank copies 2/N of the matrix:
//! 1/N from the page cache to host memory, and 1/N from host memory to a staging buffer.
//! If each rank read the matrix alone, it would copy the whole matrix to host memory, and 1/N to a staging buffer.
//!
//! Quantized matrices and most tensors of GGUF files are converted on the host. Each rank reads and converts some of
//! the rows, and all ranks copy what they need from the converted rows. There are two exceptions:
//! - If a single float matrix, or a quantized matrix or stack of matrices, is divided by rows and not transposed, each
//!   rank reads and converts only its own rows, alone.
//! - If a vector of a GGUF file is divided, each rank that needs a part converts the whole vector alone.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result, bail};
use rayon::prelude::*;

use super::source::{ByteRange, RowBuffer};
use crate::world::{World, share};

/// The maximum number of bytes that all ranks together read, or produce by conversion, at a time.
/// A single row may be longer. For reads, all ranks together keep about twice this number of bytes in buffers, because
/// a buffer stays in use until the ranks exchange the next segment.
const SEGMENT_BYTES: usize = 64 << 20;

/// The minimum number of bytes per reading thread (the last thread may read fewer). Short reads use fewer threads.
const MIN_THREAD_BYTES: usize = 1 << 20;

/// The unit, in bytes, in which ranks divide the reads of a tensor if each rank gets the whole tensor.
pub(super) const PAGE_BYTES: usize = 4096;

/// Reads tensors together with the other ranks. All ranks must read the same tensors in the same order.
#[derive(Clone)]
pub struct SharedReads {
    pub world: World,
    /// The maximum number of threads with which this rank reads bytes. Conversions use all cores instead.
    pub threads: usize,
    /// The buffers of this rank's earlier reads.
    /// Buffers are reused, because the page faults of newly allocated memory take longer than the read itself.
    pub buffers: Arc<Mutex<Vec<Arc<Vec<u8>>>>>,
}

/// A tensor to convert row by row.
#[derive(Clone, Copy)]
pub struct RowsToConvert<'n> {
    /// The name of the tensor, with which the ranks check that they convert the same tensor.
    pub name: &'n str,
    pub rows: usize,
    /// The number of converted values per row.
    pub row_length: usize,
}

/// The bytes of a tensor that one rank has read for all ranks.
struct RankBytes {
    tensor: String,
    /// The buffer that holds the bytes. Only its first `length` bytes are used.
    buffer: Arc<Vec<u8>>,
    length: usize,
}

impl RankBytes {
    fn bytes(&self) -> &[u8] {
        &self.buffer[..self.length]
    }
}

/// The rows of a tensor that one rank has converted for all ranks.
struct RankRows<T> {
    tensor: String,
    values: Vec<T>,
}

impl SharedReads {
    /// Converts all rows of a tensor together with the other ranks, each rank on all cores.
    ///
    /// `convert` converts the row with the given index and fills a slice with the converted values.
    /// `each` receives all rows in order: each call gets a range of row indices and the values of these rows.
    pub fn convert_rows<T: Copy + Default + Send + Sync + 'static>(
        &self,
        tensor: RowsToConvert,
        convert: impl Fn(usize, &mut RowBuffer, &mut [T]) -> Result<()> + Sync,
        mut each: impl FnMut(Range<usize>, &[T]) -> Result<()>,
    ) -> Result<()> {
        let RowsToConvert { name, rows, row_length } = tensor;
        let row_length = row_length.max(1);
        let segment_rows = (SEGMENT_BYTES / (row_length * size_of::<T>())).max(1);
        for start in (0..rows).step_by(segment_rows) {
            let count = segment_rows.min(rows - start);
            let part = |rank: usize| {
                let part = share(count, 1, rank, self.world.size());
                start + part.start..start + part.end
            };
            let own = part(self.world.rank());
            let mut values = Vec::new();
            let length = own.len() * row_length;
            values.try_reserve_exact(length).with_context(|| format!("cannot allocate {length} values"))?;
            values.resize(length, T::default());
            let converted = values.par_chunks_mut(row_length).with_min_len(16).enumerate();
            converted.try_for_each_init(RowBuffer::default, |buffer, (row, values)| {
                self.world.record_progress();
                convert(own.start + row, buffer, values)
            })?;
            let parts = self.world.gather_values(RankRows { tensor: name.to_string(), values })?;
            for (rank, converted) in parts.iter().enumerate() {
                let rows = part(rank);
                check(name, &converted.tensor, converted.values.len(), rows.len() * row_length)?;
                each(rows, &converted.values)?;
            }
        }
        Ok(())
    }

    /// Reads a tensor together with the other ranks, and passes all bytes of the tensor to `each` in order.
    ///
    /// Each call of `each` gets a range of offsets in the tensor and the bytes in that range.
    /// A range consists of whole units of `unit` bytes, except at the end of the tensor.
    pub fn read(
        &self,
        name: &str,
        tensor: &ByteRange,
        unit: usize,
        mut each: impl FnMut(Range<usize>, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let unit = unit.clamp(1, tensor.bytes.max(1));
        let segment_bytes = (SEGMENT_BYTES / unit).max(1) * unit;
        for start in (0..tensor.bytes).step_by(segment_bytes) {
            let length = segment_bytes.min(tensor.bytes - start);
            let part = |rank: usize| share(length, unit, rank, self.world.size());
            let own = part(self.world.rank());
            let buffer = self.read_own(tensor, start + own.start..start + own.end)?;
            let length = own.len();
            let parts = self.world.gather_values(RankBytes { tensor: name.to_string(), buffer, length })?;
            for (rank, bytes) in parts.iter().enumerate() {
                let range = part(rank);
                check(name, &bytes.tensor, bytes.length, range.len())?;
                if !range.is_empty() {
                    each(start + range.start..start + range.end, bytes.bytes())?;
                }
            }
        }
        Ok(())
    }

    /// Reads all bytes of a tensor together with the other ranks.
    pub fn read_to_vec(&self, name: &str, tensor: &ByteRange) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        all.try_reserve_exact(tensor.bytes).with_context(|| format!("cannot allocate {} bytes", tensor.bytes))?;
        self.read(name, tensor, PAGE_BYTES, |_, bytes| {
            all.extend_from_slice(bytes);
            Ok(())
        })?;
        Ok(all)
    }

    /// Returns a buffer of at least `bytes` bytes that no rank is reading.
    fn take_buffer(&self, bytes: usize) -> Result<Vec<u8>> {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let unused = buffers.iter().position(|buffer| Arc::strong_count(buffer) == 1);
        let unused = unused.and_then(|index| Arc::into_inner(buffers.swap_remove(index)));
        let mut buffer = unused.unwrap_or_default();
        if buffer.len() < bytes {
            let more = bytes - buffer.len();
            buffer.try_reserve_exact(more).with_context(|| format!("cannot allocate {bytes} bytes"))?;
            buffer.resize(bytes, 0);
        }
        Ok(buffer)
    }

    /// Reads a byte range of a tensor. Returns a buffer that begins with these bytes.
    fn read_own(&self, tensor: &ByteRange, range: Range<usize>) -> Result<Arc<Vec<u8>>> {
        let mut buffer = self.take_buffer(range.len())?;
        self.fill(tensor, range.clone(), &mut buffer[..range.len()])?;
        let buffer = Arc::new(buffer);
        // Keep the buffer, so that `take_buffer` can reuse it once no rank holds a reference to it.
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).push(buffer.clone());
        Ok(buffer)
    }

    /// Reads a byte range of a tensor to the buffer `bytes`, with several threads if the range is long.
    fn fill(&self, tensor: &ByteRange, range: Range<usize>, bytes: &mut [u8]) -> Result<()> {
        let piece = range.len().div_ceil(self.threads.max(1)).max(MIN_THREAD_BYTES);
        let read = |(index, piece_bytes): (usize, &mut [u8])| -> Result<()> {
            let offset = tensor.start + (range.start + index * piece) as u64;
            tensor.source.advise(offset, piece_bytes.len());
            tensor.source.read(piece_bytes, offset)?;
            self.world.record_progress();
            Ok(())
        };
        if range.len() <= piece {
            return read((0, bytes));
        }
        thread::scope(|scope| {
            let pieces = bytes.chunks_mut(piece).enumerate();
            let threads: Vec<_> = pieces.map(|piece| scope.spawn(|| read(piece))).collect();
            let results = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            results.collect::<Vec<_>>().into_iter().collect::<Result<()>>()
        })
    }
}

/// Converts all rows of a tensor on all cores. If `shared` is given, the ranks convert the rows together.
///
/// `convert` converts the row with the given index and fills a slice with the converted values.
pub fn convert_all<T: Copy + Default + Send + Sync + 'static>(
    shared: Option<&SharedReads>,
    tensor: RowsToConvert,
    convert: impl Fn(usize, &mut RowBuffer, &mut [T]) -> Result<()> + Sync,
) -> Result<Vec<T>> {
    let RowsToConvert { rows, row_length, .. } = tensor;
    let mut all = Vec::new();
    let length = rows * row_length;
    all.try_reserve_exact(length).with_context(|| format!("cannot allocate {length} values"))?;
    if let Some(shared) = shared {
        shared.convert_rows(tensor, convert, |_, values| {
            all.extend_from_slice(values);
            Ok(())
        })?;
        return Ok(all);
    }
    all.resize(length, T::default());
    let converted = all.par_chunks_mut(row_length.max(1)).with_min_len(16).enumerate();
    converted.try_for_each_init(RowBuffer::default, |buffer, (row, values)| convert(row, buffer, values))?;
    Ok(all)
}

/// Fails if a rank has read another tensor than `name`, or not the `expected` number of bytes or values.
/// That happens if the ranks do not read the same tensors in the same order.
fn check(name: &str, read: &str, length: usize, expected: usize) -> Result<()> {
    if read != name {
        bail!("internal error: a rank has read tensor {read} instead of {name}");
    }
    if length != expected {
        bail!("internal error: a rank has read {length} of {expected} bytes or values of tensor {name}");
    }
    Ok(())
}
