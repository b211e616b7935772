//! The launches of a decode step (`decode.cu`), with their shapes checked: each function adds one to a chain.
//!
//! Their judge is the eager decoder on a CPU: `tests/it/executor.rs`.

pub mod sample;

use std::sync::Arc;

use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute;
use candle_core::{DType, Result, Tensor, bail};

use crate::kernels::bytes;
use crate::kernels::launch::chain::{Arguments, Chain, Mailbox, Shape};
use crate::kernels::launch::cuda::{Module, attribute, module, multiprocessors, suffix};
use crate::kernels::moe::experts::Mxfp4Tiles;
use crate::kernels::moe::topk::Softmax;
use crate::kernels::quantized::{GROUP_COLUMNS, Matrix, cuda as quantized_cuda};
use crate::kernels::swiglu::{ALPHA, Activation};

/// Most warps in a block of the dense kernels (`MAX_WARPS`).
const MAX_WARPS: usize = 24;
/// As in `decode.cu`.
const UP_TILES: usize = 3;
const UP_THREADS: usize = 480;
const DOWN_SPLITS: usize = 3;
/// Most experts a token that `decode_down_mxfp4` can serve.
pub const MAX_CHOSEN_MXFP4: usize = 4;
/// Most experts a token that the routing on the device can serve (`MAX_CHOSEN`).
const MAX_CHOSEN: usize = 32;
/// Most experts in all that the routing on the device can serve.
pub const MAX_EXPERTS: usize = 1024;
/// Largest input of a chosen expert's second product.
pub const MAX_EXPERT_COLUMNS: usize = 24 << 10;

/// Static buffers of a step.
pub struct StepBuffers {
    /// f32 \[C\], the residual stream.
    pub x: Tensor,
    /// u32 \[4\]: position of the token in this step, the token, steps done.
    pub state: Tensor,
    /// f32 \[V\]
    pub logits: Tensor,
    /// A logit and its token for each block of the head, u32 \[2 · blocks\].
    best: Tensor,
    pub(super) multiprocessors: usize,
}

impl StepBuffers {
    pub fn new(device: &CudaDevice, hidden_size: usize, vocab_size: usize) -> Result<Self> {
        let multiprocessors = multiprocessors(device)?;
        let device = &candle_core::Device::Cuda(device.clone());
        Ok(Self {
            x: Tensor::zeros(hidden_size, DType::F32, device)?,
            state: Tensor::zeros(4, DType::U32, device)?,
            logits: Tensor::zeros(vocab_size, DType::F32, device)?,
            best: Tensor::zeros(2 * multiprocessors, DType::U32, device)?,
            multiprocessors,
        })
    }

    /// One block a multiprocessor, as large as that takes; `units` are what a warp works on at a time.
    fn shape(&self, units: usize, weight: &Matrix) -> Shape {
        self.shape_for(units, weight, vector_bytes(weight, 1))
    }

    /// The same with so much shared memory.
    fn shape_for(&self, units: usize, weight: &Matrix, shared_bytes: usize) -> Shape {
        let most = if matches!(weight, Matrix::Dense(_)) { MAX_WARPS } else { quantized_cuda::WARPS };
        let warps = units.div_ceil(self.multiprocessors).clamp(4, most);
        let blocks = units.div_ceil(warps).min(self.multiprocessors);
        Shape { grid: (blocks, 1, 1), block: 32 * warps, shared_bytes }
    }
}

/// Shared memory for the inputs of a product: one for each of `inputs` experts that are multiplied at once.
fn vector_bytes(weight: &Matrix, inputs: usize) -> usize {
    let (_, columns) = weight.dims();
    match weight {
        Matrix::Quantized(parts) => {
            quantized_cuda::vector_bytes(parts[0].format, inputs * columns.next_multiple_of(GROUP_COLUMNS))
        }
        _ => inputs * columns * size_of::<f32>(),
    }
}

/// Whether there are kernels for products of `inputs` vectors with such a weight, and room for them on this GPU.
pub fn can_multiply(device: &CudaDevice, weight: &Matrix, inputs: usize) -> Result<bool> {
    let most = attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    // A kernel has up to 1 KiB of its own.
    let fits = weight.dims().1.is_multiple_of(8) && vector_bytes(weight, inputs) + 1024 <= most;
    Ok(fits && !matches!(weight, Matrix::Mixed(_)))
}

