//! Describes a kernel launch and queues it on a CUDA stream.

use candle_core::cuda_backend::cudarc::driver::sys::{self, CUfunction_attribute};
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaStream};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Error, Result, bail};

use super::arguments::Arguments;
use super::device::runs_hopper_code;
use super::module::Module;
use super::parameters;
use crate::kernels::constants::ELEMENT_THREADS;

/// The bytes of dynamic shared memory that a kernel may use without raising its shared memory limit.
/// The default limit for static and dynamic shared memory together is 48 KiB. 16 KiB are left for static memory.
const DEFAULT_SHARED_BYTES: usize = 32 << 10;

/// The maximum grid size in y and in z on every GPU. The maximum in x is 2^31 - 1.
const MAX_GRID_YZ: usize = 65_535;

/// The grid size, block size and dynamic shared memory of one launch.
#[derive(Clone, Copy, Debug)]
pub struct LaunchShape {
    /// Blocks in x, y and z.
    pub grid: (usize, usize, usize),
    /// Threads per block.
    pub block: usize,
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: usize,
}

impl LaunchShape {
    pub fn new(grid: (usize, usize, usize), block: usize) -> Self {
        Self { grid, block, shared_bytes: 0 }
    }

    /// Creates a launch shape with a one-dimensional grid.
    pub fn linear(blocks: usize, block: usize) -> Self {
        Self::new((blocks, 1, 1), block)
    }

    /// Creates a launch shape with at least `count` threads, in blocks of [`ELEMENT_THREADS`].
    pub fn one_thread_each(count: usize) -> Self {
        Self::linear(count.div_ceil(ELEMENT_THREADS), ELEMENT_THREADS)
    }

    /// Creates a launch shape with at least `count` warps, in blocks of [`ELEMENT_THREADS`].
    pub fn one_warp_each(count: usize) -> Self {
        Self::linear(count.div_ceil(ELEMENT_THREADS / 32), ELEMENT_THREADS)
    }

    /// Sets the number of blocks in y to `rows`.
    pub fn with_grid_y(self, rows: usize) -> Self {
        Self { grid: (self.grid.0, rows, self.grid.2), ..self }
    }

    pub fn with_shared_bytes(self, shared_bytes: usize) -> Self {
        Self { shared_bytes, ..self }
    }

    fn is_empty(&self) -> bool {
        self.grid.0 == 0 || self.grid.1 == 0 || self.grid.2 == 0
    }

    /// Fails if the grid is larger in x, y or z than a GPU allows.
    fn check(&self) -> Result<()> {
        let (x, y, z) = self.grid;
        if x > i32::MAX as usize || y > MAX_GRID_YZ || z > MAX_GRID_YZ {
            bail!("a tensor is too large: GPUs do not support a grid of {x} × {y} × {z} blocks; try a smaller --chunk");
        }
        Ok(())
    }
}

/// One launch: the kernel, its grid and block dimensions, and its arguments.
pub struct Launch {
    module: Module,
    kernel: String,
    shape: LaunchShape,
    arguments: Arguments,
    bytes_moved: u64,
    overlap: Overlap,
}

impl Launch {
    /// Creates a launch of `kernel` from `module`.
    pub fn new(module: Module, kernel: impl Into<String>, shape: LaunchShape, arguments: Arguments) -> Self {
        Self { module, kernel: kernel.into(), shape, arguments, bytes_moved: 0, overlap: Overlap::No }
    }

    /// Sets the approximate number of bytes that the kernel reads and writes in device memory, for bandwidth reports.
    pub fn with_bytes_moved(self, bytes_moved: u64) -> Self {
        Self { bytes_moved, ..self }
    }

    /// Lets the kernel start before the previous kernel has ended, on GPUs with programmatic dependent launch.
    ///
    /// # Safety
    /// Every block must call `pdl_wait` before it reads data that an unfinished kernel writes, and before it writes
    /// data that an unfinished kernel uses. The kernel must also follow the rules in `headers/pdl.cuh`.
    /// At each launch, the part of the `SAFETY` comment that starts with "Overlap:" says why this holds.
    pub unsafe fn overlapping(self) -> Self {
        Self { overlap: Overlap::Yes, ..self }
    }

