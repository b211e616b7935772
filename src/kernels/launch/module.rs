//! Compiled CUDA modules, embedded in the binary. Each module is loaded at its first use on a candle device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaModule};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaDevice, DeviceId, WrapErr};
use candle_core::{Result, bail};

/// The fat binary compiled from one `.cu` file.
#[derive(Clone, Copy)]
pub struct Module {
    /// The name of the `.cu` file without its extension.
    pub name: &'static str,
    pub fatbin: &'static [u8],
}

/// The [`Module`] compiled from `$name.cu`.
macro_rules! module {
    ($name:literal) => {
        $crate::kernels::launch::Module {
            name: $name,
            fatbin: include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".fatbin")),
        }
    };
}
pub(crate) use module;

type LoadedModules = HashMap<(DeviceId, &'static str), Arc<CudaModule>>;

/// Returns the modules that this process has loaded, by candle device and module name.
fn loaded_modules() -> &'static Mutex<LoadedModules> {
    static MODULES: OnceLock<Mutex<LoadedModules>> = OnceLock::new();
    MODULES.get_or_init(Mutex::default)
}

impl Module {
    /// Returns a kernel of this module. The first call for a device loads the module.
    pub(super) fn function(&self, device: &CudaDevice, kernel: &str) -> Result<CudaFunction> {
        let mut modules = loaded_modules().lock().unwrap_or_else(PoisonError::into_inner);
        let module = match modules.get(&(device.id(), self.name)) {
            Some(module) => module.clone(),
            None => {
                let module = self.load(device)?;
                modules.insert((device.id(), self.name), module.clone());
                module
            }
        };
        module.load_function(kernel).w()
    }

    fn load(&self, device: &CudaDevice) -> Result<Arc<CudaModule>> {
        let binary = Ptx::from_binary(self.fatbin.to_vec());
        match device.cuda_stream().context().load_module(binary) {
            Ok(module) => Ok(module),
            Err(error) => bail!(
                "cannot load the CUDA kernels built for compute capability {}: {error}; if this GPU has \
                 another compute capability, rebuild with CUDA_COMPUTE_CAP set to it",
                env!("INFERNO_COMPUTE_CAP")
            ),
        }
    }
}
