//! Gated activations: SwiGLU and GeGLU (arXiv 2002.05202), and the clamped SwiGLU of gpt-oss.
//!
//! The clamped SwiGLU limits gate to at most `limit`, and up to the range from -`limit` to `limit`.
//! It then computes gate · sigmoid([`ALPHA`] · gate) · (up + 1).
//! Its reference is the function `swiglu` in `gpt_oss/torch/model.py` of openai/gpt-oss.

use candle_core::{D, DType, Device, Result, Tensor, bail};

use crate::kernels::{elements, to_f32};

pub use crate::kernels::constants::SWIGLU_ALPHA as ALPHA;

/// Returns the clamped SwiGLU of x. The result is `[.., intermediate]` in the dtype of x.
///
/// x is `[.., 2 * intermediate]`. In each row, gate values are at even indices, and up values are at odd indices.
pub fn clamped_swiglu(x: &Tensor, limit: f32) -> Result<Tensor> {
    let shape = half_width("clamped_swiglu", x)?;
    match x.device() {
        Device::Cpu => {
            let values = to_f32(x)?;
            let (values, layout) = values.storage_and_layout();
            Tensor::from_vec(reference(elements(&values, layout)?, limit), shape, &Device::Cpu)?.to_dtype(x.dtype())
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};
            // SAFETY: the kernel writes every element of `out`.
            let out = unsafe { crate::kernels::scratch::empty(shape, x.dtype(), x.device())? };
            let count = out.elem_count();
            let arguments = Arguments::new().tensor(x)?.tensor(&out)?.int(count).float(limit);
            let kernel = format!("clamped_swiglu_{}", dtype_suffix(x.dtype())?);
            let launch = Launch::new(module!("activation"), kernel, LaunchShape::one_thread_each(count), arguments);
            // SAFETY: both tensors are contiguous (`Arguments::tensor` checks this); x holds twice `count` elements.
            unsafe { launch.enqueue(device)? };
            Ok(out)
        }
        _ => crate::kernels::unsupported("clamped_swiglu", x),
    }
}

/// The activation function of an MLP. In a gated MLP, it applies to the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// SiLU: x · sigmoid(x).
    Silu,
    /// GELU (arXiv 1606.08415) with the tanh approximation. config.json calls it `gelu_pytorch_tanh` or `gelu_new`.
    GeluTanh,
}

impl Activation {
    /// Applies the activation function to one value, on the CPU.
    pub fn apply(self, x: f32) -> f32 {
        const SQRT_2_OVER_PI: f32 = 0.797_884_6;
        match self {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => 0.5 * x * (1.0 + (SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x)).tanh()),
        }
    }

    /// Returns the constant that selects this activation function in a kernel (`headers/activation.cuh`).
    #[cfg(feature = "cuda")]
    pub fn code(self) -> usize {
        use crate::kernels::constants::{ACTIVATION_GELU_TANH, ACTIVATION_SILU};
        match self {
            Activation::Silu => ACTIVATION_SILU,
            Activation::GeluTanh => ACTIVATION_GELU_TANH,
        }
    }
}

