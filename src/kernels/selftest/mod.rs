//! Compares tensor operations on a device with their CPU references, using small, irregular shapes.
//!
//! `inferno doctor` runs this self-test to check that the GPU, the driver and this build compute correct results.
//! The tests in `tests/it` cover the kernels in more depth, and also cover kernels that the self-test leaves out,
//! such as `matmul::dense_few_tokens`, `matmul::dense_wgmma` with several terms, the kernel in `route.cu`,
//! and the kernels of `decode`, `exchange`, `sampling` and `step_inputs`.

#[cfg(feature = "cuda")]
mod fused_experts;
mod inputs;

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};

use crate::kernels::SumOrder;
use crate::kernels::activation::{Activation, clamped_swiglu, gated, gated_halves};
use crate::kernels::attention::rope::{HeadSizes, QkNorm, Rotation, SplitQkvInputs, split_qkv};
use crate::kernels::attention::{
    AttentionBackend, AttentionInputs, AttentionMask, BLOCK_TOKENS, CachedLayer, PassBlocks, QueryLayout, attention,
};
use crate::kernels::matmul::matmul_f32;
use crate::kernels::moe::combine::combine;
use crate::kernels::moe::experts::{ExpertWeights, expert_matmul};
use crate::kernels::moe::routing::topk::{Softmax, topk_softmax};
use crate::kernels::norm::{Addend, add_norm};
use crate::kernels::quantized::{PlaneBytes, QuantizedMatrix, WeightFormat};
use crate::kernels::rows::{add_bias, copy_rows, embed, soft_cap};
#[cfg(feature = "cuda")]
use fused_experts::{ExpertCase, fused_experts};
use inputs::{CheckTarget, Noise};

#[cfg(feature = "cuda")]
pub(crate) use inputs::Random;

/// The result of comparing one operation, in one dtype, with its reference on the CPU.
#[derive(Clone, Debug)]
pub struct Check {
    pub name: String,
    pub dtype: DType,
    /// The largest absolute difference from the reference, divided by the largest absolute value of the reference.
    /// NaN if a value is not finite, or if the result and the reference differ in length.
    /// `Err` if the operation fails on the device or on the CPU.
    pub error: std::result::Result<f32, String>,
    pub tolerance: f32,
    /// The time in seconds to create the inputs, copy them to the device, run the operation, and copy the result back.
    pub seconds: f64,
}

impl Check {
    pub fn passed(&self) -> bool {
        self.error.as_ref().is_ok_and(|error| *error <= self.tolerance)
    }
}

/// Runs the checks in f32, bf16 and f16. Skips dtypes that an operation does not support.
pub fn run(device: &Device) -> Vec<Check> {
    [DType::F32, DType::BF16, DType::F16].into_iter().flat_map(|dtype| run_with_dtype(device, dtype)).collect()
}

