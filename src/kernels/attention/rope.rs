//! Splits the output of the fused QKV projection into queries, keys and values, and applies RoPE.
//!
//! Before the rotation, [`split_qkv`] adds the bias and applies the QK norms, if the model has them.
//! RoPE (RoFormer, arXiv 2104.09864) uses the split-half layout of Hugging Face checkpoints.
//!
//! The cosine and sine tables and all arithmetic are f32. Only the results are rounded to the dtype of the cache.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::paged::CachedLayer;
use crate::kernels::constants::MAX_PRODUCT_TERMS;
use crate::kernels::norm;

/// The numbers of query heads and KV heads in an attention layer, and the size of each head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadSizes {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl HeadSizes {
    /// Returns the number of weight rows of the fused QKV projection.
    pub fn qkv_rows(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// The cosine and sine tables and the token positions for RoPE.
#[derive(Clone, Copy)]
pub struct Rotation<'t> {
    /// The cosine table: f32 `[positions, rotated / 2]`. RoPE rotates the first `rotated` elements of each head.
    pub cos: &'t Tensor,
    pub sin: &'t Tensor,
    /// The position of each token: u32 `[tokens]`. `cos` and `sin` must have a row for each position.
    pub positions: &'t Tensor,
}

/// The QK norms: RMSNorms that are applied to each head of q and each head of k before the rotation.
#[derive(Clone, Copy)]
pub struct QkNorm<'t> {
    /// The weight of the query norm: f32 `[head_dim]`. The key norm has the same shape.
    pub q: &'t Tensor,
    pub k: &'t Tensor,
    pub eps: f32,
}

/// The inputs of [`split_qkv`].
#[derive(Clone, Copy)]
pub struct SplitQkvInputs<'t> {
    /// The output of the fused QKV projection without its bias, as 1 to `MAX_PRODUCT_TERMS` terms whose sum is the
    /// output: f32 `[terms, tokens, (heads + 2 * kv_heads) * head_dim]`.
    pub qkv: &'t Tensor,
    /// The bias of the projection: f32 `[(heads + 2 * kv_heads) * head_dim]`.
    pub bias: Option<&'t Tensor>,
    pub norms: Option<QkNorm<'t>>,
    pub rotation: Rotation<'t>,
    pub sizes: HeadSizes,
    /// The cached keys and values, both `[rows, kv_heads, head_dim]`.
    pub layer: CachedLayer<'t>,
    /// The row of the cache for each token: u32 `[tokens]`. The caller guarantees that the cache has these rows.
    pub slots: &'t Tensor,
}

/// Splits the output of the fused QKV projection into q, k and v. Writes k and v to the KV cache.
///
/// Adds the bias, applies the norms to q and k, and rotates the first elements of each q and k head.
/// The number of rotated elements is twice the number of columns in `cos`.
///
/// Returns q, `[tokens, heads, head_dim]`, in the dtype of the cache.
pub fn split_qkv(inputs: SplitQkvInputs) -> Result<Tensor> {
    check_inputs(inputs)?;
    match inputs.qkv.device() {
        Device::Cpu => split_qkv_on_cpu(inputs),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => with_cuda::split_qkv(device, inputs),
        _ => crate::kernels::unsupported("split_qkv", inputs.qkv),
    }
}

fn split_qkv_on_cpu(inputs: SplitQkvInputs) -> Result<Tensor> {
    let SplitQkvInputs { qkv, bias, norms, rotation, sizes, layer, slots } = inputs;
    let Rotation { cos, sin, positions } = rotation;
    let HeadSizes { heads, kv_heads, head_dim } = sizes;
    let ((_, tokens, width), (_, half)) = (qkv.dims3()?, cos.dims2()?);
    let qkv = qkv.sum(0)?;
    let qkv = bias.map_or_else(|| Ok(qkv.clone()), |bias| qkv.broadcast_add(bias))?;
    let x = qkv.flatten_all()?.to_vec1::<f32>()?;
    let cos = cos.flatten_all()?.to_vec1::<f32>()?;
    let sin = sin.flatten_all()?.to_vec1::<f32>()?;
    let positions = positions.to_vec1::<u32>()?;
    let norms = norms
        .map(|QkNorm { q, k, eps }| Ok::<_, candle_core::Error>(NormWeights { q: q.to_vec1()?, k: k.to_vec1()?, eps }));
    let out = reference(&x, norms.transpose()?, &cos, &sin, &positions, sizes, 2 * half);
    let out = Tensor::from_vec(out, (tokens, width), &Device::Cpu)?.to_dtype(layer.k.dtype())?;
    let part = |first: usize, heads: usize| {
        out.narrow(1, first * head_dim, heads * head_dim)?.reshape((tokens, heads, head_dim))?.contiguous()
    };
    let slots: Vec<u32> = slots.to_vec1()?;
    scatter_rows(layer.k, &part(heads, kv_heads)?, &slots)?;
    scatter_rows(layer.v, &part(heads + kv_heads, kv_heads)?, &slots)?;
    part(0, heads)
}

