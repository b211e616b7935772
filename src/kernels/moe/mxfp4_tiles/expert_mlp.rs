//! The MLP of routed experts with MXFP4 weights in tiles (`expert_mlp.cu`, `expert_few_pairs.cu`).
//!
//! `selftest` compares this MLP with `expert_matmul` and `clamped_swiglu` on the CPU.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Result, Tensor, bail};

use super::product_kernel::ProductKernel;
use super::tiles::Mxfp4Tiles;
use crate::kernels::SumOrder;
use crate::kernels::constants::{EXPERT_NORM_COLUMNS, EXPERT_NORM_THREADS, MAX_EXPERTS};
use crate::kernels::launch::{Arguments, Launch, LaunchShape, dtype_suffix, module};
use crate::kernels::moe::mxfp4::MXFP4_BLOCK;
use crate::kernels::moe::routing::route::RoutedPairs;
use crate::kernels::scratch;
use crate::kernels::unsupported;

/// [`spread_tokens`] copies each row of x with several warps if x has at most this many rows.
/// With one warp per row, so few rows would occupy less than half of the 132 · 64 = 8448 warps of an H100 or H200.
/// Not tuned.
const COPY_FEW_ROWS: usize = 4096;

/// The weights and biases of one linear layer, for all experts.
#[derive(Clone, Copy)]
pub struct ExpertLinear<'t> {
    pub tiles: &'t Mxfp4Tiles,
    /// The biases: bf16 or f16 `[experts, rows]`.
    pub bias: &'t Tensor,
}

/// The output down(clamped_swiglu(gate_up(x))) of each (token, expert) pair.
/// [`sum`](Self::sum), [`add_norm`](Self::add_norm) or the exchange between GPUs computes each token's weighted sum.
pub struct ExpertOutputs {
    /// The outputs, bf16 or f16 `[tokens, chosen, hidden]`.
    y: Tensor,
    /// The routing weights, f32 `[tokens, chosen]`.
    weights: Tensor,
}

/// Runs the chosen experts of each token.
///
/// - x: f32 `[tokens, hidden]`; the kernels round x to the dtype of the biases (bf16 or f16)
/// - routed: the (token, expert) pairs of the tokens in x
/// - gate_up: `[experts, 2 * intermediate, hidden]` in paired tiles
/// - down: `[experts, hidden, intermediate]` in grouped tiles
/// - limit: the limit of the clamped SwiGLU
pub fn expert_mlp(
    x: &Tensor,
    routed: &RoutedPairs,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    limit: f32,
    sum_order: SumOrder,
) -> Result<ExpertOutputs> {
    let MlpShape { tokens, chosen, experts, hidden, intermediate } = MlpShape::of_inputs(x, routed, gate_up, down)?;
    let dtype = gate_up.bias.dtype();
    let Device::Cuda(device) = x.device() else { return unsupported("expert_mlp", x) };
    let pairs = tokens * chosen;
    // In tiled x and h, each expert's rows start at a multiple of 8, so each expert needs fewer than 8 padding rows.
    let tiled_rows = pairs + 8 * experts;
    // SAFETY: the kernels below write every element that affects a stored result.
    // They may read uninitialized padding rows, but discard the products of these rows.
    let empty = |count: usize, dtype| unsafe { scratch::empty(count, dtype, x.device()) };
    let h = empty(intermediate.div_ceil(64) * tiled_rows * 64, dtype)?;
    let y = empty(pairs * hidden, dtype)?;
    let suffix = dtype_suffix(dtype)?;
    let kernel = ProductKernel::choose(device, pairs, gate_up.tiles, sum_order)?;

    // h = clamped_swiglu(gate_up · x + bias), y = down · h + bias
    let x_or_tiled = match kernel {
        ProductKernel::ExpertFewPairs(_) => x.clone(),
        ProductKernel::ExpertMlp { .. } => spread_tokens(device, x, routed, tiled_rows, dtype)?,
    };
    let arguments = |linear: ExpertLinear, input: &Tensor, output: &Tensor| {
        let arguments = kernel
            .weight_arguments(linear.tiles)?
            .tensor(linear.bias)?
            .tensor(input)?
            .tensor(&routed.sorted)?
            .tensor(&routed.offsets)?
            .tensor(output)?;
        match kernel {
            ProductKernel::ExpertFewPairs(kernel) => kernel.add_sizes(arguments, linear.tiles, tiled_rows, chosen),
            ProductKernel::ExpertMlp { .. } => {
                let (experts, rows, columns) = linear.tiles.dims();
                Ok(arguments.int(rows).int(columns).int(tiled_rows).int(experts))
            }
        }
    };
    let up_arguments = arguments(gate_up, &x_or_tiled, &h)?.float(limit);
    let down_arguments = arguments(down, &h, &y)?;
    // SAFETY: all shapes are checked above. The pairs have only experts of the layer, because `RoutedPairs::route` and
    // `RoutedPairs::new` list no others.
    // For a wgmma kernel, `weight_arguments` gives the boxes of the tensor maps the size of a ring buffer stage.
    // Overlap: before `pdl_wait`, threads read only weights, which no kernel writes after loading, and the pairs. The
    // pairs are complete when the kernel starts: a kernel that reads them early does not follow directly on the kernel
    // that sorts them (see `copy_tiles` in `expert_product_wgmma.cuh`, and `multiply_experts` in
    // `expert_few_pairs.cu`). In wgmma kernels, one warp calls `pdl_wait`, and the warps that write results first wait
    // for the data that this warp copies.
    unsafe {
        kernel.launch("gate_up", suffix, up_arguments).overlapping().enqueue(device)?;
        kernel.launch("down", suffix, down_arguments).overlapping().enqueue(device)?;
    }
    Ok(ExpertOutputs { y: y.reshape((tokens, chosen, hidden))?, weights: routed.weights.clone() })
}

