//! Loads tensors by name, and converts float tensors to the requested dtype, by default the compute dtype.

use ::safetensors::tensor::Dtype;
use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};

use super::weights::Weights;
use crate::error::Error;
use crate::text::excerpt;
use crate::weights::checkpoint::Checkpoint;
use crate::weights::gguf::GgufModel;
use crate::weights::quantized;
use crate::weights::reading::{
    ByteRange, DimOrder, PartSource, PartToRead, ReaderThreads, SharedReads, Slice, StoredBytes, TensorReader,
};
use crate::weights::safetensors::{TensorView, module};
use crate::weights::tensor_info::TensorInfo;

/// The maximum size, in bytes, of an F32, F16 or BF16 tensor of a safetensors file that is converted on the host.
/// Larger tensors are converted on the device. Tensors of GGUF files are always converted on the host.
pub(super) const MAX_HOST_CONVERSION_BYTES: usize = 1 << 20;

impl<'c> Weights<'c> {
    /// Loads a whole float tensor of exactly the given shape in the compute dtype.
    /// The file may store the tensor as F32, F16 or BF16, as E4M3 without scales, or as any supported GGUF type.
    pub fn float(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.float_as(name, shape, self.dtype)
    }

    /// Like [`float`](Self::float), but converts the tensor to `dtype`.
    pub fn float_as(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.float_slice(name, shape, dtype, None)
    }

    /// Loads a vector, such as a bias or attention sinks, as `dtype`. Ranks divide a vector like the rows of a matrix.
    pub fn vector(&self, name: &str, rows: usize, dtype: DType) -> Result<Tensor> {
        self.float_slice(name, &[rows], dtype, self.slice(DimOrder::Rows))
    }

    /// Loads one vector for each of several stacked matrices, such as the biases of all experts, in the compute dtype.
    /// The result has the shape `[matrices, rows]`.
    pub fn stacked_vectors(&self, name: &str, matrices: usize, rows: usize) -> Result<Tensor> {
        self.float_slice(name, &[matrices, rows], self.dtype, self.slice(DimOrder::StackedRows))
    }

    /// Loads a float tensor, or the part of it that `slice` selects. `shape` is the shape of the result.
    pub(super) fn float_slice(
        &self,
        name: &str,
        shape: &[usize],
        dtype: DType,
        slice: Option<Slice>,
    ) -> Result<Tensor> {
        self.reader.progress_world.record_progress();
        let name = self.full_name(name);
        let stored_shape = slice.as_ref().map_or(shape.to_vec(), |slice| slice.stored_shape(shape));
        if self.checkpoint.required(&name)?.dtype == Dtype::F8_E4M3 {
            self.progress.add_name(&name);
            return self.float_from_e4m3(&name, &stored_shape, dtype, slice);
        }
        let info = self.check(&name, &[DType::F32, DType::F16, DType::BF16], &stored_shape)?;
        // Convert small tensors, such as norms and biases, on the host: a conversion on a GPU may have to wait until
        // the driver has compiled candle's conversion kernels.
        let on_host = info.candle_dtype() != Some(dtype) && info.bytes() <= MAX_HOST_CONVERSION_BYTES;
        if let Checkpoint::Gguf(model) = self.checkpoint {
            let tensor = self.gguf_float(model, &name, shape, dtype, slice);
            let tensor = tensor.and_then(|tensor| Ok(tensor.to_device(&self.device)?));
            self.progress.add_read(info.bytes() as u64);
            return Ok(self.progress.add_tensor(tensor.with_context(|| format!("cannot load tensor {name}"))?));
        }
        let tensor = self.load(&name, shape, slice, if on_host { &Device::Cpu } else { &self.device })?;
        let converted = tensor.to_dtype(dtype).and_then(|tensor| tensor.to_device(&self.device));
        let converted = converted.with_context(|| format!("cannot convert tensor {name} to {dtype:?}"))?;
        Ok(self.progress.add_tensor(converted))
    }

    /// Loads a float tensor of a GGUF file to host memory, or the part of it that `slice` selects.
    /// `shape` is the shape of the result.
    fn gguf_float(
        &self,
        model: &GgufModel,
        name: &str,
        shape: &[usize],
        dtype: DType,
        slice: Option<Slice>,
    ) -> Result<Tensor> {
        match &slice {
            Some(slice) if slice.dim == 0 && shape.len() > 1 && !model.is_transposed(name) => {
                model.float_rows(name, dtype, shape, slice)
            }
            _ => {
                let shared = self.shared_gguf_reads(model, name, slice.as_ref());
                sliced(model.shared_float(name, dtype, shared)?, slice)
            }
        }
    }

