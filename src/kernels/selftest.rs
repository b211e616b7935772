//! Every operation on one device against its reference on the CPU, with small odd shapes: does this very card, with this
//! driver and this build, compute what it should? `tests/it/kernels.rs` asks more, of whoever changes a kernel.

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};

use crate::kernels::attention::rope::{QkNorm, Rotation, split_qkv};
use crate::kernels::attention::{AttentionBackend, AttentionMask, attention};
use crate::kernels::matmul::matmul_f32;
use crate::kernels::moe::experts::{ExpertWeights, combine, expert_matmul};
use crate::kernels::moe::topk::{Softmax, topk_softmax};
use crate::kernels::norm::add_norm;
use crate::kernels::quantized::{Format, PlaneBytes, QuantizedMatrix};
use crate::kernels::rows::{add_bias, copy_rows, embed, soft_cap};
use crate::kernels::swiglu::{Activation, clamped_swiglu, gated, gated_halves};

/// How one operation did in one dtype.
#[derive(Clone, Debug)]
pub struct Check {
    pub name: String,
    pub dtype: DType,
    /// Largest difference over the largest value; NaN where a value is none. Or why it could not run.
    pub error: std::result::Result<f32, String>,
    pub tolerance: f32,
    /// On the device, with the way there and back.
    pub seconds: f64,
}

impl Check {
    pub fn passed(&self) -> bool {
        self.error.as_ref().is_ok_and(|error| *error <= self.tolerance)
    }
}

/// Runs every operation in each dtype that kernels compute in.
pub fn run(device: &Device) -> Vec<Check> {
    [DType::F32, DType::BF16, DType::F16].into_iter().flat_map(|dtype| run_in(device, dtype)).collect()
}

