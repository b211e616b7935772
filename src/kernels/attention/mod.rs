//! Causal grouped-query attention over a cache, with an optional sliding window and optional sinks.
//!
//! A sink is a learned logit per head that takes part in the softmax and contributes no value (openai/gpt-oss,
//! `gpt_oss/torch/model.py`, `sdpa`). A window of w lets position i see keys i-w+1 ..= i.

#[cfg(feature = "flash-attn")]
mod candle_flash_attn;
pub mod rope;

use candle_core::{DType, Device, Result, Tensor, bail};
use rayon::prelude::*;

use crate::kernels::{elements, to_f32};

/// Whose kernel attends on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// The first of those below that can.
    #[default]
    Auto,
    /// `flash_attention.cu`, on tensor cores.
    Own,
    /// The kernels of the crate candle-flash-attn, in builds with the feature `flash-attn`.
    Flash,
    /// `eager_attention.cu`: plain and slow, for every dtype and head size.
    Eager,
}

impl Backend {
    /// What this comes to for queries of a dtype and head size: one of the others, or why there is none.
    /// candle-flash-attn is not given soft caps.
    pub fn choose(
        self,
        on_gpu: bool,
        dtype: DType,
        head_dim: usize,
        softcap: Option<f32>,
    ) -> std::result::Result<Self, String> {
        let fast = on_gpu && matches!(dtype, DType::BF16 | DType::F16);
        let own = fast && HEAD_DIMS.contains(&head_dim);
        let flash = fast && softcap.is_none() && cfg!(feature = "flash-attn") && head_dim.is_multiple_of(8);
        match self {
            Backend::Auto if own => Ok(Backend::Own),
            Backend::Auto if flash => Ok(Backend::Flash),
            Backend::Auto | Backend::Eager => Ok(Backend::Eager),
            Backend::Own if own => Ok(Backend::Own),
            Backend::Flash if flash => Ok(Backend::Flash),
            _ if !on_gpu => Err("it is for a GPU".into()),
            Backend::Flash if !cfg!(feature = "flash-attn") => {
                Err("this inferno was built without it: build with --features flash-attn".into())
            }
            Backend::Flash if softcap.is_some() => Err("it has no kernel for soft-capped scores".into()),
            _ => Err(format!("it has no kernel for heads of {head_dim} in {dtype:?}")),
        }
    }
}

impl std::fmt::Display for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Backend::Auto => "auto",
            Backend::Own => "own",
            Backend::Flash => "flash",
            Backend::Eager => "eager",
        })
    }
}

/// Head sizes that `flash_attention.cu` has kernels for.
pub const HEAD_DIMS: [usize; 6] = [16, 64, 80, 96, 128, 256];

/// Where the queries stand and what they see.
#[derive(Clone, Copy, Debug)]
pub struct Sight {
    /// Position of the first query; query t stands at position + t.
    pub position: usize,
    /// Keys in sight, the query's own included; `None` for all.
    pub window: Option<usize>,
    /// Factor on q·k, usually 1/sqrt(D).
    pub scale: f32,
    /// Scores s become cap · tanh(s / cap) before the softmax (Gemma 2).
    pub softcap: Option<f32>,
}

