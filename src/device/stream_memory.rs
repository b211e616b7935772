//! Replaces the driver's stream-ordered allocator with [`ReusedMemory`] on candle's streams,
//! for allocations of at most `MAX_BYTES` outside graph captures.
//!
//! A forward pass allocates and frees memory hundreds of times.
//! Threads of one process wait for each other in the driver's allocator, even if each thread uses a different GPU.
//! An allocation, a kernel launch and a free together take 5 µs if one thread uses one H100.
//! They take 41 µs in each of four threads that use one H100 each. The launch alone takes 3.4 and 4.3 µs.
//! The times are from 2026-11-27: see "Allocation on several GPUs" in docs/history/benchmarks.md.
//!
//! candle cannot use another allocator.
//! [`libraries`](super::libraries) therefore makes candle call the functions in this file instead of the driver's.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use candle_core::cuda_backend::cudarc::driver::sys;
use sys::{CUdeviceptr, CUresult, CUstream};

use super::reused_memory::{Driver, ReusedMemory};

type Allocate = unsafe extern "C" fn(*mut CUdeviceptr, usize, CUstream) -> CUresult;
type Free = unsafe extern "C" fn(CUdeviceptr, CUstream) -> CUresult;
type DestroyStream = unsafe extern "C" fn(CUstream) -> CUresult;

/// The driver's own functions that allocate memory, free memory and destroy a stream.
#[derive(Clone, Copy)]
struct DriverFunctions {
    allocate: Allocate,
    free: Free,
    destroy_stream: DestroyStream,
}

static DRIVER: OnceLock<DriverFunctions> = OnceLock::new();

/// The largest allocation in bytes that `ReusedMemory` serves. Larger allocations go to the driver.
/// Larger allocations are rare, and their segments would be hard to reuse.
const MAX_BYTES: usize = 32 << 20;

/// The maximum total size in bytes of a stream's unused segments. If a free exceeds this limit, the stream returns
/// segments to the driver, unless a graph is being captured on the stream.
/// A larger value would save calls to the driver, but leave less memory for other allocations.
const MAX_UNUSED_BYTES: usize = 128 << 20;

/// The memory of each stream that [`reuse`] was called for, by the stream's handle.
static STREAMS: RwLock<BTreeMap<usize, Arc<Mutex<ReusedMemory>>>> = RwLock::new(BTreeMap::new());

/// The functions that replace `cuMemAllocAsync`, `cuMemFreeAsync` and `cuStreamDestroy_v2`.
pub struct Replacements {
    pub allocate: *mut c_void,
    pub free: *mut c_void,
    pub destroy_stream: *mut c_void,
}

/// Stores the addresses of the driver's functions and returns their replacements.
///
/// # Safety
/// The addresses must be those of `cuMemAllocAsync`, `cuMemFreeAsync` and `cuStreamDestroy_v2`.
pub unsafe fn replace(allocate: *mut c_void, free: *mut c_void, destroy_stream: *mut c_void) -> Replacements {
    // SAFETY: the function types match NVIDIA's headers.
    DRIVER.get_or_init(|| unsafe {
        DriverFunctions {
            allocate: std::mem::transmute::<*mut c_void, Allocate>(allocate),
            free: std::mem::transmute::<*mut c_void, Free>(free),
            destroy_stream: std::mem::transmute::<*mut c_void, DestroyStream>(destroy_stream),
        }
    });
    Replacements {
        allocate: allocate_on_stream as *mut c_void,
        free: free_on_stream as *mut c_void,
        destroy_stream: release_and_destroy as *mut c_void,
    }
}

/// Makes allocations of at most `MAX_BYTES` on this stream reuse freed memory, until the stream is destroyed.
///
/// Memory that was allocated on this stream must be freed on this stream, because only this stream's `ReusedMemory`
/// can free it.
pub fn reuse(stream: CUstream) {
    let mut streams = STREAMS.write().unwrap_or_else(PoisonError::into_inner);
    streams.entry(stream as usize).or_default();
}

/// Returns the unused segments of a stream to the driver. The context of the stream must be bound to this thread.
pub fn release(stream: CUstream) -> Result<(), CUresult> {
    match (DRIVER.get(), memory_of(stream)) {
        (Some(&functions), Some(memory)) => lock(&memory).release(0, &mut OnStream { functions, stream }),
        _ => Ok(()),
    }
}

/// The driver's allocator for one stream.
struct OnStream {
    functions: DriverFunctions,
    stream: CUstream,
}

