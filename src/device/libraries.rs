//! Loads NVIDIA's libraries on the first use of a GPU. docs/nvidia-libraries.md explains why and lists alternatives.
//!
//! candle links against these libraries. Without this file, the dynamic loader would load them before `main`.
//! Every command, even `inferno --help`, would then start more slowly, mostly because of cuBLAS.
//! On a machine without the driver library, no command would start, not even those that need no GPU.
//!
//! This file therefore defines every function of these libraries that candle, cudarc and inferno call.
//! Each definition jumps to an address that [`load`] looks up.
//!
//! The linker prefers the definitions in this file over those in the libraries.
//! rustc passes `--as-needed`, so the linker drops a library if the program uses none of its functions.
//!
//! A call to a function that is missing from this file still works, but makes the linker keep the function's library.
//! The test `startup_loads_no_nvidia_library` then fails, except in debug builds linked with GNU ld.
//! Those builds always keep the libraries, because GNU ld also counts calls in unreachable code.

use std::arch::naked_asm;
use std::error::Error;
use std::ffi::{OsStr, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::Library;

use super::{capture, stream_memory};

/// The jump target of a library function: [`called_before_load`] until [`load`] stores the function or a replacement.
type Address = AtomicPtr<c_void>;

/// The file name of a library, with the names and addresses of its functions.
type LibraryTable = (&'static str, &'static [(&'static str, &'static Address)]);

/// The reason why a library cannot be used, and a hint for the user.
pub struct LoadError {
    /// One line, such as `libcuda.so.1: cannot open shared object file: No such file or directory`.
    pub reason: String,
    /// The user's next step, such as `update NVIDIA's driver`.
    pub hint: &'static str,
}

/// The file name of the driver library.
const DRIVER: &str = "libcuda.so.1";

/// A driver function that CUDA 12.8 introduced. Builds with CUDA 12 do not call it, so they accept older drivers.
const SINCE_CUDA_12_8: &str = "cuEventElapsedTime_v2";

/// Loads the libraries on the first call. Later calls return the first call's result.
pub fn load() -> Result<(), &'static LoadError> {
    static LOADED: OnceLock<Result<(), LoadError>> = OnceLock::new();
    let load_all = || LIBRARIES.iter().try_for_each(load_library).map(|()| replace_functions());
    LOADED.get_or_init(load_all).as_ref().copied()
}

/// Replaces `cuMemAllocAsync`, `cuMemFreeAsync` and `cuStreamDestroy_v2` with functions of [`stream_memory`],
/// and `cublasCreate_v2`, `cublasDestroy_v2` and `cuCtxSynchronize` with functions of [`capture`].
fn replace_functions() {
    use addresses::{cuCtxSynchronize, cuMemAllocAsync, cuMemFreeAsync, cuStreamDestroy_v2};
    use addresses::{cublasCreate_v2, cublasDestroy_v2};
    let loaded = |function: &Address| function.load(Ordering::Acquire);
    let replace = |function: &Address, by| function.store(by, Ordering::Release);
    // SAFETY: `load_library` has stored the driver's addresses of these three functions.
    let memory = unsafe {
        stream_memory::replace(loaded(&cuMemAllocAsync), loaded(&cuMemFreeAsync), loaded(&cuStreamDestroy_v2))
    };
    replace(&cuMemAllocAsync, memory.allocate);
    replace(&cuMemFreeAsync, memory.free);
    replace(&cuStreamDestroy_v2, memory.destroy_stream);
    // SAFETY: `load_library` has stored NVIDIA's addresses of these three functions.
    let waits =
        unsafe { capture::replace(loaded(&cublasCreate_v2), loaded(&cublasDestroy_v2), loaded(&cuCtxSynchronize)) };
    replace(&cublasCreate_v2, waits.create_handle);
    replace(&cublasDestroy_v2, waits.destroy_handle);
    replace(&cuCtxSynchronize, waits.synchronize);
}

/// Loads one library and stores the addresses of its functions.
fn load_library((file, functions): &LibraryTable) -> Result<(), LoadError> {
    let is_driver = *file == DRIVER;
    let library = open(file).map_err(|reason| LoadError {
        reason,
        hint: if is_driver {
            "install NVIDIA's driver, then check that `nvidia-smi` lists the GPU"
        } else {
            "install CUDA, or add the directory of its libraries to LD_LIBRARY_PATH"
        },
    })?;
    for (name, address) in *functions {
        // SAFETY: only the symbol's address is used here. Callers declare the function as NVIDIA's headers do.
        match unsafe { library.get::<*mut c_void>(name.as_bytes()) } {
            Ok(function) => address.store(*function, Ordering::Release),
            Err(_) if *name == SINCE_CUDA_12_8 && env!("INFERNO_CUDA_MAJOR") == "12" => {}
            Err(_) => {
                let reason = format!("{file} is too old for this build: it has no {name}");
                let hint = if is_driver {
                    "update NVIDIA's driver"
                } else {
                    "install the CUDA version that inferno was built with"
                };
                return Err(LoadError { reason, hint });
            }
        }
    }
    // Never unload the library, because the stored addresses point into it.
    std::mem::forget(library);
    Ok(())
}

