//! Compares the memory estimated before loading with the size of the loaded tensors, for one rank and for several.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device};
use inferno::engine::memory::{Capacity, DeviceKind, MemoryPlan};
use inferno::models::{self, ModelConfig};
use inferno::nn::kv_cache::KvCache;
use inferno::weights::ggml::GgmlType;
use inferno::weights::quantized::QuantizationTarget;
use inferno::weights::{Checkpoint, Inventory, LoadProgress, WeightsBuilder};

use crate::harness::TestCase;
use crate::ranks::on_ranks;
use crate::support::gguf::converter::{convert, convert_with_separate_experts};
use crate::support::gguf::models::{quantized_llama, saved};
use crate::support::{QUANTIZED_GGUF_MODELS, cases, demo_dir, golden, golden_models};

/// Formats with blocks of 32 values (q8_0), with blocks of 256 values (q4_k, q3_k), and without blocks (int8).
const QUANTIZED: [&str; 4] = ["q8_0", "q4_k", "q3_k", "int8"];

/// Checks the estimated size of the weights against their size after loading, in f32 and bf16.
/// If `quantize` is `None`, also checks the number of bytes that a decode step reads,
/// but only for models without experts that store `model.embed_tokens.weight` in 16 bits.
fn check(name: &str, path: &Path, quantize: Option<QuantizationTarget>) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let config = models::read_config(path).unwrap();
    let inventory = Inventory::from_checkpoint(&checkpoint, config.family.tensors, quantize);
    for dtype in [DType::F32, DType::BF16] {
        let progress = LoadProgress::silent();
        let weights =
            WeightsBuilder::new(&checkpoint, &Device::Cpu, dtype, &progress).quantize(quantize).build().unwrap();
        let decoder = config.build(&weights, 32).unwrap();
        let what = quantize.map_or("unquantized".into(), |quantize| quantize.to_string());
        assert_eq!(inventory.loaded_bytes(dtype), progress.resident_bytes(), "wrong size: {name} {what} in {dtype:?}");
        // A decode step of a model without experts reads one embedding row and all other weights.
        // If the output head is tied to the embedding, the step also reads the whole embedding.
        let is_dense = checkpoint.tensors().all(|(name, _)| !name.contains(".experts."));
        if let (true, true, Some(embedding)) =
            (is_dense, quantize.is_none(), checkpoint.info("model.embed_tokens.weight"))
            && checkpoint.stored_dtype("model.embed_tokens.weight", embedding).to_string().ends_with("f16")
        {
            let row = (embedding.shape[1] * dtype.size_in_bytes()) as u64;
            let tied = checkpoint.info("lm_head.weight").is_none();
            let unread = if tied { 0 } else { row * embedding.shape[0] as u64 };
            assert_eq!(decoder.step_bytes(), progress.resident_bytes() - unread + row, "{name} in {dtype:?}");
        }
    }
}

/// Checks that the estimated weights and KV cache of each rank equal the sizes after loading.
/// With more ranks than KV heads, some ranks hold no KV heads.
fn check_ranks(name: &str, path: &Path, quantize: Option<QuantizationTarget>) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let config = models::read_config(path).unwrap();
    let inventory = Inventory::from_checkpoint(&checkpoint, config.family.tensors, quantize);
    let plan = MemoryPlan::new(&inventory, config.architecture.as_ref(), DType::BF16, DeviceKind::Cpu);
    for (ranks, shares_reads) in [2, 3, 4, 8].into_iter().flat_map(|ranks| [(ranks, false), (ranks, true)]) {
        on_ranks(ranks, |world| {
            let what = quantize.map_or("unquantized".into(), |quantize| quantize.to_string());
            let rank = world.rank();
            let what = format!("{name} {what}, rank {rank} of {ranks}, shared reads: {shares_reads}");
            let progress = LoadProgress::silent();
            let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::BF16, &progress)
                .world(world.clone())
                .share_reads(shares_reads)
                .quantize(quantize)
                .build()
                .unwrap();
            let decoder = config.build(&weights, 32).unwrap();
            let plan = plan.clone().with_share(world.rank(), ranks);
            assert_eq!(plan.weight_bytes(), progress.resident_bytes(), "{what}");
            let capacity = Capacity { context: 32, chunk: 32 };
            let blocks = plan.cache_blocks(capacity);
            let cache = KvCache::new(decoder.cache_layout(), blocks, DType::BF16, &Device::Cpu).unwrap();
            // Layers of different layer groups share tensors, so count each tensor once.
            let tensors = cache.own_layers().flat_map(|layer| [layer.k, layer.v].map(|tensor| (tensor.id(), tensor)));
            let tensors = tensors.collect::<HashMap<_, _>>().into_values();
            let cache_bytes: usize = tensors.map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum();
            let cache_bytes = cache_bytes as u64;
            assert_eq!(plan.cache_bytes(capacity), cache_bytes, "{what}");
            // With `Split::Tensor`, `show` prints the plan of the first rank, because no other rank needs more memory.
            if world.is_first() {
                let largest = (plan.weight_bytes(), plan.cache_bytes(capacity));
                let others = (0..ranks).map(|rank| {
                    let plan = MemoryPlan::new(&inventory, config.architecture.as_ref(), DType::BF16, DeviceKind::Cpu);
                    let plan = plan.with_share(rank, ranks);
                    (plan.weight_bytes(), plan.cache_bytes(capacity))
                });
                assert_eq!(others.reduce(|a, b| (a.0.max(b.0), a.1.max(b.1))), Some(largest), "{what}");
            }
        });
    }
}