fn run_with_dtype(device: &Device, dtype: DType) -> Vec<Check> {
    let rounding = rounding(dtype);
    let target = CheckTarget { device, dtype };
    let mut checks = vec![
        check("embed", target, 0.0, &|target, noise| {
            embed(&target.put(&noise.tensor(&[51, 37], dtype)?)?, &target.ids(&[3, 50, 0, 17])?, 0.5)
        }),
        check("add_bias", target, 1e-6, &|target, noise| {
            add_bias(
                &target.f32(&noise.tensor(&[9, 37], DType::F32)?)?,
                &target.f32(&noise.tensor(&[37], DType::F32)?)?,
            )
        }),
        check("copy_rows", target, 0.0, &|target, noise| {
            let to = target.put(&noise.tensor(&[13, 5], dtype)?)?;
            copy_rows(&to, &target.put(&noise.tensor(&[4, 5], dtype)?)?, 7)?;
            Ok(to)
        }),
        check("soft_cap", target, 1e-5, &|target, noise| {
            soft_cap(&target.f32(&noise.tensor(&[9, 37], DType::F32)?)?, 3.0)
        }),
        check("add_norm", target, rounding, &|target, noise| norm(target, noise, NormKind::RmsNorm)),
        check("add_norm, layer norm", target, rounding, &|target, noise| norm(target, noise, NormKind::LayerNorm)),
        check("split_qkv", target, rounding, &|target, noise| rope(target, noise, QkNorms::Without)),
        check("split_qkv, with norms", target, rounding, &|target, noise| rope(target, noise, QkNorms::With)),
        check("clamped_swiglu", target, rounding, &|target, noise| {
            clamped_swiglu(&target.put(&noise.tensor(&[3, 514], dtype)?)?, 7.0)
        }),
        check("gated, silu", target, rounding, &|target, noise| activation(target, noise, Activation::Silu)),
        check("gated, gelu", target, rounding, &|target, noise| activation(target, noise, Activation::GeluTanh)),
        check("gated_halves", target, rounding, &|target, noise| {
            gated_halves(&target.put(&noise.tensor(&[3, 514], dtype)?)?, Activation::Silu, dtype)
        }),
        check("topk_softmax", target, 1e-5, &|target, noise| routing(target, noise, dtype, Softmax::OverChosen)),
        check("topk_softmax, over all experts", target, 1e-5, &|target, noise| {
            routing(target, noise, dtype, Softmax::OverAll)
        }),
        check("matmul", target, rounding, &|target, noise| {
            matmul_f32(
                &target.put(&noise.tensor(&[5, 96], dtype)?)?,
                &target.put(&noise.tensor(&[72, 96], dtype)?)?,
                SumOrder::Fastest,
            )
        }),
    ];
    for (name, tokens) in [("experts mxfp4, few tokens", 3), ("experts mxfp4, many tokens", 33)] {
        checks
            .push(check(name, target, rounding, &|target, noise| experts(target, noise, tokens, ExpertFormat::Mxfp4)));
    }
    for (name, tokens) in
        [("experts dense, few tokens", 3), ("experts dense, many tokens", 33), ("experts dense, 331 tokens", 331)]
    {
        checks
            .push(check(name, target, rounding, &|target, noise| experts(target, noise, tokens, ExpertFormat::Dense)));
    }
    checks.push(check("combine", target, 1e-5, &|target, noise| {
        combine(&target.put(&noise.tensor(&[5, 3, 37], dtype)?)?, &target.f32(&noise.tensor(&[5, 3], DType::F32)?)?)
    }));
    checks.extend(attention_checks(target, 2.0 * rounding));
    checks.extend(quantized_checks(target, 2.0 * rounding.max(1e-4)));
    #[cfg(feature = "cuda")]
    if device.is_cuda() && dtype != DType::F32 {
        // `expert_few_pairs.cu` requires hidden and intermediate sizes that are multiples of 192.
        for (name, case) in [
            ("expert_mlp, few tokens", ExpertCase { tokens: 5, hidden: 192, intermediate: 384 }),
            ("expert_mlp, many tokens", ExpertCase { tokens: 301, hidden: 96, intermediate: 160 }),
        ] {
            checks.push(check(name, target, 2.0 * rounding, &|target, noise| fused_experts(target, noise, case)));
        }
    }
    checks
}

/// Checks attention with every backend, for the cases that the backend supports.
fn attention_checks(target: CheckTarget, tolerance: f32) -> Vec<Check> {
    let mut checks = Vec::new();
    for backend in [AttentionBackend::Own, AttentionBackend::CandleFlashAttn, AttentionBackend::Portable] {
        // The number of tokens affects which kernel a backend chooses and how the kernel divides its work.
        for (what, tokens, position) in [("step", 1, 300), ("few", 7, 290), ("prompt", 130, 11)] {
            // Skip backends that this build lacks, or that do not support the device, dtype, head size or soft cap.
            for (variant, head_dim, softcap) in [("", 64, None), (", head size 256, soft cap", 256, Some(5.0))] {
                if backend.choose(target.device.is_cuda(), target.dtype, head_dim, softcap).is_ok() {
                    let name = format!("attention {backend}, {what}{variant}");
                    let queries = AttentionCase { tokens, position, head_dim, softcap };
                    checks.push(check(&name, target, tolerance, &|target, noise| {
                        attend(target, noise, queries, backend)
                    }));
                }
            }
        }
    }
    checks
}

