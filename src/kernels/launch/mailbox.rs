//! Words that a kernel sends to the host while the device continues.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

/// Slots of one u32 each in host memory, written by kernels and taken by the host. Zero means empty.
pub struct Mailbox {
    slots: *mut u32,
    count: usize,
    device: CudaDevice,
}

// SAFETY: every word is read and written whole and volatile, and the memory belongs to the mailbox until `drop`.
unsafe impl Send for Mailbox {}
// SAFETY: as above.
unsafe impl Sync for Mailbox {}

impl Mailbox {
    /// A mailbox with `count` empty slots.
    pub fn new(device: &CudaDevice, count: usize) -> Result<Arc<Self>> {
        device.cuda_stream().context().bind_to_thread().w()?;
        // The memory is mapped into the device's address space. With unified addressing, as on Linux, it has the same
        // address there.
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the memory is set to zero right away and freed in `drop`.
        let slots = unsafe { result::malloc_host(count * size_of::<u32>(), flags) }.w()?.cast::<u32>();
        // SAFETY: `count` words were allocated.
        unsafe { slots.write_bytes(0, count) };
        Ok(Arc::new(Self { slots, count, device: device.clone() }))
    }

    /// Takes the word of a slot and empties the slot. Returns zero if no word has arrived.
    pub fn take(&self, slot: usize) -> u32 {
        assert!(slot < self.count, "slot {slot} of {}", self.count);
        // SAFETY: the slot lies within the allocation. The callers' protocol lets the device write a slot again only
        // after its word was taken.
        unsafe {
            let word = self.slots.add(slot).read_volatile();
            if word != 0 {
                self.slots.add(slot).write_volatile(0);
            }
            word
        }
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.count
    }

    /// Returns the address of the slots on the device.
    pub(super) fn address(&self) -> u64 {
        self.slots as u64
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        // A kernel that is still queued must not write to freed memory. `drop` cannot report an error.
        let _ = self.device.cuda_stream().synchronize();
        // SAFETY: allocated by `new`, freed once.
        let _ = unsafe { result::free_host(self.slots.cast()) };
    }
}
