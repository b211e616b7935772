//! Loads matrices as floats or in one of the supported quantized formats.

use ::safetensors::tensor::Dtype;
use anyhow::{Context, Result, bail};
use candle_core::Tensor;

use super::weights::Weights;
use crate::kernels::matrix::Matrix;
use crate::kernels::quantized::{InputQuantization, QuantizedMatrix, WeightFormat};
use crate::weights::checkpoint::Checkpoint;
use crate::weights::compressed::{Activations, CodeType, WeightScales};
use crate::weights::quantized::{self, MatrixRows, QuantizedShape};
use crate::weights::reading::{DimOrder, RowBuffer, RowSource, Slice, StoredRows};
use crate::weights::safetensors::{self, SafetensorsCheckpoint, module};

impl<'c> Weights<'c> {
    /// Loads the matrix `name` of each module in `modules` and concatenates the rows of these matrices.
    /// Each element of `modules` is a module and the number of rows of its matrix.
    ///
    /// A matrix that is quantized in the file stays quantized. MXFP4 matrices of GGUF files count as float matrices.
    /// With a quantization target, a float matrix is quantized if the target supports the length of its rows.
    /// All other matrices are loaded as floats in the compute dtype.
    pub fn matrix(modules: &[(Self, usize)], name: &str, columns: usize) -> Result<Matrix> {
        let all_rows: usize = modules.iter().map(|(_, rows)| rows).sum();
        if let Some((weights, _)) = modules.first()
            && all_rows * columns == 0
        {
            for (weights, rows) in modules {
                weights.join(name, &[*rows, columns])?;
            }
            return Ok(Matrix::Dense(Tensor::zeros((all_rows, columns), weights.dtype, &weights.device)?));
        }
        let rows_of = |(weights, rows): &(Self, usize)| weights.quantized(name, 1, *rows, columns);
        let quantized = modules.iter().map(rows_of).collect::<Result<Vec<_>>>()?;
        let (mut matrices, mut rest) = (Vec::new(), modules);
        for rows in quantized.chunk_by(can_combine) {
            let (modules, remaining) = rest.split_at(rows.len());
            rest = remaining;
            let rows: Vec<&MatrixRows> = rows.iter().flatten().collect();
            matrices.push(if rows.is_empty() {
                Matrix::Dense(Self::stacked(modules, name, columns)?)
            } else {
                Self::build_modules(modules, name, &rows)?
            });
        }
        Ok(match matrices.len() {
            1 => matrices.remove(0),
            _ => Matrix::Concatenated(matrices),
        })
    }

    /// Builds the quantized matrices `name` of `modules`, in order, for a single kernel. `rows` has the rows of each.
    /// Adjacent matrices with the same format become one matrix.
    fn build_modules(modules: &[(Self, usize)], name: &str, rows: &[&MatrixRows]) -> Result<Matrix> {
        let first = &modules[0].0;
        let has_same_format = |a: &&MatrixRows, b: &&MatrixRows| a.format == b.format;
        let built = rows.chunk_by(has_same_format).map(|rows| first.build(rows)).collect::<Result<Vec<_>>>();
        let built = built.with_context(|| format!("cannot load {}", first.full_name(name)))?;
        for (weights, _) in modules {
            weights.progress.add_read(weights.checkpoint.required(&weights.full_name(name))?.bytes() as u64);
        }
        Ok(Matrix::Quantized(built))
    }

    /// Loads the matrices of all experts from one stacked tensor, with shape `[experts, rows, columns]`.
    pub fn experts(&self, name: &str, shape: [usize; 3]) -> Result<Matrix> {
        let [experts, rows, columns] = shape;
        if rows * columns == 0 {
            self.join(name, &shape)?;
            return Ok(Matrix::Dense(Tensor::zeros(&shape, self.dtype, &self.device)?));
        }
        match self.quantized(name, experts, rows, columns)? {
            Some(rows) => self.build_stored(name, &rows),
            None => {
                let slice = self.slice(DimOrder::StackedRowsColumns);
                Ok(Matrix::Dense(self.float_slice(name, &shape, self.dtype, slice)?))
            }
        }
    }

