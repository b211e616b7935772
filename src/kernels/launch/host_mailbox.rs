//! A mailbox through which kernels send u32 words to the host while the device keeps running.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, bail};

use super::device::is_idle;
use super::host_words::HostWords;

/// u32 slots in host memory; zero means empty. Kernels write nonzero words. The host reads a word, then writes zero.
///
/// A kernel that writes to a slot may be queued only after the host has taken the slot's previous word.
/// `DecodeGraph` and `QueuedStepBuffers` therefore have a slot for every word that queued kernels may still send.
/// The words of queued steps are an exception on ranks other than the first: the host does not take these words, and
/// later steps overwrite them.
pub struct HostMailbox {
    slots: Arc<HostWords>,
    device: CudaDevice,
}

impl HostMailbox {
    /// Creates a mailbox with `count` empty slots.
    pub fn new(device: &CudaDevice, count: usize) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { slots: HostWords::new(device, count)?, device: device.clone() }))
    }

    /// Returns the word in a slot and empties the slot. Returns zero if no word has arrived.
    pub fn take(&self, slot: usize) -> u32 {
        let slot = &self.slots.words()[slot];
        let word = slot.load(Ordering::Acquire);
        // No other write to this slot is queued yet, so this store cannot overwrite a new word.
        if word != 0 {
            slot.store(0, Ordering::Release);
        }
        word
    }

    /// Waits until a word arrives in a slot, empties the slot and returns the word.
    /// Fails if queued work failed, or if the device has finished all work without sending the word.
    pub fn wait(&self, slot: usize) -> Result<u32> {
        let mut polls = 0u32;
        loop {
            let word = self.take(slot);
            if word != 0 {
                return Ok(word);
            }
            std::hint::spin_loop();
            polls += 1;
            // If the device failed or has no more work, no word will arrive.
            // Check rarely, because each check is slow.
            if polls.is_multiple_of(1 << 20) && is_idle(&self.device)? {
                return match self.take(slot) {
                    0 => bail!("cannot receive a result: the GPU finished all queued work without sending one"),
                    word => Ok(word),
                };
            }
        }
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Returns the slots from slot `first` on.
    pub fn slots_from(self: &Arc<Self>, first: usize) -> MailboxSlots<'_> {
        MailboxSlots { mailbox: self, first }
    }

    /// Returns the address through which kernels access a slot.
    pub(super) fn address(&self, slot: usize) -> u64 {
        self.slots.address(slot)
    }
}

/// The slots of a mailbox from slot `first` on. A kernel writes to the first of these slots.
#[derive(Clone, Copy)]
pub struct MailboxSlots<'m> {
    pub(super) mailbox: &'m Arc<HostMailbox>,
    pub(super) first: usize,
}

impl MailboxSlots<'_> {
    /// Returns whether there are at least `count` slots.
    pub fn has_room_for(&self, count: usize) -> bool {
        self.first + count <= self.mailbox.slots()
    }
}
