//! Tensors read by threads of their own, ahead of who asks for them.
//!
//! Each thread takes the next piece of a tensor, reads it into a staging buffer of its own and queues the copy from there.
//! Tensors are begun in the order they were listed in; one that is asked for and has not been begun goes first, whatever
//! the bound on reading ahead says. So whoever asks is always served, and waits until all copies of the tensor are
//! queued, not until they are done.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, bail};
use candle_core::{DType, Tensor};

use crate::kernels::upload::Target;

/// A file that weights are read from.
pub struct Source {
    pub path: PathBuf,
    pub file: File,
}

/// One tensor to be read.
pub struct Extent {
    pub name: String,
    /// Its bytes, one part after the other: a tensor of the file, or several that are used as one.
    pub parts: Vec<Part>,
    pub retention: Retention,
}

/// Bytes of a file.
pub struct Part {
    pub source: Arc<Source>,
    /// In the file.
    pub start: u64,
    /// At least one.
    pub bytes: usize,
}

/// Whether the memory that a tensor is read into outlives loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// The model keeps the tensor, at the same size. Reading it early takes no more memory than reading it late.
    Permanent,
    /// The tensor is converted and then freed, so only a few of these may be in memory at a time.
    Temporary,
}

/// How to read.
#[derive(Clone, Copy, Debug)]
pub struct ReadAheadOptions {
    pub threads: usize,
    /// Read and copied at once.
    pub piece_bytes: usize,
    /// Of passing tensors, read and not taken.
    pub ahead_bytes: usize,
}

impl Default for ReadAheadOptions {
    fn default() -> Self {
        // Eight threads copy out of the page cache as fast as a GPU takes it (43 GB/s on an H200; 28 with four, no more
        // with sixteen), with 64 MiB of staging buffers.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { threads: cores.clamp(2, 8), piece_bytes: 4 << 20, ahead_bytes: 512 << 20 }
    }
}

/// The threads and what they have read. Dropped, it stops them and waits for them.
pub struct ReadAhead<T: Target> {
    shared: Arc<Shared<T>>,
    names: HashMap<String, usize>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<T: Target> {
    target: T,
    extents: Vec<Extent>,
    settings: ReadAheadOptions,
    queue: Mutex<Queue<T::Memory>>,
    /// Something in the queue is not as it was.
    changed: Condvar,
}

struct Queue<M> {
    tensors: Vec<Progress<M>>,
    /// Asked for before they were begun.
    wanted: VecDeque<usize>,
    /// Everything listed before this one was begun.
    next: usize,
    /// Begun tensors, and how far their pieces have been handed to threads.
    open: VecDeque<(usize, usize)>,
    /// Of passing tensors, begun and not taken.
    ahead_bytes: usize,
    failure: Option<String>,
    stopped: bool,
}

enum Progress<M> {
    /// Nobody has asked for it nor begun it.
    Idle,
    /// Asked for, or about to get its memory.
    Chosen,
    /// With the bytes whose copies have yet to be queued.
    Reading {
        memory: Arc<M>,
        left: usize,
    },
    Ready(M),
    Taken,
}

/// What a thread does at a time.
struct Piece<M> {
    tensor: usize,
    memory: Arc<M>,
    /// In the tensor.
    offset: usize,
    source: Arc<Source>,
    /// In the file.
    start: u64,
    bytes: usize,
}

impl<T: Target> ReadAhead<T> {
    /// Begins to read `extents` in their order.
    pub fn start(target: T, extents: Vec<Extent>, settings: ReadAheadOptions) -> Result<Self> {
        let names = extents.iter().enumerate().map(|(index, extent)| (extent.name.clone(), index)).collect();
        let parts = extents.iter().flat_map(|extent| &extent.parts);
        let pieces: usize = parts.map(|part| part.bytes.div_ceil(settings.piece_bytes)).sum();
        let queue = Queue {
            tensors: extents.iter().map(|_| Progress::Idle).collect(),
            wanted: VecDeque::new(),
            next: 0,
            open: VecDeque::new(),
            ahead_bytes: 0,
            failure: None,
            stopped: false,
        };
        let shared = Shared { target, extents, settings, queue: Mutex::new(queue), changed: Condvar::new() };
        let mut reader = Self { shared: Arc::new(shared), names, threads: Vec::new() };
        for _ in 0..settings.threads.clamp(1, pieces.max(1)) {
            let shared = reader.shared.clone();
            let thread = std::thread::Builder::new().name("weights".into()).spawn(move || shared.run());
            reader.threads.push(thread.context("cannot start a thread to read weights")?);
        }
        Ok(reader)
    }