/// Checks matmul and embed on quantized matrices in every format.
fn quantized_checks(target: CheckTarget, tolerance: f32) -> Vec<Check> {
    let mut checks = Vec::new();
    for format in WeightFormat::ALL {
        // On a GPU, 3 and 33 tokens use different kernels, or different tile sizes of one kernel.
        for (what, tokens) in [("few tokens", 3), ("many tokens", 33)] {
            let name = format!("matmul {format:?}, {what}");
            checks.push(check(&name, target, tolerance, &|target, noise| {
                quantized(target, noise, format)?.matmul(&target.put(&noise.tensor(&[tokens, 512], target.dtype)?)?)
            }));
        }
        checks.push(check(&format!("embed {format:?}"), target, 1e-6, &|target, noise| {
            quantized(target, noise, format)?.embed(&target.ids(&[3, 50, 0])?, 0.5)
        }));
    }
    checks
}

/// Returns a 51×512 matrix of pseudo-random bits, with two restrictions:
/// the floating-point scales have magnitudes between 2^-7 and 2^-5, and no FP8 value is NaN.
fn quantized(target: CheckTarget, noise: &mut Noise, format: WeightFormat) -> Result<QuantizedMatrix> {
    let (rows, columns) = (51, 512);
    let mut planes = format.row_bytes(columns).map(|bytes| vec![0u8; rows * bytes]);
    let count = planes.iter().map(Vec::len).sum();
    planes.iter_mut().flatten().zip(noise.numbers(count, 256)).for_each(|(byte, n)| *byte = n as u8);
    let PlaneBytes { scales, supers, .. } = format.plane_bytes();
    let [low, _, scale_plane, super_plane] = &mut planes;
    let halves = if supers > 0 { super_plane } else { &mut *scale_plane };
    match scales {
        0 => halves.chunks_exact_mut(4).for_each(|scale| scale.copy_from_slice(&0.01f32.to_le_bytes())),
        _ => halves.iter_mut().skip(1).step_by(2).for_each(|high| *high = *high & 0x84 | 0x20),
    }
    if format == WeightFormat::Fp8 {
        // Clear the highest exponent bit of each FP8 byte, so that no byte is NaN.
        low.iter_mut().for_each(|byte| *byte &= 0xbf);
    }
    QuantizedMatrix::new(format, columns, planes, target.device)
}

/// Returns the tensor as f32 on the CPU.
///
/// Converts on the CPU, because on a GPU, the driver may first have to compile candle's conversion kernel.
fn to_cpu(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)
}

/// Runs an operation on the target and on the CPU, and compares the results.
///
/// The CPU computes the reference in f32, from exactly the input values that the target gets.
/// Exception: the inputs of the products in `quantized_checks` are rounded on the target only.
fn check(
    name: &str,
    target: CheckTarget,
    tolerance: f32,
    op: &dyn Fn(CheckTarget, &mut Noise) -> Result<Tensor>,
) -> Check {
    let values = |tensor: Tensor| to_cpu(&tensor)?.flatten_all()?.to_vec1::<f32>();
    let started = Instant::now();
    let got = op(target, &mut Noise::new()).and_then(values);
    let seconds = started.elapsed().as_secs_f64();
    let reference = CheckTarget { device: &Device::Cpu, dtype: DType::F32 };
    let want = op(reference, &mut Noise::new()).and_then(values);
    let error = got.and_then(|got| Ok(distance(&got, &want?))).map_err(|error| error.to_string());
    Check { name: name.to_string(), dtype: target.dtype, error, tolerance, seconds }
}

/// Returns the largest |got - want|, divided by the largest |want|.
/// Returns NaN if a value is not finite or the lengths of `got` and `want` differ.
fn distance(got: &[f32], want: &[f32]) -> f32 {
    if got.len() != want.len() || got.iter().chain(want).any(|value| !value.is_finite()) {
        return f32::NAN;
    }
    let scale = want.iter().fold(f32::MIN_POSITIVE, |scale, value| scale.max(value.abs()));
    got.iter().zip(want).fold(0f32, |max, (got, want)| max.max((got - want).abs())) / scale
}

