//! Computes the weighted sum of the outputs of each token's experts (`combine.cu`).

use candle_core::{DType, Device, Result, Tensor, bail};

#[cfg(feature = "cuda")]
use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};
use crate::kernels::unsupported;

/// Returns the sum of `routing_weights[t, c] · y[t, c]` over c as f32 `[tokens, columns]`.
///
/// - y: f32, f16 or bf16 `[tokens, chosen, columns]`
/// - routing_weights: f32 `[tokens, chosen]`
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only builds with CUDA use `columns`"))]
pub fn combine(y: &Tensor, routing_weights: &Tensor) -> Result<Tensor> {
    let (tokens, chosen, columns) = y.dims3()?;
    if routing_weights.dims() != [tokens, chosen] || routing_weights.dtype() != DType::F32 {
        let (dtype, dims) = (routing_weights.dtype(), routing_weights.dims());
        bail!(
            "cannot combine expert outputs: routing weights are {dtype:?} {dims:?}, expected F32 [{tokens}, {chosen}]"
        );
    }
    match y.device() {
        Device::Cpu => y.to_dtype(DType::F32)?.broadcast_mul(&routing_weights.unsqueeze(2)?)?.sum(1),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            let count = tokens * columns;
            // SAFETY: the kernel writes every element of `out`.
            let out = unsafe { crate::kernels::scratch::empty((tokens, columns), DType::F32, y.device())? };
            let arguments =
                Arguments::new().tensor(y)?.tensor(routing_weights)?.tensor(&out)?.int(count).int(columns).int(chosen);
            let kernel = format!("combine_{}", dtype_suffix(y.dtype())?);
            let launch = Launch::new(module!("combine"), kernel, LaunchShape::one_thread_each(count), arguments);
            // SAFETY: shapes and dtypes are checked above.
            unsafe { launch.enqueue(device)? };
            Ok(out)
        }
        _ => unsupported("combine", y),
    }
}
