//! One function per fuzz target. Each function must handle any bytes without a panic.
//!
//! The functions in this file read checkpoints. The test suite includes this file too.
#![allow(dead_code, reason = "the test suite does not run all functions")]

pub mod answer;
mod compare;
pub mod hub;
pub mod json;
pub mod language;
pub mod server;

use std::ops::Range;

use candle_core::{DType, Device};
use inferno::models;
use inferno::tokenizer::{ControlTokens, Tokenizer};
use inferno::weights::gguf::{self, GgufCheckpoint, GgufHeader, GgufModel};
use inferno::weights::quantized::MatrixRows;
use inferno::weights::{Checkpoint, Inventory, WeightsSummary};

/// The most elements of a tensor that a fuzz target loads. Larger tensors take too long.
const MAX_ELEMENTS: usize = 1 << 16;

/// The most bytes of an input. Fuzz targets skip larger inputs, which take too long.
const MAX_BYTES: usize = 1 << 16;

/// Reads a GGUF file: its header, its metadata, its tensors, its tokenizer, and its model.
pub fn gguf(data: &[u8]) {
    let Ok(header) = GgufHeader::parse(data) else { return };
    let metadata = header.metadata(data);
    for key in metadata.keys() {
        if let Ok(Some(gguf::Value::Array(array))) = metadata.get(key) {
            assert!(array.values().all(|value| value.is_ok()), "metadata {key} has an unreadable element");
        }
        let _ = (metadata.string(key), metadata.u32(key), metadata.strings(key), metadata.i32s(key));
    }
    for (name, info) in &header.tensors {
        let bytes = &data[info.range()];
        if info.elements() <= MAX_ELEMENTS {
            let mut values = vec![0.0; info.elements()];
            let dequantized = info.ggml_type.dequantize(bytes, &mut values);
            assert!(dequantized.is_ok(), "tensor {name}: {dequantized:?}");
        }
    }
    let _ = gguf::chat_template(&metadata, None);
    model(data);
    let Ok(vocabulary) = gguf::vocabulary(&metadata) else { return };
    let Ok(tokenizer) = Tokenizer::from_gguf(&vocabulary) else { return };
    for controls in [ControlTokens::Default, ControlTokens::Parse, ControlTokens::Text] {
        if let Ok(ids) = tokenizer.encode("Hello wörld, 123\n\n <s> </s>", controls) {
            let _ = tokenizer.decode(&ids);
        }
    }
}

/// Reads a file as `show --remote` does, then its config and its tensors by their Hugging Face names.
fn model(data: &[u8]) {
    let read = |_: &str, range: Range<u64>| Ok(data[range.start as usize..range.end as usize].to_vec());
    let Ok(file) = GgufCheckpoint::open_remote(&[("a.gguf".into(), data.len() as u64)], &read) else { return };
    let _ = (file.generation_config(), file.quantization());
    if let Ok(config) = file.config().and_then(models::parse_config) {
        assert!(!config.architecture.cache_layers().is_empty());
    }
    let Ok(model) = GgufModel::new(file) else { return };
    for (name, info) in model.tensors().filter(|(_, info)| info.elements() <= MAX_ELEMENTS) {
        let tensor = match info.candle_dtype() {
            Some(DType::U8) => model.packed(name),
            _ => model.float(name, DType::BF16),
        };
        assert!(tensor.is_ok_and(|tensor| tensor.dims() == info.shape), "tensor {name}");
        if info.elements() > 0
            && let Ok(Some(rows)) = model.quantized(name)
        {
            assert!(MatrixRows::build(&[&rows], &Device::Cpu, &|| {}).is_ok(), "tensor {name}");
        }
    }
    let table = models::tensor_table(&model.file().config().unwrap_or_default());
    let inventory = Inventory::from_checkpoint(&Checkpoint::Gguf(Box::new(model)), table, None);
    let _ = (inventory.groups(), inventory.loaded_bytes(DType::BF16), inventory.largest_expert_layer(DType::BF16));
}

/// Reads a snapshot whose `model.safetensors` contains `data`.
/// If `data` starts with a brace, the snapshot instead contains `data` as the shard index, and one valid shard.
pub fn safetensors(data: &[u8]) {
    // One tensor `a` with two bytes.
    const SHARD: &[u8] = b"\x35\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}\x01\x02";
    let Ok(folder) = tempfile::tempdir() else { return };
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).is_ok();
    let written = match data.first() {
        Some(b'{') => write("shard.safetensors", SHARD) && write("model.safetensors.index.json", data),
        _ => write("model.safetensors", data),
    };
    if !written {
        return;
    }
    let _ = WeightsSummary::from_safetensors(folder.path());
    let Ok(checkpoint) = Checkpoint::open(folder.path()) else { return };
    let mut bytes = 0;
    for (name, info) in checkpoint.tensors() {
        let read = checkpoint.view(name).and_then(|view| view.bytes.read().map(|read| read.len()));
        assert!(read.is_ok_and(|length| length == info.bytes()), "tensor {name}");
        bytes += info.bytes() as u64;
        let _ = info.elements();
    }
    assert_eq!(checkpoint.bytes(), bytes);
    let _ = (checkpoint.parameters(), checkpoint.read_requests(DType::F32).len());
}
