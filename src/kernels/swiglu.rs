//! SwiGLU and GeGLU (arXiv 2002.05202), their activations alone, and gpt-oss's clamped one (openai/gpt-oss,
//! `gpt_oss/torch/model.py`, `swiglu`): the gate is clamped from above only, the linear half on both sides and shifted by
//! one.

use candle_core::{D, DType, Device, Result, Tensor, bail};

use crate::kernels::{elements, to_f32};

/// Sharpness of the sigmoid; a constant of the architecture.
pub const ALPHA: f32 = 1.702;

/// x [.., 2F] with gate and linear halves interleaved (gate first) → [.., F], of x's dtype.
pub fn clamped_swiglu(x: &Tensor, limit: f32) -> Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    if width % 2 != 0 {
        bail!("clamped_swiglu: the last dimension of {:?} is odd", x.dims());
    }
    let mut shape = x.dims().to_vec();
    *shape.last_mut().expect("dim(Minus1) found a dimension") = width / 2;
    match x.device() {
        Device::Cpu => {
            let values = to_f32(x)?;
            let (values, layout) = values.storage_and_layout();
            Tensor::from_vec(reference(elements(&values, layout)?, limit), shape, &Device::Cpu)?.to_dtype(x.dtype())
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::cuda::{Arg, launch, module, suffix};
            // SAFETY: the kernel writes each of the n elements of `out`.
            let out = unsafe { Tensor::empty(shape, x.dtype(), x.device())? };
            let n = out.elem_count();
            let args = [Arg::tensor(x)?, Arg::tensor(&out)?, n.into(), ALPHA.into(), limit.into()];
            let name = format!("clamped_swiglu_{}", suffix(x.dtype())?);
            // SAFETY: `x` holds 2n elements, `out` n, both contiguous (checked by `Arg::tensor`).
            unsafe { launch(device, &module!("swiglu"), &name, (n.div_ceil(256), 1, 1), 256, 0, &args)? };
            Ok(out)
        }
        #[allow(unreachable_patterns)]
        _ => crate::kernels::unsupported("clamped_swiglu", x),
    }
}

/// What a gate or a hidden unit goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x · sigmoid(x)
    Silu,
    /// x · Φ(x) (arXiv 1606.08415), Φ by tanh: config.json's `gelu_pytorch_tanh` and `gelu_new`.
    GeluTanh,
}

impl Activation {
    /// In plain Rust.
    pub fn of(self, x: f32) -> f32 {
        const ROOT: f32 = 0.797_884_6; // sqrt(2 / π)
        match self {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => 0.5 * x * (1.0 + (ROOT * (x + 0.044_715 * x * x * x)).tanh()),
        }
    }

    #[cfg(feature = "cuda")]
    fn code(self) -> crate::kernels::launch::cuda::Arg {
        crate::kernels::launch::cuda::Arg::Int(match self {
            Activation::Silu => 0,
            Activation::GeluTanh => 1,
        })
    }
}

/// activation(gate) · up, both f32 of one shape, in `dtype`; without `up`, the activation alone.
pub fn gated(gate: &Tensor, up: Option<&Tensor>, activation: Activation, dtype: DType) -> Result<Tensor> {
    let fits = |up: &Tensor| up.dims() == gate.dims() && up.dtype() == DType::F32;
    if gate.dtype() != DType::F32 || !up.is_none_or(fits) {
        bail!("gated: gate {:?} {:?}, up {:?}, all F32", gate.dtype(), gate.dims(), up.map(Tensor::dims));
    }
    match gate.device() {
        Device::Cpu => {
            let values = to_f32(gate)?;
            let (values, layout) = values.storage_and_layout();
            let activated = elements(&values, layout)?.iter().map(|&x| activation.of(x)).collect::<Vec<f32>>();
            let activated = Tensor::from_vec(activated, gate.dims(), &Device::Cpu)?;
            match up {
                Some(up) => (activated * up)?.to_dtype(dtype),
                None => activated.to_dtype(dtype),
            }
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::cuda::{Arg, launch, module, suffix};
            // SAFETY: the kernel writes each of the n elements.
            let out = unsafe { Tensor::empty(gate.dims(), dtype, gate.device())? };
            let n = out.elem_count();
            let args = [Arg::tensor(gate)?, Arg::optional(up)?, Arg::tensor(&out)?, n.into(), activation.code()];
            let name = format!("gated_{}", suffix(dtype)?);
            // SAFETY: all hold n elements, contiguous (checked by `Arg::tensor`).
            unsafe { launch(device, &module!("swiglu"), &name, (n.div_ceil(256), 1, 1), 256, 0, &args)? };
            Ok(out)
        }
        #[allow(unreachable_patterns)]
        _ => crate::kernels::unsupported("gated", gate),
    }
}

/// x [.., 2F], the gates in the first half, → activation(gate) · up [.., F], of x's dtype.
pub fn gated_halves(x: &Tensor, activation: Activation) -> Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    if width % 2 != 0 {
        bail!("gated_halves: the last dimension of {:?} is odd", x.dims());
    }
    let columns = width / 2;
    let mut shape = x.dims().to_vec();
    *shape.last_mut().expect("dim(Minus1) found a dimension") = columns;
    match x.device() {
        Device::Cpu => {
            let half = |first| x.narrow(D::Minus1, first, columns)?.to_dtype(DType::F32)?.contiguous();
            gated(&half(0)?, Some(&half(columns)?), activation, x.dtype())
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::cuda::{Arg, launch, module, suffix};
            // SAFETY: the kernel writes each of the n elements.
            let out = unsafe { Tensor::empty(shape, x.dtype(), x.device())? };
            let n = out.elem_count();
            let args = [Arg::tensor(x)?, Arg::tensor(&out)?, n.into(), columns.into(), activation.code()];
            let name = format!("gated_halves_{}", suffix(x.dtype())?);
            // SAFETY: `x` holds 2n elements in rows of two halves, `out` n, both contiguous (checked by `Arg::tensor`).
            unsafe { launch(device, &module!("swiglu"), &name, (n.div_ceil(256), 1, 1), 256, 0, &args)? };
            Ok(out)
        }
        #[allow(unreachable_patterns)]
        _ => crate::kernels::unsupported("gated_halves", x),
    }
}

/// The clamped one in plain Rust.
pub fn reference(x: &[f32], limit: f32) -> Vec<f32> {
    x.chunks_exact(2)
        .map(|pair| {
            // Comparisons as in torch.clamp: a NaN stays a NaN.
            let gate = if pair[0] > limit { limit } else { pair[0] };
            let up = pair[1].clamp(-limit, limit);
            gate / (1.0 + (-ALPHA * gate).exp()) * (up + 1.0)
        })
        .collect()
}