/// q \[T, H, D\]; k, v \[S, K, D\] of q's dtype, where position p lies in row p mod S and every position in sight has been
/// written; sinks \[H\] f32; positions \[T\] u32, those of `sight` once more, on the device. Returns \[T, H, D\]. On a CPU
/// the reference runs, whatever the backend.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sinks: Option<&Tensor>,
    positions: &Tensor,
    sight: Sight,
    backend: Backend,
) -> Result<Tensor> {
    let (tokens, heads, head_dim) = q.dims3()?;
    let (rows, kv_heads, kv_dim) = k.dims3()?;
    if kv_dim != head_dim || k.dims() != v.dims() || kv_heads == 0 || heads % kv_heads != 0 || head_dim > 256 {
        bail!("attention: q {:?}, k {:?}, v {:?} (head_dim at most 256)", q.dims(), k.dims(), v.dims());
    }
    if k.dtype() != q.dtype() || v.dtype() != q.dtype() {
        bail!("attention: q is {:?}, k {:?}, v {:?}", q.dtype(), k.dtype(), v.dtype());
    }
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    let backend =
        backend.choose(q.device().is_cuda(), q.dtype(), head_dim, sight.softcap).map_err(candle_core::Error::msg)?;
    if let Some(sinks) = sinks
        && (sinks.dims() != [heads] || sinks.dtype() != DType::F32)
    {
        bail!("attention: sinks are {:?} {:?}, expected F32 [{heads}]", sinks.dtype(), sinks.dims());
    }
    if positions.dims() != [tokens] || positions.dtype() != DType::U32 {
        bail!("attention: positions are {:?} {:?}, expected U32 [{tokens}]", positions.dtype(), positions.dims());
    }
    // Rows of the cache are reused: the oldest key that the first query sees must still be there after the last write.
    let in_sight = sight.window.unwrap_or(usize::MAX).min(sight.position + 1) + tokens - 1;
    if in_sight > rows {
        bail!("attention: {in_sight} positions in sight, the cache has {rows} rows");
    }
    match q.device() {
        Device::Cpu => {
            let sinks = sinks.map(Tensor::to_vec1::<f32>).transpose()?;
            let (queries, k, v) = (to_f32(q)?, to_f32(k)?, to_f32(v)?);
            let ((queries, ql), (k, kl), (v, vl)) =
                (queries.storage_and_layout(), k.storage_and_layout(), v.storage_and_layout());
            let shape = Shape { tokens, heads, kv_heads, head_dim, rows };
            let (queries, k, v) = (elements(&queries, ql)?, elements(&k, kl)?, elements(&v, vl)?);
            let out = reference(queries, k, v, sinks.as_deref(), shape, sight);
            Tensor::from_vec(out, (tokens, heads, head_dim), &Device::Cpu)?.to_dtype(q.dtype())
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use crate::kernels::launch::cuda::{Arg, launch, module, suffix};
            // SAFETY: the kernels write D elements for each of the T·H rows.
            let out = unsafe { Tensor::empty((tokens, heads, head_dim), q.dtype(), q.device())? };
            match backend {
                Backend::Own => {
                    flash::Launch::new(device, q, k, sight)?.run(device, (q, k, v), sinks, positions, &out)?;
                    return Ok(out);
                }
                #[cfg(feature = "flash-attn")]
                Backend::Flash => {
                    crate::kernels::attention::candle_flash_attn::attention(device, (q, k, v), sinks, sight, &out)?;
                    return Ok(out);
                }
                _ => {}
            }
            let args = [
                Arg::tensor(q)?,
                Arg::tensor(k)?,
                Arg::tensor(v)?,
                Arg::optional(sinks)?,
                Arg::tensor(&out)?,
                heads.into(),
                kv_heads.into(),
                head_dim.into(),
                rows.into(),
                sight.position.into(),
                sight.window.unwrap_or(0).into(),
                sight.scale.into(),
                sight.softcap.unwrap_or(0.0).into(),
            ];
            // Few blocks: more warps in each, so that enough loads are under way. Many: small blocks waste less.
            let warps = if tokens * heads <= 512 { 32 } else { 4 };
            let shared = warps * (head_dim + 2) * size_of::<f32>();
            let name = format!("attention_{}", suffix(q.dtype())?);
            // SAFETY: shapes and dtypes checked above; rows are taken modulo S.
            unsafe {
                launch(device, &module!("eager_attention"), &name, (tokens, heads, 1), 32 * warps, shared, &args)?
            };
            Ok(out)
        }
        #[allow(unreachable_patterns)]
        _ => crate::kernels::unsupported("attention", q),
    }
}

