//! Tests of the GGUF reader. Python's gguf package wrote `tiny.gguf`.
//! `tiny.json` holds the metadata and the tensor table of `tiny.gguf` as the package reads them.

use inferno::weights::Residency;
use inferno::weights::gguf::{GgufCheckpoint, GgufMetadata, Value, ValueType};
use serde_json::{Value as Json, json};

use crate::support::gguf::writer::Writer;
use crate::support::golden;

fn tiny() -> (GgufCheckpoint, Json) {
    let json = std::fs::read(golden("gguf").join("tiny.json")).unwrap();
    let checkpoint = GgufCheckpoint::open(&golden("gguf").join("tiny.gguf")).unwrap();
    (checkpoint, serde_json::from_slice(&json).unwrap())
}

fn to_json(value: Value) -> Json {
    match value {
        Value::U8(value) => json!(value),
        Value::I8(value) => json!(value),
        Value::U16(value) => json!(value),
        Value::I16(value) => json!(value),
        Value::U32(value) => json!(value),
        Value::I32(value) => json!(value),
        // The expected JSON has f64 values, because Python widens each f32 to an f64.
        Value::F32(value) => json!(f64::from(value)),
        Value::Bool(value) => json!(value),
        Value::String(bytes) => json!(std::str::from_utf8(bytes).unwrap()),
        Value::Array(array) => array.values().map(|value| to_json(value.unwrap())).collect(),
        Value::U64(value) => json!(value),
        Value::I64(value) => json!(value),
        Value::F64(value) => json!(value),
    }
}

#[test]
fn every_type_of_metadata_is_read() {
    let (checkpoint, json) = tiny();
    let wanted = json["metadata"].as_object().unwrap();
    assert_eq!(checkpoint.metadata().keys().count(), wanted.len());
    for (key, want) in wanted {
        let value = checkpoint.metadata().get(key).unwrap().unwrap();
        assert_eq!(to_json(value), want["value"], "{key}");
        let element = if let Value::Array(array) = value { Some(array.element) } else { None };
        let types: Vec<String> = [Some(value.kind()), element].into_iter().flatten().map(python_name).collect();
        assert_eq!(json!(types), want["types"], "{key}");
    }
}

fn python_name(kind: ValueType) -> String {
    let name = match kind {
        ValueType::U8 => "UINT8",
        ValueType::I8 => "INT8",
        ValueType::U16 => "UINT16",
        ValueType::I16 => "INT16",
        ValueType::U32 => "UINT32",
        ValueType::I32 => "INT32",
        ValueType::F32 => "FLOAT32",
        ValueType::Bool => "BOOL",
        ValueType::String => "STRING",
        ValueType::Array => "ARRAY",
        ValueType::U64 => "UINT64",
        ValueType::I64 => "INT64",
        ValueType::F64 => "FLOAT64",
    };
    name.to_string()
}

#[test]
fn tensors_match_the_gguf_package() {
    let (checkpoint, json) = tiny();
    let wanted = json["tensors"].as_object().unwrap();
    assert_eq!(checkpoint.tensors().count(), wanted.len());
    for (name, want) in wanted {
        let view = checkpoint.view(name).unwrap();
        assert_eq!(view.info.ggml_type.name(), want["type"], "{name}");
        assert_eq!(json!(view.info.shape), want["shape"], "{name}");
        assert_eq!(json!(view.info.bytes), want["bytes"], "{name}");
        assert_eq!(json!(view.info.range().start), want["start"], "{name}");
        let bytes = view.bytes.read().unwrap();
        assert_eq!(bytes.len(), view.info.bytes, "{name}");
        let mut values = vec![0.0; view.info.elements()];
        view.info.ggml_type.dequantize(&bytes, &mut values).unwrap();
        assert_eq!(checkpoint.values(name).unwrap().len(), values.len(), "{name}");
    }
    let count: Vec<f32> = (0..120).map(|i| i as f32).collect();
    assert_eq!(checkpoint.values("rank4.weight").unwrap(), count);
    assert_eq!(checkpoint.info("rank4.weight").unwrap().shape, [2, 3, 4, 5]);
    assert_eq!(checkpoint.architecture().unwrap(), "llama");
    assert_eq!(checkpoint.block_count().unwrap(), 2);
    let error = checkpoint.view("absent.weight").err().unwrap().to_string();
    assert!(error.starts_with("tensor absent.weight is missing from ") && error.ends_with("tiny.gguf"), "{error}");
}

