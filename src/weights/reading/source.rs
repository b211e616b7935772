//! Reads the bytes of weights files.
//!
//! Files are read, never memory-mapped. If another process truncates a file during loading, the read returns an error.
//! With a mapping, access to a truncated page would kill this process with SIGBUS.

use std::borrow::Cow;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};

use crate::files;

/// The number of bytes that a [`RowBuffer`] reads at a time, unless a row is longer or the tensor ends.
/// A [`Window`] of this size fits in a core's L2 cache.
const WINDOW_BYTES: usize = 64 << 10;

/// An open file that contains weights.
pub struct WeightsFile {
    pub path: PathBuf,
    file: File,
    /// The size of the file at the time of opening, in bytes. Another process may have changed the size since.
    bytes: u64,
    /// The number of bytes read from the file since it was opened.
    read_bytes: AtomicU64,
}

impl WeightsFile {
    /// Opens a regular file for reading.
    pub fn open(path: &Path) -> Result<Self> {
        let file = files::open(path)?;
        let bytes = file.metadata().with_context(|| format!("cannot read {}", path.display()))?.len();
        tracing::info!(path = %path.display(), bytes, "opened");
        Ok(Self { path: path.to_path_buf(), file, bytes, read_bytes: AtomicU64::new(0) })
    }

    /// Returns the size of the file at the time of opening, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of bytes read from the file since it was opened. Bytes that were read twice count twice.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// On Linux, tells the kernel that `bytes` bytes at `offset` will be read soon. Errors are ignored.
    pub(in crate::weights) fn advise(&self, offset: u64, bytes: usize) {
        #[cfg(target_os = "linux")]
        {
            use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
            let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
            let _ = posix_fadvise(&self.file, offset as _, bytes as _, advice);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (offset, bytes);
    }

    /// Fills `buffer` with the bytes at `offset` in the file. Fails if the file ends before the buffer is full.
    /// Errors do not name the file.
    pub(in crate::weights) fn read(&self, mut buffer: &mut [u8], mut offset: u64) -> Result<()> {
        while !buffer.is_empty() {
            #[cfg(unix)]
            let read = std::os::unix::fs::FileExt::read_at(&self.file, buffer, offset);
            #[cfg(windows)]
            let read = std::os::windows::fs::FileExt::seek_read(&self.file, buffer, offset);
            match read {
                Ok(0) => bail!("the file is shorter than its header says; did another program truncate it?"),
                Ok(bytes) => {
                    self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                    buffer = &mut buffer[bytes..];
                    offset += bytes as u64;
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("cannot read the file"),
            }
        }
        Ok(())
    }

    /// Reads `bytes` bytes at `offset` in the file. Unlike errors of [`read`](Self::read), read errors name the file.
    pub(in crate::weights) fn read_to_vec(&self, offset: u64, bytes: usize) -> Result<Vec<u8>> {
        let mut buffer = with_capacity(bytes)?;
        buffer.resize(bytes, 0);
        self.read(&mut buffer, offset).with_context(|| format!("cannot read {}", self.path.display()))?;
        Ok(buffer)
    }
}

/// Creates an empty vector of the given capacity. Fails, rather than aborts, if there is not enough memory.
/// `capacity` may be huge, because a hostile sparse file can contain tensors of any size.
fn with_capacity<T>(capacity: usize) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    let reserved = vec.try_reserve_exact(capacity);
    reserved.with_context(|| format!("cannot allocate {capacity} elements of {} bytes", size_of::<T>()))?;
    Ok(vec)
}

/// A range of bytes in an open file, such as the bytes of a tensor.
#[derive(Clone)]
pub struct ByteRange {
    pub source: Arc<WeightsFile>,
    /// The offset of the range in the file, in bytes.
    pub start: u64,
    /// The length in bytes.
    pub bytes: usize,
}

/// The bytes of one tensor, in a local file or in memory.
#[derive(Clone)]
pub enum StoredBytes<'c> {
    File(ByteRange),
    Memory(&'c [u8]),
}

impl<'c> StoredBytes<'c> {
    /// Returns all bytes of the tensor. Reads the file, or borrows the bytes if they are already in memory.
    pub fn read(&self) -> Result<Cow<'c, [u8]>> {
        Ok(match self {
            Self::File(range) => range.source.read_to_vec(range.start, range.bytes)?.into(),
            Self::Memory(bytes) => (*bytes).into(),
        })
    }

