//! Background threads that read tensors before they are requested.
//!
//! Each thread takes the next piece of a tensor, reads it into a staging buffer, and queues the copy to the device.
//! The threads read the tensors in the order of the list passed to [`ReadAheadReader::start`], except that a tensor
//! for which [`ReadAheadReader::take`] waits is read next. The read-ahead limit does not apply to this tensor, because
//! tensors that are taken later may already have used up the limit, and `take` would then wait forever.
//! `take` returns once all copies of its tensor are queued. The copies may still be running.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, bail};
use candle_core::{DType, Tensor};

use super::source::{ByteRange, WeightsFile};
use crate::kernels::upload::UploadTarget;

/// A request to read one tensor, or several tensors that are stacked into one.
pub struct ReadRequest {
    pub name: String,
    /// The byte ranges to read, in order: one range for each tensor of a stack. No range is empty.
    pub ranges: Vec<ByteRange>,
    pub residency: Residency,
}

/// Whether a tensor that is read ahead takes memory that the loaded model does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// The model keeps the tensor, or a repacked, stacked or transposed copy of about the same size.
    /// Norms, biases and other small tensors may become larger F32 copies.
    /// Reading the tensor early takes little or no extra memory, so it does not count toward the read-ahead limit.
    Permanent,
    /// The tensor is freed after it is converted to another dtype. It counts toward the read-ahead limit.
    Temporary,
}

/// The number of reading threads, the size of a read, and the read-ahead limit.
#[derive(Clone, Copy, Debug)]
pub struct ReadAheadOptions {
    pub threads: usize,
    /// The maximum number of bytes that a thread reads and copies at a time.
    /// A [`PartReader`](super::PartReader) that reads whole rows may exceed it.
    pub piece_bytes: usize,
    /// The read-ahead limit in bytes: the maximum total size of temporary tensors that are being read, or were read but
    /// not yet taken.
    /// A requested tensor may exceed the limit.
    /// A temporary tensor larger than the limit is read ahead only if no other one is waiting to be taken.
    pub ahead_bytes: usize,
}

impl Default for ReadAheadOptions {
    fn default() -> Self {
        // Measured in November 2026 with files in the page cache: four threads load 28 GB/s to an H200, eight load
        // 43 GB/s, and sixteen are no faster, because the copy to the GPU is then the bottleneck.
        // Each thread has two staging buffers, so eight threads need 64 MiB.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { threads: cores.clamp(2, 8), piece_bytes: 4 << 20, ahead_bytes: 512 << 20 }
    }
}

/// The reading threads and the tensors that they have read. Dropping a reader stops and joins its threads.
pub struct ReadAheadReader<T: UploadTarget> {
    shared: Arc<ReadAheadState<T>>,
    names: HashMap<String, usize>,
    threads: Vec<JoinHandle<()>>,
}

struct ReadAheadState<T: UploadTarget> {
    target: T,
    read_requests: Vec<ReadRequest>,
    options: ReadAheadOptions,
    queue: Mutex<Queue<T::Memory>>,
    /// Notified after each change to the queue that a thread may be waiting for.
    changed: Condvar,
}

struct Queue<M> {
    tensors: Vec<TensorState<M>>,
    /// The indices of tensors that `take` has requested and whose reads have not started, oldest request first.
    requested: VecDeque<usize>,
    /// The index of the next tensor to read ahead.
    next: usize,
    /// The allocated tensors with unread pieces. Pieces of the first one are read first.
    open: VecDeque<OpenTensor>,
    /// The total size of temporary tensors whose reads have started and that are not yet taken, in bytes.
    ahead_bytes: usize,
    failure: Option<String>,
    is_stopped: bool,
}

/// An allocated tensor with unread pieces.
struct OpenTensor {
    /// The index of the tensor.
    tensor: usize,
    /// The offset of the next piece to read, in bytes.
    offset: usize,
}

/// How far the read of one tensor has progressed.
enum TensorState<M> {
    /// The tensor was not requested, and its read has not started.
    Idle,
    /// The tensor was requested, or is the next to be read ahead, but its memory is not allocated yet.
    Chosen,
    /// The tensor is being read. `left` is the number of bytes whose copies are not yet queued.
    Reading {
        memory: Arc<M>,
        left: usize,
    },
    /// All copies of the tensor to the device are queued.
    Ready(M),
    Taken,
}

/// A piece of a tensor that one thread reads into its staging buffer and copies to the device.
struct Piece<M> {
    tensor: usize,
    memory: Arc<M>,
    /// The offset of the piece in the tensor, in bytes.
    offset: usize,
    source: Arc<WeightsFile>,
    /// The offset of the piece in the file, in bytes.
    start: u64,
    bytes: usize,
}

