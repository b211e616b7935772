//! The way of bytes to a device: read into a staging buffer, copied from there by the device while the next buffer fills.
//!
//! On CUDA: pinned buffers, and one stream for all copies beside the stream of candle's device. A tensor's memory comes
//! from the same stream-ordered pool as candle's, allocated on the copy stream, so that no copy waits for what is
//! computed meanwhile; candle's stream waits for the last copy when the tensor is handed over, and owns it from there on.

use candle_core::{DType, Result, Tensor};

/// Where bytes go; its copies are made in the order in which they are queued.
pub trait Target: Send + Sync + 'static {
    /// What becomes a tensor, filled piece by piece.
    type Memory: Send + Sync;
    /// The staging buffers of one reading thread.
    type Staging;

    /// Buffers of `bytes` each.
    fn staging(&self, bytes: usize) -> Result<Self::Staging>;

    /// Memory for `bytes`, at least one, with nothing in it.
    fn allocate(&self, bytes: usize) -> Result<Self::Memory>;

    /// A buffer to fill; waits until none of its earlier copies is under way.
    fn buffer<'s>(&self, staging: &'s mut Self::Staging) -> Result<&'s mut [u8]>;

    /// Queues the copy of the first `bytes` of that buffer to `offset` in `memory`.
    fn copy(&self, staging: &mut Self::Staging, bytes: usize, memory: &Self::Memory, offset: usize) -> Result<()>;

    /// Says that copies to every byte of `memory` have been queued.
    fn complete(&self, memory: &mut Self::Memory) -> Result<()>;

    /// The tensor in `memory`, which is complete. Whatever is queued on the tensor's device from here on finds its bytes.
    fn tensor(&self, memory: Self::Memory, dtype: DType, shape: &[usize]) -> Result<Tensor>;
}

#[cfg(feature = "cuda")]
pub use with_cuda::CopyStream;

#[cfg(feature = "cuda")]
mod with_cuda {
    use std::ptr::NonNull;
    use std::sync::Arc;