/// A norm ahead of a projection: its weight f32 \[C\], and epsilon.
#[derive(Clone, Copy)]
pub struct RmsNorm<'t> {
    pub weight: &'t Tensor,
    pub eps: f32,
}

/// Where q, k and v of a layer go.
pub struct QkvProjection<'t> {
    /// \[(H + 2K) · D, C\]
    pub weight: &'t Matrix,
    /// f32 \[(H + 2K) · D\]
    pub bias: Option<&'t Tensor>,
    /// f32 \[P, R/2\]
    pub cos: &'t Tensor,
    pub sin: &'t Tensor,
    /// T \[H, D\]
    pub q: &'t Tensor,
    /// T \[S, K, D\]
    pub k: &'t Tensor,
    pub v: &'t Tensor,
    /// Norms of each head of q and k before they are turned.
    pub qk_norm: Option<QkNorm<'t>>,
}

/// RMSNorm of the heads of q and k.
#[derive(Clone, Copy)]
pub struct QkNorm<'t> {
    /// f32 \[D\]
    pub q: &'t Tensor,
    pub k: &'t Tensor,
    pub eps: f32,
    /// f32 \[H + K, D\]: q and k on their way.
    pub scratch: &'t Tensor,
}

pub(super) fn check(what: &str, fits: bool, tensor: &Tensor) -> Result<()> {
    if fits { Ok(()) } else { bail!("decode: {what} is {:?} {:?}", tensor.dtype(), tensor.dims()) }
}

/// A weight for activations of `dtype`.
fn check_weight(weight: &Matrix, rows: usize, columns: usize, dtype: DType) -> Result<()> {
    let of_dtype = match weight {
        Matrix::Dense(weight) => weight.dtype() == dtype,
        Matrix::Quantized(_) => true,
        Matrix::Mixed(_) => false,
    };
    let fits = weight.dims() == (rows, columns) && columns.is_multiple_of(8);
    if fits && of_dtype && matches!(dtype, DType::BF16 | DType::F16) {
        return Ok(());
    }
    bail!("decode: a weight is {:?}, expected {rows} rows of {columns} for {dtype:?}", weight.dims())
}

/// The module and the kernel of a product with such a weight.
fn kernel(weight: &Matrix, name: &str) -> (Module, String) {
    match weight {
        Matrix::Dense(_) => (module!("decode"), format!("decode_{name}")),
        _ => (module!("decode_quantized"), format!("quantized_{name}")),
    }
}

pub(super) fn check_f32(what: &str, tensor: &Tensor, size: usize) -> Result<()> {
    check(what, tensor.dtype() == DType::F32 && tensor.elem_count() == size, tensor)
}

/// Norm, projection, bias, RoPE; q to its buffer, k and v to the cache.
pub fn qkv(chain: &mut Chain, buffers: &StepBuffers, norm: RmsNorm, layer: &QkvProjection) -> Result<()> {
    let ((heads, head_dim), (rows, kv_heads, kv_dim)) = (layer.q.dims2()?, layer.k.dims3()?);
    let (columns, out) = (buffers.x.dims1()?, (heads + 2 * kv_heads) * head_dim);
    let half = layer.cos.dim(1)?;
    let dtype = layer.q.dtype();
    check_weight(layer.weight, out, columns, dtype)?;
    check_f32("a norm", norm.weight, columns)?;
    let fits =
        kv_dim == head_dim && head_dim % 2 == 0 && [layer.q, layer.k, layer.v].iter().all(|t| t.dtype() == dtype);
    check("a cache", fits && layer.v.dims() == layer.k.dims(), layer.k)?;
    check("a rotary table", layer.cos.dims() == layer.sin.dims() && 2 * half <= head_dim, layer.cos)?;
    if let Some(bias) = layer.bias {
        check_f32("a bias", bias, out)?;
    }
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(norm.weight)?
        .matrix(layer.weight)?
        .optional(layer.bias)?
        .tensor(layer.cos)?
        .tensor(layer.sin)?
        .tensor(&buffers.state)?
        .tensor(layer.q)?
        .tensor(layer.k)?
        .tensor(layer.v)?
        .optional(layer.qk_norm.map(|norms| norms.scratch))?
        .int(columns)
        .int(heads)
        .int(kv_heads)
        .int(head_dim)
        .int(2 * half)
        .int(rows)
        .float(norm.eps)
        .rounding(layer.weight)?;
    let (module, name) = kernel(layer.weight, &format!("qkv_{}", suffix(dtype)?));
    if let Some(norms) = layer.qk_norm {
        check_f32("a norm of queries", norms.q, head_dim)?;
        check_f32("a norm of keys", norms.k, head_dim)?;
        check_f32("room for queries and keys", norms.scratch, (heads + kv_heads) * head_dim)?;
    }
    // SAFETY: shapes and dtypes checked above; the position is below P and its row is taken modulo S.
    unsafe { chain.push(&module, &name, buffers.shape(out / 2, layer.weight), layer.weight.bytes(), arguments)? };
    let Some(QkNorm { q, k, eps, scratch }) = layer.qk_norm else { return Ok(()) };
    let arguments = Arguments::new()
        .tensor(scratch)?
        .tensor(q)?
        .tensor(k)?
        .tensor(layer.cos)?
        .tensor(layer.sin)?
        .tensor(&buffers.state)?
        .tensor(layer.q)?
        .tensor(layer.k)?
        .int(heads)
        .int(kv_heads)
        .int(head_dim)
        .int(2 * half)
        .int(rows)
        .float(eps);
    let shape = Shape { grid: ((heads + kv_heads).div_ceil(8), 1, 1), block: 256, shared_bytes: 0 };
    let name = format!("decode_qk_norm_{}", suffix(dtype)?);
    // SAFETY: as above.
    unsafe { chain.push(&module!("decode"), &name, shape, 0, arguments) }
}

