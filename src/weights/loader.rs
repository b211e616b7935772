//! Loads tensors by name, and converts float tensors to the compute dtype.

use std::sync::Arc;

use ::safetensors::tensor::Dtype;
use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};

use super::checkpoint::Checkpoint;
use super::progress::LoadProgress;
use super::quantized::{self, QuantizationTarget};
use super::read_ahead::ReadAhead;
#[cfg(feature = "cuda")]
use super::read_ahead::{ReadAheadOptions, Retention};
use super::safetensors::module;
use super::tensor_info::TensorInfo;
use crate::error::Error;
#[cfg(feature = "cuda")]
use crate::kernels::upload::CopyStream;
use crate::kernels::upload::Target;
use crate::text::excerpt;

/// The tensors of a checkpoint whose names start with a prefix, plus the device and dtype to load them with.
#[derive(Clone)]
pub struct Weights<'c> {
    pub(super) checkpoint: &'c Checkpoint,
    prefix: String,
    pub(super) device: Device,
    pub(super) dtype: DType,
    /// The quantization of float matrices during loading, if any.
    pub(super) quantize: Option<QuantizationTarget>,
    pub(super) progress: &'c LoadProgress<'c>,
    /// The background reader. It stops when the last clone of these weights is dropped.
    pub(super) reader: Option<Arc<dyn TensorReader>>,
}

/// The size in bytes up to which a tensor's dtype is converted on the host. Larger tensors are converted on the device.
const MAX_HOST_CONVERSION_BYTES: usize = 1 << 20;

/// The methods of [`ReadAhead`] without its type parameter, for use as a trait object.
pub(super) trait TensorReader {
    fn contains(&self, name: &str) -> bool;
    fn take(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Tensor>;
}

impl<T: Target> TensorReader for ReadAhead<T> {
    fn contains(&self, name: &str) -> bool {
        self.contains(name)
    }

    fn take(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.take(name, dtype, shape)
    }
}

impl<'c> Weights<'c> {
    /// Returns weights that load to `device`. Float tensors are converted to `dtype`.
    ///
    /// If safetensors files are loaded to a GPU, background threads start reading immediately.
    /// Loading functions may return a tensor before its copy to the device is complete. Kernels on the device's stream
    /// wait for the copy.
    pub fn new(
        checkpoint: &'c Checkpoint,
        device: &Device,
        dtype: DType,
        progress: &'c LoadProgress<'c>,
    ) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let (Device::Cuda(cuda), Checkpoint::Safetensors(_)) = (device, checkpoint) {
            let mut read_requests = checkpoint.read_requests(dtype);
            read_requests.retain(|request| {
                request.retention == Retention::Permanent || request.bytes() > MAX_HOST_CONVERSION_BYTES
            });
            let reader = ReadAhead::start(CopyStream::new(cuda)?, read_requests, ReadAheadOptions::default())?;
            return Ok(Self::with_reader(checkpoint, device, dtype, progress, reader));
        }
        Ok(Self::without_reader(checkpoint, device, dtype, progress))
    }

    fn without_reader(
        checkpoint: &'c Checkpoint,
        device: &Device,
        dtype: DType,
        progress: &'c LoadProgress<'c>,
    ) -> Self {
        let (prefix, device) = (String::new(), device.clone());
        Self { checkpoint, prefix, device, dtype, quantize: None, progress, reader: None }
    }

    /// Like [`Weights::new`], but float matrices are quantized during loading.
    /// Nothing is read ahead, because quantizing takes longer than reading.
    pub fn quantizing(
        checkpoint: &'c Checkpoint,
        device: &Device,
        dtype: DType,
        progress: &'c LoadProgress<'c>,
        quantize: QuantizationTarget,
    ) -> Self {
        Self { quantize: Some(quantize), ..Self::without_reader(checkpoint, device, dtype, progress) }
    }

    /// Creates weights that take tensors from `reader`, which must copy them to `device`.
    pub fn with_reader(
        checkpoint: &'c Checkpoint,
        device: &Device,
        dtype: DType,
        progress: &'c LoadProgress<'c>,
        reader: ReadAhead<impl Target>,
    ) -> Self {
        Self { reader: Some(Arc::new(reader)), ..Self::without_reader(checkpoint, device, dtype, progress) }
    }

    /// Returns a copy of these weights that loads float matrices without quantizing them.
    pub fn unquantized(&self) -> Self {
        Self { quantize: None, ..self.clone() }
    }

    /// Returns the device that tensors are loaded to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the compute dtype, to which float tensors are converted.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the weights of the submodule `name`.
    pub fn at(&self, name: impl std::fmt::Display) -> Self {
        Self { prefix: self.full_name(&name.to_string()), ..self.clone() }
    }

