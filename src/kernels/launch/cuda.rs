//! Launching our kernels on candle's tensors: modules loaded once a device, arguments passed as device addresses.
//!
//! Every launch goes to the stream of the candle device, and candle frees memory in that stream's order. So a tensor may
//! be dropped as soon as the launch is queued, and no launch needs an event.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use candle_core::cuda_backend::cudarc::driver::sys::{CUdevice_attribute, CUdeviceptr, CUfunction_attribute};
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaModule, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice, DeviceId, WrapErr};
use candle_core::{DType, Result, Storage, Tensor, bail};

use crate::kernels::quantized::cuda::RawParts;

/// One compiled `.cu`.
pub struct Module {
    pub name: &'static str,
    pub fatbin: &'static [u8],
}

/// The module compiled from `$name.cu`.
macro_rules! module {
    ($name:literal) => {
        $crate::kernels::launch::cuda::Module {
            name: $name,
            fatbin: include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".fatbin")),
        }
    };
}
pub(crate) use module;

type Modules = HashMap<(DeviceId, &'static str), Arc<CudaModule>>;

/// Loaded modules by device. Process-wide, as the driver's own registry of contexts and modules is.
fn modules() -> &'static Mutex<Modules> {
    static MODULES: OnceLock<Mutex<Modules>> = OnceLock::new();
    MODULES.get_or_init(Mutex::default)
}

/// A kernel of a module, which is loaded at its first use.
pub fn function(device: &CudaDevice, module: &Module, name: &str) -> Result<CudaFunction> {
    let mut modules = modules().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let loaded = match modules.get(&(device.id(), module.name)) {
        Some(loaded) => loaded.clone(),
        None => {
            let binary = Ptx::from_binary(module.fatbin.to_vec());
            let loaded = match device.cuda_stream().context().load_module(binary) {
                Ok(loaded) => loaded,
                Err(error) => bail!(
                    "the kernels were built for compute capability {} and do not load on this GPU ({error}): \
                     rebuild with CUDA_COMPUTE_CAP set to this GPU's",
                    env!("INFERNO_COMPUTE_CAP")
                ),
            };
            modules.insert((device.id(), module.name), loaded.clone());
            loaded
        }
    };
    loaded.load_function(name).w()
}

/// Every kernel may have 48 KiB of shared memory; up to here there is room for its static part.
pub const USUAL_SHARED_BYTES: usize = 32 << 10;

/// More dynamic shared memory than that.
pub fn allow_shared_bytes(function: &CudaFunction, bytes: usize) -> Result<()> {
    let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // Never lowered: another launch of the same kernel may need more.
    match function.get_attribute(attribute).w()? {
        allowed if allowed as usize >= bytes => Ok(()),
        _ => function.set_attribute(attribute, bytes as i32).w(),
    }
}

/// What the driver says of the device, such as its number of multiprocessors.
pub fn attribute(device: &CudaDevice, attribute: CUdevice_attribute) -> Result<usize> {
    Ok(device.cuda_stream().context().attribute(attribute).w()? as usize)
}

/// How many multiprocessors the device has.
pub fn multiprocessors(device: &CudaDevice) -> Result<usize> {
    attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
}

/// The device address of a contiguous CUDA tensor's first element.
pub fn address(tensor: &Tensor) -> Result<CUdeviceptr> {
    if !tensor.is_contiguous() {
        bail!("a kernel got a tensor that is not contiguous: {:?}, strides {:?}", tensor.shape(), tensor.stride());
    }
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { bail!("a CUDA kernel got a tensor on {:?}", tensor.device()) };
    let stream = storage.device.cuda_stream();
    let base = match &storage.slice {
        CudaStorageSlice::U8(s) => s.device_ptr(&stream).0,
        CudaStorageSlice::U32(s) => s.device_ptr(&stream).0,
        CudaStorageSlice::F32(s) => s.device_ptr(&stream).0,
        CudaStorageSlice::BF16(s) => s.device_ptr(&stream).0,
        CudaStorageSlice::F16(s) => s.device_ptr(&stream).0,
        _ => bail!("no kernel takes tensors of {:?}", tensor.dtype()),
    };
    Ok(base + (layout.start_offset() * tensor.dtype().size_in_bytes()) as CUdeviceptr)
}

/// The suffix of the kernel for a dtype.
pub fn suffix(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F16 => Ok("f16"),
        DType::BF16 => Ok("bf16"),
        other => bail!("no kernel computes in {other:?}"),
    }
}

/// One kernel argument.
#[derive(Clone)]
pub enum Arg {
    Address(CUdeviceptr),
    Int(i32),
    Float(f32),
    /// A struct, by value.
    Parts(RawParts),
}

impl Arg {
    pub fn tensor(tensor: &Tensor) -> Result<Self> {
        Ok(Arg::Address(address(tensor)?))
    }

    /// The tensor's address, or null.
    pub fn optional(tensor: Option<&Tensor>) -> Result<Self> {
        tensor.map_or(Ok(Arg::Address(0)), Arg::tensor)
    }
}

impl From<usize> for Arg {
    /// Kernels count in i32. No tensor of a real model has a dimension beyond it; a wrapped one would read anywhere.
    fn from(value: usize) -> Self {
        Arg::Int(i32::try_from(value).expect("a kernel's size fits 31 bits"))
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Arg::Float(value)
    }
}

/// Queues a kernel on the device's stream.
///
/// # Safety
/// The arguments must match the kernel's signature, and every address must be valid for what the kernel reads and writes.
pub unsafe fn launch(
    device: &CudaDevice,
    module: &Module,
    name: &str,
    grid: (usize, usize, usize),
    block: usize,
    shared_bytes: usize,
    args: &[Arg],
) -> Result<()> {
    if grid.0 == 0 || grid.1 == 0 || grid.2 == 0 {
        return Ok(());
    }
    let function = function(device, module, name)?;
    if shared_bytes > USUAL_SHARED_BYTES {
        allow_shared_bytes(&function, shared_bytes)?;
    }
    let stream = device.cuda_stream();
    let mut builder = stream.launch_builder(&function);
    for arg in args {
        match arg {
            Arg::Address(value) => push(&mut builder, value),
            Arg::Int(value) => push(&mut builder, value),
            Arg::Float(value) => push(&mut builder, value),
            Arg::Parts(value) => push(&mut builder, value),
        }
    }
    let config = LaunchConfig {
        grid_dim: (grid.0 as u32, grid.1 as u32, grid.2 as u32),
        block_dim: (block as u32, 1, 1),
        shared_mem_bytes: shared_bytes as u32,
    };
    // SAFETY: passed on to the caller.
    unsafe { builder.launch(config) }.w()?;
    Ok(())
}

fn push<'a, T: DeviceRepr>(builder: &mut candle_core::cuda_backend::cudarc::driver::LaunchArgs<'a>, value: &'a T) {
    builder.arg(value);
}