/// Opens a library with `dlopen`. If the dynamic loader does not find it, tries other common directories.
/// The error is the dynamic loader's message.
fn open(file: &str) -> Result<Library, String> {
    let open = |path: &OsStr| {
        // SAFETY: the initializers of NVIDIA's libraries have no preconditions.
        let library = unsafe { Library::new(path) };
        library.map_err(|error| error.source().map_or_else(|| error.to_string(), ToString::to_string))
    };
    let not_found = match open(file.as_ref()) {
        Err(error) if error.contains("No such file") => error,
        result => return result,
    };
    match other_directories().into_iter().map(|directory| directory.join(file)).find(|path| path.exists()) {
        Some(path) => open(path.as_ref()),
        None => Err(not_found),
    }
}

/// Returns directories that often contain NVIDIA's libraries but are not always on the dynamic loader's search path.
fn other_directories() -> Vec<PathBuf> {
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    let toolkits = toolkits.chain(["/usr/local/cuda".into()]).map(|toolkit| toolkit.join("lib64"));
    // The directories of the driver library on WSL and NixOS.
    toolkits.chain(["/usr/lib/wsl/lib".into(), "/run/opengl-driver/lib".into()]).collect()
}

/// The jump target of every function until [`load`] replaces it.
extern "C" fn called_before_load() -> ! {
    // Do not use `eprintln!`, which panics if a write to stderr fails, for example on a full disk.
    let message = "error: internal error: inferno called an NVIDIA library before loading it\n";
    let _ = std::io::Write::write_all(&mut std::io::stderr(), message.as_bytes());
    std::process::abort()
}

/// Defines the address, the jump and the `LIBRARIES` entry of each listed function.
macro_rules! libraries {
    ($($file:expr => $($function:ident)+;)+) => {
        /// The libraries in load order. cuBLASLt comes before cuBLAS, which depends on it.
        const LIBRARIES: &[LibraryTable] = &[
            $(($file, &[$((stringify!($function), &addresses::$function)),+])),+
        ];

        #[allow(non_upper_case_globals)]
        mod addresses {
            $($(
                pub static $function: super::Address =
                    super::Address::new(super::called_before_load as *mut std::ffi::c_void);
            )+)+
        }

        /// The listed library functions. Each function only jumps, so arguments and results pass through unchanged.
        #[allow(non_snake_case)]
        mod jumps {
            $($(
                #[unsafe(naked)]
                #[unsafe(no_mangle)]
                unsafe extern "C" fn $function() {
                    #[cfg(target_arch = "x86_64")]
                    super::naked_asm!("jmp qword ptr [rip + {address}]", address = sym super::addresses::$function);
                    #[cfg(target_arch = "aarch64")]
                    super::naked_asm!(
                        "adrp x16, {address}",
                        "ldr x16, [x16, :lo12:{address}]",
                        "br x16",
                        address = sym super::addresses::$function,
                    );
                }
            )+)+
        }
    };
}

// Functions that cudarc calls by different names with CUDA 12 and CUDA 13 are listed under both names.
libraries! {
    DRIVER =>
        cuCtxDestroy_v2 cuCtxEnablePeerAccess cuCtxGetCurrent cuCtxSetCurrent cuCtxSynchronize
        cuDeviceCanAccessPeer cuDeviceGet cuDeviceGetAttribute
        cuDeviceGetCount cuDeviceGetDefaultMemPool cuDeviceGetName cuDeviceGetUuid cuDeviceGetUuid_v2
        cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain cuDriverGetVersion cuEventCreate cuEventDestroy_v2
        cuEventElapsedTime cuEventElapsedTime_v2 cuEventRecord cuEventSynchronize cuFuncGetAttribute
        cuFuncSetAttribute cuGetErrorString cuGraphDestroy cuGraphExecDestroy cuGraphGetNodes
        cuGraphInstantiateWithFlags cuGraphLaunch cuGraphUpload cuInit cuLaunchKernel cuLaunchKernelEx
        cuMemAllocAsync cuMemAlloc_v2 cuMemFreeAsync cuMemFreeHost cuMemFree_v2 cuMemGetInfo_v2 cuMemHostAlloc cuMemPoolSetAttribute
        cuMemPoolTrimTo cuMemcpyDtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2 cuMemcpyPeerAsync
        cuMemsetD8Async cuModuleGetFunction cuModuleLoad cuModuleLoadData cuModuleUnload cuStreamBeginCapture_v2
        cuStreamCreate cuStreamDestroy_v2 cuStreamEndCapture cuStreamIsCapturing cuStreamQuery
        cuStreamSynchronize cuStreamWaitEvent cuTensorMapEncodeTiled;
    concat!("libcublasLt.so.", env!("INFERNO_CUDA_MAJOR")) =>
        cublasLtCreate cublasLtMatmul cublasLtMatmulAlgoGetHeuristic cublasLtMatmulDescCreate
        cublasLtMatmulDescDestroy cublasLtMatmulDescSetAttribute cublasLtMatmulPreferenceCreate
        cublasLtMatmulPreferenceDestroy cublasLtMatmulPreferenceSetAttribute cublasLtMatrixLayoutCreate
        cublasLtMatrixLayoutDestroy;
    concat!("libcublas.so.", env!("INFERNO_CUDA_MAJOR")) =>
        cublasCreate_v2 cublasDestroy_v2 cublasDgemmStridedBatched cublasGemmEx cublasGemmStridedBatchedEx
        cublasSetMathMode cublasSetStream_v2;
    // CUDA 12 and CUDA 13 contain the same major version of cuRAND.
    "libcurand.so.10" =>
        curandCreateGenerator curandDestroyGenerator curandSetPseudoRandomGeneratorSeed curandSetStream;
}