    /// Returns the full name of a tensor in the checkpoint, including the prefix.
    pub(super) fn full_name(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) }
    }

    /// Returns true if the checkpoint has the tensor.
    pub fn contains(&self, name: &str) -> bool {
        self.checkpoint.info(&self.full_name(name)).is_some()
    }

    /// Loads a float tensor of exactly this shape in the compute dtype.
    /// The file may store it as F32, F16, BF16 or F8_E4M3.
    pub fn float(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.float_as(name, shape, self.dtype)
    }

    /// Loads a float tensor of exactly this shape and converts it to `dtype`.
    pub fn float_as(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let name = self.full_name(name);
        if self.checkpoint.required(&name)?.dtype == Dtype::F8_E4M3 {
            self.progress.add_name(&name);
            return self.float_from_e4m3(&name, shape, dtype);
        }
        let info = self.check(&name, &[DType::F32, DType::F16, DType::BF16], shape)?;
        // Convert small tensors, such as norms and biases, on the host. The first conversion on a GPU takes a second if
        // the driver has no compiled copy of candle's conversion kernels in its cache.
        let on_host = info.candle_dtype() != Some(dtype) && info.bytes() <= MAX_HOST_CONVERSION_BYTES;
        if let Checkpoint::Gguf(model) = self.checkpoint {
            let tensor = model.float(&name, dtype)?.to_device(&self.device);
            self.progress.add_read(info.bytes() as u64);
            let tensor = tensor.with_context(|| format!("cannot load tensor {name}"))?;
            return Ok(self.progress.add_tensor(tensor));
        }
        let tensor = self.load(&name, if on_host { &Device::Cpu } else { &self.device })?;
        let converted = tensor.to_dtype(dtype).and_then(|tensor| tensor.to_device(&self.device));
        let converted = converted.with_context(|| format!("cannot convert {name} to {dtype:?}"))?;
        Ok(self.progress.add_tensor(converted))
    }

    /// Loads an E4M3 tensor that has no scales. Converts it on the host, because GPUs before Ada do not support E4M3.
    fn float_from_e4m3(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let view = self.checkpoint.view(name)?;
        self.check_unscaled(name)?;
        if view.info.shape != shape {
            bail!("tensor {name}: expected shape {shape:?}, found {}", self.checkpoint.describe(name));
        }
        let mut values = vec![0.0; view.info.elements()];
        let bytes = view.bytes.read().with_context(|| format!("cannot load tensor {name}"))?;
        quantized::read_floats(Dtype::F8_E4M3, &bytes, &mut values)?;
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(&self.device);
        self.progress.add_read(view.info.bytes() as u64);
        Ok(self.progress.add_tensor(tensor.with_context(|| format!("cannot load tensor {name}"))?))
    }

    /// Fails if the checkpoint has a scale for the tensor, because ignoring the scale would give wrong values.
    pub(super) fn check_unscaled(&self, name: &str) -> Result<()> {
        let is_scale = |other: &str| other.strip_prefix(module(name)).is_some_and(|rest| rest.contains("scale"));
        match self.checkpoint.tensors().find(|(other, _)| is_scale(other)) {
            Some((scale, _)) => self.refuse_quantized(name, &format!("found scale tensor {}", excerpt(scale))),
            None => Ok(()),
        }
    }

    /// Returns [`Error::UnsupportedQuantization`] for a tensor that quantization_config does not describe.
    fn refuse_quantized<T>(&self, name: &str, how: &str) -> Result<T> {
        let dtype = self.checkpoint.required(name)?.dtype;
        let what = format!("tensor {name} in {dtype} ({how}, but quantization_config does not describe the tensor)");
        Err(Error::UnsupportedQuantization { what }.into())
    }

    /// Loads a U8 tensor of exactly this shape.
    pub fn bytes(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let name = self.full_name(name);
        self.check(&name, &[DType::U8], shape)?;
        Ok(self.progress.add_tensor(self.load(&name, &self.device)?))
    }

    /// Returns the header entry of a tensor. Fails unless the tensor has this shape and one of these dtypes.
    pub(super) fn check(&self, name: &str, dtypes: &[DType], shape: &[usize]) -> Result<&'c TensorInfo> {
        let info = self.checkpoint.required(name)?;
        self.progress.add_name(name);
        if matches!(info.dtype, Dtype::I8 | Dtype::U8 | Dtype::F8_E5M2) && !dtypes.contains(&DType::U8) {
            return self.refuse_quantized(name, "this dtype needs scales");
        }
        if !info.candle_dtype().is_some_and(|dtype| dtypes.contains(&dtype)) {
            bail!("tensor {name}: expected one of {dtypes:?}, found {}", self.checkpoint.describe(name));
        }
        if info.shape != shape {
            bail!("tensor {name}: expected shape {shape:?}, found {}", self.checkpoint.describe(name));
        }
        Ok(info)
    }

    /// Loads a tensor in its stored dtype. `device` is the device of these weights or the host.
    fn load(&self, name: &str, device: &Device) -> Result<Tensor> {
        if let Checkpoint::Gguf(model) = self.checkpoint {
            let tensor = model.packed(name)?.to_device(device)?;
            self.progress.add_read(self.checkpoint.required(name)?.bytes() as u64);
            return Ok(tensor);
        }
        let view = self.checkpoint.view(name)?;
        let shape = &view.info.shape;
        let Some(dtype) = view.info.candle_dtype() else {
            bail!("tensor {name}: the dtype {} is not supported", view.info.dtype)
        };
        let tensor = match &self.reader {
            Some(reader) if reader.contains(name) && device.same_device(&self.device) => {
                reader.take(name, dtype, shape)?
            }
            _ => {
                let tensor = view.bytes.tensor(dtype, shape).and_then(|tensor| Ok(tensor.to_device(device)?));
                tensor.with_context(|| format!("cannot load tensor {name}"))?
            }
        };
        self.progress.add_read(view.info.bytes() as u64);
        Ok(tensor)
    }
}