    /// Loads a matrix `[rows, columns]` that Hugging Face checkpoints store transposed, as `[columns, rows]`.
    /// GGUF files store the matrix as `[rows, columns]`.
    pub fn transposed(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix> {
        if matches!(self.checkpoint, Checkpoint::Gguf(_))
            && let Some(matrix_rows) = self.quantized(name, 1, rows, columns)?
        {
            if rows * columns == 0 {
                matrix_rows.join()?;
                return Ok(Matrix::Dense(Tensor::zeros((rows, columns), self.dtype, &self.device)?));
            }
            return self.build_stored(name, &matrix_rows);
        }
        let stored = self.float_slice(name, &[columns, rows], self.dtype, self.slice(DimOrder::ColumnsRows))?;
        Ok(Matrix::Dense(stored.t()?.contiguous()?))
    }

    /// Returns the column unit of a matrix: ranks may divide the columns only at multiples of this number.
    /// The unit is 1 if the matrix is not quantized in the file and there is no quantization target.
    /// `columns` is the number of columns of the whole matrix.
    pub fn column_unit(&self, name: &str, columns: usize) -> Result<usize> {
        Ok(self.checkpoint.column_unit(&self.full_name(name), columns, self.quantize))
    }

    /// Builds the quantized matrix or stack `name` from its rows, which fill one tensor of the checkpoint.
    fn build_stored(&self, name: &str, rows: &MatrixRows) -> Result<Matrix> {
        let name = self.full_name(name);
        self.progress.add_read(self.checkpoint.required(&name)?.bytes() as u64);
        let built = self.build(&[rows]).with_context(|| format!("cannot load {name}"))?;
        Ok(Matrix::Quantized(vec![built]))
    }

    fn build(&self, matrices: &[&MatrixRows]) -> Result<QuantizedMatrix> {
        let world = &self.reader.progress_world;
        let matrix = MatrixRows::build(matrices, &self.device, &|| world.record_progress())?;
        self.progress.add_resident(matrix.bytes());
        Ok(matrix)
    }

    /// Returns this rank's part of `matrices` stacked matrices that are quantized in the file or during loading.
    /// Returns `None` for matrices that are loaded as floats.
    fn quantized(&self, name: &str, matrices: usize, rows: usize, columns: usize) -> Result<Option<MatrixRows<'c>>> {
        let slice = self.slice(DimOrder::RowsColumns);
        let stored = slice.as_ref().map_or(vec![rows, columns], |slice| slice.stored_shape(&[rows, columns]));
        let Some(all_rows) = self.quantized_rows(name, matrices * stored[0], stored[1])? else { return Ok(None) };
        Ok(Some(match slice {
            Some(Slice { dim: 0, ranges, total }) => {
                let starts = (0..matrices).map(|matrix| matrix * total);
                let ranges = starts.flat_map(|start| ranges.iter().map(move |r| start + r.start..start + r.end));
                all_rows.rows(ranges.flatten().collect())
            }
            slice => {
                // Each rank needs some or all columns of every row, so the ranks can convert the rows together.
                let kept = slice.map_or(0..stored[1], |slice| slice.ranges[0].clone());
                let shared = self.shared_reads.as_ref().map(|reads| (reads, self.full_name(name)));
                all_rows.columns(kept, shared)?
            }
        }))
    }

    /// Takes part in the read of a matrix, or of stacked matrices, that this rank holds no part of.
    /// If the ranks share the read, the other ranks wait until this rank joins.
    /// `shape` is the shape of this rank's empty part, in which one dimension is 0.
    fn join(&self, name: &str, shape: &[usize]) -> Result<()> {
        let (Some(_), [stack @ .., rows, columns]) = (&self.shared_reads, shape) else { return Ok(()) };
        match self.quantized(name, stack.iter().product(), *rows, *columns)? {
            Some(rows) => rows.join(),
            None => self.join_reads(name, shape),
        }
    }