impl Driver for OnStream {
    type Error = CUresult;

    fn allocate(&mut self, bytes: usize) -> Result<u64, CUresult> {
        let mut address = 0;
        // SAFETY: any size is allowed, and the caller of the replaced function guarantees a valid stream.
        match unsafe { (self.functions.allocate)(&mut address, bytes, self.stream) } {
            CUresult::CUDA_SUCCESS => Ok(address),
            error => Err(error),
        }
    }

    fn free(&mut self, address: u64) -> Result<(), CUresult> {
        // SAFETY: `ReusedMemory` frees each segment once, and only if none of its blocks is in use.
        match unsafe { (self.functions.free)(address, self.stream) } {
            CUresult::CUDA_SUCCESS => Ok(()),
            error => Err(error),
        }
    }
}

fn lock(memory: &Mutex<ReusedMemory>) -> MutexGuard<'_, ReusedMemory> {
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

fn memory_of(stream: CUstream) -> Option<Arc<Mutex<ReusedMemory>>> {
    let streams = STREAMS.read().unwrap_or_else(PoisonError::into_inner);
    streams.get(&(stream as usize)).cloned()
}

/// Returns whether a CUDA graph is being captured on the stream. Also returns true if the driver reports an error.
/// During a capture, the driver must allocate the memory, because the memory belongs to the graph.
fn is_capturing(stream: CUstream) -> bool {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the caller of the replaced function guarantees a valid stream.
    let result = unsafe { sys::cuStreamIsCapturing(stream, &mut status) };
    result != CUresult::CUDA_SUCCESS || status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
}

/// Allocates memory on a stream. Replaces `cuMemAllocAsync`.
unsafe extern "C" fn allocate_on_stream(address: *mut CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
    let Some(&functions) = DRIVER.get() else { return CUresult::CUDA_ERROR_NOT_INITIALIZED };
    let is_reused = (1..=MAX_BYTES).contains(&bytes) && !is_capturing(stream);
    let Some(memory) = is_reused.then(|| memory_of(stream)).flatten() else {
        // SAFETY: the caller keeps the contract of `cuMemAllocAsync`.
        let allocate = || unsafe { (functions.allocate)(address, bytes, stream) };
        let result = allocate();
        // The driver counts unused segments as memory in use. Releasing these segments may free enough memory.
        let can_retry = result == CUresult::CUDA_ERROR_OUT_OF_MEMORY && !is_capturing(stream);
        return if can_retry && release(stream).is_ok() { allocate() } else { result };
    };
    match lock(&memory).allocate(bytes, &mut OnStream { functions, stream }) {
        Ok(allocated) => {
            // SAFETY: the caller passes a valid pointer.
            unsafe { *address = allocated };
            CUresult::CUDA_SUCCESS
        }
        Err(error) => error,
    }
}

/// Frees memory on a stream. Replaces `cuMemFreeAsync`.
unsafe extern "C" fn free_on_stream(address: CUdeviceptr, stream: CUstream) -> CUresult {
    let Some(&functions) = DRIVER.get() else { return CUresult::CUDA_ERROR_NOT_INITIALIZED };
    let memory = memory_of(stream);
    if let Some(mut memory) = memory.as_deref().map(lock)
        && memory.free(address)
    {
        if memory.unused_bytes() <= MAX_UNUSED_BYTES || is_capturing(stream) {
            return CUresult::CUDA_SUCCESS;
        }
        let released = memory.release(MAX_UNUSED_BYTES, &mut OnStream { functions, stream });
        return released.err().unwrap_or(CUresult::CUDA_SUCCESS);
    }
    // The memory is not from `ReusedMemory`, so the driver frees it.
    // SAFETY: the caller keeps the contract of `cuMemFreeAsync`.
    unsafe { (functions.free)(address, stream) }
}

/// Releases the unused memory of a stream and destroys the stream. Replaces `cuStreamDestroy_v2`.
unsafe extern "C" fn release_and_destroy(stream: CUstream) -> CUresult {
    let Some(functions) = DRIVER.get() else { return CUresult::CUDA_ERROR_NOT_INITIALIZED };
    // Destroy the stream even if its memory cannot be released, for example after a GPU error.
    let _ = release(stream);
    STREAMS.write().unwrap_or_else(PoisonError::into_inner).remove(&(stream as usize));
    // SAFETY: the caller keeps the contract of `cuStreamDestroy_v2`.
    unsafe { (functions.destroy_stream)(stream) }
}