fn each_quantization(name: &str, path: &Path) {
    check(name, path, None);
    check_ranks(name, path, None);
    for quantize in QUANTIZED {
        check(name, path, Some(quantize.parse().unwrap()));
        check_ranks(name, path, Some(quantize.parse().unwrap()));
    }
}

fn models() -> Vec<TestCase<&'static str>> {
    cases(golden_models(|_| true).into_iter().chain(["trained"]))
}

#[test(each = models)]
fn estimates_equal_the_loaded_bytes(model: &'static str) {
    each_quantization(model, &golden(model));
}

#[test]
fn estimates_of_the_demo_model_equal_the_loaded_bytes() {
    each_quantization("demo", &demo_dir());
}

fn converted_models() -> Vec<TestCase<&'static str>> {
    cases(golden_models(|model| model.has_gguf))
}

#[test(each = converted_models)]
fn estimates_of_gguf_files_equal_the_loaded_bytes(model: &'static str) {
    let (_folder, path) = saved(&convert(&golden(model)));
    each_quantization(&format!("{model}.gguf"), &path);
}

#[test]
fn estimates_of_separate_experts_equal_the_loaded_bytes() {
    let (_folder, path) = saved(&convert_with_separate_experts(&golden("mixtral")));
    each_quantization("mixtral.gguf, separate experts", &path);
}

fn quantized_models() -> Vec<TestCase<&'static str>> {
    cases(QUANTIZED_GGUF_MODELS)
}

/// A quantization block in these files has 32 values, so it covers more than one attention head (8 to 16 values).
/// Ranks therefore cannot divide the columns of the output projection at every head.
#[test(each = quantized_models)]
fn estimates_of_quantized_gguf_files_equal_the_loaded_bytes(model: &'static str) {
    let path = golden("gguf_quantized").join(format!("{model}.gguf"));
    check(&format!("quantized {model}.gguf"), &path, None);
    check_ranks(&format!("quantized {model}.gguf"), &path, None);
}

fn block_formats() -> Vec<TestCase<GgmlType>> {
    cases(GgmlType::ALL.into_iter().filter(|&of| of.block_length() > 1 && of != GgmlType::Mxfp4))
}

#[test(each = block_formats)]
fn estimates_of_each_block_format_equal_the_loaded_bytes(ggml_type: GgmlType) {
    let (_folder, path) = saved(&quantized_llama(ggml_type, false));
    each_quantization(&format!("{ggml_type}.gguf"), &path);
}

/// Without compressed-tensors, an estimate from the headers alone equals the estimate from the complete files.
/// With compressed-tensors, the estimate may be low, because the headers do not show the layout after loading.
/// Rows may be padded to a multiple of 32 columns, and each row may get its own scale.
#[test(each = models)]
fn estimates_from_headers_agree_with_estimates_from_files(case: &'static str) {
    let dir = golden(case);
    let ModelConfig { family, architecture, .. } = models::read_config(&dir).unwrap();
    let kv_heads: Vec<_> = architecture.cache_layers().iter().map(|layer| layer.kv_heads).collect();
    let mut inventory = Inventory::new(family.tensors);
    let mut tensors = 0;
    for file in std::fs::read_dir(&dir).unwrap().map(|file| file.unwrap().path()) {
        let name = file.file_name().unwrap().to_str().unwrap().to_string();
        if !name.starts_with("model") || !name.ends_with(".safetensors") {
            continue;
        }
        let bytes = std::fs::read(&file).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = &bytes[8..8 + length];
        inventory.add_header(&name, header, Some((bytes.len() - 8 - length) as u64)).unwrap();
        tensors += 1;
    }
    assert!(tensors > 0, "{case}");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let from_files = Inventory::from_checkpoint(&checkpoint, family.tensors, None);
    for dtype in [DType::F32, DType::BF16] {
        let (estimate, exact) = (inventory.loaded_bytes(dtype), from_files.loaded_bytes(dtype));
        for ranks in [2, 3] {
            let parts = |inventory: &Inventory| inventory.rank_shares(&kv_heads, ranks, dtype);
            if !case.starts_with("compressed") {
                assert_eq!(parts(&inventory), parts(&from_files), "wrong estimate of {case} on {ranks} ranks");
            }
        }
        if case.starts_with("compressed") {
            let codes = checkpoint.tensors().filter(|(_, info)| info.dtype.bitsize() == 8);
            let rows: usize = codes.map(|(_, info)| info.shape[0]).sum();
            assert!(
                estimate <= exact && exact - estimate <= rows as u64 * (31 + 4),
                "{case}: the estimate is {estimate} bytes, but the exact size is {exact} bytes"
            );
        } else {
            assert_eq!(estimate, exact, "{case} in {dtype:?}");
        }
    }
}