fn run_in(device: &Device, dtype: DType) -> Vec<Check> {
    let rounding = rounding(dtype);
    let there = Side { device, dtype };
    let mut checks = vec![
        check("embed", there, 0.0, &|side| {
            embed(&side.put(&noise(1, &[51, 37], dtype)?)?, &side.ids(&[3, 50, 0, 17])?, 0.5)
        }),
        check("add_bias", there, 1e-6, &|side| {
            add_bias(&side.f32(&noise(2, &[9, 37], DType::F32)?)?, &side.f32(&noise(3, &[37], DType::F32)?)?)
        }),
        check("copy_rows", there, 0.0, &|side| {
            let to = side.put(&noise(4, &[13, 5], dtype)?)?;
            copy_rows(&to, &side.put(&noise(5, &[4, 5], dtype)?)?, 7)?;
            Ok(to)
        }),
        check("soft_cap", there, 1e-5, &|side| soft_cap(&side.f32(&noise(38, &[9, 37], DType::F32)?)?, 3.0)),
        check("add_norm", there, rounding, &|side| norm(side, false)),
        check("add_norm, layer norm", there, rounding, &|side| norm(side, true)),
        check("split_qkv", there, rounding, &|side| split(side, false)),
        check("split_qkv, normed", there, rounding, &|side| split(side, true)),
        check("clamped_swiglu", there, rounding, &|side| clamped_swiglu(&side.put(&noise(9, &[3, 514], dtype)?)?, 7.0)),
        check("gated, silu", there, rounding, &|side| gate(side, Activation::Silu)),
        check("gated, gelu", there, rounding, &|side| gate(side, Activation::GeluTanh)),
        check("gated_halves", there, rounding, &|side| {
            gated_halves(&side.put(&noise(39, &[3, 514], dtype)?)?, Activation::Silu)
        }),
        check("topk_softmax", there, 1e-5, &|side| choice(side, dtype, Softmax::OverChosen)),
        check("topk_softmax, of all", there, 1e-5, &|side| choice(side, dtype, Softmax::OverAll)),
        check("matmul", there, rounding, &|side| {
            matmul_f32(&side.put(&noise(13, &[5, 96], dtype)?)?, &side.put(&noise(14, &[72, 96], dtype)?)?)
        }),
    ];
    for (name, tokens) in [("experts mxfp4", 3), ("experts mxfp4, many", 33)] {
        checks.push(check(name, there, rounding, &|side| experts(side, tokens, true)));
    }
    for (name, tokens) in [("experts dense", 3), ("experts dense, many", 33), ("experts dense, very many", 331)] {
        checks.push(check(name, there, rounding, &|side| experts(side, tokens, false)));
    }
    checks.push(check("combine", there, 1e-5, &|side| {
        combine(&side.put(&noise(43, &[5, 3, 37], dtype)?)?, &side.f32(&noise(44, &[5, 3], DType::F32)?)?)
    }));
    for backend in [AttentionBackend::Own, AttentionBackend::CandleFlashAttn, AttentionBackend::Eager] {
        // One token, a few, and enough for tiles; each kernel of a backend has its own range.
        for (what, tokens, position) in [("step", 1, 300), ("few", 7, 290), ("prompt", 130, 11)] {
            // A backend that this build or dtype has no kernel for is no failure.
            for (heads_of, head_dim, softcap) in [("", 64, None), (", heads of 256, soft-capped", 256, Some(5.0))] {
                if backend.choose(device.is_cuda(), dtype, head_dim, softcap).is_ok() {
                    let name = format!("attention {backend}, {what}{heads_of}");
                    let queries = Queries { tokens, position, head_dim, softcap };
                    checks.push(check(&name, there, 2.0 * rounding, &|side| attend(side, queries, backend)));
                }
            }
        }
    }
    for format in Format::ALL {
        // With few tokens weights are multiplied as they are, with many as floats of the dtype.
        for (what, tokens) in [("few", 3), ("many", 33)] {
            let name = format!("product with {format:?}, {what}");
            checks.push(check(&name, there, 2.0 * rounding.max(1e-4), &|side| {
                quantized(side, format)?.matmul(&side.put(&noise(42, &[tokens, 512], dtype)?)?)
            }));
        }
        checks.push(check(&format!("embed {format:?}"), there, 1e-6, &|side| {
            quantized(side, format)?.embed(&side.ids(&[3, 50, 0])?, 0.5)
        }));
    }
    #[cfg(feature = "cuda")]
    if device.is_cuda() && dtype != DType::F32 {
        for (name, tokens) in [("expert_mlp", 5), ("expert_mlp, many", 301)] {
            checks.push(check(name, there, 2.0 * rounding, &|side| fused::expert_mlp(side, tokens)));
        }
    }
    checks
}

/// Where an operation runs, and in what.
#[derive(Clone, Copy)]
struct Side<'d> {
    device: &'d Device,
    dtype: DType,
}

impl Side<'_> {
    fn put(&self, tensor: &Tensor) -> Result<Tensor> {
        tensor.to_dtype(self.dtype)?.to_device(self.device)
    }

    fn f32(&self, tensor: &Tensor) -> Result<Tensor> {
        tensor.to_device(self.device)
    }

    fn ids(&self, ids: &[u32]) -> Result<Tensor> {
        Tensor::new(ids, self.device)
    }
}

/// 51 rows of 512: any bits, with scales between 2^-7 and 2^-5.
fn quantized(side: Side, format: Format) -> Result<QuantizedMatrix> {
    let (rows, columns) = (51, 512);
    let mut planes = format.row_bytes(columns).map(|bytes| vec![0u8; rows * bytes]);
    let count = planes.iter().map(Vec::len).sum();
    planes.iter_mut().flatten().zip(numbers(41, count, 256)).for_each(|(byte, n)| *byte = n as u8);
    let PlaneBytes { scales, supers, .. } = format.plane_bytes();
    let [low, _, of_chunks, of_supers] = &mut planes;
    let halves = if supers > 0 { of_supers } else { &mut *of_chunks };
    match scales {
        0 => halves.chunks_exact_mut(4).for_each(|scale| scale.copy_from_slice(&0.01f32.to_le_bytes())),
        _ => halves.iter_mut().skip(1).step_by(2).for_each(|high| *high = *high & 0x84 | 0x20),
    }
    if format == Format::Fp8 {
        // Nothing that is no number.
        low.iter_mut().for_each(|byte| *byte &= 0xbf);
    }
    QuantizedMatrix::new(format, columns, planes, side.device)
}

