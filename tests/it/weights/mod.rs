//! Tests of the weights in checkpoints.
//!
//! - how tensors are read: `read_ahead`, `ranks`
//! - formats: `gguf`, `compressed`, `dtypes`
//! - invalid files: `hostile`, `truncated`

mod compressed;
mod dtypes;
mod gguf;
mod hostile;
mod ranks;
mod read_ahead;
mod truncated;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Tensor, bail, safetensors};
use inferno::kernels::upload::UploadTarget;
use inferno::weights::ReadAheadOptions;
use tempfile::TempDir;

use crate::support::Random;

/// An upload target in host memory that counts its live allocations.
#[derive(Clone, Default)]
struct Host {
    live: Arc<AtomicUsize>,
    /// The largest size that `allocate` accepts, in bytes. `None` means that there is no limit.
    limit: Option<usize>,
    panics: bool,
}

/// A value that counts as a live allocation until it is dropped.
struct Counted<T>(T, Arc<AtomicUsize>);

impl Host {
    fn count<T>(&self, value: T) -> Counted<T> {
        self.live.fetch_add(1, Ordering::SeqCst);
        Counted(value, self.live.clone())
    }
}

impl<T> Drop for Counted<T> {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

impl UploadTarget for Host {
    /// The bytes of a tensor, the number of bytes already copied into it, and whether the tensor is complete.
    type Memory = Counted<Mutex<(Vec<u8>, usize, bool)>>;
    type Staging = Counted<Vec<u8>>;

    fn staging(&self, bytes: usize) -> Result<Self::Staging> {
        Ok(self.count(vec![0; bytes]))
    }

    fn allocate(&self, bytes: usize) -> Result<Self::Memory> {
        if self.limit.is_some_and(|limit| bytes > limit) {
            bail!("out of memory");
        }
        Ok(self.count(Mutex::new((vec![0xaa; bytes], 0, false))))
    }

    fn buffer<'s>(&self, staging: &'s mut Self::Staging) -> Result<&'s mut [u8]> {
        assert!(!self.panics, "the target panics on purpose");
        Ok(&mut staging.0)
    }

    fn copy(&self, staging: &mut Self::Staging, bytes: usize, memory: &Self::Memory, offset: usize) -> Result<()> {
        let mut memory = memory.0.lock().unwrap();
        memory.0[offset..offset + bytes].copy_from_slice(&staging.0[..bytes]);
        memory.1 += bytes;
        Ok(())
    }

    fn complete(&self, memory: &mut Self::Memory) -> Result<()> {
        let memory = memory.0.get_mut().unwrap();
        assert_eq!((memory.1, memory.2), (memory.0.len(), false), "a tensor was completed early or twice");
        memory.2 = true;
        Ok(())
    }

    fn tensor(&self, memory: Self::Memory, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let memory = memory.0.lock().unwrap();
        assert!(memory.2);
        Tensor::from_raw_buffer(&memory.0, dtype, shape, &Device::Cpu)
    }
}

/// Returns options with tiny pieces and a tiny read-ahead limit.
fn small(threads: usize) -> ReadAheadOptions {
    ReadAheadOptions { threads, piece_bytes: 8, ahead_bytes: 64 }
}

/// Writes a checkpoint that contains `tensors`.
fn snapshot(tensors: impl IntoIterator<Item = (String, Tensor)>) -> TempDir {
    let folder = TempDir::new().unwrap();
    let tensors: HashMap<String, Tensor> = tensors.into_iter().collect();
    safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    folder
}

/// Returns a vector of random numbers, none of them negative. Each call returns other numbers.
fn random(elements: usize, dtype: DType) -> Tensor {
    static SEED: AtomicU64 = AtomicU64::new(0);
    let values = Random(SEED.fetch_add(1, Ordering::Relaxed)).tensor(&[elements], DType::F32);
    (values.abs().unwrap() * 50.0).unwrap().to_dtype(dtype).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = tensor.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    values.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}
