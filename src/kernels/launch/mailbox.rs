//! A mailbox through which kernels send u32 words to the host while the device keeps running.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use candle_core::cuda_backend::cudarc::driver::{result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};

/// u32 slots in host memory. Kernels write nonzero words to the slots, and the host takes them. Zero means empty.
pub struct Mailbox {
    slots: NonNull<AtomicU32>,
    count: usize,
    device: CudaDevice,
}

// SAFETY: the mailbox owns the memory until `drop`, and the host accesses the slots only as atomics.
unsafe impl Send for Mailbox {}
// SAFETY: as above.
unsafe impl Sync for Mailbox {}

impl Mailbox {
    /// Creates a mailbox with `count` empty slots.
    pub fn new(device: &CudaDevice, count: usize) -> Result<Arc<Self>> {
        device.cuda_stream().context().bind_to_thread().w()?;
        // The memory is mapped into the device's address space.
        // With unified addressing, as on Linux, the host address is also valid on the device.
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: any length is allowed, and the context is bound. `drop` frees the memory.
        let slots = unsafe { result::malloc_host(count * size_of::<AtomicU32>(), flags) }.w()?;
        let Some(slots) = NonNull::new(slots.cast::<AtomicU32>()) else {
            bail!("cannot allocate pinned host memory for a mailbox: the driver returned a null pointer")
        };
        // SAFETY: the allocation has space for `count` slots and is page-aligned. Zeros initialize the slots.
        unsafe { slots.write_bytes(0, count) };
        Ok(Arc::new(Self { slots, count, device: device.clone() }))
    }

    /// Returns the word in a slot and empties the slot. Returns zero if no word has arrived.
    pub fn take(&self, slot: usize) -> u32 {
        assert!(slot < self.count, "slot {slot} is out of range for {} slots", self.count);
        // SAFETY: the slot is within the allocation, is initialized, and lives as long as `self`.
        let slot = unsafe { self.slots.add(slot).as_ref() };
        let word = slot.load(Ordering::Acquire);
        // The device does not write to a slot again until the host has emptied it, so this store loses no new word.
        if word != 0 {
            slot.store(0, Ordering::Release);
        }
        word
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.count
    }

    /// Returns the address of the slots on the device.
    pub(super) fn address(&self) -> u64 {
        self.slots.as_ptr() as u64
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        // After a failed synchronization, a queued kernel may still write to the slots, so the slots are leaked.
        if self.device.cuda_stream().synchronize().is_ok() {
            // SAFETY: `malloc_host` allocated the slots, only `drop` frees them, and all queued kernels have ended.
            let _ = unsafe { result::free_host(self.slots.as_ptr().cast()) };
        }
    }
}