    /// Returns the [`SharedReads`] for a float tensor of a GGUF file, or `None` if this rank reads the tensor alone.
    ///
    /// The read of a tensor that is divided along its first dimension is not shared: a rank that holds no rows of a
    /// matrix does not load the matrix, so the other ranks would wait in vain.
    /// Transposed matrices are an exception: their reads are always shared, because all ranks load them.
    fn shared_gguf_reads(&self, model: &GgufModel, name: &str, slice: Option<&Slice>) -> Option<&SharedReads> {
        let is_shared = slice.is_none_or(|slice| slice.dim > 0) || model.is_transposed(name);
        self.shared_reads.as_ref().filter(|_| is_shared)
    }

    /// Takes part in the read of a float matrix, or of stacked float matrices, that this rank holds no part of.
    /// If the ranks share the read, the other ranks wait until this rank joins.
    /// `shape` is the shape of this rank's empty part, in which one dimension is 0.
    pub(super) fn join_reads(&self, name: &str, shape: &[usize]) -> Result<()> {
        let order = if shape.len() == 2 { DimOrder::RowsColumns } else { DimOrder::StackedRowsColumns };
        let slice = self.slice(order).filter(|slice| slice.dim > 0);
        let (Some(_), Some(slice)) = (&self.shared_reads, slice) else { return Ok(()) };
        let name = self.full_name(name);
        let info = self.checkpoint.required(&name)?;
        match self.checkpoint {
            Checkpoint::Gguf(model) => {
                model.shared_float(&name, self.dtype, self.shared_gguf_reads(model, &name, Some(&slice)))?;
            }
            Checkpoint::Safetensors(_) if info.is_float() && info.dtype != Dtype::F8_E4M3 => {
                self.load(&name, shape, Some(slice), &Device::Cpu)?;
            }
            Checkpoint::Safetensors(_) => {}
        }
        Ok(())
    }

    /// Loads an E4M3 tensor that has no scales, or the part of it that `slice` selects.
    /// `shape` is the shape in the file. Converts the whole tensor on the host. Fails if the tensor has a scale.
    fn float_from_e4m3(&self, name: &str, shape: &[usize], dtype: DType, slice: Option<Slice>) -> Result<Tensor> {
        let view = self.checkpoint.view(name)?;
        self.check_unscaled(name)?;
        if view.info.shape != shape {
            bail!("tensor {name}: expected shape {shape:?}, found {}", self.checkpoint.describe(name));
        }
        let mut values = vec![0.0; view.info.elements()];
        let bytes = view.bytes.read().with_context(|| format!("cannot load tensor {name}"))?;
        quantized::read_floats(Dtype::F8_E4M3, &bytes, &mut values)?;
        let whole = Tensor::from_vec(values, shape, &Device::Cpu)?;
        let tensor = sliced(whole, slice)?.to_dtype(dtype)?.to_device(&self.device);
        self.progress.add_read(view.info.bytes() as u64);
        Ok(self.progress.add_tensor(tensor.with_context(|| format!("cannot load tensor {name}"))?))
    }

    /// Fails if the checkpoint has a scale for the tensor, because ignoring the scale would produce wrong values.
    pub(super) fn check_unscaled(&self, name: &str) -> Result<()> {
        let module = module(name);
        // A module contains its scales, such as `q_proj.weight_scale`. The scales of a tensor that is not the `weight`
        // of a module, such as the stacked matrices `down_proj`, can also be next to it, such as `down_proj_scale`.
        let separators: &[char] = if module == name { &['.', '_'] } else { &['.'] };
        let is_scale = |other: &str| {
            let end = other.strip_prefix(module).filter(|end| end.starts_with(separators));
            end.is_some_and(|end| end.contains("scale"))
        };
        match self.checkpoint.tensors().find(|(other, _)| is_scale(other)) {
            Some((scale, _)) => self.refuse_quantized(name, &format!("found scale tensor {}", excerpt(scale))),
            None => Ok(()),
        }
    }

    /// Returns [`Error::UnsupportedQuantization`] for a tensor that `quantization_config` does not describe.
    fn refuse_quantized<T>(&self, name: &str, how: &str) -> Result<T> {
        let dtype = self.checkpoint.required(name)?.dtype;
        let what = format!("tensor {name} in {dtype} ({how}, but quantization_config does not describe the tensor)");
        Err(Error::UnsupportedQuantization { what }.into())
    }

    /// Loads a U8 tensor of exactly the given shape.
    pub fn bytes(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.bytes_slice(name, shape, None)
    }

    /// Loads a U8 tensor, or the part of it that `slice` selects. `shape` is the shape of the result.
    pub(super) fn bytes_slice(&self, name: &str, shape: &[usize], slice: Option<Slice>) -> Result<Tensor> {
        let name = self.full_name(name);
        let stored_shape = slice.as_ref().map_or(shape.to_vec(), |slice| slice.stored_shape(shape));
        self.check(&name, &[DType::U8], &stored_shape)?;
        Ok(self.progress.add_tensor(self.load(&name, shape, slice, &self.device)?))
    }