/// Checks the shapes and dtypes of the inputs of [`split_qkv`].
fn check_inputs(inputs: SplitQkvInputs) -> Result<()> {
    let SplitQkvInputs { qkv, bias, norms, rotation, sizes, layer, slots } = inputs;
    let Rotation { cos, sin, positions } = rotation;
    let HeadSizes { kv_heads, head_dim, .. } = sizes;
    let ((terms, tokens, width), (_, half)) = (qkv.dims3()?, cos.dims2()?);
    if !(1..=MAX_PRODUCT_TERMS).contains(&terms)
        || width != sizes.qkv_rows()
        || bias.is_some_and(|bias| bias.dims() != [width])
    {
        let bias = bias.map(Tensor::dims);
        bail!("cannot compute split_qkv: unsupported shapes: qkv {:?}, bias {bias:?}, {sizes:?}", qkv.dims());
    }
    if cos.dims() != sin.dims() || 2 * half > head_dim || positions.dims() != [tokens] {
        let cos = cos.dims();
        let sin = sin.dims();
        let positions = positions.dims();
        bail!(
            "cannot compute split_qkv: shapes do not match: cos {cos:?}, sin {sin:?}, positions {positions:?}, \
             head_dim {head_dim}"
        );
    }
    let CachedLayer { k: k_rows, v: v_rows } = layer;
    let rows = k_rows.dim(0)?;
    let dtype = k_rows.dtype();
    let has_rows = k_rows.dims() == [rows, kv_heads, head_dim] && v_rows.dims() == k_rows.dims();
    if !has_rows || v_rows.dtype() != dtype || slots.dims() != [tokens] || slots.dtype() != DType::U32 {
        let k = k_rows.dims();
        let v = v_rows.dims();
        let slots = slots.dims();
        bail!(
            "cannot compute split_qkv: k {k:?}, v {v:?} or slots {slots:?} has the wrong shape or dtype for {sizes:?}, \
             {tokens} tokens"
        );
    }
    let (q_norm, k_norm) = (norms.map(|norms| norms.q), norms.map(|norms| norms.k));
    if let Some(norm) = [q_norm, k_norm].into_iter().flatten().find(|norm| norm.dims() != [head_dim]) {
        bail!("cannot compute split_qkv: a QK norm weight has shape {:?}, expected [{head_dim}]", norm.dims());
    }
    let tensors = [Some(qkv), bias, q_norm, k_norm, Some(cos), Some(sin)];
    let all_f32 = tensors.into_iter().flatten().all(|tensor| tensor.dtype() == DType::F32);
    if !all_f32 || positions.dtype() != DType::U32 {
        bail!("cannot compute split_qkv: positions must be U32; qkv, bias, norms, cos and sin must be F32");
    }
    Ok(())
}

/// Copies each row i of `from` to row `slots[i]` of `to`. Rows with consecutive slots are copied in one call.
fn scatter_rows(to: &Tensor, from: &Tensor, slots: &[u32]) -> Result<()> {
    let mut first = 0;
    for run in slots.chunk_by(|a, b| a + 1 == *b) {
        to.slice_set(&from.narrow(0, first, run.len())?.contiguous()?, 0, run[0] as usize)?;
        first += run.len();
    }
    Ok(())
}

/// The elements of a [`QkNorm`].
struct NormWeights {
    q: Vec<f32>,
    k: Vec<f32>,
    eps: f32,
}

/// Applies the norms and RoPE in plain Rust. Does not add a bias.
///
/// Returns x with the heads of q and k normalized and rotated. The heads of v are unchanged.
///
/// - x: `[tokens, (heads + 2 * kv_heads) * head_dim]`
/// - cos, sin: `[positions, rotated / 2]`
fn reference(
    x: &[f32],
    norms: Option<NormWeights>,
    cos: &[f32],
    sin: &[f32],
    positions: &[u32],
    sizes: HeadSizes,
    rotated: usize,
) -> Vec<f32> {
    let HeadSizes { heads, kv_heads, head_dim } = sizes;
    let (half, all_heads) = (rotated / 2, heads + 2 * kv_heads);
    let mut out = x.to_vec();
    for (row, out) in out.chunks_exact_mut(head_dim).enumerate() {
        if row % all_heads >= heads + kv_heads {
            continue;
        }
        if let Some(NormWeights { q, k, eps }) = &norms {
            let weight = if row % all_heads < heads { q } else { k };
            out.copy_from_slice(&norm::reference(out, weight, None, *eps));
        }
        let angles = positions[row / all_heads] as usize * half;
        for i in 0..half {
            let (a, b) = (out[i], out[i + half]);
            out[i] = a * cos[angles + i] - b * sin[angles + i];
            out[i + half] = b * cos[angles + i] + a * sin[angles + i];
        }
    }
    out
}

/// Chooses and launches a kernel of `rope.cu`.
#[cfg(feature = "cuda")]
mod with_cuda {
    use candle_core::cuda_backend::CudaDevice;
    use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
    use candle_core::{Result, Tensor};