impl ExpertOutputs {
    /// Returns the dtype of the outputs.
    pub fn dtype(&self) -> DType {
        self.y.dtype()
    }

    /// Returns the outputs `[tokens, chosen, hidden]` and the routing weights, f32 `[tokens, chosen]`.
    pub fn outputs_and_weights(&self) -> (&Tensor, &Tensor) {
        (&self.y, &self.weights)
    }

    /// Returns the sum of each token's outputs, weighted with the routing weights, `[tokens, hidden]`.
    /// `dtype` is f32, or the dtype of the outputs.
    pub fn sum(&self, dtype: DType) -> Result<Tensor> {
        let (tokens, chosen, columns) = self.y.dims3()?;
        let Device::Cuda(device) = self.y.device() else { return unsupported("expert_combine", &self.y) };
        let suffix = dtype_suffix(self.y.dtype())?;
        let kernel = match dtype {
            DType::F32 => format!("expert_combine_{suffix}"),
            dtype if dtype == self.y.dtype() => format!("expert_combine_rounded_{suffix}"),
            other => bail!("cannot return the sum of {:?} expert outputs as {other:?}", self.y.dtype()),
        };
        // SAFETY: the kernel writes every element of `out`.
        let out = unsafe { scratch::empty((tokens, columns), dtype, self.y.device())? };
        let count = tokens * columns / 8;
        let arguments = Arguments::new().tensor(&self.y)?.tensor(&self.weights)?.tensor(&out)?;
        let arguments = arguments.int(count).int(columns).int(chosen);
        let shape = LaunchShape::one_thread_each(count);
        // SAFETY: `expert_mlp` has checked all shapes, and its last kernel writes every element of `y`.
        // Overlap: all threads call `pdl_wait` before they access device memory.
        unsafe { Launch::new(module!("expert_mlp"), kernel, shape, arguments).overlapping().enqueue(device)? };
        Ok(out)
    }

    /// Returns s = x + the weighted sum of each token's outputs, f32 `[tokens, hidden]`.
    /// Also returns the RMSNorm of s, s / sqrt(mean(s²) + eps) · weight, in `dtype`.
    /// `dtype` is f32, or the dtype of the outputs. Returns `None` if the hidden size exceeds `EXPERT_NORM_COLUMNS`.
    ///
    /// - x: f32 `[tokens, hidden]`; must be computed before the call of [`expert_mlp`], because the kernel reads x
    ///   before it waits for the outputs
    /// - weight: f32 `[hidden]`
    pub fn add_norm(&self, x: &Tensor, weight: &Tensor, eps: f32, dtype: DType) -> Result<Option<(Tensor, Tensor)>> {
        let (tokens, chosen, columns) = self.y.dims3()?;
        let Device::Cuda(device) = self.y.device() else { return unsupported("expert_add_norm", &self.y) };
        let are_f32 = x.dtype() == DType::F32 && weight.dtype() == DType::F32;
        if x.dims() != [tokens, columns] || weight.dims() != [columns] || !are_f32 {
            bail!(
                "cannot add expert outputs: x {:?}, y {:?} and weight {:?} must match, and x and weight must be F32",
                x.dims(),
                self.y.dims(),
                weight.dims()
            );
        }
        if columns > EXPERT_NORM_COLUMNS {
            return Ok(None);
        }
        let suffix = dtype_suffix(self.y.dtype())?;
        let kernel = match dtype {
            DType::F32 => format!("expert_add_norm_{suffix}"),
            dtype if dtype == self.y.dtype() => format!("expert_add_norm_rounded_{suffix}"),
            other => bail!("cannot return the norm of {:?} expert outputs as {other:?}", self.y.dtype()),
        };
        // SAFETY: the kernel writes every element of `sum` and `normed`.
        let empty = |dtype| unsafe { scratch::empty((tokens, columns), dtype, x.device()) };
        let sum = empty(DType::F32)?;
        let normed = empty(dtype)?;
        let arguments = Arguments::new()
            .tensor(x)?
            .tensor(&self.y)?
            .tensor(&self.weights)?
            .tensor(weight)?
            .tensor(&sum)?
            .tensor(&normed)?
            .int(columns)
            .int(chosen)
            .float(eps);
        let shape = LaunchShape::linear(tokens, EXPERT_NORM_THREADS);
        // SAFETY: all shapes are checked above and in `expert_mlp`, whose last kernel writes every element of `y`.
        // Overlap: all threads call `pdl_wait`. Before, they read only x and `weight`. The caller computed both before
        // `expert_mlp` launched the two previous kernels.
        unsafe { Launch::new(module!("expert_mlp"), kernel, shape, arguments).overlapping().enqueue(device)? };
        Ok(Some((sum, normed)))
    }
}