#[test]
fn getters_name_the_wrong_key() {
    let (checkpoint, _) = tiny();
    let metadata = checkpoint.metadata();
    assert_eq!(metadata.u32("all.u8").unwrap(), Some(200));
    assert_eq!(metadata.u32("all.absent").unwrap(), None);
    assert_eq!(metadata.f32("all.f64").unwrap(), Some(0.1));
    assert_eq!(metadata.bool("all.bool").unwrap(), Some(true));
    assert_eq!(metadata.strings("array.string").unwrap().unwrap(), ["", "a", "ü b"]);
    assert_eq!(metadata.bools("array.bool").unwrap().unwrap(), [true, false, true]);
    assert_eq!(metadata.i32s("array.i16").unwrap().unwrap(), [-32768, 32767]);
    assert_eq!(metadata.u32s("array.u16").unwrap().unwrap(), [0, 65535]);
    assert_eq!(metadata.f32s("array.f32").unwrap().unwrap(), [-1.5, 3.25]);
    let errors = [
        (
            metadata.u32("all.i8").map(drop),
            "metadata key all.i8: expected an integer from 0 to 2^32 - 1, found I8(-100)",
        ),
        (
            metadata.u32("all.u64").map(drop),
            "metadata key all.u64: expected an integer from 0 to 2^32 - 1, found U64(92233",
        ),
        (metadata.string("all.u32").map(drop), "metadata key all.u32: expected a string, found U32(4000000000)"),
        (metadata.bool("all.string").map(drop), "metadata key all.string: expected a boolean, found a string"),
        (metadata.f32("all.i32").map(drop), "metadata key all.i32: expected a finite float, found I32"),
        (metadata.strings("all.u8").map(drop), "metadata key all.u8: expected an array of strings, found U8(200)"),
        (metadata.strings("array.u8").map(drop), "metadata key array.u8[0]: expected strings, found U8(0)"),
        (
            metadata.u32s("array.i32").map(drop),
            "metadata key array.i32[0]: expected integers from 0 to 2^32 - 1, found I32",
        ),
        (
            metadata.u32("array.u8").map(drop),
            "metadata key array.u8: expected an integer from 0 to 2^32 - 1, found an array",
        ),
        (metadata.required("all.absent", GgufMetadata::u32).map(drop), "metadata key all.absent is missing"),
    ];
    for (result, want) in errors {
        let error = format!("{:#}", result.unwrap_err());
        assert!(error.starts_with(want), "{error}");
    }
}

#[test]
fn version_2_is_supported() {
    let mut writer = Writer::new().string("general.architecture", "llama").tensor("a.weight", &[2], 0, &[0; 8]);
    writer.version = 2;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.gguf");
    std::fs::write(&path, writer.bytes()).unwrap();
    let checkpoint = GgufCheckpoint::open(&path).unwrap();
    assert_eq!(checkpoint.values("a.weight").unwrap(), [0.0, 0.0]);
    assert_eq!((checkpoint.bytes(), checkpoint.parameters()), (8, 2));
    let error = format!("{:#}", checkpoint.block_count().unwrap_err());
    assert_eq!(error, "metadata key llama.block_count is missing");
}

#[test]
fn read_requests_locate_the_bytes_of_tensors() {
    let (checkpoint, _) = tiny();
    for (name, info) in checkpoint.tensors() {
        let request = checkpoint.read_request(name, Residency::Permanent).unwrap();
        let file = std::fs::read(&request.ranges[0].source.path).unwrap();
        assert_eq!(
            &file[request.ranges[0].start as usize..][..request.bytes()],
            &*checkpoint.view(name).unwrap().bytes.read().unwrap(),
            "{name}"
        );
        assert_eq!(request.bytes(), info.bytes);
    }
    assert!(checkpoint.read_request("absent", Residency::Permanent).is_none());
}
