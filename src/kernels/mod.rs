//! The operations that inferno brings itself. Most are twins: `x.rs` has the public op (checked shapes and dtypes), the
//! launch, and `reference`, the same in plain Rust on f32; `x.cu` has the CUDA kernel. On a CPU the op runs its reference.
//!
//! What is for a GPU alone is judged by the twins: `moe::expert_mlp`, and `decode`, the fused kernels of a decode step, which a
//! chain records. `launch` launches kernels, `upload` is the way of weights to a device, `bandwidth` only measures,
//! `selftest` runs the twins against each other on whatever card there is.

pub mod attention;
pub mod bandwidth;
mod constants;
#[cfg(feature = "cuda")]
pub mod decode;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod matmul;
pub mod moe;
pub mod norm;
pub mod quantized;
pub mod rows;
pub mod selftest;
pub mod swiglu;
pub mod upload;

use candle_core::{DType, Layout, Result, Storage, Tensor, WithDType, bail};

/// The tensor as contiguous f32; no copy if it is that already. The way into every CPU reference.
pub(crate) fn to_f32(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_dtype(DType::F32)?.contiguous()
}

/// Bytes of the elements, without what a view leaves out.
pub(crate) fn bytes(tensor: &Tensor) -> u64 {
    (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64
}

/// The elements of a contiguous CPU tensor, from what its `storage_and_layout` returns.
pub(crate) fn elements<'s, T: WithDType>(storage: &'s Storage, layout: &Layout) -> Result<&'s [T]> {
    match (storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some((start, end))) => Ok(&storage.as_slice::<T>()?[start..end]),
        _ => bail!("expected a contiguous tensor on the CPU"),
    }
}

/// An op got a tensor on a device that it has no code for.
#[cfg_attr(feature = "cuda", allow(dead_code))]
pub(crate) fn unsupported<T>(op: &str, tensor: &Tensor) -> Result<T> {
    bail!("{op} has no implementation for {:?}", tensor.device().location())
}
