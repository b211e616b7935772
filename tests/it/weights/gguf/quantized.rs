//! Compares the logits of quantized GGUF files with those of transformers, and checks the memory size of the weights.
//!
//! `tests/golden/make_gguf_quantized.py` wrote the files, and ran transformers on the dequantized weights.

use candle_core::DType;
use inferno::models;
use inferno::weights::{Checkpoint, Inventory, LoadProgress, WeightsBuilder};

use crate::harness::TestCase;
use crate::support::{QUANTIZED_GGUF_MODELS, TestDevice, expected_logits, golden, logits_of, logits_tolerance};
use crate::support::{on_devices, relative_error, values};

fn families() -> Vec<TestCase<(&'static str, TestDevice)>> {
    on_devices(QUANTIZED_GGUF_MODELS.map(|family| (family, family)))
}

#[test(each = families)]
fn logits_of_quantized_files_agree_with_transformers((family, device): (&str, TestDevice)) {
    let (device, dtype) = device.open();
    let path = golden("gguf_quantized").join(format!("{family}.gguf"));
    let (ids, expected) = expected_logits(&path.with_extension("safetensors"));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let progress = LoadProgress::silent();
    let weights = WeightsBuilder::new(&checkpoint, &device, dtype, &progress).build().unwrap();
    let config = models::read_config(&path).unwrap();
    let decoder = config.build(&weights, ids.len()).unwrap();
    let logits = values(&logits_of(&decoder, &ids, dtype, &device).unwrap());
    let error = relative_error(&logits, &expected);
    println!("{family} on {:?} in {dtype:?}: relative error of the logits: {error:e}", device.location());
    let tolerance = if device.is_cpu() { 1e-5 } else { logits_tolerance(dtype) };
    assert!(error < tolerance, "relative error of the logits: {error:e}");

    let inventory = Inventory::from_checkpoint(&checkpoint, config.family.tensors, None);
    assert_eq!(inventory.loaded_bytes(dtype), progress.resident_bytes());
    if dtype == DType::F32 {
        // Quantized tensors stay quantized, and all other tensors are F32, so the sizes in memory and in the file are
        // equal. The exception is an MoE layer whose gate and up projections have different types: both become f32.
        let two_types = checkpoint.info("model.layers.1.mlp.experts.gate_up_proj");
        let extra_bytes = two_types.map_or(0, |info| 4 * info.elements() as u64 - info.bytes() as u64);
        assert_eq!(two_types.is_some(), ["mixtral", "qwen3_moe"].contains(&family));
        assert_eq!(progress.resident_bytes(), checkpoint.bytes() + extra_bytes);
    }
}