/// The tensor-core kernels of `flash_attention.cu`: how they are launched.
#[cfg(feature = "cuda")]
pub mod flash {
    use candle_core::cuda_backend::CudaDevice;
    use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute;
    use candle_core::{DType, Result, Tensor, bail};

    use super::{HEAD_DIMS, Sight};
    use crate::kernels::launch::cuda::{Arg, Module, attribute, launch, module, multiprocessors, suffix};

    pub fn code() -> Module {
        module!("flash_attention")
    }

    /// Rows of a block's tile, its threads and its shared memory: `Shape` of `flash_attention.cu`.
    struct Cut {
        rows: usize,
        block: usize,
        shared_bytes: usize,
    }

    impl Cut {
        /// The kernels of 16, 64 and 128 rows.
        fn of(head_dim: usize) -> [Self; 3] {
            // Teams of warps, keys in a tile, and whether queries lie in shared memory.
            let cut = |rows: usize, block: usize, teams: usize, keys: usize, queries: bool| {
                let rows_in_shared = teams * 4 * keys + if queries { rows } else { 0 };
                Self { rows, block, shared_bytes: 2 * rows_in_shared * (head_dim + 8) }
            };
            if head_dim == 256 {
                return [cut(16, 128, 4, 16, true), cut(64, 128, 1, 16, true), cut(128, 256, 1, 32, true)];
            }
            let few = cut(16, 256, 8, if head_dim <= 64 { 32 } else { 16 }, false);
            let many = cut(128, 128, 1, if head_dim == 16 { 64 } else { 48 }, head_dim > 80);
            [few, cut(64, 128, 1, 64, false), many]
        }
    }

    /// A kernel and its launch for queries \[T, H, D\] on a cache \[S, K, D\].
    pub struct Launch {
        pub name: String,
        pub grid: (usize, usize, usize),
        pub block: usize,
        pub shared_bytes: usize,
        tokens: usize,
        heads: usize,
        kv_heads: usize,
        rows: usize,
        sight: Sight,
        /// f32 elements of scratch for partial results, and u32 counters, which must be zero.
        pub partials: usize,
        pub arrivals: usize,
    }

    impl Launch {
        /// For bf16 and f16, and heads of one of [`HEAD_DIMS`].
        pub fn new(device: &CudaDevice, q: &Tensor, k: &Tensor, sight: Sight) -> Result<Self> {
            let ((tokens, heads, head_dim), (cache_rows, kv_heads, _)) = (q.dims3()?, k.dims3()?);
            let short = matches!(q.dtype(), DType::BF16 | DType::F16);
            if !HEAD_DIMS.contains(&head_dim) || !short {
                bail!("flash_attention has no kernel for heads of {head_dim} in {:?}", q.dtype());
            }
            let limit = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
            let (limit, multiprocessors) = (attribute(device, limit)?, multiprocessors(device)?);
            // A row is a token and one of the heads that share a key/value head.
            let group_rows = tokens * (heads / kv_heads);
            let [few, medium, many] = Cut::of(head_dim);
            let wide = kv_heads * group_rows.div_ceil(128) >= 2 * multiprocessors;
            let Cut { rows, block, shared_bytes } = match () {
                () if group_rows <= 32 && few.shared_bytes <= limit => few,
                () if wide && many.shared_bytes <= limit => many,
                () => medium,
            };
            let tiles = group_rows.div_ceil(rows);
            // Few tiles after a long context leave multiprocessors idle: they share the keys.
            let wanted = match rows {
                16 => multiprocessors / (kv_heads * tiles),
                64 => 2 * multiprocessors / (kv_heads * tiles),
                _ => 1,
            };
            let few_keys = sight.window.is_some_and(|window| window <= 256);
            let splits = if few_keys { 1 } else { wanted.clamp(1, 64) };
            let shared = splits > 1;
            Ok(Self {
                name: format!("flash_attention_{rows}_rows_{head_dim}_{}", suffix(q.dtype())?),
                grid: (kv_heads, tiles, splits),
                block,
                shared_bytes,
                tokens,
                heads,
                kv_heads,
                rows: cache_rows,
                sight,
                partials: if shared { tiles * kv_heads * splits * rows * (head_dim + 2) } else { 0 },
                arrivals: if shared { tiles * kv_heads } else { 0 },
            })
        }

