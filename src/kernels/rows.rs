//! Embedding lookup, bias, soft cap, and copying of rows.
//!
//! candle also has these operations, but its kernels are PTX code. The driver compiles them on first use, which would
//! delay the first answer on a new machine. The build compiles the kernels of `rows.cu` to machine code for its target.
//!
//! On a GPU, most forward passes run no candle kernel. The main exceptions are:
//! - candle casts the input of the experts in Mixtral and Qwen3-MoE, and in gpt-oss unless the weights are MXFP4 tiles.
//! - candle concatenates the outputs of q_proj, k_proj and v_proj, or of gate_proj and up_proj, if their weights
//!   require different kernels.
//! - candle selects the last token of each sequence in a batch of several sequences that contains prompts.

use candle_core::{DType, Device, Result, Tensor, bail};

/// Returns the rows `ids` of an embedding table, multiplied by `scale`, as f32 `[tokens, columns]`.
///
/// - `table` is `[rows, columns]`.
/// - `ids` are u32 `[tokens]`. If an id is not a row index, this function fails on a CPU. On a GPU, it returns the last
///   row for this id.
pub fn embed(table: &Tensor, ids: &Tensor, scale: f32) -> Result<Tensor> {
    match table.device() {
        Device::Cpu => table.index_select(ids, 0)?.to_dtype(DType::F32)? * f64::from(scale),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};
            let ((rows, columns), tokens) = (table.dims2()?, ids.dims1()?);
            if ids.dtype() != DType::U32 || rows == 0 {
                bail!("cannot look up embeddings: ids are {:?}, expected U32, for {rows} rows", ids.dtype());
            }
            // SAFETY: the kernel writes every element of `out`.
            let out = unsafe { crate::kernels::scratch::empty((tokens, columns), DType::F32, table.device())? };
            let arguments = Arguments::new().tensor(table)?.tensor(ids)?.tensor(&out)?.int(rows).int(columns);
            let kernel = format!("embed_{}", dtype_suffix(table.dtype())?);
            let shape = LaunchShape::linear(tokens, 256);
            let launch = Launch::new(module!("rows"), kernel, shape, arguments.float(scale));
            // SAFETY: shapes and dtypes are checked above. The kernel reads no row past the last one.
            unsafe { launch.enqueue(device)? };
            Ok(out)
        }
        _ => crate::kernels::unsupported("embed", table),
    }
}

/// Returns `y + bias`: adds `bias`, f32 `[columns]`, to every row of `y`, f32 `[tokens, columns]`.
pub fn add_bias(y: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let (_, columns) = y.dims2()?;
    if bias.dims() != [columns] || y.dtype() != DType::F32 || bias.dtype() != DType::F32 {
        let (bias_dtype, y_dtype) = (bias.dtype(), y.dtype());
        let (bias, y) = (bias.dims(), y.dims());
        bail!(
            "cannot add a bias: y and bias must be F32, and bias must have a value for each column: \
             y {y_dtype:?} {y:?}, bias {bias_dtype:?} {bias:?}"
        );
    }
    match y.device() {
        Device::Cpu => y.broadcast_add(bias),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::{Arguments, Launch, LaunchShape, module};
            // SAFETY: the kernel writes every element of `out`.
            let out = unsafe { crate::kernels::scratch::empty(y.dims(), DType::F32, y.device())? };
            let count = out.elem_count();
            let arguments = Arguments::new().tensor(y)?.tensor(bias)?.tensor(&out)?.int(count).int(columns);
            let launch = Launch::new(module!("rows"), "add_bias", LaunchShape::one_thread_each(count), arguments);
            // SAFETY: shapes and dtypes are checked above.
            unsafe { launch.enqueue(device)? };
            Ok(out)
        }
        _ => crate::kernels::unsupported("add_bias", y),
    }
}

/// Returns cap · tanh(x / cap) for each element x of an f32 tensor.
pub fn soft_cap(x: &Tensor, cap: f32) -> Result<Tensor> {
    if x.dtype() != DType::F32 {
        bail!("cannot apply a soft cap: x is {:?}, expected F32", x.dtype());
    }
    match x.device() {
        Device::Cpu => (x / f64::from(cap))?.tanh()? * f64::from(cap),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::{Arguments, Launch, LaunchShape, module};
            // SAFETY: the kernel writes every element of `out`.
            let out = unsafe { crate::kernels::scratch::empty(x.dims(), DType::F32, x.device())? };
            let count = out.elem_count();
            let arguments = Arguments::new().tensor(x)?.tensor(&out)?.int(count).float(cap);
            let launch = Launch::new(module!("rows"), "soft_cap", LaunchShape::one_thread_each(count), arguments);
            // SAFETY: both tensors are contiguous (`Arguments::tensor` checks this) and hold `count` elements.
            unsafe { launch.enqueue(device)? };
            Ok(out)
        }
        _ => crate::kernels::unsupported("soft_cap", x),
    }
}

/// Copies all rows of `from` into `to`, starting at row `row` of `to`. Rows are indexed by the first dimension.
///
/// Both tensors must be contiguous and have the same dtype and the same dimensions except the first.
pub fn copy_rows(to: &Tensor, from: &Tensor, row: usize) -> Result<()> {
    let rows_match = to.dims()[1..] == from.dims()[1..] && to.dtype() == from.dtype();
    if !rows_match || row + from.dims()[0] > to.dims()[0] {
        let (from_dtype, to_dtype) = (from.dtype(), to.dtype());
        let (from, to) = (from.dims(), to.dims());
        bail!("cannot copy rows: {from_dtype:?} {from:?} does not fit at row {row} of {to_dtype:?} {to:?}");
    }
    match to.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use candle_core::cuda_backend::WrapErr;
            use candle_core::cuda_backend::cudarc::driver::result;

            use crate::kernels::{bytes, launch::address};
            let row_bytes = bytes(to) as usize / to.dims()[0];
            let target = address(to)? + (row * row_bytes) as u64;
            let stream = device.cuda_stream();
            stream.context().bind_to_thread().w()?;
            // SAFETY: `to` and `from` are contiguous CUDA tensors (`address` checks this).
            // The copied rows are within `to` (checked above). The copy runs in stream order.
            unsafe { result::memcpy_dtod_async(target, address(from)?, bytes(from) as usize, stream.cu_stream()).w() }
        }
        _ => to.slice_set(from, 0, row),
    }
}