    /// Queues the kernel on the device's stream. A launch with an empty grid does nothing.
    ///
    /// # Safety
    /// The arguments must match the kernel's parameters.
    /// Every address must be valid for all of the kernel's reads and writes.
    pub unsafe fn enqueue(self, device: &CudaDevice) -> Result<()> {
        if self.shape.is_empty() {
            return Ok(());
        }
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().w()?;
        let overlap = if self.overlap == Overlap::Yes { Overlap::of_device(device)? } else { Overlap::No };
        let launch = self.prepare(device)?;
        // SAFETY: the caller guarantees valid arguments and addresses.
        unsafe { launch.enqueue(&stream, overlap) }
    }

    /// Loads the kernel, and raises the kernel's shared memory limit if necessary.
    /// Fails if the grid is empty or too large, or if a size among the arguments does not fit in an i32.
    /// In debug builds, also fails if an argument does not have the size of the kernel's parameter.
    pub(super) fn prepare(self, device: &CudaDevice) -> Result<PreparedLaunch> {
        let Self { module, kernel, shape, arguments, bytes_moved, .. } = self;
        if shape.is_empty() {
            bail!("cannot record a launch of {kernel}: the grid {:?} is empty", shape.grid);
        }
        let in_context = |error: Error| error.context(format!("cannot launch {kernel}"));
        shape.check().and_then(|()| arguments.check()).map_err(in_context)?;
        let function = module.function(device, &kernel)?;
        if cfg!(debug_assertions) {
            parameters::check(&function, &arguments).map_err(in_context)?;
        }
        if shape.shared_bytes > DEFAULT_SHARED_BYTES {
            allow_shared_bytes(&function, shape.shared_bytes)?;
        }
        Ok(PreparedLaunch { kernel, function, shape, arguments, bytes_moved })
    }
}

/// Raises the kernel's limit on dynamic shared memory to at least `bytes`.
fn allow_shared_bytes(function: &CudaFunction, bytes: usize) -> Result<()> {
    let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // Never lower the limit, because another launch of the same kernel may need more shared memory.
    match function.get_attribute(attribute).w()? {
        limit if limit as usize >= bytes => Ok(()),
        _ => function.set_attribute(attribute, bytes as i32).w(),
    }
}

/// Whether a kernel may start before the previous kernel has ended (programmatic dependent launch).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overlap {
    Yes,
    No,
}

impl Overlap {
    /// Returns whether kernels may overlap on a device. Only code for Hopper or later contains the waits of `pdl.cuh`.
    pub fn of_device(device: &CudaDevice) -> Result<Self> {
        Ok(if runs_hopper_code(device)? { Self::Yes } else { Self::No })
    }
}

/// A launch whose shape and arguments have been checked and whose kernel has been loaded.
pub(super) struct PreparedLaunch {
    pub kernel: String,
    function: CudaFunction,
    shape: LaunchShape,
    pub arguments: Arguments,
    pub bytes_moved: u64,
}

impl PreparedLaunch {
    /// Queues the kernel on a stream whose context is bound to this thread.
    ///
    /// # Safety
    /// The same requirements as for [`Launch::enqueue`] apply.
    pub unsafe fn enqueue(&self, stream: &CudaStream, overlap: Overlap) -> Result<()> {
        let mut overlap_attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let (grid, block) = (self.shape.grid, self.shape.block);
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0 as u32,
            gridDimY: grid.1 as u32,
            gridDimZ: grid.2 as u32,
            blockDimX: block as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shape.shared_bytes as u32,
            hStream: stream.cu_stream(),
            attrs: &mut overlap_attribute,
            numAttrs: u32::from(overlap == Overlap::Yes),
        };
        let mut arguments = self.arguments.pointers();
        // SAFETY: the caller guarantees valid arguments and addresses. The driver copies the arguments during the call.
        unsafe {
            sys::cuLaunchKernelEx(&config, self.function.cu_function(), arguments.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()
        .w()
    }
}