/// As f32 on the CPU: nothing of candle's is to run on the device, whose kernels the driver compiles at their first use.
fn back(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)
}

/// The same operation on both sides. On the CPU it is computed in f32, from values that `there.dtype` holds exactly.
fn check(name: &str, there: Side, tolerance: f32, op: &dyn Fn(Side) -> Result<Tensor>) -> Check {
    let values = |tensor: Tensor| back(&tensor)?.flatten_all()?.to_vec1::<f32>();
    let started = Instant::now();
    let got = op(there).and_then(values);
    let seconds = started.elapsed().as_secs_f64();
    let want = op(Side { device: &Device::Cpu, dtype: DType::F32 }).and_then(values);
    let error = got.and_then(|got| Ok(distance(&got, &want?))).map_err(|error| error.to_string());
    Check { name: name.to_string(), dtype: there.dtype, error, tolerance, seconds }
}

/// Largest |got - want| over the largest |want|; NaN if any of them is none.
fn distance(got: &[f32], want: &[f32]) -> f32 {
    if got.len() != want.len() || got.iter().chain(want).any(|value| !value.is_finite()) {
        return f32::NAN;
    }
    let scale = want.iter().fold(f32::MIN_POSITIVE, |scale, value| scale.max(value.abs()));
    got.iter().zip(want).fold(0f32, |most, (got, want)| most.max((got - want).abs())) / scale
}

fn rounding(dtype: DType) -> f32 {
    match dtype {
        // Sums in another order.
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        _ => 8e-3,
    }
}

/// Repeatable numbers below `below`.
fn numbers(seed: u64, count: usize, below: u64) -> impl Iterator<Item = u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    })
    .take(count)
}

/// About normal values with some outliers, as f32 on the CPU, each one that `dtype` holds exactly.
fn noise(seed: u64, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let unit = |n: u64| n as f32 / 4096.0 - 0.5;
    let halves: Vec<f32> = numbers(seed, 2 * count, 4096).map(unit).collect();
    let value = |(index, pair): (usize, &[f32])| (pair[0] + pair[1]) * if index % 53 == 7 { 20.0 } else { 1.0 };
    let values: Vec<f32> = halves.chunks_exact(2).enumerate().map(value).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_dtype(DType::F32)
}

fn bytes(seed: u64, shape: &[usize], first: u8, below: u64) -> Result<Tensor> {
    let bytes: Vec<u8> = numbers(seed, shape.iter().product(), below).map(|n| first + n as u8).collect();
    Tensor::from_vec(bytes, shape, &Device::Cpu)
}

fn norm(side: Side, layer_norm: bool) -> Result<Tensor> {
    let (x, y) = (noise(6, &[5, 1027], DType::F32)?, noise(7, &[5, 1027], DType::F32)?);
    let (weight, bias) = (side.f32(&noise(8, &[1027], DType::F32)?)?, side.f32(&noise(40, &[1027], DType::F32)?)?);
    let bias = layer_norm.then_some(&bias);
    Ok(add_norm(&side.f32(&x)?, Some(&side.f32(&y)?), &weight, bias, 1e-5, side.dtype)?.1)
}

fn gate(side: Side, activation: Activation) -> Result<Tensor> {
    let (gate, up) = (noise(10, &[3, 257], DType::F32)?, noise(11, &[3, 257], DType::F32)?);
    gated(&side.f32(&gate)?, Some(&side.f32(&up)?), activation, side.dtype)
}

fn choice(side: Side, dtype: DType, softmax: Softmax) -> Result<Tensor> {
    let (ids, shares) = topk_softmax(&side.put(&noise(12, &[7, 33], dtype)?)?, 4, softmax)?;
    // A wrong choice is off by at least one, whatever its share.
    Tensor::cat(&[back(&ids)?, back(&shares)?], 1)
}

