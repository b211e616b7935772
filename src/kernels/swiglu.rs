//! SwiGLU (arXiv 2002.05202), and gpt-oss's clamped one (openai/gpt-oss, `gpt_oss/torch/model.py`, `swiglu`): the gate is
//! clamped from above only, the linear half on both sides and shifted by one.

use candle_core::{D, DType, Device, Result, Tensor, bail};

use super::{elements, to_f32};

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
            use super::cuda::{Arg, launch, module, suffix};
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
        _ => super::unsupported("clamped_swiglu", x),
    }
}

/// silu(gate) · up, both f32 of one shape, in `dtype`.
pub fn silu_mul(gate: &Tensor, up: &Tensor, dtype: DType) -> Result<Tensor> {
    if gate.dims() != up.dims() || gate.dtype() != DType::F32 || up.dtype() != DType::F32 {
        bail!("silu_mul: gate {:?} {:?}, up {:?} {:?}", gate.dtype(), gate.dims(), up.dtype(), up.dims());
    }
    match gate.device() {
        Device::Cpu => (gate.silu()? * up)?.to_dtype(dtype),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use super::cuda::{Arg, launch, module, suffix};
            // SAFETY: the kernel writes each of the n elements.
            let out = unsafe { Tensor::empty(gate.dims(), dtype, gate.device())? };
            let n = out.elem_count();
            let args = [Arg::tensor(gate)?, Arg::tensor(up)?, Arg::tensor(&out)?, n.into()];
            let name = format!("silu_mul_{}", suffix(dtype)?);
            // SAFETY: all three hold n elements, contiguous (checked by `Arg::tensor`).
            unsafe { launch(device, &module!("swiglu"), &name, (n.div_ceil(256), 1, 1), 256, 0, &args)? };
            Ok(out)
        }
        #[allow(unreachable_patterns)]
        _ => super::unsupported("silu_mul", gate),
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
