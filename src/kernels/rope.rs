//! Rotary position embedding (RoFormer, arXiv 2104.09864) in the split-half layout of Hugging Face checkpoints.
//!
//! The angles come in as f32 tables and the rotation is done in f32 whatever the dtype, so that late positions keep
//! their precision in bf16.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{elements, to_f32};

/// Rotates the first 2·cols(cos) dims of every head; the others pass through.
///
/// x \[T, H, D\] of f32, f16 or bf16; cos, sin \[P, R/2\] f32; positions \[T\] u32, each below P. Returns \[T, H, D\].
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, positions: &Tensor) -> Result<Tensor> {
    let (tokens, heads, head_dim) = x.dims3()?;
    let (_, half) = cos.dims2()?;
    if cos.dims() != sin.dims() || 2 * half > head_dim || positions.dims() != [tokens] {
        bail!("rope: x {:?}, cos {:?}, sin {:?}, positions {:?}", x.dims(), cos.dims(), sin.dims(), positions.dims());
    }
    if cos.dtype() != DType::F32 || sin.dtype() != DType::F32 || positions.dtype() != DType::U32 {
        bail!("rope: cos and sin must be F32 and positions U32");
    }
    match x.device() {
        Device::Cpu => {
            let (values, cos, sin) = (to_f32(x)?, to_f32(cos)?, to_f32(sin)?);
            let ((values, v), (cos, c), (sin, s)) =
                (values.storage_and_layout(), cos.storage_and_layout(), sin.storage_and_layout());
            let positions = positions.to_vec1::<u32>()?;
            let shape = (tokens, heads, head_dim);
            let out =
                reference(elements(&values, v)?, elements(&cos, c)?, elements(&sin, s)?, &positions, shape, 2 * half);
            Tensor::from_vec(out, (tokens, heads, head_dim), &Device::Cpu)?.to_dtype(x.dtype())
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use super::cuda::{Arg, launch, module, suffix};
            // SAFETY: the kernel writes all of `out`: rotated pairs, then the rest.
            let out = unsafe { Tensor::empty((tokens, heads, head_dim), x.dtype(), x.device())? };
            let args = [
                Arg::tensor(x)?,
                Arg::tensor(cos)?,
                Arg::tensor(sin)?,
                Arg::tensor(positions)?,
                Arg::tensor(&out)?,
                heads.into(),
                head_dim.into(),
                (2 * half).into(),
            ];
            let name = format!("rope_{}", suffix(x.dtype())?);
            // SAFETY: shapes and dtypes checked above; positions are below P by contract of the caller's table.
            unsafe { launch(device, &module!("rope"), &name, (tokens, heads, 1), 64, 0, &args)? };
            Ok(out)
        }
        #[allow(unreachable_patterns)]
        _ => super::unsupported("rope", x),
    }
}

/// The same in plain Rust. `shape` is (T, H, D).
pub fn reference(
    x: &[f32],
    cos: &[f32],
    sin: &[f32],
    positions: &[u32],
    (_, heads, head_dim): (usize, usize, usize),
    rotated: usize,
) -> Vec<f32> {
    let half = rotated / 2;
    let mut out = x.to_vec();
    for (row, out) in out.chunks_exact_mut(head_dim).enumerate() {
        let angles = positions[row / heads] as usize * half;
        for i in 0..half {
            let (a, b) = (x[row * head_dim + i], x[row * head_dim + i + half]);
            out[i] = a * cos[angles + i] - b * sin[angles + i];
            out[i + half] = b * cos[angles + i] + a * sin[angles + i];
        }
    }
    out
}