    /// Returns the bytes as a tensor in host memory. `dtype` must be U8, F32, F16 or BF16.
    pub fn tensor(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Ok(match dtype {
            DType::U8 => Tensor::from_vec(self.read()?.into_owned(), shape, &Device::Cpu)?,
            DType::F32 => Tensor::from_vec(self.elements(f32::from_le_bytes)?, shape, &Device::Cpu)?,
            DType::F16 => Tensor::from_vec(self.elements(f16::from_le_bytes)?, shape, &Device::Cpu)?,
            DType::BF16 => Tensor::from_vec(self.elements(bf16::from_le_bytes)?, shape, &Device::Cpu)?,
            other => bail!("cannot load weights as {other:?}"),
        })
    }

    /// Converts the bytes of the tensor to elements of `N` bytes each.
    /// Reads a file piece by piece to avoid a second copy in memory.
    fn elements<T: WithDType, const N: usize>(&self, convert: fn([u8; N]) -> T) -> Result<Vec<T>> {
        let mut window = RowBuffer::default();
        let mut elements = with_capacity(self.len() / N)?;
        for start in (0..self.len()).step_by(WINDOW_BYTES) {
            let bytes = WINDOW_BYTES.min(self.len() - start);
            elements.extend(window.get(self, start, bytes)?.as_chunks().0.iter().map(|element| convert(*element)));
        }
        Ok(elements)
    }

    fn len(&self) -> usize {
        match self {
            Self::File(range) => range.bytes,
            Self::Memory(bytes) => bytes.len(),
        }
    }
}

/// The rows of a matrix in a file or in memory.
pub trait RowSource: Sync {
    /// Returns the bytes of a row, which may be stored in `buffer`.
    fn row<'b>(&'b self, row: usize, buffer: &'b mut RowBuffer) -> Result<&'b [u8]>;
}

/// Consecutive rows of `row_bytes` bytes each.
pub struct StoredRows<'c> {
    pub bytes: StoredBytes<'c>,
    pub row_bytes: usize,
}

impl RowSource for StoredRows<'_> {
    fn row<'b>(&'b self, row: usize, buffer: &'b mut RowBuffer) -> Result<&'b [u8]> {
        buffer.get(&self.bytes, row * self.row_bytes, self.row_bytes)
    }
}

/// A buffer for one thread that reads rows from files. A read fetches 64 KiB or one row, whichever is longer,
/// so a thread that reads short rows in order finds most of them in the buffer.
#[derive(Default)]
pub struct RowBuffer {
    /// Two windows, because the rows of a matrix may alternate between two tensors.
    /// The most recently used window comes first.
    windows: [Window; 2],
}

/// Consecutive bytes of a file, held in memory.
#[derive(Default)]
struct Window {
    /// The file that the bytes come from. `None` if the window is empty.
    source: Option<Arc<WeightsFile>>,
    /// The offset of the window in the file, in bytes.
    start: u64,
    bytes: Vec<u8>,
}

impl Window {
    /// If the window contains the `bytes` bytes at offset `start` of a file, returns their index in the window.
    fn position(&self, source: &Arc<WeightsFile>, start: u64, bytes: usize) -> Option<usize> {
        self.source.as_ref().filter(|own| Arc::ptr_eq(own, source))?;
        let position = usize::try_from(start.checked_sub(self.start)?).ok()?;
        (bytes <= self.bytes.len().checked_sub(position)?).then_some(position)
    }

    /// Fills the window with `bytes` bytes at the offset `start` of a file.
    fn fill(&mut self, source: &Arc<WeightsFile>, start: u64, bytes: usize) -> Result<()> {
        // Mark the window as empty, in case the read fails.
        self.source = None;
        self.bytes.resize(bytes, 0);
        source.read(&mut self.bytes, start).with_context(|| format!("cannot read {}", source.path.display()))?;
        (self.source, self.start) = (Some(source.clone()), start);
        Ok(())
    }
}

impl RowBuffer {
    /// Returns `bytes` bytes at the offset `start` of a tensor. Reads the file only if no window contains all of them.
    fn get<'b>(&'b mut self, tensor: &'b StoredBytes, start: usize, bytes: usize) -> Result<&'b [u8]> {
        let ByteRange { source, start: first, bytes: all } = match tensor {
            StoredBytes::Memory(all) => return Ok(&all[start..][..bytes]),
            StoredBytes::File(range) => range,
        };
        assert!(start + bytes <= *all, "a row is outside of its tensor");
        let offset = first + start as u64;
        if self.windows[0].position(source, offset, bytes).is_none() {
            self.windows.swap(0, 1);
        }
        let window = &mut self.windows[0];
        let position = match window.position(source, offset, bytes) {
            Some(position) => position,
            None => {
                window.fill(source, offset, bytes.max(WINDOW_BYTES).min(all - start))?;
                0
            }
        };
        Ok(&window.bytes[position..][..bytes])
    }
}