/// A norm of what is added to the residual stream, and room f32 \[C\] for that.
#[derive(Clone, Copy)]
pub struct PostNorm<'t> {
    pub norm: RmsNorm<'t>,
    pub scratch: &'t Tensor,
}

/// x += W·y + bias, normed first where there is an `after`. weight \[C, R\]; y T \[R\]; bias f32 \[C\].
pub fn residual(
    chain: &mut Chain,
    buffers: &StepBuffers,
    y: &Tensor,
    weight: &Matrix,
    bias: Option<&Tensor>,
    post_norm: Option<PostNorm>,
) -> Result<()> {
    let (rows, columns) = (buffers.x.dims1()?, y.elem_count());
    check_weight(weight, rows, columns, y.dtype())?;
    if let Some(bias) = bias {
        check_f32("a bias", bias, rows)?;
    }
    let out = post_norm.map_or(&buffers.x, |post_norm| post_norm.scratch);
    check_f32("room for what is added", out, rows)?;
    let arguments = Arguments::new()
        .optional(post_norm.is_none().then_some(&buffers.x))?
        .tensor(out)?
        .tensor(y)?
        .matrix(weight)?
        .optional(bias)?
        .int(rows)
        .int(columns)
        .rounding(weight)?;
    let (module, name) = kernel(weight, &format!("residual_{}", suffix(y.dtype())?));
    // SAFETY: shapes and dtypes checked above.
    unsafe { chain.push(&module, &name, buffers.shape(rows, weight), weight.bytes(), arguments)? };
    let Some(PostNorm { norm, scratch }) = post_norm else { return Ok(()) };
    check_f32("a norm", norm.weight, rows)?;
    let arguments =
        Arguments::new().tensor(&buffers.x)?.tensor(scratch)?.tensor(norm.weight)?.int(rows).float(norm.eps);
    let shape = Shape { grid: (1, 1, 1), block: 1024, shared_bytes: 0 };
    // SAFETY: as above; `check_weight` wants columns by eights, and so does the head of x's.
    unsafe { chain.push(&module!("decode"), "decode_add_normed_f32", shape, 0, arguments) }
}

/// A projection of a gated MLP: weight \[F, C\], bias f32 \[F\].
#[derive(Clone, Copy)]
pub struct Projection<'t> {
    pub weight: &'t Matrix,
    pub bias: Option<&'t Tensor>,
}