        /// The sizes that follow the addresses: T, H, K, S, window; `factors` come next.
        pub fn sizes(&self) -> [usize; 5] {
            [self.tokens, self.heads, self.kv_heads, self.rows, self.sight.window.unwrap_or(0)]
        }

        /// The scale, and the soft cap, 0 for none.
        pub fn factors(&self) -> [f32; 2] {
            [self.sight.scale, self.sight.softcap.unwrap_or(0.0)]
        }

        pub(super) fn run(
            &self,
            device: &CudaDevice,
            (q, k, v): (&Tensor, &Tensor, &Tensor),
            sinks: Option<&Tensor>,
            positions: &Tensor,
            out: &Tensor,
        ) -> Result<()> {
            // SAFETY: partial results are written before they are read.
            let partials = unsafe { Tensor::empty(self.partials.max(1), DType::F32, q.device())? };
            let arrivals = Tensor::zeros(self.arrivals.max(1), DType::U32, q.device())?;
            let mut args = vec![
                Arg::tensor(q)?,
                Arg::tensor(k)?,
                Arg::tensor(v)?,
                Arg::optional(sinks)?,
                Arg::tensor(out)?,
                Arg::tensor(positions)?,
                Arg::tensor(&partials)?,
                Arg::tensor(&arrivals)?,
            ];
            args.extend(self.sizes().map(Arg::from));
            // Not in a chain: nothing is read early.
            args.extend(self.factors().map(Arg::from));
            args.push(Arg::Int(0));
            // SAFETY: shapes and dtypes checked by `attention`; rows of the cache are taken modulo S.
            unsafe { launch(device, &code(), &self.name, self.grid, self.block, self.shared_bytes, &args) }
        }
    }
}

/// Sizes for [`reference()`]: T, H, K, D, S.
#[derive(Clone, Copy)]
pub struct Shape {
    pub tokens: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rows: usize,
}

/// The same in plain Rust: scores, softmax with the sink in its denominator, weighted values.
pub fn reference(q: &[f32], k: &[f32], v: &[f32], sinks: Option<&[f32]>, shape: Shape, sight: Sight) -> Vec<f32> {
    let Shape { tokens, heads, kv_heads, head_dim, rows } = shape;
    let mut out = vec![0f32; tokens * heads * head_dim];
    out.par_chunks_exact_mut(head_dim).enumerate().for_each(|(row, out)| {
        let (token, head) = (row / heads, row % heads);
        let kv_head = head / (heads / kv_heads);
        let last = sight.position + token;
        let first = sight.window.map_or(0, |window| (last + 1).saturating_sub(window));
        let query = &q[row * head_dim..][..head_dim];
        let slot = |position: usize| ((position % rows) * kv_heads + kv_head) * head_dim;
        let score = |position| {
            let score = dot(query, &k[slot(position)..][..head_dim]) * sight.scale;
            sight.softcap.map_or(score, |cap| cap * (score / cap).tanh())
        };
        let scores: Vec<f32> = (first..=last).map(score).collect();
        let sink = sinks.map(|sinks| sinks[head]);
        let top = scores.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
        let mut total = sink.map_or(0.0, |sink| (sink - top).exp());
        for (position, score) in (first..=last).zip(&scores) {
            let weight = (score - top).exp();
            total += weight;
            for (out, value) in out.iter_mut().zip(&v[slot(position)..][..head_dim]) {
                *out += weight * value;
            }
        }
        out.iter_mut().for_each(|value| *value /= total);
    });
    out
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