impl<T: UploadTarget> ReadAheadReader<T> {
    /// Starts the threads that read the tensors of `read_requests`, in order.
    pub fn start(target: T, read_requests: Vec<ReadRequest>, options: ReadAheadOptions) -> Result<Self> {
        let names = read_requests.iter().enumerate().map(|(index, request)| (request.name.clone(), index)).collect();
        let ranges = read_requests.iter().flat_map(|request| &request.ranges);
        let pieces: usize = ranges.map(|range| range.bytes.div_ceil(options.piece_bytes)).sum();
        let queue = Queue {
            tensors: read_requests.iter().map(|_| TensorState::Idle).collect(),
            requested: VecDeque::new(),
            next: 0,
            open: VecDeque::new(),
            ahead_bytes: 0,
            failure: None,
            is_stopped: false,
        };
        let shared =
            ReadAheadState { target, read_requests, options, queue: Mutex::new(queue), changed: Condvar::new() };
        let mut reader = Self { shared: Arc::new(shared), names, threads: Vec::new() };
        for _ in 0..options.threads.clamp(1, pieces.max(1)) {
            let shared = reader.shared.clone();
            let thread = std::thread::Builder::new().name("weights".into()).spawn(move || shared.run());
            reader.threads.push(thread.context("cannot start a thread to read weights")?);
        }
        Ok(reader)
    }

    /// Returns whether the tensor is in the read-ahead list.
    pub fn contains(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }

    /// Waits until all copies of a tensor are queued, and returns the tensor.
    /// A tensor that is taken twice is read twice.
    ///
    /// Fails if the tensor is not in the read-ahead list, if its size does not match `dtype` and `shape`,
    /// or if a thread has failed to read this or any other tensor.
    pub fn take(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let Some(&index) = self.names.get(name) else { bail!("tensor {name} is not in the read-ahead list") };
        let memory = self.shared.take(index)?;
        self.shared.target.tensor(memory, dtype, shape).with_context(|| format!("cannot create tensor {name}"))
    }
}

impl<T: UploadTarget> Drop for ReadAheadReader<T> {
    fn drop(&mut self) {
        self.shared.lock().is_stopped = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // Ignore the result of `join`, which cannot fail because `run` catches panics.
            let _ = thread.join();
        }
    }
}

