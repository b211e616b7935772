//! Checkpoints: tensors by their Hugging Face names, each checked for dtype and shape before it is used.

mod checkpoint;
pub mod compressed;
pub mod ggml;
pub mod gguf;
mod header;
pub mod inventory;
pub mod mxfp4;
pub mod quantized;
pub mod read_ahead;
mod safetensors;

use std::cell::Cell;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};

use crate::error::Error;
use crate::kernels;
use crate::kernels::quantized::{Format, InputRounding, Matrix, QuantizedMatrix};
#[cfg(feature = "cuda")]
use crate::kernels::upload::CopyStream;
use crate::kernels::upload::Target;
use ::safetensors::tensor::Dtype;
use compressed::{Activations, WeightScales};
use quantized::{MatrixRows, QuantizationTarget};
use read_ahead::ReadAhead;
#[cfg(feature = "cuda")]
use read_ahead::{ReadAheadOptions, Retention};
use safetensors::{SafetensorsCheckpoint, module};

pub use checkpoint::{Checkpoint, TensorInfo};
pub use inventory::{Inventory, Summary};

/// A place in a checkpoint from which a layer takes its tensors, and where they go.
#[derive(Clone)]
pub struct Weights<'c> {
    checkpoint: &'c Checkpoint,
    prefix: String,
    device: Device,
    dtype: DType,
    /// What matrices of floats become.
    quantize: Option<QuantizationTarget>,
    loaded: &'c LoadProgress<'c>,
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
pub struct LoadProgress<'p> {
    bytes: Cell<u64>,
    kept: Cell<u64>,
    report: &'p dyn Fn(u64),
}

impl<'p> LoadProgress<'p> {
    /// `report` is called with the total so far after each tensor.
    pub fn new(report: &'p dyn Fn(u64)) -> Self {
        Self { bytes: Cell::new(0), kept: Cell::new(0), report }
    }

    /// Bytes of the tensors that were made of what was read.
    pub fn resident_bytes(&self) -> u64 {
        self.kept.get()
    }

    fn keep(&self, bytes: u64) {
        self.kept.set(self.kept.get() + bytes);
    }

    fn keep_tensor(&self, tensor: Tensor) -> Tensor {
        self.keep(kernels::bytes(&tensor));
        tensor
    }

    fn add(&self, bytes: u64) {
        self.bytes.set(self.bytes.get() + bytes);
        (self.report)(self.bytes.get());
    }
}

