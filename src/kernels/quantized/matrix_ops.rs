//! The operations of a [`QuantizedMatrix`] on a CPU or GPU: matrix products, dequantization and embedding lookup.

use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

use super::quantized_matrix::QuantizedMatrix;
#[cfg(feature = "cuda")]
use super::quantized_ops;
use super::reference::{dot, round_input, with_host_planes};
#[cfg(feature = "cuda")]
use crate::kernels::SumOrder;
use crate::kernels::{elements, to_f32, unsupported};

impl QuantizedMatrix {
    /// Returns the dequantized matrix as `[rows, columns]` in the float dtype `dtype`.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        let (rows, columns) = self.dims();
        match self.device() {
            Device::Cpu => {
                let values = with_host_planes(self, |host| {
                    let mut values = vec![0.0; rows * columns];
                    values.par_chunks_mut(columns).enumerate().for_each(|(row, values)| host.row(row, values));
                    Ok(values)
                })?;
                Tensor::from_vec(values, (rows, columns), &Device::Cpu)?.to_dtype(dtype)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => quantized_ops::dequantize(device, self, dtype),
            _ => unsupported("dequantize", self.low()),
        }
    }

    /// Returns `x · Wᵀ` as f32 `[tokens, rows]`.
    ///
    /// `x` is `[tokens, columns]` in any float dtype. First quantizes `x` as `input_quantization` specifies.
    pub fn matmul(&self, x: &Tensor) -> Result<Tensor> {
        let (tokens, columns) = x.dims2()?;
        let (rows, _) = self.dims();
        if columns != self.columns {
            bail!("cannot multiply: x has shape {:?}, and the matrix has shape {:?}", x.dims(), self.dims());
        }
        match self.device() {
            Device::Cpu => {
                let x = round_input(&to_f32(x)?, self.input_quantization)?;
                let (storage, layout) = x.storage_and_layout();
                let x: &[f32] = elements(&storage, layout)?;
                let mut products = vec![0.0; rows * tokens];
                with_host_planes(self, |host| {
                    products.par_chunks_mut(tokens.max(1)).enumerate().for_each_init(
                        || vec![0.0; columns],
                        |values, (row, products)| {
                            host.row(row, values);
                            for (product, x) in products.iter_mut().zip(x.chunks_exact(columns)) {
                                *product = dot(values, x);
                            }
                        },
                    );
                    Ok(())
                })?;
                Tensor::from_vec(products, (rows, tokens), &Device::Cpu)?.t()?.contiguous()
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => quantized_ops::matmul(device, std::slice::from_ref(self), x, SumOrder::Fastest),
            _ => unsupported("matmul of a quantized matrix", x),
        }
    }

    /// Looks up the embedding rows `ids` and multiplies each row by `scale`. Returns f32 `[tokens, columns]`.
    ///
    /// `ids` are u32 `[tokens]`. If an id is not a row index, this function fails on a CPU. On a GPU, it returns the
    /// last row for this id.
    pub fn embed(&self, ids: &Tensor, scale: f32) -> Result<Tensor> {
        match self.device() {
            Device::Cpu => {
                let ids: Vec<u32> = ids.to_vec1()?;
                let (rows, columns) = self.dims();
                if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
                    bail!("cannot embed token {id}: the embedding has only {rows} rows");
                }
                let mut values = vec![0.0; ids.len() * columns];
                with_host_planes(self, |host| {
                    for (values, &id) in values.chunks_exact_mut(columns).zip(&ids) {
                        host.row(id as usize, values);
                        values.iter_mut().for_each(|value| *value *= scale);
                    }
                    Ok(())
                })?;
                Tensor::from_vec(values, (ids.len(), columns), &Device::Cpu)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => quantized_ops::embed(device, self, ids, scale),
            _ => unsupported("embed", ids),
        }
    }
}