impl<T: UploadTarget> ReadAheadState<T> {
    fn lock(&self) -> MutexGuard<'_, Queue<T::Memory>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'q>(&self, queue: MutexGuard<'q, Queue<T::Memory>>) -> MutexGuard<'q, Queue<T::Memory>> {
        self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, index: usize) -> Result<T::Memory> {
        let mut queue = self.lock();
        loop {
            if let Some(failure) = &queue.failure {
                bail!("{failure}");
            }
            match std::mem::replace(&mut queue.tensors[index], TensorState::Taken) {
                TensorState::Ready(memory) => {
                    queue.ahead_bytes -= self.read_requests[index].temporary_bytes();
                    self.changed.notify_all();
                    return Ok(memory);
                }
                TensorState::Idle | TensorState::Taken => {
                    queue.tensors[index] = TensorState::Chosen;
                    queue.requested.push_back(index);
                    self.changed.notify_all();
                }
                in_progress => queue.tensors[index] = in_progress,
            }
            queue = self.wait(queue);
        }
    }

    /// Runs one reading thread until the reader is stopped or a thread fails. Only the first failure is recorded.
    fn run(&self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.read_pieces()));
        if let Err(error) = outcome.unwrap_or_else(|_| Err(anyhow!("a thread that reads weights panicked"))) {
            self.lock().failure.get_or_insert(format!("{error:#}"));
            self.changed.notify_all();
        }
    }

    fn read_pieces(&self) -> Result<()> {
        let mut staging = self.target.staging(self.options.piece_bytes).context("cannot allocate staging buffers")?;
        while let Some(piece) = self.next_piece()? {
            let name = &self.read_requests[piece.tensor].name;
            self.read_piece(&piece, &mut staging)
                .with_context(|| format!("cannot load tensor {name} from {}", piece.source.path.display()))?;
            self.piece_done(piece)?;
        }
        Ok(())
    }

    fn read_piece(&self, piece: &Piece<T::Memory>, staging: &mut T::Staging) -> Result<()> {
        // Let the disk start reading while this thread waits for a staging buffer.
        piece.source.advise(piece.start, piece.bytes);
        piece.source.read(&mut self.target.buffer(staging)?[..piece.bytes], piece.start)?;
        Ok(self.target.copy(staging, piece.bytes, &piece.memory, piece.offset)?)
    }

    /// Returns the next piece to read, waiting if necessary. Returns `None` once the reader is stopped or has failed.
    fn next_piece(&self) -> Result<Option<Piece<T::Memory>>> {
        let mut queue = self.lock();
        loop {
            if queue.is_stopped || queue.failure.is_some() {
                return Ok(None);
            }
            let requested = queue.requested.pop_front();
            if requested.is_none()
                && let Some(piece) = self.cut_piece(&mut queue)
            {
                return Ok(Some(piece));
            }
            let Some(tensor) = requested.or_else(|| self.choose_next(&mut queue)) else {
                queue = self.wait(queue);
                continue;
            };
            // Release the lock during the allocation, because the driver may take a long time to allocate memory.
            let request = &self.read_requests[tensor];
            queue.ahead_bytes += request.temporary_bytes();
            drop(queue);
            let memory = self.target.allocate(request.bytes());
            let memory = memory.with_context(|| format!("cannot allocate tensor {}", request.name))?;
            queue = self.lock();
            queue.tensors[tensor] = TensorState::Reading { memory: Arc::new(memory), left: request.bytes() };
            let open = OpenTensor { tensor, offset: 0 };
            if requested.is_some() {
                queue.open.push_front(open);
            } else {
                queue.open.push_back(open);
            }
            self.changed.notify_all();
        }
    }

    /// Removes and returns the next piece of the first tensor in `open`. Returns `None` if `open` is empty.
    fn cut_piece(&self, queue: &mut Queue<T::Memory>) -> Option<Piece<T::Memory>> {
        let OpenTensor { tensor, offset } = queue.open.pop_front()?;
        let (range, inside) = self.read_requests[tensor].range_at(offset)?;
        let bytes = (range.bytes - inside).min(self.options.piece_bytes);
        if offset + bytes < self.read_requests[tensor].bytes() {
            queue.open.push_front(OpenTensor { tensor, offset: offset + bytes });
        }
        let TensorState::Reading { memory, .. } = &queue.tensors[tensor] else {
            unreachable!("an open tensor is not in the Reading state")
        };
        let memory = memory.clone();
        Some(Piece { tensor, memory, offset, source: range.source.clone(), start: range.start + inside as u64, bytes })
    }

    /// Chooses the next tensor to read ahead, and returns its index.
    /// Returns `None` if no tensors are left, or if the next tensor would exceed the read-ahead limit.
    fn choose_next(&self, queue: &mut Queue<T::Memory>) -> Option<usize> {
        while queue.next < self.read_requests.len() {
            let tensor = queue.next;
            let ahead_bytes = queue.ahead_bytes + self.read_requests[tensor].temporary_bytes();
            let is_idle = matches!(queue.tensors[tensor], TensorState::Idle);
            if is_idle && ahead_bytes > self.options.ahead_bytes && queue.ahead_bytes > 0 {
                return None;
            }
            queue.next += 1;
            if is_idle {
                queue.tensors[tensor] = TensorState::Chosen;
                return Some(tensor);
            }
        }
        None
    }

    fn piece_done(&self, piece: Piece<T::Memory>) -> Result<()> {
        let mut queue = self.lock();
        drop(piece.memory);
        let progress = std::mem::replace(&mut queue.tensors[piece.tensor], TensorState::Chosen);
        let TensorState::Reading { memory, left } = progress else {
            unreachable!("the tensor of a piece is not in the Reading state")
        };
        let left = left - piece.bytes;
        if left > 0 {
            queue.tensors[piece.tensor] = TensorState::Reading { memory, left };
            return Ok(());
        }
        let Some(mut memory) = Arc::into_inner(memory) else {
            unreachable!("a piece still holds the memory of a complete tensor")
        };
        self.target.complete(&mut memory)?;
        queue.tensors[piece.tensor] = TensorState::Ready(memory);
        self.changed.notify_all();
        Ok(())
    }
}

impl ReadRequest {
    /// Returns the size of the tensor or stack of tensors, in bytes.
    pub fn bytes(&self) -> usize {
        self.ranges.iter().map(|range| range.bytes).sum()
    }

    fn temporary_bytes(&self) -> usize {
        if self.residency == Residency::Temporary { self.bytes() } else { 0 }
    }

    /// Returns the byte range that contains the tensor's byte at `offset`, and the offset of the byte in that range.
    /// Returns `None` if `offset` is past the end of the tensor.
    fn range_at(&self, offset: usize) -> Option<(&ByteRange, usize)> {
        let mut range_start = 0;
        self.ranges.iter().find_map(|range| {
            let inside = offset - range_start;
            range_start += range.bytes;
            (inside < range.bytes).then_some((range, inside))
        })
    }
}
