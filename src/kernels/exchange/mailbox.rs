//! The mailbox of a rank, in memory that the GPUs of all ranks can access.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use candle_core::cuda_backend::cudarc::driver::{CudaContext, result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};

use super::path::ExchangePath;
use super::sizes::MAILBOX_BYTES;
use crate::kernels::launch::HostWords;

/// The bytes allocated for a rank's exchange state. The kernels use three words (`Mailboxes` in `exchange.cuh`).
const STATE_BYTES: usize = 256;

/// The mailbox of a rank, with the rank's exchange state and launch counters.
/// Every rank holds a reference, so the mailbox lives as long as any rank uses it.
pub(super) struct RankMailbox {
    device: CudaDevice,
    pub context: Arc<CudaContext>,
    pub path: ExchangePath,
    /// The device address of the mailbox. Its memory is not from candle's pool, which other GPUs cannot access.
    pub address: u64,
    /// The device address of the rank's exchange state, in GPU memory.
    pub state: u64,
    /// A word in host memory. A nonzero value ends the exchange.
    /// All ranks use the control word of rank 0. The control words of the other ranks are unused.
    pub control: Arc<HostWords>,
    /// How many times this rank has been ready to launch an operation, or a CUDA graph with operations.
    pub ready: AtomicU64,
    /// How many operations, or CUDA graphs with operations, this rank has launched.
    pub launched: AtomicU64,
}

impl RankMailbox {
    /// Allocates an empty mailbox, in GPU memory or in host memory, as `path` requires.
    pub fn new(device: &CudaDevice, path: ExchangePath) -> Result<Self> {
        let stream = device.cuda_stream();
        let context = stream.context().clone();
        context.bind_to_thread().w()?;
        let control = HostWords::new(device, 1)?;
        // SAFETY: any size is allowed, and the context is bound. `drop` frees the memory.
        let state = unsafe { result::malloc_sync(STATE_BYTES) }.w()?;
        let (ready, launched) = (AtomicU64::new(0), AtomicU64::new(0));
        // If the next allocation fails, dropping the mailbox frees the state. Freeing address 0 does nothing.
        let mut mailbox = Self { device: device.clone(), context, path, address: 0, state, control, ready, launched };
        // SAFETY: the context is bound, and each memset writes exactly the bytes of one allocation.
        unsafe {
            result::memset_d8_async(state, 0, STATE_BYTES, stream.cu_stream()).w()?;
            mailbox.address = match path {
                ExchangePath::Direct => result::malloc_sync(MAILBOX_BYTES).w()?,
                // With unified addressing, as on 64-bit Linux, the host address is also valid on all GPUs.
                ExchangePath::HostMemory => {
                    let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
                    result::malloc_host(MAILBOX_BYTES, flags).w()? as u64
                }
            };
            // Every word of an empty mailbox is `EMPTY` (`exchange.cuh`).
            result::memset_d8_async(mailbox.address, 0xff, MAILBOX_BYTES, stream.cu_stream()).w()?;
        }
        stream.synchronize().w()?;
        Ok(mailbox)
    }

    /// Gives the GPU of this mailbox access to the mailbox of `peer`.
    /// Fails if this requires peer access between the GPUs and they do not support it.
    pub fn enable_access_to(&self, peer: &RankMailbox) -> Result<()> {
        if self.path == ExchangePath::HostMemory || self.context.cu_device() == peer.context.cu_device() {
            return Ok(());
        }
        self.context.bind_to_thread().w()?;
        let mut can_access = 0;
        // SAFETY: both devices exist, and the context of the peer is alive.
        unsafe {
            sys::cuDeviceCanAccessPeer(&mut can_access, self.context.cu_device(), peer.context.cu_device())
                .result()
                .w()?;
            if can_access == 0 {
                bail!("a GPU cannot access the memory of another GPU");
            }
            match sys::cuCtxEnablePeerAccess(peer.context.cu_ctx(), 0) {
                sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
                result => result.result().w(),
            }
        }
    }
}

impl Drop for RankMailbox {
    fn drop(&mut self) {
        // If binding or synchronizing fails, a queued kernel may still use the memory, so the memory is leaked.
        if self.context.bind_to_thread().is_ok() && self.device.cuda_stream().synchronize().is_ok() {
            // SAFETY: `new` allocated the memory. No kernel uses it any longer: before a rank drops its reference to
            // the mailbox, `GpuExchange::drop` waits for the rank's kernels.
            let _ = unsafe {
                match self.path {
                    ExchangePath::Direct => result::free_sync(self.address),
                    ExchangePath::HostMemory => result::free_host(self.address as *mut _),
                }
                .and(result::free_sync(self.state))
            };
        }
    }
}
