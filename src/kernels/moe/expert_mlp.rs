//! The whole MLP of routed experts on MXFP4 tiles: grouped products on tensor cores (`experts_gemm.cu`).
//!
//! Its judge is the same MLP by `expert_matmul` and `clamped_swiglu` on a CPU.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Result, Tensor, bail};

use crate::kernels::launch::cuda::{Arg, launch, module, multiprocessors, suffix};
use crate::kernels::moe::experts::Mxfp4Tiles;

/// One stack of experts' matrices and its bias.
#[derive(Clone, Copy)]
pub struct ExpertLinear<'t> {
    pub tiles: &'t Mxfp4Tiles,
    /// T \[E, R\]
    pub bias: &'t Tensor,
}

/// Σ over a token's chosen experts of share · (down · clamped_swiglu(gate_up · x)).
///
/// x f32 \[T, C\], rounded to the biases' dtype, bf16 or f16; ids u32 \[T, N\], each below E (not checked); shares f32 \[T, N\];
/// gate_up \[E, 2F, C\] in paired tiles, down \[E, C, F\] in plain ones. Returns f32 \[T, C\].
pub fn expert_mlp(
    x: &Tensor,
    ids: &Tensor,
    shares: &Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    limit: f32,
) -> Result<Tensor> {
    let ((tokens, columns), (_, chosen)) = (x.dims2()?, ids.dims2()?);
    let ((experts, width, up_columns), dtype) = (gate_up.tiles.dims(), gate_up.bias.dtype());
    let intermediate = width / 2;
    let fits = up_columns == columns && down.tiles.dims() == (experts, columns, intermediate);
    let biases = gate_up.bias.dims() == [experts, width] && down.bias.dims() == [experts, columns];
    if !fits || !biases || down.bias.dtype() != dtype || !matches!(dtype, DType::BF16 | DType::F16) {
        bail!("expert_mlp: x {:?}, gate_up {:?}, down {:?}", x.dims(), gate_up.tiles.dims(), down.tiles.dims());
    }
    if ids.dims() != shares.dims()
        || ids.dtype() != DType::U32
        || shares.dtype() != DType::F32
        || x.dtype() != DType::F32
    {
        bail!("expert_mlp: ids {:?} {:?}, shares {:?} {:?}", ids.dtype(), ids.dims(), shares.dtype(), shares.dims());
    }
    if experts > 1024 || chosen > 32 || columns % 32 != 0 || intermediate % 32 != 0 {
        bail!("expert_mlp: {chosen} of {experts} experts, C {columns}, F {intermediate}");
    }
    let Device::Cuda(device) = x.device() else { return crate::kernels::unsupported("expert_mlp", x) };
    let pairs = tokens * chosen;
    // Each expert's rows begin at a multiple of 8.
    let tiled_rows = pairs + 8 * experts;
    // SAFETY: `sort_by_expert` writes all pairs and all offsets; the products write what is read of the others.
    let empty = |count: usize, dtype| unsafe { Tensor::empty(count, dtype, x.device()) };
    let (sorted, offsets) = (empty(pairs, DType::U32)?, empty(experts + 1, DType::U32)?);
    let gathered = empty(columns.div_ceil(64) * tiled_rows * 64, dtype)?;
    let h = empty(intermediate.div_ceil(64) * tiled_rows * 64, dtype)?;
    let y = empty(pairs * columns, dtype)?;
    // SAFETY: the last kernel writes every element.
    let out = unsafe { Tensor::empty((tokens, columns), DType::F32, x.device())? };
    let (suffix, code) = (suffix(dtype)?, module!("experts_gemm"));

    // 1. group the pairs of token and expert by expert
    let args = [Arg::tensor(ids)?, Arg::tensor(&sorted)?, Arg::tensor(&offsets)?, pairs.into(), experts.into()];
    // SAFETY: shapes checked above, here and below; grids cover all elements; ids are below E by contract.
    unsafe { launch(device, &module!("experts"), "sort_by_expert", (1, 1, 1), 1024, 0, &args)? };
    let args = [
        Arg::tensor(x)?,
        Arg::tensor(&sorted)?,
        Arg::tensor(&offsets)?,
        Arg::tensor(&gathered)?,
        columns.into(),
        tiled_rows.into(),
        chosen.into(),
        experts.into(),
    ];
    let name = format!("gather_tokens_{suffix}");
    // SAFETY: as above.
    unsafe { launch(device, &code, &name, (pairs.div_ceil(8), 1, 1), 256, 0, &args)? };

    // 2. h = clamped_swiglu(gate_up · x), y = down · h
    let product = Product::choose(device, pairs, experts)?;
    let args = |linear: ExpertLinear, from: &Tensor, to: &Tensor, rows: usize, columns: usize| -> Result<Vec<Arg>> {
        Ok(vec![
            Arg::tensor(linear.tiles.blocks())?,
            Arg::tensor(linear.tiles.scales())?,
            Arg::tensor(linear.bias)?,
            Arg::tensor(from)?,
            Arg::tensor(&sorted)?,
            Arg::tensor(&offsets)?,
            Arg::tensor(to)?,
            rows.into(),
            columns.into(),
            tiled_rows.into(),
            experts.into(),
        ])
    };
    let mut up_args = args(gate_up, &gathered, &h, width, columns)?;
    up_args.push(limit.into());
    let Product { grid, block, shared_bytes, name } = product;
    // SAFETY: as above.
    unsafe {
        let up = format!("expert_gate_up_{suffix}_{name}");
        launch(device, &code, &up, (grid, 1, 1), block, shared_bytes, &up_args)?;
        let args = args(down, &h, &y, columns, intermediate)?;
        let down = format!("expert_down_{suffix}_{name}");
        launch(device, &code, &down, (grid, 1, 1), block, shared_bytes, &args)?;
    }

    // 3. mix
    let chunks = tokens * columns / 8;
    let args =
        [Arg::tensor(&y)?, Arg::tensor(shares)?, Arg::tensor(&out)?, chunks.into(), columns.into(), chosen.into()];
    let name = format!("expert_mix_{suffix}");
    // SAFETY: as above.
    unsafe { launch(device, &code, &name, (chunks.div_ceil(256), 1, 1), 256, 0, &args)? };
    Ok(out)
}

/// A persistent product kernel: its tile fits how many pairs an expert has.
struct Product {
    name: &'static str,
    grid: usize,
    block: usize,
    shared_bytes: usize,
}

impl Product {
    fn choose(device: &CudaDevice, pairs: usize, experts: usize) -> Result<Self> {
        let multiprocessors = multiprocessors(device)?;
        let capability = device.cuda_stream().context().compute_capability();
        // Hopper's own matrix instructions are only in code built for it, and nothing else runs them.
        let hopper = env!("INFERNO_COMPUTE_CAP") == "90" && matches!(capability, Ok((9, 0)));
        let (name, blocks, block, shared_bytes) = match (hopper, pairs) {
            (true, pairs) if pairs <= 80 * experts => ("narrow", 1, 512, 189_264),
            (true, _) => ("wide", 1, 512, 217_152),
            (false, pairs) if pairs <= 24 * experts => ("t32", 2, 256, 51_200),
            (false, pairs) if pairs <= 48 * experts => ("t64", 2, 256, 67_584),
            (false, _) => ("t128", 1, 256, 100_352),
        };
        Ok(Self { name, grid: blocks * multiprocessors, block, shared_bytes })
    }
}
