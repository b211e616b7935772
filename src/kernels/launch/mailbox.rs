//! A mailbox for words that kernels send to the host while the device keeps running.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

/// u32 slots in host memory. Kernels write words to the slots, and the host takes them. An empty slot is zero.
pub struct Mailbox {
    slots: *mut u32,
    count: usize,
    device: CudaDevice,
}

// SAFETY: every access is volatile and covers a whole word, and the mailbox owns the memory until `drop`.
unsafe impl Send for Mailbox {}
// SAFETY: as above.
unsafe impl Sync for Mailbox {}

impl Mailbox {
    /// Creates a mailbox with `count` empty slots.
    pub fn new(device: &CudaDevice, count: usize) -> Result<Arc<Self>> {
        device.cuda_stream().context().bind_to_thread().w()?;
        // The memory is mapped into the device's address space.
        // With unified addressing, as on Linux, host and device use the same address for it.
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the memory is set to zero right away and freed in `drop`.
        let slots = unsafe { result::malloc_host(count * size_of::<u32>(), flags) }.w()?.cast::<u32>();
        // SAFETY: `count` words were allocated.
        unsafe { slots.write_bytes(0, count) };
        Ok(Arc::new(Self { slots, count, device: device.clone() }))
    }

    /// Returns the word in a slot and empties the slot. Returns zero if no word has arrived.
    pub fn take(&self, slot: usize) -> u32 {
        assert!(slot < self.count, "slot {slot} is out of range for {} slots", self.count);
        // SAFETY: the slot is within the allocation.
        // By convention, the device does not write to a slot again until the host has emptied it.
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
