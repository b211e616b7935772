//! NVIDIA's libraries, loaded when a GPU is first asked for.
//!
//! candle wants them linked. Then the system loads them before `main`: `inferno --help` waits 80 ms for cuBLAS, and
//! without a driver nothing starts, not even to say that there is none. So the functions that candle and the kernels
//! call are defined here as well, each a jump through a slot that [`load`] fills. The linker takes a definition of the
//! program's before a library's and, by the `--as-needed` that rustc passes, leaves out a library that gives nothing.
//!
//! A function that is not in the list still works: its library is then linked as usual, which the test
//! `starting_loads_none_of_nvidias_libraries` finds. In a debug build GNU ld links them all as usual, since it counts
//! calls in code that is never reached; LLD does not, and a release build has no such code.

use std::arch::naked_asm;
use std::error::Error;
use std::ffi::{OsStr, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::Library;

/// Where a function is, once its library is loaded.
type Slot = AtomicPtr<c_void>;

/// A library by its file name and what is called of it.
type Listed = (&'static str, &'static [(&'static str, &'static Slot)]);

/// Why a library cannot be used.
pub struct Unusable {
    /// In a line, beginning with the library.
    pub reason: String,
    /// What to do.
    pub hint: &'static str,
}

/// Loads the libraries, the first time that it is called.
pub fn load() -> Result<(), &'static Unusable> {
    static LOADED: OnceLock<Result<(), Unusable>> = OnceLock::new();
    LOADED.get_or_init(|| LIBRARIES.iter().try_for_each(load_one)).as_ref().copied()
}

fn load_one((file, functions): &Listed) -> Result<(), Unusable> {
    let is_driver = *file == DRIVER;
    let library = open(file).map_err(|reason| Unusable {
        reason,
        hint: match is_driver {
            true => "install NVIDIA's driver; it works once `nvidia-smi` lists the GPU",
            false => "put the folder of CUDA's libraries into LD_LIBRARY_PATH, such as /usr/local/cuda/lib64",
        },
    })?;
    for (name, slot) in *functions {
        // SAFETY: the address is only ever called, by those who declare it as NVIDIA's headers do.
        match unsafe { library.get::<*mut c_void>(name.as_bytes()) } {
            Ok(function) => slot.store(*function, Ordering::Release),
            Err(_) if *name == NEW && env!("INFERNO_CUDA_MAJOR") == "12" => {}
            Err(_) => {
                let reason = format!("{file} has no {name}: it is too old for this build");
                let hint =
                    if is_driver { "update NVIDIA's driver" } else { "install the CUDA that this was built with" };
                return Err(Unusable { reason, hint });
            }
        }
    }
    // For as long as the program runs.
    std::mem::forget(library);
    Ok(())
}

/// By its name, as the system's loader finds it, else from where it may lie besides. The error is the loader's.
fn open(file: &str) -> Result<Library, String> {
    let open = |path: &OsStr| {
        // SAFETY: NVIDIA's libraries do nothing unusual when they are loaded, and are never unloaded.
        let library = unsafe { Library::new(path) };
        library.map_err(|error| error.source().map_or_else(|| error.to_string(), ToString::to_string))
    };
    let absent = match open(file.as_ref()) {
        Err(error) if error.contains("No such file") => error,
        result => return result,
    };
    match folders().into_iter().map(|folder| folder.join(file)).find(|path| path.exists()) {
        Some(path) => open(path.as_ref()),
        None => Err(absent),
    }
}

/// Where libraries are that the system's loader does not know of.
fn folders() -> Vec<PathBuf> {
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    let toolkits = toolkits.chain(["/usr/local/cuda".into()]).map(|toolkit| toolkit.join("lib64"));
    // The driver, under WSL and on NixOS.
    toolkits.chain(["/usr/lib/wsl/lib".into(), "/run/opengl-driver/lib".into()]).collect()
}

extern "C" fn too_early() -> ! {
    eprintln!("error: a function of NVIDIA's libraries was called before they were loaded: a mistake in inferno");
    std::process::abort()
}