    use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
    use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr, result};
    use candle_core::cuda_backend::{CudaDevice, CudaStorage, CudaStorageSlice, WrapErr};
    use candle_core::op::BackpropOp;
    use candle_core::{DType, Result, Storage, Tensor, bail};

    use super::Target;

    /// Buffers a thread: one is filled while the copy engine reads the other.
    const BUFFERS: usize = 2;

    /// A stream of copies to the GPU of a candle device.
    pub struct CopyStream {
        device: CudaDevice,
        stream: Arc<CudaStream>,
    }

    impl CopyStream {
        /// The device's event tracking must be off (as `device::open` leaves it): then cudarc adds nothing to either
        /// stream for there being a second one.
        pub fn new(device: &CudaDevice) -> Result<Self> {
            if device.is_event_tracking() {
                bail!("uploads order their streams themselves: turn event tracking off");
            }
            let stream = device.cuda_stream().context().new_stream().w()?;
            Ok(Self { device: device.clone(), stream })
        }
    }

    /// Memory of the copy stream. Dropped before it is a tensor, it is freed in that stream's order, after its copies.
    pub struct DeviceMemory {
        bytes: CudaSlice<u8>,
        /// Follows the last copy.
        arrived: Option<CudaEvent>,
    }

    pub struct Staging {
        buffers: [Pinned; BUFFERS],
        /// The buffer that is filled next.
        next: usize,
    }

    /// Page-locked host memory, all of it initialized.
    struct Pinned {
        start: NonNull<u8>,
        len: usize,
        /// Follows the last copy from here.
        copied: CudaEvent,
        stream: Arc<CudaStream>,
    }

    impl Pinned {
        fn new(len: usize, stream: &Arc<CudaStream>) -> Result<Self> {
            // Waiting threads sleep: spinning ones would take the cores from those that read.
            let copied = stream.context().new_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC)).w()?;
            // SAFETY: any length may be asked for, and the event above has bound the context. Flags 0: cached memory,
            // since the kernel's copy out of the page cache is no faster into a write-combined one.
            let start = unsafe { result::malloc_host(len, 0) }.w()?.cast::<u8>();
            let Some(start) = NonNull::new(start) else { bail!("the driver gave no pinned memory") };
            // SAFETY: `len` bytes were allocated. Zeroed so that it may be seen as a slice.
            unsafe { start.write_bytes(0, len) };
            Ok(Self { start, len, copied, stream: stream.clone() })
        }
    }

    impl Drop for Pinned {
        fn drop(&mut self) {
            // If the stream cannot tell whether it still reads the buffer, the buffer is better lost.
            if self.stream.synchronize().is_ok() {
                // SAFETY: allocated by `malloc_host`, freed once, and no copy is under way.
                let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
            }
        }
    }

    impl Target for CopyStream {
        type Memory = DeviceMemory;
        type Staging = Staging;

        fn staging(&self, bytes: usize) -> Result<Staging> {
            let buffers = [Pinned::new(bytes, &self.stream)?, Pinned::new(bytes, &self.stream)?];
            Ok(Staging { buffers, next: 0 })
        }

        fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
            // SAFETY: `complete` is called, and a tensor made of it, only after copies to all of it were queued.
            let bytes = unsafe { self.stream.alloc(bytes) }.w()?;
            Ok(DeviceMemory { bytes, arrived: None })
        }

        fn buffer<'s>(&self, staging: &'s mut Staging) -> Result<&'s mut [u8]> {
            let buffer = &mut staging.buffers[staging.next];
            buffer.copied.synchronize().w()?;
            // SAFETY: `len` initialized bytes that `buffer` owns, and the last copy from them is done.
            Ok(unsafe { std::slice::from_raw_parts_mut(buffer.start.as_ptr(), buffer.len) })
        }

        fn copy(&self, staging: &mut Staging, bytes: usize, memory: &DeviceMemory, offset: usize) -> Result<()> {
            let buffer = &staging.buffers[staging.next];
            assert!(bytes <= buffer.len && offset + bytes <= memory.bytes.len(), "a piece lies within its tensor");
            let address = memory.bytes.device_ptr(&self.stream).0 + offset as u64;
            // SAFETY: both ranges were checked. The buffer is written or freed again only after `copied` or the stream
            // was waited for; the memory is freed in this stream's order, or on one that waits for `arrived`.
            unsafe {
                let source = std::slice::from_raw_parts(buffer.start.as_ptr(), bytes);
                result::memcpy_htod_async(address, source, self.stream.cu_stream()).w()?;
            }
            buffer.copied.record(&self.stream).w()?;
            staging.next = (staging.next + 1) % BUFFERS;
            Ok(())
        }

        fn complete(&self, memory: &mut DeviceMemory) -> Result<()> {
            memory.arrived = Some(self.stream.record_event(None).w()?);
            Ok(())
        }

        fn tensor(&self, memory: DeviceMemory, dtype: DType, shape: &[usize]) -> Result<Tensor> {
            let elements: usize = shape.iter().product();
            let DeviceMemory { bytes, arrived: Some(arrived) } = memory else { bail!("a tensor before its bytes") };
            if elements * dtype.size_in_bytes() != bytes.len() {
                bail!("{} bytes are no tensor of {dtype:?} {shape:?}", bytes.len());
            }
            let stream = self.device.cuda_stream();
            stream.wait(&arrived).w()?;
            macro_rules! slice {
                ($variant:ident) => {
                    // SAFETY: an allocation of this length in bytes; any bits are a value of these types. It is written
                    // before whatever candle's stream does from here on, and will be freed in that stream's order.
                    CudaStorageSlice::$variant(unsafe { stream.upgrade_device_ptr(bytes.leak(), elements) })
                };
            }
            let slice = match dtype {
                DType::U8 => slice!(U8),
                DType::F32 => slice!(F32),
                DType::F16 => slice!(F16),
                DType::BF16 => slice!(BF16),
                other => bail!("weights are not kept in {other:?}"),
            };
            let storage = Storage::Cuda(CudaStorage { slice, device: self.device.clone() });
            Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
        }
    }
}
