//! u32 words in host memory that the host and running kernels can both read and write.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use candle_core::cuda_backend::cudarc::driver::{result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};

/// Page-locked u32 words in host memory that are mapped into the address space of a GPU. All words start at zero.
pub struct HostWords {
    words: NonNull<AtomicU32>,
    count: usize,
    device: CudaDevice,
}

// SAFETY: the words belong to `self` until `drop`, and the host accesses them only as atomics.
unsafe impl Send for HostWords {}
// SAFETY: the host accesses the words only as atomics, so several threads may share `self`.
unsafe impl Sync for HostWords {}

impl HostWords {
    /// Allocates `count` words and sets them to zero.
    pub fn new(device: &CudaDevice, count: usize) -> Result<Arc<Self>> {
        device.cuda_stream().context().bind_to_thread().w()?;
        // CU_MEMHOSTALLOC_DEVICEMAP maps the memory into the device's address space.
        // With unified addressing, as on 64-bit Linux, the host address is also valid on the device.
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: any length is allowed, and the context is bound. `drop` frees the memory.
        let words = unsafe { result::malloc_host(count * size_of::<AtomicU32>(), flags) }.w()?;
        let Some(words) = NonNull::new(words.cast::<AtomicU32>()) else {
            bail!("cannot allocate {count} words of page-locked memory: the driver returned a null pointer")
        };
        // SAFETY: the allocation has space for `count` aligned words. Writing zeros initializes the words.
        unsafe { words.write_bytes(0, count) };
        Ok(Arc::new(Self { words, count, device: device.clone() }))
    }

    /// Returns the number of words.
    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns all words as atomics.
    pub fn words(&self) -> &[AtomicU32] {
        // SAFETY: all words are initialized and live as long as `self`. Because they are atomics, the device may write
        // to them at any time.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), self.count) }
    }

    /// Returns the words with the indices in `range`.
    pub fn range(self: &Arc<Self>, range: Range<usize>) -> HostWordRange<'_> {
        assert!(range.end <= self.count, "words {range:?} are out of range for {} words", self.count);
        HostWordRange { words: self, range }
    }

    /// Returns the address through which kernels access a word.
    pub fn address(&self, word: usize) -> u64 {
        assert!(word <= self.count, "word {word} is out of range for {} words", self.count);
        self.words.as_ptr() as u64 + (word * size_of::<u32>()) as u64
    }
}

/// A range of [`HostWords`]. The host writes to the first words of the range, and a kernel reads them.
pub struct HostWordRange<'w> {
    pub(super) words: &'w Arc<HostWords>,
    range: Range<usize>,
}

impl HostWordRange<'_> {
    /// Returns whether the range has at least `count` words.
    pub fn has_room_for(&self, count: usize) -> bool {
        count <= self.range.len()
    }

    /// Writes `values` to the first words of the range. Kernels that are queued later see these values.
    pub fn write(&self, values: &[u32]) {
        for (word, &value) in self.words.words()[self.range.clone()][..values.len()].iter().zip(values) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Returns the address through which kernels access the first word.
    pub(super) fn address(&self) -> u64 {
        self.words.address(self.range.start)
    }
}

impl Drop for HostWords {
    fn drop(&mut self) {
        // After a failed synchronization, a queued kernel may still use the words, so the words are leaked.
        if self.device.cuda_stream().synchronize().is_ok() {
            // SAFETY: `malloc_host` allocated the words, only `drop` frees them, and the stream's kernels have ended.
            let _ = unsafe { result::free_host(self.words.as_ptr().cast()) };
        }
    }
}