/// Returns the tolerated relative error. For f16 and bf16, the tolerance is about the machine epsilon.
fn rounding(dtype: DType) -> f32 {
    match dtype {
        // The reference is also f32. The results differ only by rounding, for example because sums have another order.
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        _ => 8e-3,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum NormKind {
    RmsNorm,
    LayerNorm,
}

fn norm(target: CheckTarget, noise: &mut Noise, kind: NormKind) -> Result<Tensor> {
    let x = noise.tensor(&[5, 1027], DType::F32)?;
    let y = noise.tensor(&[2, 5, 1027], DType::F32)?;
    let (weight, bias) =
        (target.f32(&noise.tensor(&[1027], DType::F32)?)?, target.f32(&noise.tensor(&[1027], DType::F32)?)?);
    let bias = (kind == NormKind::LayerNorm).then_some(&bias);
    let y = target.f32(&y)?;
    let y_bias = target.f32(&noise.tensor(&[1027], DType::F32)?)?;
    let y = Addend { terms: &y, bias: Some(&y_bias) };
    Ok(add_norm(&target.f32(&x)?, Some(y), &weight, bias, 1e-5, target.dtype)?.1)
}

fn activation(target: CheckTarget, noise: &mut Noise, activation: Activation) -> Result<Tensor> {
    let gate = noise.tensor(&[3, 257], DType::F32)?;
    let up = noise.tensor(&[3, 257], DType::F32)?;
    gated(&target.f32(&gate)?, Some(&target.f32(&up)?), activation, target.dtype)
}

fn routing(target: CheckTarget, noise: &mut Noise, dtype: DType, softmax: Softmax) -> Result<Tensor> {
    let (ids, weights) = topk_softmax(&target.put(&noise.tensor(&[7, 33], dtype)?)?, 4, softmax)?;
    // Compare ids and routing weights together. All ids are below 33, so a wrong id causes a relative error of at least
    // 1/32, far above the tolerance.
    Tensor::cat(&[to_cpu(&ids)?, to_cpu(&weights)?], 1)
}

/// Whether the queries and keys are normalized before the rotation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum QkNorms {
    Without,
    With,
}

fn rope(target: CheckTarget, noise: &mut Noise, norms: QkNorms) -> Result<Tensor> {
    let (tokens, sizes) = (5, HeadSizes { heads: 6, kv_heads: 2, head_dim: 24 });
    let (width, head_dim) = (sizes.qkv_rows(), sizes.head_dim);
    let cos = noise.tensor(&[90, 10], DType::F32)?;
    let sin = noise.tensor(&[90, 10], DType::F32)?;
    let (cos, sin) = (target.f32(&cos)?, target.f32(&sin)?);
    let positions = target.ids(&[89, 0, 7, 7, 31])?;
    let qkv = noise.tensor(&[2, tokens, width], DType::F32)?;
    let bias = noise.tensor(&[width], DType::F32)?;
    let rotation = Rotation { cos: &cos, sin: &sin, positions: &positions };
    let (q_norm, k_norm) =
        (target.f32(&noise.tensor(&[head_dim], DType::F32)?)?, target.f32(&noise.tensor(&[head_dim], DType::F32)?)?);
    let norms = (norms == QkNorms::With).then_some(QkNorm { q: &q_norm, k: &k_norm, eps: 1e-5 });
    let slots = [63u32, 0, 17, 5, 40];
    let cache = Tensor::zeros((BLOCK_TOKENS, sizes.kv_heads, head_dim), target.dtype, target.device)?;
    let k = &cache;
    let v = &cache.zeros_like()?;
    let layer = CachedLayer { k, v };
    let qkv = target.f32(&qkv)?;
    let bias = target.f32(&bias)?;
    let slots_on_target = target.ids(&slots)?;
    let q = split_qkv(SplitQkvInputs {
        qkv: &qkv,
        bias: Some(&bias),
        norms,
        rotation,
        sizes,
        layer,
        slots: &slots_on_target,
    })?;
    let written = |rows: &Tensor| to_cpu(rows)?.index_select(&Tensor::new(&slots, &Device::Cpu)?, 0);
    Tensor::cat(&[to_cpu(&q)?, written(k)?, written(v)?], 1)
}

#[derive(Clone, Copy)]
struct AttentionCase {
    tokens: usize,
    position: usize,
    head_dim: usize,
    softcap: Option<f32>,
}

fn attend(target: CheckTarget, noise: &mut Noise, case: AttentionCase, backend: AttentionBackend) -> Result<Tensor> {
    let AttentionCase { tokens, position, head_dim, softcap } = case;
    let heads = 6;
    let kv_heads = 2;
    let blocks = (position + tokens).div_ceil(BLOCK_TOKENS);
    let rows = blocks * BLOCK_TOKENS;
    // After rounding to bf16, the noise is also exact in f16 and f32, so every target gets the same values.
    let mut tensor = |rows, heads| target.put(&noise.tensor(&[rows, heads, head_dim], DType::BF16)?);
    let q = tensor(tokens, heads)?;
    let k = tensor(rows, kv_heads)?;
    let v = tensor(rows, kv_heads)?;
    let sinks = target.f32(&noise.tensor(&[heads], DType::F32)?)?;
    let layer = CachedLayer { k: &k, v: &v };
    // The blocks are in reverse order, so that a kernel that ignores the block table fails the check.
    let table: Vec<u32> = (0..blocks as u32).rev().collect();
    let queries = QueryLayout::new(&[(tokens, position)], target.device)?;
    let pass_blocks = PassBlocks::new(&queries, &[&table], blocks, target.device)?;
    let backend = if target.device.is_cpu() { AttentionBackend::Auto } else { backend };
    let attend = |window| {
        let mask = AttentionMask { window, scale: 1.0 / (head_dim as f32).sqrt(), softcap };
        let (sinks, blocks) = (Some(&sinks), &pass_blocks);
        attention(
            AttentionInputs { q: &q, layer, queries: &queries, blocks, sinks, mask, sum_order: SumOrder::Fastest },
            backend,
        )
    };
    Tensor::cat(&[to_cpu(&attend(None)?)?, to_cpu(&attend(Some(100))?)?], 0)
}

#[derive(Clone, Copy)]
enum ExpertFormat {
    Mxfp4,
    Dense,
}

fn experts(target: CheckTarget, noise: &mut Noise, tokens: usize, format: ExpertFormat) -> Result<Tensor> {
    let experts = 5;
    let chosen = 3;
    let rows = 67;
    let columns = 96;
    let weights = match format {
        ExpertFormat::Mxfp4 => ExpertWeights::Mxfp4 {
            blocks: noise.bytes(&[experts, rows, columns / 32, 16], 0, 256)?.to_device(target.device)?,
            scales: noise.bytes(&[experts, rows, columns / 32], 118, 8)?.to_device(target.device)?,
        },
        ExpertFormat::Dense => {
            ExpertWeights::Dense(target.put(&noise.tensor(&[experts, rows, columns], DType::BF16)?)?)
        }
    };
    let x = target.put(&noise.tensor(&[tokens, columns], DType::BF16)?)?;
    let bias = target.put(&noise.tensor(&[experts, rows], DType::BF16)?)?;
    let ids: Vec<u32> = noise.numbers(tokens * chosen, experts as u64).map(|id| id as u32).collect();
    expert_matmul(&x, &weights, Some(&bias), &target.ids(&ids)?.reshape((tokens, chosen))?, SumOrder::Fastest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_matches_itself_within_rounding() {
        let checks = run(&Device::Cpu);
        assert!(checks.len() > 40);
        for check in checks {
            assert!(check.passed(), "{check:?}");
        }
    }

    #[test]
    fn wrong_values_nan_and_errors_fail_the_check() {
        let cpu = CheckTarget { device: &Device::Cpu, dtype: DType::BF16 };
        let wrong = check("wrong", cpu, 1e-3, &|target, _| {
            Tensor::new(&[1f32, if target.dtype == DType::F32 { 2.0 } else { 2.1 }], target.device)
        });
        assert!(!wrong.passed() && wrong.error.is_ok());
        let nan = check("nan", cpu, 1e-3, &|target, _| {
            Tensor::new(&[1f32, if target.dtype == DType::F32 { 2.0 } else { f32::NAN }], target.device)
        });
        assert!(!nan.passed());
        let failed = check("failed", cpu, 1.0, &|target, noise| {
            embed(&target.f32(&noise.tensor(&[2, 2], DType::F32)?)?, &target.ids(&[5])?, 1.0)
        });
        assert!(!failed.passed() && failed.error.is_err());
    }
}
