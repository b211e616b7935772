//! Products of 8-bit matrices on tensor cores, computed with cuBLASLt.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, Tensor, bail};

use crate::kernels::launch::address;
use crate::kernels::scratch;

/// The element type of both input matrices of an 8-bit product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EightBitType {
    /// i8 elements with i32 sums.
    Int8,
    /// E4M3 elements with f32 sums.
    Fp8,
}

/// The types that cuBLASLt uses for a product.
struct ProductTypes {
    input: sys::cudaDataType_t,
    output: sys::cudaDataType_t,
    compute: sys::cublasComputeType_t,
    /// The bits of the factor 1 in the type of the sums, i32 or f32. The factor 0 has only zero bits in both types.
    one: u32,
}

impl ProductTypes {
    fn new(kind: EightBitType) -> Self {
        match kind {
            EightBitType::Int8 => Self {
                input: sys::cudaDataType_t::CUDA_R_8I,
                output: sys::cudaDataType_t::CUDA_R_32I,
                compute: sys::cublasComputeType_t::CUBLAS_COMPUTE_32I,
                one: 1,
            },
            EightBitType::Fp8 => Self {
                input: sys::cudaDataType_t::CUDA_R_8F_E4M3,
                output: sys::cudaDataType_t::CUDA_R_32F,
                compute: sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                one: 1.0f32.to_bits(),
            },
        }
    }
}

/// The size of cuBLASLt's workspace in bytes. NVIDIA recommends this size for Hopper (see `cublasSetWorkspace`).
const WORKSPACE_BYTES: usize = 32 << 20;

/// Returns x·wᵀ `[tokens, rows]` in a tensor of dtype F32.
/// For [`EightBitType::Int8`], the F32 elements hold the bits of i32 sums.
///
/// x `[tokens, columns]` and w `[rows, columns]` are U8 tensors whose bytes are elements of type `kind`.
/// `tokens` and `columns` are multiples of 16.
pub fn matmul_8bit(device: &CudaDevice, kind: EightBitType, w: &Tensor, x: &Tensor) -> Result<Tensor> {
    let ((rows, columns), (tokens, x_columns)) = (w.dims2()?, x.dims2()?);
    if columns != x_columns
        || !columns.is_multiple_of(16)
        || !tokens.is_multiple_of(16)
        || w.dtype() != DType::U8
        || x.dtype() != DType::U8
    {
        bail!("matmul_8bit: unsupported inputs: x {:?} {:?}, w {:?} {:?}", x.dtype(), x.dims(), w.dtype(), w.dims());
    }
    // SAFETY: the product below writes every element of `out`. Because beta is 0, it reads no element of `out`.
    let out = unsafe { scratch::empty((tokens, rows), DType::F32, x.device())? };
    // SAFETY: only cuBLASLt accesses the workspace.
    let workspace = unsafe { Tensor::empty(WORKSPACE_BYTES, DType::U8, x.device())? };
    let ProductTypes { input, output, compute, one } = ProductTypes::new(kind);
    let zero = 0u32;
    let scalar = |value: &u32| (value as *const u32).cast::<c_void>();
    // cuBLAS is column-major. It reads w as wᵀ and x as xᵀ, and computes outᵀ [rows, tokens] = (wᵀ)ᵀ · xᵀ.
    // The leading dimension of each cuBLAS matrix is the row length of the row-major tensor.
    let shapes = [(input, columns, rows), (input, columns, tokens), (output, rows, tokens)];
    let mut descriptors = Descriptors::default();
    let layouts = shapes.map(|(dtype, height, width)| {
        let layout = checked(result::create_matrix_layout(dtype, height as u64, width as u64, height as i64));
        layout.inspect(|layout| descriptors.layouts.push(*layout))
    });
    let [a, b, c] = layouts;
    let (a, b, c) = (a?, b?, c?);
    let desc = checked(result::create_matmul_desc(compute, output))?;
    descriptors.desc = Some(desc);
    let preference = checked(result::create_matmul_pref())?;
    descriptors.preference = Some(preference);
    // The numeric value of CUBLAS_OP_T, which transposes w.
    let transposed = 1i32;
    let stream = device.cuda_stream();
    stream.context().bind_to_thread().w()?;
    let handle = handle(device)?;
    // SAFETY: the descriptors live until the end of this function. The tensors have the sizes in `shapes`.
    // `address` checks that the tensors are contiguous and on a GPU. candle frees their memory in stream order.
    unsafe {
        checked(result::set_matmul_desc_attribute(
            desc,
            sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
            (&transposed as *const i32).cast(),
            size_of_val(&transposed),
        ))?;
        checked(result::set_matmul_pref_attribute(
            preference,
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            (&WORKSPACE_BYTES as *const usize).cast(),
            size_of::<usize>(),
        ))?;
        let algorithm = checked(result::get_matmul_algo_heuristic(handle, desc, a, b, c, c, preference))?;
        checked(result::matmul(
            handle,
            desc,
            scalar(&one),
            scalar(&zero),
            address(w)? as *const _,
            a,
            address(x)? as *const _,
            b,
            address(&out)? as *const _,
            c,
            address(&out)? as *mut _,
            c,
            &algorithm.algo,
            address(&workspace)? as *mut _,
            WORKSPACE_BYTES,
            stream.cu_stream().cast(),
        ))?;
    }
    Ok(out)
}

fn checked<T>(result: std::result::Result<T, result::CublasError>) -> Result<T> {
    result.map_err(|error| candle_core::Error::Msg(format!("cuBLASLt: {:?}", error.0)))
}

/// The cuBLASLt descriptors of one matrix product. Destroying them while the product is still running is allowed.
#[derive(Default)]
struct Descriptors {
    layouts: Vec<sys::cublasLtMatrixLayout_t>,
    desc: Option<sys::cublasLtMatmulDesc_t>,
    preference: Option<sys::cublasLtMatmulPreference_t>,
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: each descriptor was created once, and nothing uses it afterwards. `drop` cannot report errors.
        unsafe {
            for layout in self.layouts.drain(..) {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = self.desc.take().map(|desc| result::destroy_matmul_desc(desc));
            let _ = self.preference.take().map(|preference| result::destroy_matmul_pref(preference));
        }
    }
}

/// Returns the cuBLASLt handle of a device. The context of the device must be bound to this thread.
fn handle(device: &CudaDevice) -> Result<sys::cublasLtHandle_t> {
    struct Handle {
        handle: sys::cublasLtHandle_t,
        /// The CUDA context, kept alive because a handle is invalid once its context is destroyed.
        _context: Arc<CudaContext>,
    }
    // SAFETY: several threads may use one cuBLASLt handle at the same time.
    unsafe impl Send for Handle {}
    static HANDLES: Mutex<BTreeMap<usize, Handle>> = Mutex::new(BTreeMap::new());
    let mut handles = HANDLES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let context = device.cuda_stream().context().clone();
    if let Some(known) = handles.get(&context.ordinal()) {
        return Ok(known.handle);
    }
    let handle = checked(result::create_handle())?;
    handles.insert(context.ordinal(), Handle { handle, _context: context });
    Ok(handle)
}
