//! Prevents other threads from invalidating the capture of a CUDA graph.
//!
//! If any thread calls a function that waits for all work of a GPU, every running capture on this GPU fails with
//! `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`.
//! candle and cudarc call three such functions when they open or drop a device: `cublasCreate_v2`, `cublasDestroy_v2`
//! and `cuCtxSynchronize`. [`libraries`](super::libraries) therefore replaces them with the functions in this file,
//! which acquire [`capture_lock`] before they call the original functions.

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::cuda_backend::cudarc::cublas::sys::{cublasHandle_t, cublasStatus_t};
use candle_core::cuda_backend::cudarc::driver::sys::CUresult;

/// Acquires the lock for a graph capture.
/// While a thread holds the lock, `cublasCreate_v2`, `cublasDestroy_v2` and `cuCtxSynchronize` wait for it.
/// A thread that holds the lock must not open or drop a device, because the thread would wait for itself.
pub fn capture_lock() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

type CreateHandle = unsafe extern "C" fn(*mut cublasHandle_t) -> cublasStatus_t;
type DestroyHandle = unsafe extern "C" fn(cublasHandle_t) -> cublasStatus_t;
type Synchronize = unsafe extern "C" fn() -> CUresult;

/// The original `cublasCreate_v2`, `cublasDestroy_v2` and `cuCtxSynchronize`. Each of them waits for all work of a GPU.
#[derive(Clone, Copy)]
struct WaitingFunctions {
    create_handle: CreateHandle,
    destroy_handle: DestroyHandle,
    synchronize: Synchronize,
}

static WAITING: OnceLock<WaitingFunctions> = OnceLock::new();

/// The functions that replace `cublasCreate_v2`, `cublasDestroy_v2` and `cuCtxSynchronize`.
pub struct Replacements {
    pub create_handle: *mut c_void,
    pub destroy_handle: *mut c_void,
    pub synchronize: *mut c_void,
}

/// Stores the addresses of the original functions and returns their replacements.
///
/// # Safety
/// The addresses must be those of `cublasCreate_v2`, `cublasDestroy_v2` and `cuCtxSynchronize`.
pub unsafe fn replace(
    create_handle: *mut c_void,
    destroy_handle: *mut c_void,
    synchronize: *mut c_void,
) -> Replacements {
    // SAFETY: the function types match NVIDIA's headers.
    WAITING.get_or_init(|| unsafe {
        WaitingFunctions {
            create_handle: std::mem::transmute::<*mut c_void, CreateHandle>(create_handle),
            destroy_handle: std::mem::transmute::<*mut c_void, DestroyHandle>(destroy_handle),
            synchronize: std::mem::transmute::<*mut c_void, Synchronize>(synchronize),
        }
    });
    Replacements {
        create_handle: create_handle_between_captures as *mut c_void,
        destroy_handle: destroy_handle_between_captures as *mut c_void,
        synchronize: synchronize_between_captures as *mut c_void,
    }
}

/// Replaces `cublasCreate_v2`.
unsafe extern "C" fn create_handle_between_captures(handle: *mut cublasHandle_t) -> cublasStatus_t {
    let Some(waiting) = WAITING.get() else { return cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED };
    let _lock = capture_lock();
    // SAFETY: the caller keeps the contract of `cublasCreate_v2`.
    unsafe { (waiting.create_handle)(handle) }
}

/// Replaces `cublasDestroy_v2`.
unsafe extern "C" fn destroy_handle_between_captures(handle: cublasHandle_t) -> cublasStatus_t {
    let Some(waiting) = WAITING.get() else { return cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED };
    let _lock = capture_lock();
    // SAFETY: the caller keeps the contract of `cublasDestroy_v2`.
    unsafe { (waiting.destroy_handle)(handle) }
}

/// Replaces `cuCtxSynchronize`.
unsafe extern "C" fn synchronize_between_captures() -> CUresult {
    let Some(waiting) = WAITING.get() else { return CUresult::CUDA_ERROR_NOT_INITIALIZED };
    let _lock = capture_lock();
    // SAFETY: `cuCtxSynchronize` returns an error if no context is bound to this thread.
    unsafe { (waiting.synchronize)() }
}
