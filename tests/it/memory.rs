//! Compares the memory estimated before loading with the size of the loaded tensors.

use std::path::Path;

use candle_core::{DType, Device};
use inferno::models;
use inferno::weights::ggml::GgmlType;
use inferno::weights::quantized::QuantizationTarget;
use inferno::weights::{Checkpoint, Inventory, LoadProgress, Weights};

use crate::support::gguf::converter::{convert, convert_with_separate_experts};
use crate::support::gguf::models::{quantized_llama, saved};
use crate::support::{demo_dir, golden, golden_models};

/// Formats with blocks of 32 values (q8_0), with blocks of 256 values (q4_k, q3_k), and without blocks (int8).
const QUANTIZED: [&str; 4] = ["q8_0", "q4_k", "q3_k", "int8"];

/// Checks that the estimate equals the number of bytes in memory after loading, in f32 and bf16.
fn check(name: &str, path: &Path, quantize: Option<QuantizationTarget>) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let architecture = models::read_config(path).unwrap().architecture;
    let inventory = Inventory::from_checkpoint(&checkpoint, quantize);
    for dtype in [DType::F32, DType::BF16] {
        let progress = LoadProgress::silent();
        let weights = match quantize {
            Some(quantize) => Weights::quantizing(&checkpoint, &Device::Cpu, dtype, &progress, quantize),
            None => Weights::new(&checkpoint, &Device::Cpu, dtype, &progress).unwrap(),
        };
        let decoder = architecture.build(&weights, 32).unwrap();
        let what = quantize.map_or("unquantized".into(), |quantize| quantize.to_string());
        assert_eq!(inventory.loaded_bytes(dtype), progress.resident_bytes(), "{name} {what} in {dtype:?}");
        // A decode step of a dense model reads one embedding row, and all weights except an embedding that is not tied
        // to the output matrix.
        let is_dense = !name.contains("oss") && !name.contains("moe") && !name.contains("mixtral") && name != "demo";
        if let (true, true, Some(embedding)) =
            (is_dense, quantize.is_none(), checkpoint.info("model.embed_tokens.weight"))
            && checkpoint.stored_as("model.embed_tokens.weight", embedding).ends_with("f16")
        {
            let row = (embedding.shape[1] * dtype.size_in_bytes()) as u64;
            let tied = checkpoint.info("lm_head.weight").is_none();
            let unread = if tied { 0 } else { row * embedding.shape[0] as u64 };
            assert_eq!(decoder.step_bytes(), progress.resident_bytes() - unread + row, "{name} in {dtype:?}");
        }
    }
}

fn each_quantization(name: &str, path: &Path) {
    check(name, path, None);
    for quantize in QUANTIZED {
        check(name, path, Some(quantize.parse().unwrap()));
    }
}

#[test]
fn estimates_equal_the_loaded_bytes() {
    for case in golden_models(|_| true).into_iter().chain(["trained"]) {
        each_quantization(case, &golden(case));
    }
    each_quantization("demo", &demo_dir());
}

#[test]
fn estimates_of_gguf_files_equal_the_loaded_bytes() {
    for case in golden_models(|model| model.has_gguf) {
        let (_folder, path) = saved(&convert(&golden(case)));
        each_quantization(&format!("{case}.gguf"), &path);
    }
    let (_folder, path) = saved(&convert_with_separate_experts(&golden("mixtral")));
    each_quantization("mixtral.gguf, separate experts", &path);
    for ggml_type in GgmlType::ALL.into_iter().filter(|&of| of.block_length() > 1 && of != GgmlType::Mxfp4) {
        let (_folder, path) = saved(&quantized_llama(ggml_type, false));
        each_quantization(&format!("{ggml_type}.gguf"), &path);
    }
}

/// For most models, an estimate from the headers alone equals the estimate from the whole files.
/// For compressed-tensors models, the headers do not show the layout after loading, so the estimate may be low.
/// Loading may pad rows to a multiple of 32 columns and give each row its own scale.
#[test]
fn estimates_from_headers_agree_with_estimates_from_files() {
    for case in golden_models(|_| true).into_iter().chain(["trained"]) {
        let (dir, mut inventory) = (golden(case), Inventory::default());
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
        for dtype in [DType::F32, DType::BF16] {
            let (estimate, exact) =
                (inventory.loaded_bytes(dtype), Inventory::from_checkpoint(&checkpoint, None).loaded_bytes(dtype));
            if case.starts_with("compressed") {
                let codes = checkpoint.tensors().filter(|(_, info)| info.dtype.bitsize() == 8);
                let rows: usize = codes.map(|(_, info)| info.shape[0]).sum();
                assert!(
                    estimate <= exact && exact - estimate <= rows as u64 * (31 + 4),
                    "{case}: the estimate is {estimate} bytes, but the exact size is {exact}"
                );
            } else {
                assert_eq!(estimate, exact, "{case} in {dtype:?}");
            }
        }
    }
}
