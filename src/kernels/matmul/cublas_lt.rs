//! Matrix products computed with cuBLASLt.
//!
//! cuBLASLt proposes an algorithm for the sizes of a product. When an algorithm is first used, cuBLASLt waits until
//! the GPU has finished all queued work, such as a step of many requests, and then loads the algorithm's kernel.
//! To make such waits rare, products with similar numbers of tokens share an algorithm (see [`size_class`]).
//! There are then so few algorithms that all of them can be loaded before the first request.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Device, Result, Tensor, bail};

use super::size_class::size_class;
use crate::kernels::launch::address;
use crate::kernels::scratch;

/// The maximum size of a workspace in bytes. NVIDIA recommends this size for Hopper (see `cublasSetWorkspace`).
const MAX_WORKSPACE_BYTES: usize = 32 << 20;

/// Products of floats with at most this number of tokens get no workspace.
/// With a workspace, cuBLASLt often divides the columns (split-K) and adds up the terms with a second kernel.
/// On an H200 (2026-11-28), this was slower for almost all dense matrices of gpt-oss-20b and Llama-3.1-8B.
const UNDIVIDED_TOKENS: usize = 128;

/// The alignment in bytes that cuBLASLt assumes by default.
const MAX_ALIGNMENT: u32 = 256;

/// The element type of both input matrices of an 8-bit product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EightBitType {
    /// i8 elements with i32 sums.
    Int8,
    /// E4M3 elements with f32 sums.
    Fp8,
}

/// The element types of a product's input matrices and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Elements {
    EightBit(EightBitType),
    /// Floats with f32 sums.
    Float {
        input: DType,
        output: DType,
    },
}

/// The types and reduction schemes that cuBLASLt uses for a product.
struct ProductTypes {
    input: sys::cudaDataType_t,
    output: sys::cudaDataType_t,
    compute: sys::cublasComputeType_t,
    /// The type of alpha, the factor of the product, and beta, the factor of the old output. alpha is 1, and beta is 0.
    scale: sys::cudaDataType_t,
    /// The bits of alpha, an i32 or an f32. beta has only zero bits in both types.
    one: u32,
    /// A bit mask of the reduction schemes that split-K algorithms may use, or `None` for all schemes.
    reductions: Option<u32>,
}

impl ProductTypes {
    fn new(elements: Elements) -> Result<Self> {
        let float = |dtype| {
            Ok(match dtype {
                DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
                DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
                DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
                other => bail!("cannot multiply matrices of dtype {other:?}: expected F16, BF16 or F32"),
            })
        };
        let with_f32_sums = |input, output| Self {
            input,
            output,
            compute: sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            scale: sys::cudaDataType_t::CUDA_R_32F,
            one: 1.0f32.to_bits(),
            reductions: None,
        };
        Ok(match elements {
            Elements::EightBit(EightBitType::Int8) => Self {
                input: sys::cudaDataType_t::CUDA_R_8I,
                output: sys::cudaDataType_t::CUDA_R_32I,
                compute: sys::cublasComputeType_t::CUBLAS_COMPUTE_32I,
                scale: sys::cudaDataType_t::CUDA_R_32I,
                one: 1,
                reductions: None,
            },
            Elements::EightBit(EightBitType::Fp8) => {
                with_f32_sums(sys::cudaDataType_t::CUDA_R_8F_E4M3, sys::cudaDataType_t::CUDA_R_32F)
            }
            Elements::Float { input, output } => {
                let types = with_f32_sums(float(input)?, float(output)?);
                // With the other split-K schemes, cuBLASLt would round each term to the dtype of the output.
                let in_f32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
                Self { reductions: (output != DType::F32).then_some(in_f32), ..types }
            }
        })
    }
}

/// The sizes of a product out = x·wᵀ, and the distance between consecutive rows of `out` in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ProductSizes {
    tokens: usize,
    rows: usize,
    columns: usize,
    stride: usize,
}

/// The device addresses of w `[rows, columns]`, x `[tokens, columns]` and out `[tokens, rows]`.
#[derive(Clone, Copy)]
struct ProductAddresses {
    w: u64,
    x: u64,
    out: u64,
}

/// Everything on which the choice of an algorithm depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct AlgorithmKey {
    gpu: usize,
    elements: Elements,
    /// The sizes, with the number of tokens rounded up to a size class.
    sizes: ProductSizes,
    /// The smallest alignment of the three matrices in bytes, at most [`MAX_ALIGNMENT`].
    alignment: u32,
}

/// An algorithm of cuBLASLt, and the size in bytes of the workspace that it needs.
#[derive(Clone, Copy)]
struct Algorithm {
    description: sys::cublasLtMatmulAlgo_t,
    workspace_bytes: usize,
}