/// h = activation(gate(norm(x))) · up(norm(x)), h T \[F\].
pub fn gate_up(
    chain: &mut Chain,
    buffers: &StepBuffers,
    norm: RmsNorm,
    gate: Projection,
    up: Projection,
    activation: Activation,
    h: &Tensor,
) -> Result<()> {
    let (rows, columns) = (h.dims1()?, buffers.x.dims1()?);
    check_f32("a norm", norm.weight, columns)?;
    for projection in [gate, up] {
        check_weight(projection.weight, rows, columns, h.dtype())?;
        if let Some(bias) = projection.bias {
            check_f32("a bias", bias, rows)?;
        }
    }
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(norm.weight)?
        .pair(gate.weight, up.weight)?
        .optional(gate.bias)?
        .optional(up.bias)?
        .tensor(h)?
        .int(rows)
        .int(columns)
        .int(activation as usize)
        .float(norm.eps)
        .rounding(gate.weight)?;
    let (module, name) = kernel(gate.weight, &format!("gate_up_{}", suffix(h.dtype())?));
    let moved = gate.weight.bytes() + up.weight.bytes();
    // SAFETY: shapes and dtypes checked above.
    unsafe { chain.push(&module, &name, buffers.shape(rows, gate.weight), moved, arguments) }
}

/// What the kernels of a layer's MXFP4 experts hand on.
pub struct ExpertBuffers {
    /// f32 \[E\]
    pub logits: Tensor,
    /// f16 \[C\]
    normed: Tensor,
    /// f32 \[1\]
    normed_scale: Tensor,
    /// f16 \[N, F\]
    h: Tensor,
}

impl ExpertBuffers {
    pub fn new(x: &Tensor, experts: usize, chosen: usize, intermediate_size: usize) -> Result<Self> {
        let device = x.device();
        Ok(Self {
            logits: Tensor::zeros(experts, DType::F32, device)?,
            normed: Tensor::zeros(x.dims1()?, DType::F16, device)?,
            normed_scale: Tensor::zeros(1, DType::F32, device)?,
            h: Tensor::zeros((chosen, intermediate_size), DType::F16, device)?,
        })
    }
}

/// Router logits f32 \[E\], and the normed input of MXFP4 experts. weight f32 \[E, C\], bias f32 \[E\].
pub fn router(
    chain: &mut Chain,
    buffers: &StepBuffers,
    norm: RmsNorm,
    weight: &Tensor,
    bias: Option<&Tensor>,
    logits: &Tensor,
    mxfp4: Option<&ExpertBuffers>,
) -> Result<()> {
    let (count, columns) = (logits.dims1()?, buffers.x.dims1()?);
    check_f32("router logits", logits, count)?;
    check("a router", weight.dtype() == DType::F32 && weight.dims() == [count, columns] && columns % 8 == 0, weight)?;
    check_f32("a norm", norm.weight, columns)?;
    if let Some(bias) = bias {
        check_f32("a router's bias", bias, count)?;
    }
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(norm.weight)?
        .tensor(weight)?
        .optional(bias)?
        .tensor(logits)?
        .optional(mxfp4.map(|experts| &experts.normed))?
        .optional(mxfp4.map(|experts| &experts.normed_scale))?
        .int(columns)
        .int(count)
        .float(norm.eps);
    let shape = Shape { grid: (count, 1, 1), block: 256, shared_bytes: 0 };
    // SAFETY: shapes and dtypes checked above.
    unsafe { chain.push(&module!("decode"), "decode_router_f32", shape, bytes(weight), arguments) }
}

/// h of the chosen experts. weights \[E, 2F, C\] in paired tiles, bias f32 \[E, 2F\].
pub fn expert_gate_up(
    chain: &mut Chain,
    buffers: &StepBuffers,
    weights: &Mxfp4Tiles,
    bias: &Tensor,
    limit: f32,
    experts: &ExpertBuffers,
) -> Result<()> {
    let ((chosen, intermediate), columns) = (experts.h.dims2()?, buffers.x.dims1()?);
    let count = experts.logits.dims1()?;
    check("experts' tiles", weights.dims() == (count, 2 * intermediate, columns), weights.blocks())?;
    check_f32("experts' bias", bias, count * 2 * intermediate)?;
    let arguments = Arguments::new()
        .tensor(&experts.normed)?
        .tensor(&experts.normed_scale)?
        .tensor(&experts.logits)?
        .tensor(weights.blocks())?
        .tensor(weights.scales())?
        .tensor(bias)?
        .tensor(&experts.h)?
        .int(count)
        .int(intermediate)
        .int(columns)
        .float(ALPHA)
        .float(limit);
    let grid = (intermediate.div_ceil(8).div_ceil(UP_TILES), chosen, 1);
    let shape = Shape { grid, block: UP_THREADS, shared_bytes: columns.next_multiple_of(64) * 2 };
    let moved = weights.bytes() / count as u64 * chosen as u64;
    // SAFETY: shapes and dtypes checked above; the routing chooses experts below E.
    unsafe { chain.push(&module!("decode"), "decode_gate_up_mxfp4", shape, moved, arguments) }
}

