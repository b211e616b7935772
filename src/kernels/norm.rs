//! RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450) of the residual stream, with the addition that comes before
//! it.

use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

use crate::kernels::{elements, to_f32};

/// s = x + y, and its norm in `dtype`: s / sqrt(mean(s²) + eps) · weight. With a bias it is a LayerNorm: the mean is taken
/// from s first, the bias added last. Without y, x itself and its norm.
///
/// x, y f32 \[T, C\]; weight, bias f32 \[C\].
pub fn add_norm(
    x: &Tensor,
    y: Option<&Tensor>,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f32,
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    let (tokens, columns) = x.dims2()?;
    let f32s = [Some(x), y, Some(weight), bias].into_iter().flatten().all(|tensor| tensor.dtype() == DType::F32);
    let sized = weight.dims() == [columns] && bias.is_none_or(|bias| bias.dims() == [columns]);
    if !f32s || y.is_some_and(|y| y.dims() != x.dims()) || !sized {
        bail!("add_norm: x {:?}, y {:?}, weight {:?}, all F32", x.dims(), y.map(Tensor::dims), weight.dims());
    }
    match x.device() {
        Device::Cpu => {
            let sum = match y {
                Some(y) => (x + y)?,
                None => x.clone(),
            };
            let (values, weights) = (to_f32(&sum)?, to_f32(weight)?);
            let ((values, v), (weights, w)) = (values.storage_and_layout(), weights.storage_and_layout());
            let bias = bias.map(Tensor::to_vec1::<f32>).transpose()?;
            let normed = reference(elements(&values, v)?, elements(&weights, w)?, bias.as_deref(), eps);
            let normed = Tensor::from_vec(normed, (tokens, columns), &Device::Cpu)?.to_dtype(dtype)?;
            Ok((sum, normed))
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::cuda::{Arg, launch, module, suffix};
            // SAFETY: the kernel writes every element of both.
            let normed = unsafe { Tensor::empty((tokens, columns), dtype, x.device())? };
            let sum = match y {
                // SAFETY: as above.
                Some(_) => unsafe { Tensor::empty((tokens, columns), DType::F32, x.device())? },
                None => x.clone(),
            };
            let args = [
                Arg::tensor(x)?,
                Arg::optional(y)?,
                Arg::tensor(weight)?,
                Arg::optional(bias)?,
                Arg::tensor(&sum)?,
                Arg::tensor(&normed)?,
                columns.into(),
                eps.into(),
            ];
            let name = format!("add_norm_{}", suffix(dtype)?);
            // SAFETY: shapes and dtypes checked above.
            unsafe { launch(device, &module!("norm"), &name, (tokens, 1, 1), 256, 0, &args)? };
            Ok((sum, normed))
        }
        #[allow(unreachable_patterns)]
        _ => crate::kernels::unsupported("add_norm", x),
    }
}

/// The norm in plain Rust, row by row.
pub fn reference(x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f32) -> Vec<f32> {
    let mut out = vec![0f32; x.len()];
    let columns = weight.len();
    out.par_chunks_exact_mut(columns).zip(x.par_chunks_exact(columns)).for_each(|(out, x)| {
        let center = bias.map_or(0.0, |_| x.iter().sum::<f32>() / columns as f32);
        let mean = x.iter().map(|x| (x - center) * (x - center)).sum::<f32>() / columns as f32;
        let scale = 1.0 / (mean + eps).sqrt();
        for (i, out) in out.iter_mut().enumerate() {
            *out = (x[i] - center) * scale * weight[i] + bias.map_or(0.0, |bias| bias[i]);
        }
    });
    out
}