/// Returns x·wᵀ `[tokens, rows]` in a tensor of dtype F32.
/// For [`EightBitType::Int8`], the F32 elements hold the bits of i32 sums.
///
/// x `[tokens, columns]` and w `[rows, columns]` are U8 tensors whose bytes are elements of type `eight_bit_type`.
/// `tokens` and `columns` are multiples of 16.
pub fn matmul_8bit(device: &CudaDevice, x: &Tensor, w: &Tensor, eight_bit_type: EightBitType) -> Result<Tensor> {
    let ((rows, columns), (tokens, x_columns)) = (w.dims2()?, x.dims2()?);
    if columns != x_columns
        || !columns.is_multiple_of(16)
        || !tokens.is_multiple_of(16)
        || w.dtype() != DType::U8
        || x.dtype() != DType::U8
    {
        bail!(
            "cannot multiply 8-bit matrices: unsupported inputs: x {:?} {:?}, w {:?} {:?}",
            x.dtype(),
            x.dims(),
            w.dtype(),
            w.dims()
        );
    }
    // SAFETY: the product below writes every element of `out`.
    // It reads no element of `out`, because beta, the factor of the old output, is 0.
    let out = unsafe { scratch::empty((tokens, rows), DType::F32, x.device())? };
    let sizes = ProductSizes { tokens, rows, columns, stride: rows };
    let addresses = ProductAddresses { w: address(w)?, x: address(x)?, out: address(&out)? };
    // SAFETY: the tensors have these sizes and element types. `address` checks that they are contiguous and on a GPU,
    // which is `device`, because the tensors of a rank are on one device.
    unsafe { multiply(device, Elements::EightBit(eight_bit_type), sizes, addresses)? };
    Ok(out)
}

/// Writes x·wᵀ, `[tokens, rows]` in `out_dtype`, to address `out`.
/// Consecutive rows of the result are `stride` elements apart.
///
/// x `[tokens, columns]` and w `[rows, columns]` have the same dtype. `out_dtype` is f32 or the dtype of x.
///
/// # Safety
/// `out` must be the address of an element in row 0 of a matrix `[tokens, stride]` of `out_dtype` in device memory.
/// The column of the element at `out` must be at most `stride - rows`.
pub unsafe fn gemm(
    device: &CudaDevice,
    x: &Tensor,
    w: &Tensor,
    out: u64,
    stride: usize,
    out_dtype: DType,
) -> Result<()> {
    let ((tokens, columns), (rows, w_columns)) = (x.dims2()?, w.dims2()?);
    if columns != w_columns || x.dtype() != w.dtype() || rows > stride {
        bail!(
            "cannot multiply: x {:?} {:?}, w {:?} {:?} and output stride {stride} do not match",
            x.dtype(),
            x.dims(),
            w.dtype(),
            w.dims()
        );
    }
    if out_dtype != DType::F32 && out_dtype != x.dtype() {
        bail!("cannot multiply {:?} matrices into an output of dtype {out_dtype:?}", x.dtype());
    }
    let elements = Elements::Float { input: x.dtype(), output: out_dtype };
    let sizes = ProductSizes { tokens, rows, columns, stride };
    let addresses = ProductAddresses { w: address(w)?, x: address(x)?, out };
    // SAFETY: x and w have these sizes and element types. `address` checks that they are contiguous and on a GPU, which
    // is `device`, because the tensors of a rank are on one device.
    // The caller guarantees that `out` is valid.
    unsafe { multiply(device, elements, sizes, addresses) }
}

/// Queues out = x·wᵀ.
///
/// # Safety
/// The matrices must be in the memory of the device, and must have the sizes and element types that the arguments give.
unsafe fn multiply(
    device: &CudaDevice,
    elements: Elements,
    sizes: ProductSizes,
    ProductAddresses { w, x, out }: ProductAddresses,
) -> Result<()> {
    // If a size overflowed i32, some algorithms would read or write out of bounds. `rows` is at most `stride`.
    if [sizes.tokens, sizes.columns, sizes.stride].into_iter().any(|size| i32::try_from(size).is_err()) {
        let ProductSizes { tokens, columns, stride, .. } = sizes;
        bail!(
            "cannot multiply matrices: {tokens} tokens, {columns} columns or an output stride of {stride} \
             exceeds 2^31 - 1"
        );
    }
    let stream = device.cuda_stream();
    stream.context().bind_to_thread().w()?;
    let handle = handle(device)?;
    let types = ProductTypes::new(elements)?;
    let alignment = MAX_ALIGNMENT.min(1 << (w | x | out).trailing_zeros().min(8));
    let class = ProductSizes { tokens: size_class(sizes.tokens), ..sizes };
    let key = AlgorithmKey { gpu: stream.context().ordinal(), elements, sizes: class, alignment };
    let Algorithm { description, workspace_bytes } = find_algorithm(handle, &types, key)?;
    // Many algorithms need no workspace. Allocate nothing then, because even an empty allocation calls the driver.
    let workspace = match workspace_bytes {
        0 => None,
        // SAFETY: only cuBLASLt accesses the workspace. candle frees it in stream order.
        bytes => Some(unsafe { scratch::empty(bytes, DType::U8, &Device::Cuda(device.clone()))? }),
    };
    let workspace_address = workspace.as_ref().map_or(Ok(0), address)?;
    let descriptors = Descriptors::new(&types, sizes)?;
    let zero = 0u32;
    let scalar = |value: &u32| (value as *const u32).cast::<c_void>();
    // SAFETY: the caller guarantees valid matrices. The descriptors live until the end of this function.
    let result = unsafe {
        result::matmul(
            handle,
            descriptors.product,
            scalar(&types.one),
            scalar(&zero),
            w as *const _,
            descriptors.w,
            x as *const _,
            descriptors.x,
            out as *const _,
            descriptors.out,
            out as *mut _,
            descriptors.out,
            &description,
            workspace_address as *mut _,
            workspace_bytes,
            stream.cu_stream().cast(),
        )
    };
    checked(result)
}