const DRIVER: &str = "libcuda.so.1";

/// What a driver may lack: CUDA 12.8 has it first, and a build with CUDA 12 does not call it.
const NEW: &str = "cuEventElapsedTime_v2";

macro_rules! libraries {
    ($($file:expr => $($function:ident)+;)+) => {
        /// In the order in which they are loaded: cuBLAS needs cuBLASLt.
        const LIBRARIES: &[Listed] = &[
            $(($file, &[$((stringify!($function), &slots::$function)),+])),+
        ];

        #[allow(non_upper_case_globals)]
        mod slots {
            $($(pub static $function: super::Slot = super::Slot::new(super::too_early as *mut std::ffi::c_void);)+)+
        }

        /// What candle's calls reach. Arguments and result pass through untouched, whatever they are.
        #[allow(non_snake_case)]
        mod jumps {
            $($(
                #[unsafe(naked)]
                #[unsafe(no_mangle)]
                unsafe extern "C" fn $function() {
                    #[cfg(target_arch = "x86_64")]
                    super::naked_asm!("jmp qword ptr [rip + {slot}]", slot = sym super::slots::$function);
                    #[cfg(target_arch = "aarch64")]
                    super::naked_asm!(
                        "adrp x16, {slot}",
                        "ldr x16, [x16, :lo12:{slot}]",
                        "br x16",
                        slot = sym super::slots::$function,
                    );
                }
            )+)+
        }
    };
}

// Where CUDA 12 and 13 differ, the names of both.
libraries! {
    DRIVER =>
        cuCtxDestroy_v2 cuCtxGetCurrent cuCtxSetCurrent cuCtxSynchronize cuDeviceGet cuDeviceGetAttribute
        cuDeviceGetCount cuDeviceGetDefaultMemPool cuDeviceGetName cuDeviceGetUuid cuDeviceGetUuid_v2
        cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain cuDriverGetVersion cuEventCreate cuEventDestroy_v2
        cuEventElapsedTime cuEventElapsedTime_v2 cuEventRecord cuEventSynchronize cuFuncGetAttribute
        cuFuncSetAttribute cuGetErrorString cuGraphDestroy cuGraphExecDestroy cuGraphInstantiateWithFlags
        cuGraphLaunch cuGraphUpload cuInit cuLaunchKernel cuLaunchKernelEx cuMemAllocAsync cuMemAlloc_v2
        cuMemFreeAsync cuMemFreeHost cuMemFree_v2 cuMemGetInfo_v2 cuMemHostAlloc cuMemPoolSetAttribute
        cuMemPoolTrimTo cuMemcpyDtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2 cuMemcpyPeerAsync
        cuMemsetD8Async cuModuleGetFunction cuModuleLoad cuModuleLoadData cuModuleUnload cuStreamBeginCapture_v2
        cuStreamCreate cuStreamDestroy_v2 cuStreamEndCapture cuStreamIsCapturing cuStreamQuery
        cuStreamSynchronize cuStreamWaitEvent;
    concat!("libcublasLt.so.", env!("INFERNO_CUDA_MAJOR")) =>
        cublasLtCreate cublasLtMatmul cublasLtMatmulAlgoGetHeuristic cublasLtMatmulDescCreate
        cublasLtMatmulDescDestroy cublasLtMatmulDescSetAttribute cublasLtMatmulPreferenceCreate
        cublasLtMatmulPreferenceDestroy cublasLtMatmulPreferenceSetAttribute cublasLtMatrixLayoutCreate
        cublasLtMatrixLayoutDestroy;
    concat!("libcublas.so.", env!("INFERNO_CUDA_MAJOR")) =>
        cublasCreate_v2 cublasDestroy_v2 cublasDgemmStridedBatched cublasGemmEx cublasGemmStridedBatchedEx
        cublasSetStream_v2;
    // Of CUDA 12 and 13.
    "libcurand.so.10" =>
        curandCreateGenerator curandDestroyGenerator curandSetPseudoRandomGeneratorSeed curandSetStream;
}