/// x += Σ share · (down(h) + bias). weights \[E, C, F\] in plain tiles, bias f32 \[E, C\].
pub fn expert_down(
    chain: &mut Chain,
    buffers: &StepBuffers,
    weights: &Mxfp4Tiles,
    bias: &Tensor,
    experts: &ExpertBuffers,
) -> Result<()> {
    let ((chosen, intermediate), rows) = (experts.h.dims2()?, buffers.x.dims1()?);
    let count = experts.logits.dims1()?;
    check("experts' tiles", weights.dims() == (count, rows, intermediate), weights.blocks())?;
    check("h", chosen <= MAX_CHOSEN_MXFP4 && intermediate % 8 == 0, &experts.h)?;
    check_f32("experts' bias", bias, count * rows)?;
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(&experts.h)?
        .tensor(&experts.logits)?
        .tensor(weights.blocks())?
        .tensor(weights.scales())?
        .tensor(bias)?
        .int(count)
        .int(chosen)
        .int(rows)
        .int(intermediate);
    let warps = chosen * DOWN_SPLITS;
    let shape = Shape {
        grid: (rows.div_ceil(16), 1, 1),
        block: 32 * warps,
        shared_bytes: chosen * intermediate.next_multiple_of(64) * 2 + warps * 16 * size_of::<f32>(),
    };
    let moved = weights.bytes() / count as u64 * chosen as u64;
    // SAFETY: shapes and dtypes checked above; the routing chooses experts below E.
    unsafe { chain.push(&module!("decode"), "decode_down_mxfp4", shape, moved, arguments) }
}

/// h of the chosen experts, h T \[N, F\]: silu(gate(norm(x))) · up(norm(x)). weight \[E · 2F, C\], an expert's gate above its
/// up; logits f32 \[E\] of the router.
pub fn routed_gate_up(
    chain: &mut Chain,
    buffers: &StepBuffers,
    norm: RmsNorm,
    weight: &Matrix,
    logits: &Tensor,
    h: &Tensor,
) -> Result<()> {
    let ((chosen, rows), columns, count) = (h.dims2()?, buffers.x.dims1()?, logits.dims1()?);
    check_routing(logits, chosen)?;
    check_weight(weight, count * 2 * rows, columns, h.dtype())?;
    check_f32("a norm", norm.weight, columns)?;
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(norm.weight)?
        .matrix(weight)?
        .tensor(logits)?
        .tensor(h)?
        .int(count)
        .int(chosen)
        .int(rows)
        .int(columns)
        .float(norm.eps)
        .rounding(weight)?;
    let (module, name) = kernel(weight, &format!("routed_gate_up_{}", suffix(h.dtype())?));
    let moved = weight.bytes() / count as u64 * chosen as u64;
    // SAFETY: shapes and dtypes checked above; the routing chooses experts below E.
    unsafe { chain.push(&module, &name, buffers.shape(chosen * rows, weight), moved, arguments) }
}

/// x += Σ share · down(h) over the chosen experts. weight \[E · C, F\]; h T \[N, F\]; logits f32 \[E\] of the router.
pub fn routed_down(
    chain: &mut Chain,
    buffers: &StepBuffers,
    weight: &Matrix,
    logits: &Tensor,
    softmax: Softmax,
    h: &Tensor,
) -> Result<()> {
    let ((chosen, columns), rows, count) = (h.dims2()?, buffers.x.dims1()?, logits.dims1()?);
    check_routing(logits, chosen)?;
    check_weight(weight, count * rows, columns, h.dtype())?;
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(h)?
        .tensor(logits)?
        .matrix(weight)?
        .int(count)
        .int(chosen)
        .int(rows)
        .int(columns)
        .int(usize::from(softmax == Softmax::OverAll))
        .rounding(weight)?;
    let (module, name) = kernel(weight, &format!("routed_down_{}", suffix(h.dtype())?));
    let moved = weight.bytes() / count as u64 * chosen as u64;
    let shape = buffers.shape_for(rows, weight, vector_bytes(weight, chosen));
    // SAFETY: as above.
    unsafe { chain.push(&module, &name, shape, moved, arguments) }
}

fn check_routing(logits: &Tensor, chosen: usize) -> Result<()> {
    let fits = logits.elem_count() <= MAX_EXPERTS && chosen <= MAX_CHOSEN.min(logits.elem_count());
    check("router logits", fits && logits.dtype() == DType::F32, logits)
}