/// Returns the algorithm that cuBLASLt proposes. Remembers it for later products with the same key.
fn find_algorithm(handle: sys::cublasLtHandle_t, types: &ProductTypes, key: AlgorithmKey) -> Result<Algorithm> {
    static ALGORITHMS: LazyLock<Mutex<HashMap<AlgorithmKey, Algorithm>>> = LazyLock::new(Mutex::default);
    let mut algorithms = ALGORITHMS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&known) = algorithms.get(&key) {
        return Ok(known);
    }
    use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    let descriptors = Descriptors::new(types, key.sizes)?;
    let &Descriptors { product, w, x, out } = &descriptors;
    let preference = Preference(checked(result::create_matmul_pref())?);
    let set = |attribute, value: &[u8]| {
        // SAFETY: the preference is valid, and `value` has the size of the attribute.
        checked(unsafe {
            result::set_matmul_pref_attribute(preference.0, attribute, value.as_ptr().cast(), value.len())
        })
    };
    let is_undivided = matches!(key.elements, Elements::Float { .. }) && key.sizes.tokens <= UNDIVIDED_TOKENS;
    let workspace_bytes = if is_undivided { 0 } else { MAX_WORKSPACE_BYTES };
    set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes.to_ne_bytes())?;
    if let Some(reductions) = types.reductions {
        set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions.to_ne_bytes())?;
    }
    for attribute in [
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    ] {
        set(attribute, &key.alignment.to_ne_bytes())?;
    }
    // SAFETY: the handle and all descriptors are valid.
    let proposed =
        checked(unsafe { result::get_matmul_algo_heuristic(handle, product, w, x, out, out, preference.0) })?;
    let algorithm = Algorithm { description: proposed.algo, workspace_bytes: proposed.workspaceSize };
    algorithms.insert(key, algorithm);
    Ok(algorithm)
}

fn checked<T>(result: std::result::Result<T, result::CublasError>) -> Result<T> {
    result.map_err(|error| candle_core::Error::Msg(format!("cuBLASLt: {:?}", error.0)))
}

/// The cuBLASLt descriptors of a product and its matrices. Destroying them while the product still runs is allowed.
///
/// cuBLAS is column-major. It reads w as wᵀ and x as xᵀ, and computes outᵀ [rows, tokens] = (wᵀ)ᵀ · xᵀ.
/// The leading dimension of each cuBLAS matrix is the row stride of the row-major matrix.
struct Descriptors {
    product: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
}

impl Descriptors {
    fn new(types: &ProductTypes, sizes: ProductSizes) -> Result<Self> {
        let ProductSizes { tokens, rows, columns, stride } = sizes;
        let layout = |dtype, height, width, stride| {
            checked(result::create_matrix_layout(dtype, height as u64, width as u64, stride as i64))
        };
        let descriptors = Self {
            product: checked(result::create_matmul_desc(types.compute, types.scale))?,
            w: layout(types.input, columns, rows, columns)?,
            x: layout(types.input, columns, tokens, columns)?,
            out: layout(types.output, rows, tokens, stride)?,
        };
        // The numeric value of CUBLAS_OP_T. It transposes the first matrix, which cuBLAS reads as wᵀ.
        let transposed = 1i32;
        // SAFETY: the descriptor is valid, and the attribute is an i32.
        checked(unsafe {
            result::set_matmul_desc_attribute(
                descriptors.product,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&transposed as *const i32).cast(),
                size_of_val(&transposed),
            )
        })?;
        Ok(descriptors)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: each descriptor was created once, and nothing uses it afterwards. `drop` cannot report errors.
        unsafe {
            for layout in [self.w, self.x, self.out] {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.product);
        }
    }
}

/// The limits within which cuBLASLt chooses an algorithm: workspace size, reduction schemes and alignment.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: the preference was created once, and nothing uses it afterwards. `drop` cannot report errors.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
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
    let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
    let context = device.cuda_stream().context().clone();
    if let Some(known) = handles.get(&context.ordinal()) {
        return Ok(known.handle);
    }
    let handle = checked(result::create_handle())?;
    handles.insert(context.ordinal(), Handle { handle, _context: context });
    Ok(handle)
}