    /// Returns the header entry of a tensor. Fails unless the tensor has the given shape and one of `dtypes`.
    pub(super) fn check(&self, name: &str, dtypes: &[DType], shape: &[usize]) -> Result<&'c TensorInfo> {
        let info = self.checkpoint.required(name)?;
        self.progress.add_name(name);
        if matches!(info.dtype, Dtype::I8 | Dtype::U8 | Dtype::F8_E5M2) && !dtypes.contains(&DType::U8) {
            return self.refuse_quantized(name, "this dtype needs scales");
        }
        if !info.candle_dtype().is_some_and(|dtype| dtypes.contains(&dtype)) {
            bail!("tensor {name}: expected one of the dtypes {dtypes:?}, found {}", self.checkpoint.describe(name));
        }
        if info.shape != shape {
            bail!("tensor {name}: expected shape {shape:?}, found {}", self.checkpoint.describe(name));
        }
        Ok(info)
    }

    /// Loads a tensor, or the part of it that `slice` selects, in its stored dtype. `shape` is the shape of the result.
    /// `device` is either the device of the weights or the host. From a GGUF file, loads only packed MXFP4.
    fn load(&self, name: &str, shape: &[usize], slice: Option<Slice>, device: &Device) -> Result<Tensor> {
        self.reader.progress_world.record_progress();
        if let Checkpoint::Gguf(model) = self.checkpoint {
            let tensor = sliced(model.shared_packed(name, self.shared_reads.as_ref())?, slice)?.to_device(device)?;
            self.progress.add_read(self.checkpoint.required(name)?.bytes() as u64);
            return Ok(tensor);
        }
        let view = self.checkpoint.view(name)?;
        let Some(dtype) = view.info.candle_dtype() else {
            bail!("tensor {name}: the dtype {} is not supported", view.info.dtype)
        };
        let part = PartToRead { name, dtype, shape, slice: slice.as_ref() };
        let tensor = match self.read_plan(&view, &part, device) {
            ReadPlan::Ahead(reader) => reader.take(name, dtype, shape)?,
            ReadPlan::Threads { reader, file, shared } => match shared {
                Some(shared) => reader.read_shared(shared, file, &part),
                None => reader.read(file, dtype, shape, part.slice),
            }
            .with_context(|| format!("cannot load tensor {name}"))?,
            ReadPlan::Host { shared } => {
                let tensor = part.read_to_host(&view.bytes, shared);
                let tensor = tensor.and_then(|tensor| Ok(tensor.to_device(device)?));
                tensor.with_context(|| format!("cannot load tensor {name}"))?
            }
        };
        self.progress.add_read(view.info.bytes() as u64);
        Ok(tensor)
    }

    /// Returns the background reader if the tensor `name` is in its read-ahead list.
    pub(super) fn read_ahead(&self, name: &str) -> Option<&dyn TensorReader> {
        match &self.reader.threads {
            ReaderThreads::Ahead(reader) if reader.contains(name) => Some(reader.as_ref()),
            _ => None,
        }
    }

    /// Decides which threads read `part` of the tensor `view`, and whether the ranks read the tensor together.
    fn read_plan<'r>(&'r self, view: &'r TensorView, part: &PartToRead, device: &Device) -> ReadPlan<'r> {
        let is_own_device = device.same_device(&self.device);
        let is_large = part.bytes() > MAX_HOST_CONVERSION_BYTES;
        let shared = self.shared_reads.as_ref().filter(|shared| {
            let has_short_runs =
                |slice: &Slice| slice.has_short_runs(&view.info.shape, part.dtype, shared.world.size());
            part.slice.is_none_or(has_short_runs)
        });
        match (&self.reader.threads, &view.bytes) {
            (ReaderThreads::Parts(reader), StoredBytes::File(file)) if is_large && is_own_device => {
                ReadPlan::Threads { reader: reader.as_ref(), file, shared }
            }
            (ReaderThreads::Ahead(reader), _)
                if part.slice.is_none() && is_own_device && reader.contains(part.name) =>
            {
                ReadPlan::Ahead(reader.as_ref())
            }
            _ => ReadPlan::Host { shared },
        }
    }
}

/// How to read a tensor of a safetensors file. With `shared`, the ranks read the tensor together.
enum ReadPlan<'r> {
    /// The background reader reads the whole tensor to the device of the weights.
    Ahead(&'r dyn TensorReader),
    /// Several threads read the tensor to the device of the weights.
    Threads { reader: &'r dyn PartSource, file: &'r ByteRange, shared: Option<&'r SharedReads> },
    /// The tensor is read to host memory. With `shared`, each rank reads a share of the tensor, which may take several
    /// threads. Otherwise, this thread reads the tensor.
    Host { shared: Option<&'r SharedReads> },
}

/// Returns the part of the loaded tensor `whole` that `slice` selects, or `whole` if there is no slice.
fn sliced(whole: Tensor, slice: Option<Slice>) -> Result<Tensor> {
    match slice {
        Some(slice) => slice.of(&whole),
        None => Ok(whole),
    }
}
