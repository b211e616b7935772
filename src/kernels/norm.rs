//! RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450), each fused with the residual addition before the norm.

use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

use crate::kernels::constants::MAX_PRODUCT_TERMS;
use crate::kernels::{elements, to_f32};

/// The addend y of [`add_norm`], such as the output of attention.
#[derive(Clone, Copy)]
pub struct Addend<'t> {
    /// 1 to `MAX_PRODUCT_TERMS` terms whose sum is y without its bias: f32 `[terms, tokens, hidden]`.
    pub terms: &'t Tensor,
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
    let inputs = Inputs { x, y: y.map(|y| y.terms), y_bias: y.and_then(|y| y.bias), weight, bias, eps };
    inputs.check()?;
    match x.device() {
        Device::Cpu => inputs.add_norm_on_cpu(dtype),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => with_cuda::add_norm(device, inputs, dtype),
        _ => crate::kernels::unsupported("add_norm", x),
    }
}

/// The inputs of [`add_norm`].
#[derive(Clone, Copy)]
struct Inputs<'t> {
    x: &'t Tensor,
    /// [`Addend::terms`]
    y: Option<&'t Tensor>,
    /// [`Addend::bias`]
    y_bias: Option<&'t Tensor>,
    weight: &'t Tensor,
    bias: Option<&'t Tensor>,
    eps: f32,
}

impl Inputs<'_> {
    /// Checks that all tensors are f32 and have matching shapes.
    fn check(self) -> Result<()> {
        let Self { x, y, y_bias, weight, bias, .. } = self;
        let (tokens, columns) = x.dims2()?;
        let y_matches = match y.map(Tensor::dims) {
            None => true,
            Some(&[1..=MAX_PRODUCT_TERMS, y_tokens, y_columns]) => (y_tokens, y_columns) == (tokens, columns),
            Some(_) => false,
        };
        let vectors_match = [y_bias, Some(weight), bias].into_iter().flatten().all(|vector| vector.dims() == [columns]);
        let mut tensors = [Some(x), y, y_bias, Some(weight), bias].into_iter().flatten();
        if !y_matches || !vectors_match || tensors.any(|tensor| tensor.dtype() != DType::F32) {
            let x = x.dims();
            let y = y.map(Tensor::dims);
            let weight = weight.dims();
            let (bias, y_bias) = (bias.map(Tensor::dims), y_bias.map(Tensor::dims));
            bail!(
                "cannot compute add_norm: the inputs must be F32 and have matching shapes: x {x:?}, y {y:?}, \
                 y_bias {y_bias:?}, weight {weight:?}, bias {bias:?}"
            );
        }
        Ok(())
    }

    /// Computes [`add_norm`] in plain Rust.
    fn add_norm_on_cpu(self, dtype: DType) -> Result<(Tensor, Tensor)> {
        let Self { x, y, y_bias, weight, bias, eps } = self;
        let sum = match (y.map(|y| y.sum(0)).transpose()?, y_bias) {
            (Some(y), Some(y_bias)) => (x + y.broadcast_add(y_bias)?)?,
            (Some(y), None) => (x + y)?,
            (None, _) => x.clone(),
        };
        let values = to_f32(&sum)?;
        let weights = to_f32(weight)?;
        let (values, values_layout) = values.storage_and_layout();
        let (weights, weights_layout) = weights.storage_and_layout();
        let values = elements(&values, values_layout)?;
        let weights = elements(&weights, weights_layout)?;
        let bias = bias.map(Tensor::to_vec1::<f32>).transpose()?;
        let normed = reference(values, weights, bias.as_deref(), eps);
        let normed = Tensor::from_vec(normed, x.dims(), &Device::Cpu)?.to_dtype(dtype)?;
        Ok((sum, normed))
    }
}

#[cfg(feature = "cuda")]
mod with_cuda {
    use candle_core::cuda_backend::CudaDevice;
    use candle_core::{DType, Result, Tensor};

    use super::Inputs;
    use crate::kernels::constants::ADD_NORM_THREADS;
    use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};
    use crate::kernels::scratch;

    /// Computes [`add_norm`](super::add_norm) on a GPU. The caller has checked the inputs.
    pub(super) fn add_norm(device: &CudaDevice, inputs: Inputs, dtype: DType) -> Result<(Tensor, Tensor)> {
        let Inputs { x, y, y_bias, weight, bias, eps } = inputs;
        let (tokens, columns) = x.dims2()?;
        // SAFETY: the kernel writes every element of `normed`.
        let normed = unsafe { scratch::empty((tokens, columns), dtype, x.device())? };
        let sum = match y {
            // SAFETY: the kernel writes every element of `sum`.
            Some(_) => unsafe { scratch::empty((tokens, columns), DType::F32, x.device())? },
            None => x.clone(),
        };
        let terms = y.map_or(1, |y| y.dims()[0]);
        let name = if terms > 1 { "add_norm_terms" } else { "add_norm" };
        let arguments = Arguments::new()
            .tensor(x)?
            .optional(y)?
            .optional(y_bias)?
            .tensor(weight)?
            .optional(bias)?
            .tensor(&sum)?
            .tensor(&normed)?
            .int(terms)
            .int(columns)
            .float(eps);
        let kernel = format!("{name}_{}", dtype_suffix(dtype)?);
        let launch = Launch::new(module!("norm"), kernel, LaunchShape::linear(tokens, ADD_NORM_THREADS), arguments);
        // SAFETY: `Inputs::check` has checked shapes and dtypes.
        // Overlap: all threads call `pdl_wait`. Before, they read only `weight` and the bias of y, which no kernel
        // writes after loading.
        unsafe { launch.overlapping().enqueue(device)? };
        Ok((sum, normed))
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