    /// Whether the tensor was listed.
    pub fn contains(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }

    /// Waits for a listed tensor and hands it out; if asked for again, it is read again.
    pub fn take(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let Some(&index) = self.names.get(name) else { bail!("tensor {name} was not listed to be read") };
        let memory = self.shared.take(index)?;
        self.shared.target.tensor(memory, dtype, shape).with_context(|| format!("cannot use tensor {name}"))
    }
}

impl<T: Target> Drop for ReadAhead<T> {
    fn drop(&mut self) {
        self.shared.lock().stopped = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // Its panics were caught.
            let _ = thread.join();
        }
    }
}

impl<T: Target> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Queue<T::Memory>> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn wait<'q>(&self, queue: MutexGuard<'q, Queue<T::Memory>>) -> MutexGuard<'q, Queue<T::Memory>> {
        self.changed.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn take(&self, index: usize) -> Result<T::Memory> {
        let mut queue = self.lock();
        loop {
            if let Some(failure) = &queue.failure {
                bail!("{failure}");
            }
            match std::mem::replace(&mut queue.tensors[index], Progress::Taken) {
                Progress::Ready(memory) => {
                    queue.ahead_bytes -= self.extents[index].passing_bytes();
                    self.changed.notify_all();
                    return Ok(memory);
                }
                Progress::Idle | Progress::Taken => {
                    queue.tensors[index] = Progress::Chosen;
                    queue.wanted.push_back(index);
                    self.changed.notify_all();
                }
                under_way => queue.tensors[index] = under_way,
            }
            queue = self.wait(queue);
        }
    }

    /// One thread's life.
    fn run(&self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.read_pieces()));
        if let Err(error) = outcome.unwrap_or_else(|_| Err(anyhow!("a thread that reads weights panicked"))) {
            self.lock().failure.get_or_insert(format!("{error:#}"));
            self.changed.notify_all();
        }
    }

    fn read_pieces(&self) -> Result<()> {
        let mut staging = self.target.staging(self.settings.piece_bytes).context("cannot get staging buffers")?;
        while let Some(piece) = self.next_piece()? {
            let name = &self.extents[piece.tensor].name;
            self.read_piece(&piece, &mut staging)
                .with_context(|| format!("cannot load tensor {name} from {}", piece.source.path.display()))?;
            self.piece_done(piece)?;
        }
        Ok(())
    }

    fn read_piece(&self, piece: &Piece<T::Memory>, staging: &mut T::Staging) -> Result<()> {
        // The disk begins while this thread waits for a buffer.
        piece.source.announce(piece.start, piece.bytes);
        piece.source.read(&mut self.target.buffer(staging)?[..piece.bytes], piece.start)?;
        Ok(self.target.copy(staging, piece.bytes, &piece.memory, piece.offset)?)
    }

    /// The next piece to be read; none at the end.
    fn next_piece(&self) -> Result<Option<Piece<T::Memory>>> {
        let mut queue = self.lock();
        loop {
            if queue.stopped || queue.failure.is_some() {
                return Ok(None);
            }
            let asked = queue.wanted.pop_front();
            if asked.is_none()
                && let Some(piece) = self.cut_piece(&mut queue)
            {
                return Ok(Some(piece));
            }
            let Some(tensor) = asked.or_else(|| self.choose(&mut queue)) else {
                queue = self.wait(queue);
                continue;
            };
            // Allocating takes its time where the driver has to find memory first.
            let extent = &self.extents[tensor];
            queue.ahead_bytes += extent.passing_bytes();
            drop(queue);
            let memory = self.target.allocate(extent.bytes());
            let memory = memory.with_context(|| format!("cannot allocate tensor {}", extent.name))?;
            queue = self.lock();
            queue.tensors[tensor] = Progress::Reading { memory: Arc::new(memory), left: extent.bytes() };
            if asked.is_some() {
                queue.open.push_front((tensor, 0))
            } else {
                queue.open.push_back((tensor, 0))
            }
            self.changed.notify_all();
        }
    }

    /// The next piece of the tensors that have been begun.
    fn cut_piece(&self, queue: &mut Queue<T::Memory>) -> Option<Piece<T::Memory>> {
        let (tensor, offset) = queue.open.pop_front()?;
        let (part, inside) = self.extents[tensor].part_at(offset)?;
        let bytes = (part.bytes - inside).min(self.settings.piece_bytes);
        if offset + bytes < self.extents[tensor].bytes() {
            queue.open.push_front((tensor, offset + bytes));
        }
        let Progress::Reading { memory, .. } = &queue.tensors[tensor] else { unreachable!("an open tensor is read") };
        let (memory, source, start) = (memory.clone(), part.source.clone(), part.start + inside as u64);
        Some(Piece { tensor, memory, offset, source, start, bytes })
    }

    /// The next tensor to be begun without having been asked for, unless there is enough of what will pass.
    fn choose(&self, queue: &mut Queue<T::Memory>) -> Option<usize> {
        while queue.next < self.extents.len() {
            let tensor = queue.next;
            let ahead_bytes = queue.ahead_bytes + self.extents[tensor].passing_bytes();
            let idle = matches!(queue.tensors[tensor], Progress::Idle);
            if idle && ahead_bytes > self.settings.ahead_bytes && queue.ahead_bytes > 0 {
                return None;
            }
            queue.next += 1;
            if idle {
                queue.tensors[tensor] = Progress::Chosen;
                return Some(tensor);
            }
        }
        None
    }

    fn piece_done(&self, piece: Piece<T::Memory>) -> Result<()> {
        let mut queue = self.lock();
        drop(piece.memory);
        let progress = std::mem::replace(&mut queue.tensors[piece.tensor], Progress::Chosen);
        let Progress::Reading { memory, left } = progress else { unreachable!("a piece of a tensor that is not read") };
        let left = left - piece.bytes;
        if left > 0 {
            queue.tensors[piece.tensor] = Progress::Reading { memory, left };
            return Ok(());
        }
        let Some(mut memory) = Arc::into_inner(memory) else { unreachable!("all pieces have let go of their tensor") };
        self.target.complete(&mut memory)?;
        queue.tensors[piece.tensor] = Progress::Ready(memory);
        self.changed.notify_all();
        Ok(())
    }
}