fn split(side: Side, normed: bool) -> Result<Tensor> {
    let (tokens, heads) = (5, (6, 2, 24));
    let width = (heads.0 + 2 * heads.1) * heads.2;
    let [cos, sin] = [15, 16].map(|seed| noise(seed, &[90, 10], DType::F32));
    let (cos, sin) = (side.f32(&cos?)?, side.f32(&sin?)?);
    let positions = side.ids(&[89, 0, 7, 7, 31])?;
    let (qkv, bias) = (noise(17, &[tokens, width], DType::F32)?, noise(18, &[width], DType::F32)?);
    let rotation = Rotation { cos: &cos, sin: &sin, positions: &positions };
    let (q_norm, k_norm) =
        (side.f32(&noise(41, &[heads.2], DType::F32)?)?, side.f32(&noise(42, &[heads.2], DType::F32)?)?);
    let norms = normed.then_some(QkNorm { q: &q_norm, k: &k_norm, eps: 1e-5 });
    let (q, k, v) = split_qkv(&side.f32(&qkv)?, Some(&side.f32(&bias)?), norms, rotation, heads, side.dtype)?;
    Tensor::cat(&[back(&q)?, back(&k)?, back(&v)?], 1)
}

#[derive(Clone, Copy)]
struct Queries {
    tokens: usize,
    position: usize,
    head_dim: usize,
    softcap: Option<f32>,
}

fn attend(side: Side, queries: Queries, backend: AttentionBackend) -> Result<Tensor> {
    let Queries { tokens, position, head_dim, softcap } = queries;
    let (heads, kv_heads, rows) = (6, 2, 331);
    // All values are drawn for the narrowest dtype, so that every side gets the same ones.
    let tensor = |seed, rows, heads| side.put(&noise(seed, &[rows, heads, head_dim], DType::BF16)?);
    let (q, k, v) = (tensor(19, tokens, heads)?, tensor(20, rows, kv_heads)?, tensor(21, rows, kv_heads)?);
    let sinks = side.f32(&noise(22, &[heads], DType::F32)?)?;
    let positions: Vec<u32> = (position..position + tokens).map(|position| position as u32).collect();
    let positions = side.ids(&positions)?;
    let backend = if side.device.is_cpu() { AttentionBackend::Auto } else { backend };
    let attend = |window| {
        let mask = AttentionMask { position, window, scale: 1.0 / (head_dim as f32).sqrt(), softcap };
        attention(&q, &k, &v, Some(&sinks), &positions, mask, backend)
    };
    Tensor::cat(&[back(&attend(None)?)?, back(&attend(Some(100))?)?], 0)
}

fn experts(side: Side, tokens: usize, packed: bool) -> Result<Tensor> {
    let (experts, chosen, rows, columns) = (5, 3, 67, 96);
    let weights = match packed {
        true => ExpertWeights::Mxfp4 {
            blocks: bytes(23, &[experts, rows, columns / 32, 16], 0, 256)?.to_device(side.device)?,
            scales: bytes(24, &[experts, rows, columns / 32], 118, 8)?.to_device(side.device)?,
        },
        false => ExpertWeights::Dense(side.put(&noise(25, &[experts, rows, columns], DType::BF16)?)?),
    };
    let x = side.put(&noise(26, &[tokens, columns], DType::BF16)?)?;
    let bias = side.put(&noise(27, &[experts, rows], DType::BF16)?)?;
    let ids: Vec<u32> = numbers(28, tokens * chosen, experts as u64).map(|id| id as u32).collect();
    expert_matmul(&x, &weights, Some(&bias), &side.ids(&ids)?.reshape((tokens, chosen))?)
}

#[cfg(feature = "cuda")]
mod fused {
    use candle_core::{DType, Result, Tensor, bail};

