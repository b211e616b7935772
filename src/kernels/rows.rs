//! Rows looked up, added to, capped and copied: small steps that candle has too. Its kernels are compiled by the driver when
//! they are first used, which on a fresh machine takes seconds for each of its modules; ours are not, so a forward pass on
//! a GPU uses none of candle's.

use candle_core::{DType, Device, Result, Tensor, bail};

/// Rows of `table` \[V, C\] for ids u32 \[T\], each below V (not checked on a GPU), times `scale`, as f32 \[T, C\].
pub fn embed(table: &Tensor, ids: &Tensor, scale: f32) -> Result<Tensor> {
    match table.device() {
        Device::Cpu => table.index_select(ids, 0)?.to_dtype(DType::F32)? * f64::from(scale),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::cuda::{Arg, launch, module, suffix};
            if ids.dtype() != DType::U32 {
                bail!("embed: ids are {:?}", ids.dtype());
            }
            let ((_, columns), tokens) = (table.dims2()?, ids.dims1()?);
            // SAFETY: the kernel writes every element.
            let out = unsafe { Tensor::empty((tokens, columns), DType::F32, table.device())? };
            let args = [Arg::tensor(table)?, Arg::tensor(ids)?, Arg::tensor(&out)?, columns.into(), scale.into()];
            let name = format!("embed_{}", suffix(table.dtype())?);
            // SAFETY: shapes and dtypes checked above; ids are below V by contract.
            unsafe { launch(device, &module!("rows"), &name, (tokens, 1, 1), 256, 0, &args)? };
            Ok(out)
        }
        #[allow(unreachable_patterns)]
        _ => crate::kernels::unsupported("embed", table),
    }
}

/// y f32 \[T, R\] + bias f32 \[R\] on every row.
pub fn add_bias(y: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let (_, columns) = y.dims2()?;
    if bias.dims() != [columns] || y.dtype() != DType::F32 || bias.dtype() != DType::F32 {
        bail!("add_bias: y {:?} {:?}, bias {:?} {:?}", y.dtype(), y.dims(), bias.dtype(), bias.dims());
    }
    match y.device() {
        Device::Cpu => y.broadcast_add(bias),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::cuda::{Arg, launch, module};
            // SAFETY: the kernel writes every element.
            let out = unsafe { Tensor::empty(y.dims(), DType::F32, y.device())? };
            let n = out.elem_count();
            let args = [Arg::tensor(y)?, Arg::tensor(bias)?, Arg::tensor(&out)?, n.into(), columns.into()];
            // SAFETY: shapes and dtypes checked above.
            unsafe { launch(device, &module!("rows"), "add_bias", (n.div_ceil(256), 1, 1), 256, 0, &args)? };
            Ok(out)
        }
        #[allow(unreachable_patterns)]
        _ => crate::kernels::unsupported("add_bias", y),
    }
}

/// cap · tanh(x / cap) of each element, f32.
pub fn soft_cap(x: &Tensor, cap: f32) -> Result<Tensor> {
    if x.dtype() != DType::F32 {
        bail!("soft_cap: x is {:?}", x.dtype());
    }
    match x.device() {
        Device::Cpu => (x / f64::from(cap))?.tanh()? * f64::from(cap),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::cuda::{Arg, launch, module};
            // SAFETY: the kernel writes every element.
            let out = unsafe { Tensor::empty(x.dims(), DType::F32, x.device())? };
            let n = out.elem_count();
            let args = [Arg::tensor(x)?, Arg::tensor(&out)?, n.into(), cap.into()];
            // SAFETY: both hold n elements, contiguous (checked by `Arg::tensor`).
            unsafe { launch(device, &module!("rows"), "soft_cap", (n.div_ceil(256), 1, 1), 256, 0, &args)? };
            Ok(out)
        }
        #[allow(unreachable_patterns)]
        _ => crate::kernels::unsupported("soft_cap", x),
    }
}

/// Copies `from` \[T, ..\] over the rows of `to` \[S, ..\] from `row` on. Both contiguous, of one dtype and row size.
pub fn copy_rows(to: &Tensor, from: &Tensor, row: usize) -> Result<()> {
    let same = to.dims()[1..] == from.dims()[1..] && to.dtype() == from.dtype();
    if !same || row + from.dims()[0] > to.dims()[0] {
        bail!("copy_rows: {:?} {:?} to row {row} of {:?} {:?}", from.dtype(), from.dims(), to.dtype(), to.dims());
    }
    match to.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use candle_core::cuda_backend::WrapErr;
            use candle_core::cuda_backend::cudarc::driver::result;
            let row_bytes = crate::kernels::bytes(to) as usize / to.dims()[0];
            let target = crate::kernels::launch::cuda::address(to)? + (row * row_bytes) as u64;
            let stream = device.cuda_stream();
            stream.context().bind_to_thread().w()?;
            // SAFETY: both are contiguous and on the device (`address`), and the rows lie within `to`, checked above; the
            // copy is in the order of the device's stream, as all uses of both.
            unsafe {
                let count = crate::kernels::bytes(from) as usize;
                result::memcpy_dtod_async(
                    target,
                    crate::kernels::launch::cuda::address(from)?,
                    count,
                    stream.cu_stream(),
                )
                .w()
            }
        }
        _ => to.slice_set(from, 0, row),
    }
}
