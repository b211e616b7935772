//! The tensor operations that inferno implements itself, on CPUs and NVIDIA GPUs.
//!
//! [Internal](crate#stable-api): can change in any release.
//!
//! Most operations have two source files:
//! - `x.rs` contains the public operation, its shape and dtype checks, and the launch of the CUDA kernel.
//!   On a CPU, the operation runs plain Rust code in f32 (often named `reference`) or candle operations.
//! - `x.cu` contains the CUDA kernel.
//!
//! The operations of `bandwidth`, `decode`, `exchange` and `step_inputs` run only on a GPU.
//! The kernels of `sampling` also run only on a GPU. On a CPU, `RowEdits` and `TokenMask` edit and mask logits.
//! Of the public operations of `moe`, those of `mxfp4_tiles` and `routing::route` also run only on a GPU.
//! Tests compare the operations that run only on a GPU with other implementations of the same operations.
//!
//! `launch` launches kernels, and `scratch` allocates their outputs. `upload` copies weights to a device.
//! `exchange` combines tensors of several GPUs. `sampling` edits logits and chooses tokens.
//! `bandwidth` measures GPU memory bandwidth. `selftest` compares operations on a device with their CPU references.

pub mod activation;
pub mod attention;
pub mod bandwidth;
mod constants;
#[cfg(feature = "cuda")]
pub mod decode;
pub mod exchange;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod matmul;
pub mod matrix;
pub mod moe;
pub mod norm;
pub mod quantized;
pub mod rows;
pub mod sampling;
pub mod scratch;
pub mod selftest;
#[cfg(feature = "cuda")]
pub mod step_inputs;
mod sum_order;
pub mod upload;

use candle_core::{DType, Layout, Result, Storage, Tensor, WithDType, bail};

pub use sum_order::SumOrder;

const _: () = assert!(
    constants::EXCHANGE_MAX_RANKS == crate::device::MAX_RANKS,
    "EXCHANGE_MAX_RANKS must equal MAX_RANKS, because all ranks of a model must be able to exchange data"
);

/// Returns the tensor as contiguous f32, which `reference` functions require. Copies only if necessary.
pub(crate) fn to_f32(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_dtype(DType::F32)?.contiguous()
}

/// Returns the total size of a tensor's elements in bytes. For a view, counts only the elements of the view.
pub(crate) fn bytes(tensor: &Tensor) -> u64 {
    (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64
}

/// Returns the elements of a CPU tensor. `storage` and `layout` are the results of `Tensor::storage_and_layout`.
/// Fails if the tensor is not contiguous, is not on the CPU, or does not have the dtype of `T`.
pub(crate) fn elements<'s, T: WithDType>(storage: &'s Storage, layout: &Layout) -> Result<&'s [T]> {
    match (storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some((start, end))) => Ok(&storage.as_slice::<T>()?[start..end]),
        _ => bail!("cannot read a tensor: it must be contiguous and on the CPU"),
    }
}

/// Always returns an error: the operation `op` does not support the device of `tensor`.
pub(crate) fn unsupported<T>(op: &str, tensor: &Tensor) -> Result<T> {
    bail!("cannot run {op}: not implemented for {:?}", tensor.device().location())
}
