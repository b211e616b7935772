//! RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450), each fused with the residual addition before the norm.

use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

use crate::kernels::constants::MAX_PRODUCT_PARTS;
use crate::kernels::{elements, to_f32};

/// The addend y of [`add_norm`], such as the output of attention.
#[derive(Clone, Copy)]
pub struct Addend<'t> {
    /// 1 to `MAX_PRODUCT_PARTS` parts whose sum is y without its bias: f32 `[parts, tokens, hidden]`.
    pub parts: &'t Tensor,
    /// A bias to add to every row of y, such as the bias of `o_proj`: f32 `[hidden]`.
    pub bias: Option<&'t Tensor>,
}

/// Returns the sum s = x + y as f32, and the normalized sum in `dtype`. If `y` is `None`, s is x.
///
/// Without `bias`, the norm is RMSNorm: s / sqrt(mean(s²) + eps) · weight.
/// With `bias`, the norm is LayerNorm, which first subtracts the mean of s and adds `bias` last.
///
/// - x: f32 `[tokens, hidden]`
/// - weight, bias: f32 `[hidden]`
pub fn add_norm(
    x: &Tensor,
    y: Option<Addend>,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f32,
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    let (tokens, columns) = x.dims2()?;
    let (y, y_bias) = (y.map(|y| y.parts), y.and_then(|y| y.bias));
    let tensors = [Some(x), y, y_bias, Some(weight), bias].into_iter().flatten();
    let y_matches = match y.map(Tensor::dims) {
        None => true,
        Some(&[1..=MAX_PRODUCT_PARTS, y_tokens, y_columns]) => (y_tokens, y_columns) == (tokens, columns),
        Some(_) => false,
    };
    let shapes_match =
        y_matches && [y_bias, Some(weight), bias].into_iter().flatten().all(|vector| vector.dims() == [columns]);
    if !shapes_match || tensors.into_iter().any(|tensor| tensor.dtype() != DType::F32) {
        let (x, y, weight) = (x.dims(), y.map(Tensor::dims), weight.dims());
        let (bias, y_bias) = (bias.map(Tensor::dims), y_bias.map(Tensor::dims));
        bail!(
            "cannot compute add_norm: the inputs must be F32 and have matching shapes: x {x:?}, y {y:?}, \
             y_bias {y_bias:?}, weight {weight:?}, bias {bias:?}"
        );
    }
    match x.device() {
        Device::Cpu => {
            let sum = match y.map(|y| y.sum(0)).transpose()? {
                Some(y) => match y_bias {
                    Some(bias) => (x + y.broadcast_add(bias)?)?,
                    None => (x + y)?,
                },
                None => x.clone(),
            };
            let (values, weights) = (to_f32(&sum)?, to_f32(weight)?);
            let ((values, values_layout), (weights, weights_layout)) =
                (values.storage_and_layout(), weights.storage_and_layout());
            let (values, weights) = (elements(&values, values_layout)?, elements(&weights, weights_layout)?);
            let bias = bias.map(Tensor::to_vec1::<f32>).transpose()?;
            let normed = reference(values, weights, bias.as_deref(), eps);
            let normed = Tensor::from_vec(normed, (tokens, columns), &Device::Cpu)?.to_dtype(dtype)?;
            Ok((sum, normed))
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::constants::ADD_NORM_THREADS;
            use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};
            // SAFETY: the kernel writes every element of `normed`.
            let normed = unsafe { crate::kernels::scratch::empty((tokens, columns), dtype, x.device())? };
            let sum = match y {
                // SAFETY: the kernel writes every element of `sum`.
                Some(_) => unsafe { crate::kernels::scratch::empty((tokens, columns), DType::F32, x.device())? },
                None => x.clone(),
            };
            let parts = y.map_or(1, |y| y.dims()[0]);
            let name = if parts > 1 { "add_norm_parts" } else { "add_norm" };
            let arguments = Arguments::new()
                .tensor(x)?
                .optional(y)?
                .optional(y_bias)?
                .tensor(weight)?
                .optional(bias)?
                .tensor(&sum)?
                .tensor(&normed)?
                .int(parts)
                .int(columns)
                .float(eps);
            let kernel = format!("{name}_{}", dtype_suffix(dtype)?);
            let launch = Launch::new(module!("norm"), kernel, LaunchShape::linear(tokens, ADD_NORM_THREADS), arguments);
            // SAFETY: shapes and dtypes are checked above.
            // Overlap: all threads call `pdl_wait`. Before, they read only `weight` and the bias of y, which no kernel
            // writes after loading.
            unsafe { launch.overlapping().enqueue(device)? };
            Ok((sum, normed))
        }
        _ => crate::kernels::unsupported("add_norm", x),
    }
}

/// Applies a norm to each row of x in plain Rust: LayerNorm if there is a bias, otherwise RMSNorm.
///
/// x and the result are `[tokens, hidden]`. `weight` and `bias` are `[hidden]`.
pub fn reference(x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f32) -> Vec<f32> {
    let mut out = vec![0f32; x.len()];
    let columns = weight.len();
    out.par_chunks_exact_mut(columns).zip(x.par_chunks_exact(columns)).for_each(|(out, x)| {
        let mean = bias.map_or(0.0, |_| x.iter().sum::<f32>() / columns as f32);
        let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / columns as f32;
        let scale = 1.0 / (variance + eps).sqrt();
        for (i, out) in out.iter_mut().enumerate() {
            *out = (x[i] - mean) * scale * weight[i] + bias.map_or(0.0, |bias| bias[i]);
        }
    });
    out
}
