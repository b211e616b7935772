//! Tests of 8-bit tensors without a quantization_config. E4M3 tensors load, unless the checkpoint has scales for them.
//! I8, U8 and E5M2 tensors are refused, because they need scales.

use std::path::Path;

use candle_core::{DType, Device};
use float8::F8E4M3;
use inferno::Error;
use inferno::models;
use inferno::weights::quantized::QuantizationTarget;
use inferno::weights::{Checkpoint, Inventory, LoadProgress, WeightsBuilder};
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

use crate::support::{TestDevice, devices, golden, logits_of, values};

const IDS: [u32; 7] = [3, 1, 4, 1, 5, 9, 2];

/// Writes the golden Llama 3 with its matrices in `dtype`.
/// `element` encodes a value. `extra` is the name of a scale tensor to add, if any.
fn rewritten(dtype: Dtype, element: impl Fn(f32) -> Vec<u8>, extra: Option<&str>) -> TempDir {
    let (dir, folder) = (golden("llama3"), TempDir::new().unwrap());
    std::fs::copy(dir.join("config.json"), folder.path().join("config.json")).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let progress = LoadProgress::silent();
    let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress).build().unwrap();
    let tensors = checkpoint.tensors().map(|(name, info)| {
        if info.shape.len() < 2 {
            let bytes = checkpoint.view(name).unwrap().bytes.read().unwrap().into_owned();
            return (name.to_string(), info.dtype, info.shape.clone(), bytes);
        }
        let floats = values(&weights.float(name, &info.shape).unwrap());
        (name.to_string(), dtype, info.shape.clone(), floats.into_iter().flat_map(&element).collect())
    });
    let extra = extra.map(|name| (name.to_string(), Dtype::F32, vec![1], 2f32.to_le_bytes().to_vec()));
    let tensors: Vec<_> = tensors.chain(extra).collect();
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    folder
}

fn logits(dir: &Path, quantize: Option<QuantizationTarget>, device: &Device, dtype: DType) -> anyhow::Result<Vec<f32>> {
    let checkpoint = Checkpoint::open(dir)?;
    let progress = LoadProgress::silent();
    let weights = WeightsBuilder::new(&checkpoint, device, dtype, &progress).quantize(quantize).build()?;
    let config = models::read_config(dir)?;
    let decoder = config.build(&weights, IDS.len())?;
    let inventory = Inventory::from_checkpoint(&checkpoint, config.family.tensors, quantize);
    assert_eq!(inventory.loaded_bytes(dtype), progress.resident_bytes());
    Ok(values(&logits_of(&decoder, &IDS, dtype, device)?))
}

fn e4m3(value: f32) -> Vec<u8> {
    vec![F8E4M3::from_f32(value).to_bits()]
}

/// E4M3 weights without scales produce the same logits as equal bf16 weights. bf16 can represent every E4M3 value.
/// Like inferno, transformers casts E4M3 tensors without scales to the requested dtype.
#[test(each = devices)]
fn e4m3_without_scales_is_a_float(device: TestDevice) {
    let (device, dtype) = device.open();
    let cast = rewritten(Dtype::F8_E4M3, e4m3, None);
    let rounded = |value| F8E4M3::from_f32(value).to_f32();
    let same = rewritten(Dtype::BF16, |value| ((rounded(value).to_bits() >> 16) as u16).to_le_bytes().into(), None);
    for quantize in [None, Some("int8".parse().unwrap())] {
        let run = |dir: &TempDir| logits(dir.path(), quantize, &device, dtype).unwrap();
        let (got, want) = (run(&cast), run(&same));
        assert!(want.iter().all(|logit| logit.is_finite()) && want.iter().any(|logit| logit.abs() > 0.1));
        assert_eq!(got, want, "{quantize:?}");
    }
    // Rounding to E4M3 must change the logits. Otherwise, both checkpoints above may contain the original weights.
    let exact = logits(&golden("llama3"), None, &Device::Cpu, DType::F32).unwrap();
    assert_ne!(logits(cast.path(), None, &Device::Cpu, DType::F32).unwrap(), exact);
}

