//! Checks the decode graph: compares its logits for a tiny model with logits from the CPU.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};

use crate::kernels::SumOrder;
use crate::kernels::selftest::{Check, Random};
use crate::models;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::{BlockTables, KvCache};
use crate::nn::pass::{PassBatch, RowSelection, SequenceSpan};
use crate::runner::DecodeGraph;
use crate::weights::quantized::QuantizationTarget;
use crate::weights::{Checkpoint, LoadProgress, WeightsBuilder};

/// The number of decode steps per check, and the context length of the model.
/// A block of the KV cache has 64 positions, so the steps use two blocks.
const STEPS: usize = 80;

/// Checks decode steps in bf16 and f16, each with unquantized and with q8_0 weights.
pub fn run(device: &Device) -> Vec<Check> {
    let weights = [("", None), (", quantized", "q8_0".parse().ok())];
    let cases = weights.into_iter().flat_map(|weights| [(weights, DType::BF16, 6e-2), (weights, DType::F16, 2e-2)]);
    let check = |((label, quantize), dtype, tolerance)| {
        let started = Instant::now();
        let error = max_error(device, dtype, quantize).map_err(|error| crate::text::error_message(&error));
        let seconds = started.elapsed().as_secs_f64();
        Check { name: format!("decode step{label}"), dtype, error, tolerance, seconds }
    };
    cases.map(check).collect()
}

/// Returns the maximum error of the GPU's logits, relative to the largest absolute CPU logit of the same step.
/// Returns NaN if the GPU computes a NaN.
fn max_error(device: &Device, dtype: DType, quantize: Option<QuantizationTarget>) -> Result<f32> {
    let folder = TemporaryFolder::new()?;
    let dir = folder.0.as_path();
    write_checkpoint(dir)?;
    let (reference, reference_cache, tables) = load(dir, &Device::Cpu, DType::F32, quantize)?;
    let (decoder, cache, _) = load(dir, device, dtype, quantize)?;
    let ids: Vec<u32> = (0..STEPS).map(|step| (step * 31 + 7) as u32 % reference.vocab_size() as u32).collect();
    let span = SequenceSpan { tokens: STEPS, position: 0, tables: &tables };
    let batch = PassBatch { ids: &ids, sequences: &[span], rows: RowSelection::All, sum_order: SumOrder::Fastest };
    let expected = reference.forward(&batch, &reference_cache)?.to_vec2::<f32>()?;
    let mut graph = match DecodeGraph::plan(&decoder, &cache, STEPS)? {
        Ok(graph) => graph,
        Err(reason) => bail!("cannot build a decode graph: {reason}"),
    };
    let mut max_error = 0f32;
    for (position, (&id, expected)) in ids.iter().zip(&expected).enumerate() {
        graph.start(0, position, id, None, &tables)?;
        graph.next(1)?;
        let actual = graph.logits().to_vec1::<f32>()?;
        let scale = expected.iter().fold(f32::MIN_POSITIVE, |scale, value| scale.max(value.abs()));
        for (actual, expected) in actual.iter().zip(expected) {
            let error = (actual - expected).abs() / scale;
            // Do not use `f32::max`, which would ignore a NaN.
            max_error = if error > max_error || error.is_nan() { error } else { max_error };
        }
    }
    Ok(max_error)
}

fn load(
    dir: &Path,
    device: &Device,
    dtype: DType,
    quantize: Option<QuantizationTarget>,
) -> Result<(Decoder, KvCache, BlockTables)> {
    let checkpoint = Checkpoint::open(dir)?;
    let progress = LoadProgress::silent();
    let weights = WeightsBuilder::new(&checkpoint, device, dtype, &progress).quantize(quantize).build()?;
    let decoder = models::read_config(dir)?.build(&weights, STEPS)?;
    let (cache, tables) = KvCache::for_one_sequence(decoder.cache_layout(), STEPS, dtype, device)?;
    Ok((decoder, cache, tables))
}

/// A temporary directory that is deleted on drop.
struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("inferno-doctor-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Writes a Qwen3-MoE checkpoint with random weights: one MoE layer and one dense layer.
///
/// Every token uses all experts. Otherwise, a rounding error could select different experts.
fn write_checkpoint(dir: &Path) -> Result<()> {
    let config = serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_experts": 3, "num_experts_per_tok": 3, "norm_topk_prob": true, "decoder_sparse_step": 1,
        "mlp_only_layers": [1], "vocab_size": 301, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu",
    });
    std::fs::write(dir.join("config.json"), config.to_string())?;
    let mut shapes: Vec<(String, Vec<usize>)> =
        [("model.embed_tokens", 301), ("lm_head", 301)].map(|(name, rows)| (name.to_string(), vec![rows, 64])).into();
    shapes.push(("model.norm".into(), vec![64]));
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[usize]| {
            shapes.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        };
        for name in ["input_layernorm", "post_attention_layernorm"] {
            add(name, &[64]);
        }
        for (name, rows) in [("q", 64), ("k", 32), ("v", 32), ("o", 64)] {
            add(&format!("self_attn.{name}_proj"), &[rows, 64]);
        }
        for name in ["self_attn.q_norm", "self_attn.k_norm"] {
            add(name, &[16]);
        }
        let mut mlp = |prefix: &str, width: usize| {
            add(&format!("{prefix}.gate_proj"), &[width, 64]);
            add(&format!("{prefix}.up_proj"), &[width, 64]);
            add(&format!("{prefix}.down_proj"), &[64, width]);
        };
        if layer == 1 {
            mlp("mlp", 96);
        } else {
            (0..3).for_each(|expert| mlp(&format!("mlp.experts.{expert}"), 32));
            add("mlp.gate", &[3, 64]);
        }
    }
    let mut random = Random::new(1);
    let mut value = || ((random.next_bits() >> 7) as f32 / (1u64 << 24) as f32 - 0.5) * 3.4;
    let tensors = shapes.into_iter().map(|(name, shape)| {
        // Norm weights are near 1. Matrix weights are scaled so that outputs are about as large as inputs.
        let (center, scale) = match shape[..] {
            [_, columns] => (0.0, (columns as f32).powf(-0.5)),
            _ => (1.0, 0.1),
        };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| center + value() * scale).collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(DType::BF16)?;
        Ok((format!("{name}.weight"), tensor))
    });
    let tensors = tensors.collect::<Result<HashMap<_, _>>>()?;
    Ok(candle_core::safetensors::save(&tensors, dir.join("model.safetensors"))?)
}