/// Returns activation(gate) · up in `dtype`. If `up` is `None`, returns activation(gate).
///
/// gate and up must be f32 and have equal shapes.
pub fn gated(gate: &Tensor, up: Option<&Tensor>, activation: Activation, dtype: DType) -> Result<Tensor> {
    let up_fits = up.is_none_or(|up| up.dims() == gate.dims() && up.dtype() == DType::F32);
    if gate.dtype() != DType::F32 || !up_fits {
        let shown = |tensor: &Tensor| format!("{:?} {:?}", tensor.dtype(), tensor.dims());
        let (gate, up) = (shown(gate), up.map_or("none".into(), shown));
        bail!("cannot compute gated: the inputs must be F32 and have the same shape: gate {gate}, up {up}");
    }
    if gate.elem_count() == 0 {
        return Tensor::zeros(gate.dims(), dtype, gate.device());
    }
    match gate.device() {
        Device::Cpu => {
            let values = to_f32(gate)?;
            let (values, layout) = values.storage_and_layout();
            let activated = elements(&values, layout)?.iter().map(|&x| activation.apply(x)).collect::<Vec<f32>>();
            let activated = Tensor::from_vec(activated, gate.dims(), &Device::Cpu)?;
            match up {
                Some(up) => (activated * up)?.to_dtype(dtype),
                None => activated.to_dtype(dtype),
            }
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};
            // SAFETY: the kernel writes every element of `out`.
            let out = unsafe { crate::kernels::scratch::empty(gate.dims(), dtype, gate.device())? };
            let count = out.elem_count();
            let arguments =
                Arguments::new().tensor(gate)?.optional(up)?.tensor(&out)?.int(count).int(activation.code());
            let kernel = format!("gated_{}", dtype_suffix(dtype)?);
            let launch = Launch::new(module!("activation"), kernel, LaunchShape::one_thread_each(count), arguments);
            // SAFETY: all tensors are contiguous (`Arguments::tensor` checks this) and hold `count` elements.
            // Overlap: all threads call `pdl_wait` before they access device memory.
            unsafe { launch.overlapping().enqueue(device)? };
            Ok(out)
        }
        _ => crate::kernels::unsupported("gated", gate),
    }
}

/// Returns activation(gate) · up for the gate and up values in x. The result is `[.., intermediate]` in `dtype`.
///
/// x is `[.., 2 * intermediate]`. Each row holds all gate values, then all up values.
/// On a GPU, x must be f32 or have `dtype`.
pub fn gated_halves(x: &Tensor, activation: Activation, dtype: DType) -> Result<Tensor> {
    let out_shape = half_width("gated_halves", x)?;
    let columns = out_shape[out_shape.len() - 1];
    if x.elem_count() == 0 {
        return Tensor::zeros(out_shape, dtype, x.device());
    }
    match x.device() {
        Device::Cpu => {
            let half = |first| x.narrow(D::Minus1, first, columns)?.to_dtype(DType::F32)?.contiguous();
            gated(&half(0)?, Some(&half(columns)?), activation, dtype)
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};
            // SAFETY: the kernel writes every element of `out`.
            let out = unsafe { crate::kernels::scratch::empty(out_shape, dtype, x.device())? };
            let count = out.elem_count();
            let arguments = Arguments::new().tensor(x)?.tensor(&out)?.int(count).int(columns).int(activation.code());
            let input = match x.dtype() {
                same if same == dtype => "",
                DType::F32 => "of_f32_",
                other => bail!("cannot compute gated_halves: x is {other:?}, expected F32 or {dtype:?}"),
            };
            let kernel = format!("gated_halves_{input}{}", dtype_suffix(dtype)?);
            let launch = Launch::new(module!("activation"), kernel, LaunchShape::one_thread_each(count), arguments);
            // SAFETY: both tensors are contiguous (`Arguments::tensor` checks this); x holds twice `count` elements.
            // Overlap: all threads call `pdl_wait` before they access device memory.
            unsafe { launch.overlapping().enqueue(device)? };
            Ok(out)
        }
        _ => crate::kernels::unsupported("gated_halves", x),
    }
}

/// Returns the shape of x with the last dimension halved. Fails if x is a scalar, or if its last dimension is odd.
fn half_width(op: &str, x: &Tensor) -> Result<Vec<usize>> {
    let mut shape = x.dims().to_vec();
    match shape.last_mut() {
        Some(width) if width.is_multiple_of(2) => *width /= 2,
        _ => bail!("cannot compute {op}: the last dimension of {:?} must be even", x.dims()),
    }
    Ok(shape)
}

/// Computes [`clamped_swiglu`] in plain Rust.
pub fn reference(x: &[f32], limit: f32) -> Vec<f32> {
    x.chunks_exact(2)
        .map(|pair| {
            // The comparison keeps a NaN gate, as torch.clamp does. f32::min would turn a NaN gate into the limit.
            let gate = if pair[0] > limit { limit } else { pair[0] };
            let up = pair[1].clamp(-limit, limit);
            gate / (1.0 + (-ALPHA * gate).exp()) * (up + 1.0)
        })
        .collect()
}