    use super::{CachedLayer, HeadSizes, Rotation, SplitQkvInputs};
    use crate::kernels::constants::{ROPE_FEW_TOKENS, ROPE_HEADS_PER_WARP, ROPE_VECTORIZED_HEADS};
    use crate::kernels::launch::{
        Arguments, Launch, LaunchShape, address, dtype_suffix, kernel_size, module, optional_address,
    };
    use crate::kernels::scratch;

    /// Mirrors `SplitQkvArguments` in `rope.cu`. The tensors are device addresses, or 0 for tensors that are `None`.
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct RawArguments {
        qkv: u64,
        bias: u64,
        q_norm: u64,
        k_norm: u64,
        cos: u64,
        sin: u64,
        positions: u64,
        q: u64,
        k: u64,
        v: u64,
        slots: u64,
        terms: i32,
        tokens: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        rotated: i32,
        eps: f32,
    }

    // The last 4 bytes are padding.
    const _: () = assert!(size_of::<RawArguments>() == 11 * 8 + 8 * 4);
    // SAFETY: the struct has C layout and contains only numbers. The kernels do not read the padding.
    unsafe impl DeviceRepr for RawArguments {}

    /// Computes `split_qkv` on a GPU. The caller, [`super::split_qkv`], has checked all shapes and dtypes.
    pub fn split_qkv(device: &CudaDevice, inputs: SplitQkvInputs) -> Result<Tensor> {
        let SplitQkvInputs { qkv, bias, norms, rotation, sizes, layer: CachedLayer { k, v }, slots } = inputs;
        let Rotation { cos, sin, positions } = rotation;
        let HeadSizes { heads, kv_heads, head_dim } = sizes;
        let (q_norm, k_norm) = (norms.map(|norms| norms.q), norms.map(|norms| norms.k));
        let (terms, tokens, _) = qkv.dims3()?;
        let (_, half) = cos.dims2()?;
        let dtype = k.dtype();
        // SAFETY: the kernel writes every element of `q`.
        let q = unsafe { scratch::empty((tokens, heads, head_dim), dtype, qkv.device())? };
        let raw = RawArguments {
            qkv: address(qkv)?,
            bias: optional_address(bias)?,
            q_norm: optional_address(q_norm)?,
            k_norm: optional_address(k_norm)?,
            cos: address(cos)?,
            sin: address(sin)?,
            positions: address(positions)?,
            q: address(&q)?,
            k: address(k)?,
            v: address(v)?,
            slots: address(slots)?,
            terms: kernel_size(terms)?,
            tokens: kernel_size(tokens)?,
            heads: kernel_size(heads)?,
            kv_heads: kernel_size(kv_heads)?,
            head_dim: kernel_size(head_dim)?,
            rotated: kernel_size(2 * half)?,
            eps: norms.map_or(0.0, |norms| norms.eps),
        };
        let used = [qkv, cos, sin, positions, &q, k, v, slots].into_iter().chain(bias).chain(q_norm).chain(k_norm);
        let arguments = Arguments::new().value(raw, used);
        let mut is_vectorized = norms.is_none() && 2 * half == head_dim && matches!(head_dim, 64 | 128 | 256);
        for tensor in [Some(qkv), bias, Some(cos), Some(sin)].into_iter().flatten() {
            is_vectorized &= address(tensor)?.is_multiple_of(16);
        }
        // Only products of at most `DENSE_WGMMA_MAX_TOKENS` tokens have several terms, so they count as few tokens.
        // The kernel `split_qkv` must not run with several terms, because it reads only the first term.
        let has_few_tokens = tokens <= ROPE_FEW_TOKENS || terms > 1;
        let (name, heads_per_warp) = if is_vectorized {
            let name = if terms > 1 { "split_qkv_vectorized_terms" } else { "split_qkv_vectorized" };
            (name, ROPE_VECTORIZED_HEADS * 256 / head_dim)
        } else if has_few_tokens {
            ("split_qkv_few_tokens", 1)
        } else {
            ("split_qkv", ROPE_HEADS_PER_WARP)
        };
        let block = if has_few_tokens { 64 } else { 256 };
        let warps = tokens * (heads + 2 * kv_heads).div_ceil(heads_per_warp);
        let shape = LaunchShape::linear(warps.div_ceil(block / 32), block);
        let kernel = format!("{name}_{}", dtype_suffix(dtype)?);
        let launch = Launch::new(module!("rope"), kernel, shape, arguments);
        // SAFETY: `super::split_qkv` has checked shapes and dtypes. Its caller guarantees valid positions and slots:
        // `BatchGraph::next_inputs` checks them in batch graphs. In other passes, `Decoder::validate` and
        // `PassBlocks::new` check them.
        // Overlap: all threads call `pdl_wait` before they access device memory.
        unsafe { launch.overlapping().enqueue(device)? };
        Ok(q)
    }
}