    use super::{Side, bytes, noise, numbers};
    use crate::kernels::moe::expert_mlp::{self, ExpertLinear};
    use crate::kernels::moe::experts::{ExpertWeights, Mxfp4Tiles, RowOrder, expert_matmul};
    use crate::kernels::swiglu::clamped_swiglu;

    /// On a GPU by one fused kernel after the other, on a CPU product by product.
    pub fn expert_mlp(side: Side, tokens: usize) -> Result<Tensor> {
        let (experts, chosen, columns, intermediate) = (5, 3, 96, 160);
        // Sizes as after a norm, so that sums stay within the limit's reach; halves are exact.
        let x = (noise(29, &[tokens, columns], DType::BF16)? * 0.5)?;
        let ids: Vec<u32> = numbers(30, tokens, experts as u64)
            .flat_map(|first| (0..chosen as u64).map(move |next| ((first + next) % experts as u64) as u32))
            .collect();
        let ids = side.ids(&ids)?.reshape((tokens, chosen))?;
        let shares = (bytes(31, &[tokens, chosen], 1, 200)?.to_dtype(DType::F32)? / 256.0)?.to_device(side.device)?;
        let stack = |seed, rows: usize, columns: usize| -> Result<_> {
            let blocks = bytes(seed, &[experts, rows, columns / 32, 16], 0, 256)?.to_device(side.device)?;
            let scales = bytes(seed + 1, &[experts, rows, columns / 32], 120, 5)?.to_device(side.device)?;
            let bias = side.put(&noise(seed + 2, &[experts, rows], DType::BF16)?)?;
            Ok((blocks, scales, bias))
        };
        let (up, down) = (stack(32, 2 * intermediate, columns)?, stack(35, columns, intermediate)?);
        if side.device.is_cpu() {
            let weights = |(blocks, scales, _): &(Tensor, Tensor, Tensor)| ExpertWeights::Mxfp4 {
                blocks: blocks.clone(),
                scales: scales.clone(),
            };
            let h = clamped_swiglu(&expert_matmul(&x, &weights(&up), Some(&up.2), &ids)?, 7.0)?;
            let y = expert_matmul(&h, &weights(&down), Some(&down.2), &ids)?;
            return y.broadcast_mul(&shares.unsqueeze(2)?)?.sum(1);
        }
        let tiles =
            |(blocks, scales, _): &(Tensor, Tensor, Tensor), order| match Mxfp4Tiles::repack(blocks, scales, order)? {
                Some(tiles) => Ok(tiles),
                None => bail!("scales of at most 2 were taken for larger ones"),
            };
        let (up_tiles, down_tiles) = (tiles(&up, RowOrder::Paired)?, tiles(&down, RowOrder::Plain)?);
        let gate_up = ExpertLinear { tiles: &up_tiles, bias: &up.2 };
        let down = ExpertLinear { tiles: &down_tiles, bias: &down.2 };
        expert_mlp::expert_mlp(&side.f32(&x)?, &ids, &shares, gate_up, down, 7.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounding aside, the CPU agrees with itself; and what is wrong is seen.
    #[test]
    fn the_cpu_passes() {
        let checks = run(&Device::Cpu);
        assert!(checks.len() > 40);
        for check in checks {
            assert!(check.passed(), "{check:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_seen() {
        let cpu = Side { device: &Device::Cpu, dtype: DType::BF16 };
        let wrong = check("wrong", cpu, 1e-3, &|side| {
            Tensor::new(&[1f32, if side.dtype == DType::F32 { 2.0 } else { 2.1 }], side.device)
        });
        assert!(!wrong.passed() && wrong.error.is_ok());
        let nan = check("nan", cpu, 1e-3, &|side| {
            Tensor::new(&[1f32, if side.dtype == DType::F32 { 2.0 } else { f32::NAN }], side.device)
        });
        assert!(!nan.passed());
        let refused = check("refused", cpu, 1.0, &|side| {
            embed(&side.f32(&noise(1, &[2, 2], DType::F32)?)?, &side.ids(&[5])?, 1.0)
        });
        assert!(!refused.passed() && refused.error.is_err());
    }
}