impl<'c> Weights<'c> {
    /// Float tensors will be converted to `dtype` on `device`. For a GPU, reading begins here, but for GGUF files. A tensor
    /// that is handed out may still be on its way: whatever is queued on the device's stream is ordered after its arrival.
    pub fn new(
        checkpoint: &'c Checkpoint,
        device: &Device,
        dtype: DType,
        loaded: &'c LoadProgress<'c>,
    ) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let (Device::Cuda(cuda), Checkpoint::Safetensors(_)) = (device, checkpoint) {
            let mut extents = checkpoint.extents(dtype);
            extents.retain(|extent| extent.retention == Retention::Permanent || extent.bytes() > CONVERTED_ON_HOST);
            let reader = ReadAhead::start(CopyStream::new(cuda)?, extents, ReadAheadOptions::default())?;
            return Ok(Self::with_reader(checkpoint, device, dtype, loaded, reader));
        }
        Ok(Self::mapped(checkpoint, device, dtype, loaded))
    }

    fn mapped(checkpoint: &'c Checkpoint, device: &Device, dtype: DType, loaded: &'c LoadProgress<'c>) -> Self {
        let (prefix, device) = (String::new(), device.clone());
        Self { checkpoint, prefix, device, dtype, quantize: None, loaded, ahead: None }
    }

    /// The same, with matrices of floats quantized on their way. Nothing is read ahead: the host is what takes its time.
    pub fn quantizing(
        checkpoint: &'c Checkpoint,
        device: &Device,
        dtype: DType,
        loaded: &'c LoadProgress<'c>,
        quantize: QuantizationTarget,
    ) -> Self {
        Self { quantize: Some(quantize), ..Self::mapped(checkpoint, device, dtype, loaded) }
    }

    /// The same by way of any reader of the checkpoint, whose tensors are on `device`.
    pub fn with_reader(
        checkpoint: &'c Checkpoint,
        device: &Device,
        dtype: DType,
        loaded: &'c LoadProgress<'c>,
        reader: ReadAhead<impl Target>,
    ) -> Self {
        Self { ahead: Some(Arc::new(reader)), ..Self::mapped(checkpoint, device, dtype, loaded) }
    }

    /// The same place, whose floats stay floats.
    pub fn unquantized(&self) -> Self {
        Self { quantize: None, ..self.clone() }
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

    /// A float tensor (F32, F16, BF16 or F8_E4M3 in the file) of exactly this shape, in the compute dtype.
    pub fn float(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.float_as(name, shape, self.dtype)
    }

    /// A float tensor of exactly this shape in a dtype of the caller's choice.
    pub fn float_as(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let name = self.full_name(name);
        if self.checkpoint.required(&name)?.dtype == Dtype::F8_E4M3 {
            return self.float_of_e4m3(&name, shape, dtype);
        }
        let info = self.check(&name, &[DType::F32, DType::F16, DType::BF16], shape)?;
        // Norms, biases and the like are converted on the host: the first use of candle's conversions on a GPU loads them,
        // and on a machine's first run the driver compiles them for a second.
        let on_host = info.candle_dtype() != Some(dtype) && info.bytes() <= CONVERTED_ON_HOST;
        if let Checkpoint::Gguf(model) = self.checkpoint {
            let tensor = model.float(&name, dtype)?.to_device(&self.device);
            self.loaded.add(info.bytes() as u64);
            let tensor = tensor.with_context(|| format!("cannot load tensor {name}"))?;
            return Ok(self.loaded.keep_tensor(tensor));
        }
        let tensor = self.load(&name, if on_host { &Device::Cpu } else { &self.device })?;
        let converted = tensor.to_dtype(dtype).and_then(|tensor| tensor.to_device(&self.device));
        let converted = converted.with_context(|| format!("cannot convert {name} to {dtype:?}"))?;
        Ok(self.loaded.keep_tensor(converted))
    }

    /// What was cast to 8 bits, without scales. The host does it: few GPUs know the type.
    fn float_of_e4m3(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let view = self.checkpoint.view(name)?;
        self.check_unscaled(name)?;
        if view.info.shape != shape {
            bail!("tensor {name}: expected shape {shape:?}, found {}", self.checkpoint.describe(name));
        }
        let mut values = vec![0.0; view.info.elements()];
        quantized::read_floats(Dtype::F8_E4M3, view.bytes, &mut values)?;
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(&self.device);
        self.loaded.add(view.bytes.len() as u64);
        Ok(self.loaded.keep_tensor(tensor.with_context(|| format!("cannot load tensor {name}"))?))
    }

    /// Fails if something of the same layer is a scale: then numbers are not what they stand for.
    fn check_unscaled(&self, name: &str) -> Result<()> {
        let of_layer = |other: &str| other.strip_prefix(module(name)).is_some_and(|rest| rest.contains("scale"));
        match self.checkpoint.tensors().find(|(other, _)| of_layer(other)) {
            Some((scale, _)) => self.refuse_codes(name, &format!("which {scale} belongs to")),
            None => Ok(()),
        }
    }

    fn refuse_codes<T>(&self, name: &str, why: &str) -> Result<T> {
        let dtype = self.checkpoint.required(name)?.dtype;
        let what = format!("tensor {name} in {dtype}, {why} and of which quantization_config says nothing,");
        Err(Error::UnsupportedQuantization { what }.into())
    }

    /// Matrices \[rows, columns\] called `name` at several places, one below the other: quantized where they are so in the
    /// file or are to be, else floats in the compute dtype.
    pub fn matrix(parts: &[(Self, usize)], name: &str, columns: usize) -> Result<Matrix> {
        let quantized = |(weights, rows): &(Self, usize)| weights.quantized(name, *rows, columns);
        let found = parts.iter().map(quantized).collect::<Result<Vec<_>>>()?;
        // What one kernel can multiply by is one matrix.
        let together = |a: &Option<MatrixRows>, b: &Option<MatrixRows>| match (a, b) {
            (Some(a), Some(b)) => a.rounding == b.rounding && (a.format == Format::Fp8) == (b.format == Format::Fp8),
            (None, None) => true,
            _ => false,
        };
        let (mut matrices, mut rest) = (Vec::new(), parts);
        for found in found.chunk_by(together) {
            let (here, after) = rest.split_at(found.len());
            rest = after;
            let rows: Vec<_> = found.iter().flatten().collect();
            if rows.is_empty() {
                matrices.push(Matrix::Dense(Self::stacked(here, name, columns)?));
                continue;
            }
            let first = &here[0].0;
            let alike = |a: &&MatrixRows, b: &&MatrixRows| a.format == b.format;
            let built = rows.chunk_by(alike).map(|rows| first.build(rows)).collect::<Result<Vec<_>>>();
            matrices.push(Matrix::Quantized(built.with_context(|| format!("cannot load {}", first.full_name(name)))?));
            for (weights, _) in here {
                weights.loaded.add(weights.checkpoint.required(&weights.full_name(name))?.bytes() as u64);
            }
        }
        Ok(match matrices.len() {
            1 => matrices.remove(0),
            _ => Matrix::Mixed(matrices),
        })
    }

    /// Matrices of several experts in one tensor, one below the other; floats as \[E, R, C\].
    pub fn experts(&self, name: &str, shape: [usize; 3]) -> Result<Matrix> {
        let [experts, rows, columns] = shape;
        match self.quantized(name, experts * rows, columns)? {
            Some(found) => {
                self.loaded.add(self.checkpoint.required(&self.full_name(name))?.bytes() as u64);
                Ok(Matrix::Quantized(vec![self.build(&[&found])?]))
            }
            None => Ok(Matrix::Dense(self.float(name, &shape)?)),
        }
    }

    /// A matrix that a GGUF file has the other way round, or none if it has it not or in floats.
    pub fn transposed(&self, name: &str, rows: usize, columns: usize) -> Result<Option<Matrix>> {
        if !matches!(self.checkpoint, Checkpoint::Gguf(_)) {
            return Ok(None);
        }
        let Some(found) = self.quantized(name, rows, columns)? else { return Ok(None) };
        self.loaded.add(self.checkpoint.required(&self.full_name(name))?.bytes() as u64);
        Ok(Some(Matrix::Quantized(vec![self.build(&[&found])?])))
    }

    fn build(&self, parts: &[&MatrixRows]) -> Result<QuantizedMatrix> {
        let matrix = MatrixRows::build(parts, &self.device)?;
        self.loaded.keep(matrix.bytes());
        Ok(matrix)
    }

    /// The rows of a matrix that stays quantized or becomes so.
    fn quantized(&self, name: &str, rows: usize, columns: usize) -> Result<Option<MatrixRows<'c>>> {
        let name = self.full_name(name);
        let info = self.checkpoint.required(&name)?;
        let found = match self.checkpoint {
            Checkpoint::Gguf(model) => match (model.quantized(&name)?, self.quantize) {
                (None, Some(quantize)) => model.to_quantize(&name, quantize)?,
                (found, _) => found,
            },
            Checkpoint::Safetensors(checkpoint) => match self.quantize {
                // Embeddings and what is ignored have no scales.
                _ if checkpoint.info(&format!("{name}_scale")).is_some() => {
                    Some(self.compressed(checkpoint, &name, [rows, columns])?)
                }
                Some(quantize) if info.is_float() => {
                    if info.dtype == Dtype::F8_E4M3 {
                        self.check_unscaled(&name)?;
                    }
                    let (bytes, dtype) = (self.checkpoint.view(&name)?.bytes, info.dtype);
                    let row_bytes = columns * dtype.bitsize() / 8;
                    if info.elements() != rows * columns || info.shape.last() != Some(&columns) {
                        bail!("tensor {name}: expected shape {:?}, found {:?}", [rows, columns], info.shape);
                    }
                    MatrixRows::from_floats(quantize, rows, columns, move |row, values| {
                        quantized::read_floats(dtype, &bytes[row * row_bytes..][..row_bytes], values)
                    })
                }
                _ => None,
            },
        };
        match found {
            Some(found) if (found.rows, found.columns) != (rows, columns) => {
                bail!("tensor {name}: expected shape {:?}, found {}", [rows, columns], self.checkpoint.describe(&name))
            }
            found => Ok(found),
        }
    }

    /// The rows of a matrix that compressed-tensors quantized.
    fn compressed(
        &self,
        checkpoint: &'c SafetensorsCheckpoint,
        name: &str,
        shape: [usize; 2],
    ) -> Result<MatrixRows<'c>> {
        let Some(scheme) = checkpoint.scheme(module(name)) else {
            bail!("tensor {name} has a scale, but quantization_config does not say what it is for");
        };
        let view = checkpoint.view(name)?;
        let (format, stored) = match scheme.format {
            compressed::Format::Int8 => (scheme.format.kept(), Dtype::I8),
            compressed::Format::Fp8 => (scheme.format.kept(), Dtype::F8_E4M3),
        };
        if view.info.dtype != stored || view.info.shape != shape {
            let found = self.checkpoint.describe(name);
            bail!("tensor {name}: quantization_config promises {stored} {shape:?}, found {found}");
        }
        let [rows, columns] = shape;
        let scales = |name: &str, counts: [usize; 2]| -> Result<Vec<f32>> {
            let view = checkpoint.view(name)?;
            let elements = view.info.elements();
            if !view.info.is_float() || !counts.contains(&elements) {
                bail!("tensor {name}: expected {counts:?} scales, found {}", self.checkpoint.describe(name));
            }
            let mut values = vec![0.0; elements];
            quantized::read_floats(view.info.dtype, view.bytes, &mut values)?;
            self.loaded.add(view.bytes.len() as u64);
            Ok(values)
        };
        let weight_scales = match scheme.weight_scales {
            WeightScales::PerTensor => scales(&format!("{name}_scale"), [1, 1])?,
            WeightScales::PerChannel => scales(&format!("{name}_scale"), [rows, rows])?,
        };
        let rounding = match (scheme.activations, format) {
            (Activations::Unquantized, _) => InputRounding::None,
            (Activations::PerToken, Format::Int8) => InputRounding::Int8PerToken,
            (Activations::PerToken, _) => InputRounding::Fp8PerToken,
            (Activations::Static, _) => {
                let scale = scales(&format!("{}.input_scale", module(name)), [1, 1])?[0];
                if format == Format::Int8 { InputRounding::Int8Static(scale) } else { InputRounding::Fp8Static(scale) }
            }
        };
        // Packed codes are counted from the lowest.
        let (bytes, flip) = (view.bytes, if scheme.packed { 0x80 } else { 0 });
        let write = move |row: usize, [low, _, scales, _]: [&mut [u8]; 4]| {
            for (code, byte) in low.iter_mut().zip(&bytes[row * columns..][..columns]) {
                *code = byte ^ flip;
            }
            let scale = weight_scales.get(row).unwrap_or(&weight_scales[0]);
            scales.copy_from_slice(&scale.to_le_bytes());
            Ok(())
        };
        Ok(MatrixRows { format, rows, columns, rounding, write: Box::new(write) })
    }

    /// Float matrices \[rows, columns\] called `name` at several places, one below the other, in the compute dtype.
    pub fn stacked(parts: &[(Weights, usize)], name: &str, columns: usize) -> Result<Tensor> {
        if let [(weights, rows)] = parts {
            return weights.float(name, &[*rows, columns]);
        }
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
            return Ok(first.loaded.keep_tensor(ahead.take(&stacked, first.dtype, &[rows, columns])?));
        }
        let tensors = parts.iter().map(|(weights, rows)| weights.float(name, &[*rows, columns]));
        Ok(Tensor::cat(&tensors.collect::<Result<Vec<_>>>()?, 0)?)
    }

    /// A U8 tensor of exactly this shape.
    pub fn bytes(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let name = self.full_name(name);
        self.check(&name, &[DType::U8], shape)?;
        Ok(self.loaded.keep_tensor(self.load(&name, &self.device)?))
    }

    fn check(&self, name: &str, dtypes: &[DType], shape: &[usize]) -> Result<&'c TensorInfo> {
        let info = self.checkpoint.required(name)?;
        if matches!(info.dtype, Dtype::I8 | Dtype::U8 | Dtype::F8_E5M2) && !dtypes.contains(&DType::U8) {
            return self.refuse_codes(name, "whose numbers need scales");
        }
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