    /// Returns all rows of a matrix that is quantized in the file or during loading.
    /// Returns `None` for a matrix that is loaded as floats.
    fn quantized_rows(&self, name: &str, rows: usize, columns: usize) -> Result<Option<MatrixRows<'c>>> {
        let name = self.full_name(name);
        self.progress.add_name(&name);
        let matrix_rows = match self.checkpoint {
            Checkpoint::Gguf(model) => match (model.quantized(&name)?, self.quantize) {
                (None, Some(target)) => model.rows_to_quantize(&name, target)?,
                (stored, _) => stored,
            },
            Checkpoint::Safetensors(checkpoint) => self.safetensors_rows(checkpoint, &name, [rows, columns])?,
        };
        match matrix_rows {
            Some(stored) if (stored.rows, stored.columns) != (rows, columns) => {
                bail!("tensor {name}: expected shape {:?}, found {}", [rows, columns], self.checkpoint.describe(&name))
            }
            matrix_rows => Ok(matrix_rows),
        }
    }

    /// Like [`quantized_rows`](Self::quantized_rows), for a matrix of a safetensors file with the full name `name`.
    fn safetensors_rows(
        &self,
        checkpoint: &'c SafetensorsCheckpoint,
        name: &str,
        shape: [usize; 2],
    ) -> Result<Option<MatrixRows<'c>>> {
        let view = checkpoint.view(name)?;
        // A scale means that the matrix is quantized. Modules that `quantization_config` ignores have no scale.
        if checkpoint.info(&format!("{name}_scale")).is_some() {
            return self.compressed(checkpoint, name, shape).map(Some);
        }
        let Some(target) = self.quantize.filter(|_| view.info.is_float()) else { return Ok(None) };
        let dtype = view.info.dtype;
        if dtype == Dtype::F8_E4M3 {
            self.check_unscaled(name)?;
        }
        let [rows, columns] = shape;
        if view.info.elements() != rows * columns || view.info.shape.last() != Some(&columns) {
            bail!("tensor {name}: expected shape {shape:?}, found {:?}", view.info.shape);
        }
        let source = StoredRows { bytes: view.bytes, row_bytes: columns * dtype.bitsize() / 8 };
        Ok(MatrixRows::from_floats(target, rows, columns, move |row, buffer, values| {
            quantized::read_floats(dtype, source.row(row, buffer)?, values)
        }))
    }

    /// Returns the rows of a matrix in the compressed-tensors format.
    fn compressed(
        &self,
        checkpoint: &'c SafetensorsCheckpoint,
        name: &str,
        shape: [usize; 2],
    ) -> Result<MatrixRows<'c>> {
        let Some(scheme) = checkpoint.scheme(module(name)) else {
            bail!("tensor {name} has a scale, but quantization_config does not describe the tensor");
        };
        let view = checkpoint.view(name)?;
        let format = scheme.code_type.weight_format();
        let stored = match scheme.code_type {
            CodeType::Int8 => Dtype::I8,
            CodeType::Fp8 => Dtype::F8_E4M3,
        };
        if view.info.dtype != stored || view.info.shape != shape {
            let found = self.checkpoint.describe(name);
            bail!("tensor {name}: config.json requires {stored} {shape:?}, found {found}");
        }
        let [rows, columns] = shape;
        let weight_scale_count = match scheme.weight_scales {
            WeightScales::PerTensor => 1,
            WeightScales::PerChannel => rows,
        };
        let weight_scales = self.scales(checkpoint, &format!("{name}_scale"), weight_scale_count)?;
        let input_scale =
            || -> Result<f32> { Ok(self.scales(checkpoint, &format!("{}.input_scale", module(name)), 1)?[0]) };
        let input_quantization = match (scheme.activations, format) {
            (Activations::Unquantized, _) => InputQuantization::None,
            (Activations::PerToken, WeightFormat::Int8) => InputQuantization::Int8PerToken,
            (Activations::PerToken, _) => InputQuantization::Fp8PerToken,
            (Activations::Static, WeightFormat::Int8) => InputQuantization::Int8Static(input_scale()?),
            (Activations::Static, _) => InputQuantization::Fp8Static(input_scale()?),
        };
        // Packed codes are unsigned: each is stored as code + 128. Flipping the top bit removes the offset.
        let flip = if scheme.is_packed { 0x80 } else { 0 };
        let source = StoredRows { bytes: view.bytes, row_bytes: columns };
        let write = move |row: usize, buffer: &mut RowBuffer, [low, _, scales, _]: [&mut [u8]; 4]| {
            for (code, byte) in low.iter_mut().zip(source.row(row, buffer)?) {
                *code = byte ^ flip;
            }
            let scale = weight_scales.get(row).unwrap_or(&weight_scales[0]);
            scales.copy_from_slice(&scale.to_le_bytes());
            Ok(())
        };
        Ok(MatrixRows::new(QuantizedShape { format, rows, columns }, input_quantization, Box::new(write)))
    }

    /// Reads the scales in a tensor, which must have `count` elements.
    fn scales(&self, checkpoint: &SafetensorsCheckpoint, name: &str, count: usize) -> Result<Vec<f32>> {
        let view = checkpoint.view(name)?;
        if !view.info.is_float() || view.info.elements() != count {
            bail!("tensor {name}: expected float scales (count: {count}), found {}", self.checkpoint.describe(name));
        }
        self.progress.add_name(name);
        let mut scales = vec![0.0; count];
        quantized::read_floats(view.info.dtype, &view.bytes.read()?, &mut scales)?;
        self.progress.add_read(view.info.bytes() as u64);
        Ok(scales)
    }

    /// Loads the float matrix `name` of each module in `modules` and concatenates the rows of these matrices.
    /// Each element of `modules` is a module and the number of rows of its matrix. The result has the compute dtype.
    pub fn stacked(modules: &[(Weights, usize)], name: &str, columns: usize) -> Result<Tensor> {
        if let [(weights, rows)] = modules {
            return weights.float_slice(name, &[*rows, columns], weights.dtype, weights.slice(DimOrder::RowsColumns));
        }
        let names: Vec<String> = modules.iter().map(|(weights, _)| weights.full_name(name)).collect();
        let stacked = safetensors::stacked_name(&names);
        if let Some((first, _)) = modules.first()
            && let Some(reader) = first.read_ahead(&stacked)
        {
            for ((weights, rows), name) in modules.iter().zip(&names) {
                let info = weights.check(name, &[weights.dtype], &[*rows, columns])?;
                weights.progress.add_read(info.bytes() as u64);
            }
            let rows = modules.iter().map(|(_, rows)| rows).sum();
            return Ok(first.progress.add_tensor(reader.take(&stacked, first.dtype, &[rows, columns])?));
        }
        let tensors = modules.iter().map(|(weights, rows)| {
            weights.float_slice(name, &[*rows, columns], weights.dtype, weights.slice(DimOrder::RowsColumns))
        });
        Ok(Tensor::cat(&tensors.collect::<Result<Vec<_>>>()?, 0)?)
    }
}

/// Returns whether a single kernel can process two adjacent matrices together. Float matrices are `None`.
fn can_combine(a: &Option<MatrixRows>, b: &Option<MatrixRows>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => {
            a.input_quantization == b.input_quantization
                && (a.format == WeightFormat::Fp8) == (b.format == WeightFormat::Fp8)
        }
        (None, None) => true,
        _ => false,
    }
}