/// Copies each token's row of x, rounded to `dtype`, to the rows of the token's pairs in a new tiled tensor
/// (`tiles.cuh`).
///
/// The kernel reads x before it waits for the previous kernel on the stream, which must therefore not compute x.
/// In a forward pass, the previous kernel computes `routed`.
fn spread_tokens(
    device: &CudaDevice,
    x: &Tensor,
    routed: &RoutedPairs,
    tiled_rows: usize,
    dtype: DType,
) -> Result<Tensor> {
    let (tokens, columns) = x.dims2()?;
    let chosen = routed.weights.dim(1)?;
    // SAFETY: the kernel writes the rows of all pairs.
    // The product kernels may read uninitialized padding rows, but discard the products of these rows.
    let tiled = unsafe { scratch::empty(columns.div_ceil(64) * tiled_rows * 64, dtype, x.device())? };
    let arguments = Arguments::new().tensor(x)?.tensor(&routed.rows)?.tensor(&tiled)?.int(tokens);
    let arguments = arguments.int(columns).int(tiled_rows).int(chosen);
    let warps_per_row = if tokens <= COPY_FEW_ROWS { 6 } else { 1 };
    let shape = LaunchShape::one_warp_each(tokens).with_grid_y(warps_per_row);
    let kernel = format!("spread_tokens_{}", dtype_suffix(dtype)?);
    // SAFETY: the grid covers all tokens, and `expert_mlp` has checked all shapes.
    // Overlap: all threads call `pdl_wait`. Before, they read only x, which the caller computed before `routed`.
    unsafe { Launch::new(module!("expert_mlp"), kernel, shape, arguments).overlapping().enqueue(device)? };
    Ok(tiled)
}

/// The sizes of the inputs of [`expert_mlp`].
struct MlpShape {
    tokens: usize,
    /// The number of experts per token.
    chosen: usize,
    experts: usize,
    hidden: usize,
    intermediate: usize,
}

impl MlpShape {
    /// Returns the sizes. Fails if the shapes or dtypes of the inputs do not match, or if no kernel supports the sizes.
    fn of_inputs(x: &Tensor, routed: &RoutedPairs, gate_up: ExpertLinear, down: ExpertLinear) -> Result<Self> {
        let (tokens, hidden) = x.dims2()?;
        let (experts, up_rows, up_columns) = gate_up.tiles.dims();
        let (intermediate, dtype) = (up_rows / 2, gate_up.bias.dtype());
        let tiles_fit = up_columns == hidden && down.tiles.dims() == (experts, hidden, intermediate);
        let biases_fit = gate_up.bias.dims() == [experts, up_rows] && down.bias.dims() == [experts, hidden];
        if !tiles_fit || !biases_fit || down.bias.dtype() != dtype || !matches!(dtype, DType::BF16 | DType::F16) {
            let (gate_up, down) = (gate_up.tiles.dims(), down.tiles.dims());
            bail!(
                "cannot run experts: x {:?}, gate_up {gate_up:?}, down {down:?} and the biases must match, and the \
                 biases must be BF16 or F16",
                x.dims()
            );
        }
        let RoutedPairs { sorted, offsets, weights, rows } = routed;
        let chosen = sorted.elem_count() / tokens.max(1);
        let dtypes = [x.dtype(), weights.dtype(), sorted.dtype(), offsets.dtype(), rows.dtype()];
        if dtypes != [DType::F32, DType::F32, DType::U32, DType::U32, DType::U32]
            || weights.dims() != [tokens, chosen]
            || sorted.dims() != [tokens * chosen]
            || offsets.dims() != [experts + 1]
            || rows.dims() != sorted.dims()
        {
            let x = x.dims();
            let weights = weights.dims();
            let sorted = sorted.dims();
            let offsets = offsets.dims();
            bail!(
                "cannot run experts: x {x:?}, routing weights {weights:?}, pairs {sorted:?} and expert offsets \
                 {offsets:?} of dtypes {dtypes:?}, or the rows of the pairs, do not match"
            );
        }
        let are_whole_blocks = hidden.is_multiple_of(MXFP4_BLOCK) && intermediate.is_multiple_of(MXFP4_BLOCK);
        if experts > MAX_EXPERTS || !are_whole_blocks {
            bail!(
                "cannot run experts: unsupported sizes: {experts} experts, hidden size {hidden}, \
                 intermediate size {intermediate}"
            );
        }
        Ok(Self { tokens, chosen, experts, hidden, intermediate })
    }
}