/// Logits of norm(x), and the best of them; with a soft cap, l becomes cap · tanh(l / cap). weight \[V, C\], of floats `dtype`.
pub fn head(
    chain: &mut Chain,
    buffers: &StepBuffers,
    norm: RmsNorm,
    weight: &Matrix,
    dtype: DType,
    softcap: Option<f32>,
) -> Result<()> {
    let (vocab, columns) = (buffers.logits.dims1()?, buffers.x.dims1()?);
    check_weight(weight, vocab, columns, dtype)?;
    check_f32("a norm", norm.weight, columns)?;
    let shape = buffers.shape(vocab.div_ceil(2), weight);
    let arguments = Arguments::new()
        .tensor(&buffers.x)?
        .tensor(norm.weight)?
        .matrix(weight)?
        .tensor(&buffers.logits)?
        .tensor(&buffers.best)?
        .int(vocab)
        .int(columns)
        .float(norm.eps)
        .float(softcap.unwrap_or(0.0))
        .rounding(weight)?;
    let (module, name) = match weight {
        Matrix::Dense(_) => kernel(weight, &format!("head_{}", suffix(dtype)?)),
        _ => kernel(weight, "head"),
    };
    // SAFETY: shapes and dtypes checked above; `best` has room for a block a multiprocessor, and there are no more.
    unsafe { chain.push(&module, &name, shape, weight.bytes(), arguments) }
}

/// Where inputs come from: rows of `table` \[V, C\] times `scale`.
#[derive(Clone)]
pub struct Embedding {
    pub table: Matrix,
    pub scale: f32,
}

/// The likeliest token becomes the next input; it is told to the host. head \[V, C\].
pub fn argmax_token(
    chain: &mut Chain,
    buffers: &StepBuffers,
    embedding: &Embedding,
    head: &Matrix,
    mailbox: &Arc<Mailbox>,
) -> Result<()> {
    let (vocab, columns) = check_embedding(buffers, &embedding.table)?;
    let (table, suffix) = dense_table(&embedding.table)?;
    let arguments = Arguments::new()
        .tensor(&buffers.best)?
        .int(buffers.shape(vocab.div_ceil(2), head).grid.0)
        .optional(table)?
        .tensor(&buffers.x)?
        .tensor(&buffers.state)?
        .mailbox(mailbox)
        .int(mailbox.slots())
        .int(columns)
        .float(embedding.scale);
    let shape = Shape { grid: (1, 1, 1), block: 1024, shared_bytes: 0 };
    // SAFETY: shapes checked above; tokens come from the head's rows.
    unsafe { chain.push(&module!("decode"), &format!("decode_next_{suffix}"), shape, 0, arguments)? };
    embed_token(chain, buffers, embedding)
}

pub(super) fn check_embedding(buffers: &StepBuffers, embedding: &Matrix) -> Result<(usize, usize)> {
    let dims = (buffers.logits.dims1()?, buffers.x.dims1()?);
    if embedding.dims() == dims { Ok(dims) } else { bail!("decode: an embedding is {:?}", embedding.dims()) }
}

/// The table that a choice of a token reads its row from, and the kernel's suffix. With none it reads no row.
pub(super) fn dense_table(embedding: &Matrix) -> Result<(Option<&Tensor>, &'static str)> {
    match embedding {
        Matrix::Dense(table) => Ok((Some(table), suffix(table.dtype())?)),
        _ => Ok((None, "bf16")),
    }
}

/// After a choice of a token: its row, where the embedding is quantized.
pub(super) fn embed_token(chain: &mut Chain, buffers: &StepBuffers, embedding: &Embedding) -> Result<()> {
    let Matrix::Quantized(parts) = &embedding.table else { return Ok(()) };
    let (_, columns) = embedding.table.dims();
    let arguments = Arguments::new().parts(parts)?.tensor(&buffers.state)?.tensor(&buffers.x)?.int(columns);
    let arguments = arguments.float(embedding.scale);
    let blocks = columns.div_ceil(8).div_ceil(256);
    let shape = Shape { grid: (blocks, 1, 1), block: 256, shared_bytes: 0 };
    // SAFETY: the token is one of the embedding's rows; columns are x's.
    unsafe { chain.push(&module!("decode_quantized"), "quantized_next", shape, 0, arguments) }
}
