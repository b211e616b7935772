//! Uploads weights to a device through staging buffers. The device copies one buffer while a thread fills the next.
//!
//! On CUDA, the staging buffers are pinned, and the copies run on a stream of their own, the copy stream.
//! The tensors use the same memory pool as candle, but their memory is allocated on the copy stream,
//! so that copies do not have to wait for computations on candle's stream.
//! Before candle's stream uses a tensor, it waits for the copies to that tensor.

use candle_core::{DType, Result, Tensor};

/// The device that receives an upload. Copies run in the order in which they are queued.
pub trait UploadTarget: Send + Sync + 'static {
    /// Device memory that one or more copies fill before it becomes a tensor.
    type Memory: Send + Sync;
    /// The staging buffers of one reader thread.
    type Staging: Send;

    /// Creates the staging buffers of one reader thread, each `bytes` long.
    fn staging(&self, bytes: usize) -> Result<Self::Staging>;

    /// Allocates `bytes` bytes of uninitialized device memory. `bytes` is at least 1.
    fn allocate(&self, bytes: usize) -> Result<Self::Memory>;

    /// Waits until no copy reads from the next staging buffer, then returns the buffer for the caller to fill.
    fn buffer<'s>(&self, staging: &'s mut Self::Staging) -> Result<&'s mut [u8]>;

    /// Queues a copy of the first `bytes` bytes of the buffer that [`buffer`](Self::buffer) has just returned.
    /// The destination starts at byte `offset` of `memory`.
    fn copy(&self, staging: &mut Self::Staging, bytes: usize, memory: &Self::Memory, offset: usize) -> Result<()>;

    /// Marks `memory` as complete. The caller must have queued copies to all of its bytes.
    fn complete(&self, memory: &mut Self::Memory) -> Result<()>;

    /// Converts complete `memory` to a tensor. Work that is queued on the device afterward sees the uploaded bytes.
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

    use super::UploadTarget;

    /// The number of staging buffers per reader thread: the thread fills one while the GPU copies from the other.
    const BUFFERS: usize = 2;

    /// A CUDA stream that copies data to the GPU of a candle device.
    pub struct CopyStream {
        device: CudaDevice,
        stream: Arc<CudaStream>,
    }

    impl CopyStream {
        /// Creates a stream for copies to the GPU of `device`.
        ///
        /// The device's event tracking must be off (`device::open` turns it off).
        /// With event tracking, cudarc would make the copy stream and candle's stream wait for each other.
        pub fn new(device: &CudaDevice) -> Result<Self> {
            if device.is_event_tracking() {
                bail!("cannot upload: event tracking is on for this device; open the device with `device::open`");
            }
            let stream = device.cuda_stream().context().new_stream().w()?;
            Ok(Self { device: device.clone(), stream })
        }
    }

    /// Device memory allocated on the copy stream. If it is dropped before it becomes a tensor, it is freed after all
    /// queued copies.
    pub struct DeviceMemory {
        bytes: CudaSlice<u8>,
        /// The event recorded after the last copy to this memory. `None` until `complete` is called.
        arrived: Option<CudaEvent>,
    }

    pub struct Staging {
        buffers: [Pinned; BUFFERS],
        /// The index of the staging buffer to fill next.
        next: usize,
    }

    /// One staging buffer: pinned, initialized host memory.
    struct Pinned {
        start: NonNull<u8>,
        len: usize,
        /// The event recorded after the last copy from this buffer.
        copied: CudaEvent,
        stream: Arc<CudaStream>,
    }

    impl Pinned {
        fn new(len: usize, stream: &Arc<CudaStream>) -> Result<Self> {
            // With this flag, a thread that waits for `copied` sleeps. Spinning would take a core from other readers.
            let copied = stream.context().new_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC)).w()?;
            // Flags of 0 request ordinary cached memory instead of write-combined memory.
            // SAFETY: any length is allowed, and creating the event has bound the CUDA context to this thread.
            let start = unsafe { result::malloc_host(len, 0) }.w()?.cast::<u8>();
            let Some(start) = NonNull::new(start) else {
                bail!("cannot allocate {len} bytes of pinned memory: the driver returned null")
            };
            // SAFETY: `len` bytes were allocated. Zeroing them initializes the slices that `buffer` returns.
            unsafe { start.write_bytes(0, len) };
            Ok(Self { start, len, copied, stream: stream.clone() })
        }
    }

    // SAFETY: the memory belongs to this value, and any thread may use and free it.
    unsafe impl Send for Pinned {}

    impl Drop for Pinned {
        fn drop(&mut self) {
            // If the stream reports an error, a copy may still be reading the buffer. The buffer is then leaked.
            if self.stream.synchronize().is_ok() {
                // SAFETY: allocated by `malloc_host`, freed once, and no copy is in progress.
                let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
            }
        }
    }

    impl UploadTarget for CopyStream {
        type Memory = DeviceMemory;
        type Staging = Staging;

        fn staging(&self, bytes: usize) -> Result<Staging> {
            let buffers = [Pinned::new(bytes, &self.stream)?, Pinned::new(bytes, &self.stream)?];
            Ok(Staging { buffers, next: 0 })
        }

        fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
            // SAFETY: the memory becomes a tensor only after `complete`. By then, copies to all its bytes are queued.
            let bytes = unsafe { self.stream.alloc(bytes) }.w()?;
            Ok(DeviceMemory { bytes, arrived: None })
        }

        fn buffer<'s>(&self, staging: &'s mut Staging) -> Result<&'s mut [u8]> {
            let buffer = &mut staging.buffers[staging.next];
            buffer.copied.synchronize().w()?;
            // SAFETY: `buffer` owns `len` initialized bytes, and the last copy from them has finished.
            Ok(unsafe { std::slice::from_raw_parts_mut(buffer.start.as_ptr(), buffer.len) })
        }

        fn copy(&self, staging: &mut Staging, bytes: usize, memory: &DeviceMemory, offset: usize) -> Result<()> {
            let buffer = &staging.buffers[staging.next];
            assert!(
                bytes <= buffer.len && offset + bytes <= memory.bytes.len(),
                "the copy exceeds its staging buffer or the device memory"
            );
            let address = memory.bytes.device_ptr(&self.stream).0 + offset as u64;
            // SAFETY: both ranges are checked above.
            // The buffer is written again only after the event `copied`, and freed only after the stream has finished.
            // The device memory is freed on this stream, or on a stream that waits for the event `arrived`.
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
            let DeviceMemory { bytes, arrived: Some(arrived) } = memory else {
                bail!("cannot make a tensor: the upload is not complete")
            };
            if elements * dtype.size_in_bytes() != bytes.len() {
                bail!("cannot make a {dtype:?} tensor of shape {shape:?} from {} bytes", bytes.len());
            }
            let stream = self.device.cuda_stream();
            stream.wait(&arrived).w()?;
            macro_rules! slice {
                ($variant:ident) => {
                    // SAFETY: the allocation has this length, and any bit pattern is valid for these types.
                    // The copies finish before later work on candle's stream starts. That stream frees the allocation.
                    CudaStorageSlice::$variant(unsafe { stream.upgrade_device_ptr(bytes.leak(), elements) })
                };
            }
            let slice = match dtype {
                DType::U8 => slice!(U8),
                DType::F32 => slice!(F32),
                DType::F16 => slice!(F16),
                DType::BF16 => slice!(BF16),
                other => bail!("cannot upload weights in dtype {other:?}"),
            };
            let storage = Storage::Cuda(CudaStorage { slice, device: self.device.clone() });
            Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
        }
    }
}