impl Extent {
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    fn passing_bytes(&self) -> usize {
        if self.retention == Retention::Temporary { self.bytes() } else { 0 }
    }

    /// The part that holds the byte at `offset`, and where in it.
    fn part_at(&self, offset: usize) -> Option<(&Part, usize)> {
        let mut before = 0;
        self.parts.iter().find_map(|part| {
            let inside = offset - before;
            before += part.bytes;
            (inside < part.bytes).then_some((part, inside))
        })
    }
}

impl Source {
    /// Tells the system that these bytes are read next. Advice only: what comes of it is not looked at.
    fn announce(&self, offset: u64, bytes: usize) {
        #[cfg(target_os = "linux")]
        {
            use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
            let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
            let _ = posix_fadvise(&self.file, offset as _, bytes as _, advice);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (offset, bytes);
    }

    /// Fills `buffer` with the bytes at `offset`.
    fn read(&self, mut buffer: &mut [u8], mut offset: u64) -> Result<()> {
        while !buffer.is_empty() {
            #[cfg(unix)]
            let read = std::os::unix::fs::FileExt::read_at(&self.file, buffer, offset);
            #[cfg(windows)]
            let read = std::os::windows::fs::FileExt::seek_read(&self.file, buffer, offset);
            match read {
                Ok(0) => bail!("the file ends {} bytes short of what its header says", buffer.len()),
                Ok(bytes) => {
                    buffer = &mut buffer[bytes..];
                    offset += bytes as u64;
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("reading failed"),
            }
        }
        Ok(())
    }
}