#[test]
fn tensors_that_need_scales_are_errors() {
    let query = "model.layers.0.self_attn.q_proj.weight";
    let int8 = |value: f32| vec![(value * 100.0) as i8 as u8];
    for (dtype, extra, message) in [
        (Dtype::I8, None, "this dtype needs scales"),
        (Dtype::U8, None, "this dtype needs scales"),
        (Dtype::F8_E5M2, None, "this dtype needs scales"),
        (
            Dtype::F8_E4M3,
            Some("model.layers.0.self_attn.q_proj.weight_scale_inv"),
            "found scale tensor model.layers.0.self_attn.q_proj.weight_scale_inv",
        ),
        (
            Dtype::F8_E4M3,
            Some("model.layers.0.self_attn.q_proj.scale_weight"),
            "found scale tensor model.layers.0.self_attn.q_proj.scale_weight",
        ),
    ] {
        let folder = match dtype {
            Dtype::F8_E4M3 => rewritten(dtype, e4m3, extra),
            _ => rewritten(dtype, int8, extra),
        };
        for quantize in [None, Some("int8".parse().unwrap())] {
            let error = logits(folder.path(), quantize, &Device::Cpu, DType::F32).unwrap_err();
            let text = format!("{error:#}");
            // With a scale tensor, only q_proj is invalid. Otherwise, all matrices are invalid,
            // and the error names the embedding, which is loaded first.
            let name = if extra.is_some() { query } else { "model.embed_tokens.weight" };
            assert!(text.contains(&format!("tensor {name} in {dtype} (")) && text.contains(message), "{text}");
            let kind = error.chain().find_map(|cause| cause.downcast_ref::<Error>()).expect(&text);
            assert_eq!(kind.exit_code(), 9);
        }
    }
    let folder = rewritten(Dtype::F8_E4M3, e4m3, Some("model.layers.0.self_attn.q_proj.weight_scale"));
    let error = format!("{:#}", logits(folder.path(), None, &Device::Cpu, DType::F32).unwrap_err());
    assert!(
        error.contains(&format!("tensor {query} has a scale, but quantization_config does not describe the tensor")),
        "{error}"
    );
}

/// A scale makes only its own tensor an error, not a tensor whose module has a name that starts with the same letters.
#[test]
fn scales_of_other_modules_are_ignored() {
    let folder = TempDir::new().unwrap();
    let (codes, scale) = (e4m3(0.5).repeat(4), 2f32.to_le_bytes());
    let matrix = || TensorView::new(Dtype::F8_E4M3, vec![2, 2], &codes).unwrap();
    let scale = || TensorView::new(Dtype::F32, vec![1], &scale).unwrap();
    let tensors = [
        ("mlp.gate.weight", matrix()),
        ("mlp.gate_proj.weight", matrix()),
        ("mlp.gate_proj.weight_scale", scale()),
        ("experts.down_proj", matrix()),
        ("experts.down_proj_weight_scale", scale()),
        ("experts.up_proj", matrix()),
        ("experts.up_proj.scale", scale()),
    ];
    safetensors::serialize_to_file(tensors, None, &folder.path().join("model.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let progress = LoadProgress::silent();
    let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress).build().unwrap();
    assert_eq!(values(&weights.float("mlp.gate.weight", &[2, 2]).unwrap()), [0.5; 4]);
    for (name, scale) in [
        ("mlp.gate_proj.weight", "mlp.gate_proj.weight_scale"),
        ("experts.down_proj", "experts.down_proj_weight_scale"),
        ("experts.up_proj", "experts.up_proj.scale"),
    ] {
        let error = format!("{:#}", weights.float(name, &[2, 2]).unwrap_err());
        assert!(error.contains(&format!("found scale tensor {scale},")), "{error}");
    }
}
