//! Checkpoints: tensors by their Hugging Face names, each checked for dtype and shape before it is used.

mod checkpoint;
pub mod compressed;
pub mod ggml;
pub mod gguf;
pub mod inventory;
pub mod mxfp4;
pub mod read_ahead;
mod safetensors;

use std::cell::Cell;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};

#[cfg(feature = "cuda")]
use crate::kernels::upload::CopyStream;
use crate::kernels::upload::Target;
use read_ahead::ReadAhead;
#[cfg(feature = "cuda")]
use read_ahead::{Keep, Settings};

pub use checkpoint::{Checkpoint, TensorInfo};
pub use inventory::Inventory;

/// A place in a checkpoint from which a layer takes its tensors, and where they go.
#[derive(Clone)]
pub struct Weights<'c> {
    checkpoint: &'c Checkpoint,
    prefix: String,
    device: Device,
    dtype: DType,
    loaded: &'c Loaded<'c>,
    /// Reads what has not been asked for yet. The last clone of these weights stops it.
    ahead: Option<Arc<dyn Ahead>>,
}

/// Tensors of up to this many bytes are converted before they go to a device.
const CONVERTED_ON_HOST: usize = 1 << 20;

/// Some [`ReadAhead`].
trait Ahead {
    fn contains(&self, name: &str) -> bool;
    fn take(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Tensor>;
}

impl<T: Target> Ahead for ReadAhead<T> {
    fn contains(&self, name: &str) -> bool {
        self.contains(name)
    }

    fn take(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.take(name, dtype, shape)
    }
}

/// Counts bytes as they are loaded and tells whoever shows progress.
pub struct Loaded<'p> {
    bytes: Cell<u64>,
    report: &'p dyn Fn(u64),
}

impl<'p> Loaded<'p> {
    /// `report` is called with the total so far after each tensor.
    pub fn new(report: &'p dyn Fn(u64)) -> Self {
        Self { bytes: Cell::new(0), report }
    }

    fn add(&self, bytes: u64) {
        self.bytes.set(self.bytes.get() + bytes);
        (self.report)(self.bytes.get());
    }
}

impl<'c> Weights<'c> {
    /// Float tensors will be converted to `dtype` on `device`. For a GPU, reading begins here, but for GGUF files. A tensor
    /// that is handed out may still be on its way: whatever is queued on the device's stream is ordered after its arrival.
    pub fn new(checkpoint: &'c Checkpoint, device: &Device, dtype: DType, loaded: &'c Loaded<'c>) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let (Device::Cuda(cuda), Checkpoint::Safetensors(_)) = (device, checkpoint) {
            let mut extents = checkpoint.extents(dtype);
            extents.retain(|extent| extent.keep == Keep::Lasting || extent.bytes() > CONVERTED_ON_HOST);
            let reader = ReadAhead::start(CopyStream::new(cuda)?, extents, Settings::default())?;
            return Ok(Self::read_ahead(checkpoint, device, dtype, loaded, reader));
        }
        Ok(Self { checkpoint, prefix: String::new(), device: device.clone(), dtype, loaded, ahead: None })
    }

    /// The same by way of any reader of the checkpoint, whose tensors are on `device`.
    pub fn read_ahead(
        checkpoint: &'c Checkpoint,
        device: &Device,
        dtype: DType,
        loaded: &'c Loaded<'c>,
        reader: ReadAhead<impl Target>,
    ) -> Self {
        let (prefix, device) = (String::new(), device.clone());
        Self { checkpoint, prefix, device, dtype, loaded, ahead: Some(Arc::new(reader)) }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The place `name` under this one.
    pub fn at(&self, name: impl std::fmt::Display) -> Self {
        Self { prefix: self.full_name(&name.to_string()), ..self.clone() }
    }

    fn full_name(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) }
    }

    pub fn contains(&self, name: &str) -> bool {
        self.checkpoint.info(&self.full_name(name)).is_some()
    }

    /// A float tensor (F32, F16 or BF16 in the file) of exactly this shape, in the compute dtype.
    pub fn float(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.float_as(name, shape, self.dtype)
    }

    /// A float tensor of exactly this shape in a dtype of the caller's choice.
    pub fn float_as(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let name = self.full_name(name);
        let info = self.check(&name, &[DType::F32, DType::F16, DType::BF16], shape)?;
        // Norms, biases and the like are converted on the host: the first use of candle's conversions on a GPU loads them,
        // and on a machine's first run the driver compiles them for a second.
        let on_host = info.candle_dtype() != Some(dtype) && info.bytes() <= CONVERTED_ON_HOST;
        if let Checkpoint::Gguf(model) = self.checkpoint {
            let tensor = model.float(&name, dtype)?.to_device(&self.device);
            self.loaded.add(info.bytes() as u64);
            return tensor.with_context(|| format!("cannot load tensor {name}"));
        }
        let tensor = self.load(&name, if on_host { &Device::Cpu } else { &self.device })?;
        let converted = tensor.to_dtype(dtype).and_then(|tensor| tensor.to_device(&self.device));
        converted.with_context(|| format!("cannot convert {name} to {dtype:?}"))
    }

    /// Float matrices \[rows, columns\] called `name` at several places, one below the other, in the compute dtype.
    pub fn stacked(parts: &[(Weights, usize)], name: &str, columns: usize) -> Result<Tensor> {
        let names: Vec<String> = parts.iter().map(|(weights, _)| weights.full_name(name)).collect();
        let stacked = safetensors::stacked_name(&names);
        if let Some((first, _)) = parts.first()
            && let Some(ahead) = first.ahead.as_ref().filter(|ahead| ahead.contains(&stacked))
        {
            for ((weights, rows), name) in parts.iter().zip(&names) {
                let info = weights.check(name, &[weights.dtype], &[*rows, columns])?;
                weights.loaded.add(info.bytes() as u64);
            }
            let rows = parts.iter().map(|(_, rows)| rows).sum();
            return ahead.take(&stacked, first.dtype, &[rows, columns]);
        }
        let tensors = parts.iter().map(|(weights, rows)| weights.float(name, &[*rows, columns]));
        Ok(Tensor::cat(&tensors.collect::<Result<Vec<_>>>()?, 0)?)
    }

    /// A U8 tensor of exactly this shape.
    pub fn bytes(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let name = self.full_name(name);
        self.check(&name, &[DType::U8], shape)?;
        self.load(&name, &self.device)
    }

    fn check(&self, name: &str, dtypes: &[DType], shape: &[usize]) -> Result<&'c TensorInfo> {
        let info = self.checkpoint.required(name)?;
        if !info.candle_dtype().is_some_and(|dtype| dtypes.contains(&dtype)) {
            bail!("tensor {name}: expected one of {dtypes:?}, found {}", self.checkpoint.describe(name));
        }
        if info.shape != shape {
            bail!("tensor {name}: expected shape {shape:?}, found {}", self.checkpoint.describe(name));
        }
        Ok(info)
    }

    /// A tensor as it is stored, on the weights' own device or on the host.
    fn load(&self, name: &str, device: &Device) -> Result<Tensor> {
        if let Checkpoint::Gguf(model) = self.checkpoint {
            let tensor = model.packed(name)?.to_device(device)?;
            self.loaded.add(self.checkpoint.required(name)?.bytes() as u64);
            return Ok(tensor);
        }
        let view = self.checkpoint.view(name)?;
        let (shape, file) = (&view.info.shape, view.file.display());
        let Some(dtype) = view.info.candle_dtype() else { bail!("tensor {name}: {} cannot be used", view.info.dtype) };
        let tensor = match &self.ahead {
            Some(ahead) if ahead.contains(name) && device.same_device(&self.device) => {
                ahead.take(name, dtype, shape)?
            }
            _ => Tensor::from_raw_buffer(view.bytes, dtype, shape, device)
                .with_context(|| format!("cannot load tensor {name} from {file}"))?,
        };
        self.loaded.add(view.bytes.len() as u64);
        Ok(tensor)
    }
}
