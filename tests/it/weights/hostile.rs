//! Tests of invalid safetensors headers, shard indexes and packed experts, as a hostile checkpoint may contain them.
//! Each must cause an error that says what is wrong.

use std::path::Path;
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use inferno::weights::{Checkpoint, LoadProgress, WeightsBuilder, mxfp4};
use tempfile::TempDir;

/// Returns the bytes of a safetensors file with the given header and `data` zero bytes of tensor data.
/// If `length` is given, the file states this header length instead of the real one.
fn file(length: Option<u64>, header: &str, data: usize) -> Vec<u8> {
    let length = length.unwrap_or(header.len() as u64);
    [&length.to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
}

/// Returns the error from opening the checkpoint in `dir`, or `no error`. Panics if this takes ten seconds or longer.
fn error(dir: &Path) -> String {
    let begin = Instant::now();
    let error = Checkpoint::open(dir).err().map_or("no error".into(), |error| format!("{error:#}"));
    assert!(begin.elapsed() < Duration::from_secs(10), "{error} after {:?}", begin.elapsed());
    error
}

/// Returns the error from opening a checkpoint whose single file contains `bytes`, or `no error`.
fn error_for_file(bytes: &[u8]) -> String {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    error(folder.path())
}

#[test]
fn invalid_headers_are_errors() {
    let one = |entry: &str| format!("{{\"a\":{entry}}}");
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        one(&format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#))
    };
    let two = |first: &str, second: &str| {
        let tensor = |offsets: &str| format!(r#"{{"dtype":"U8","shape":[4],"data_offsets":{offsets}}}"#);
        format!(r#"{{"a":{},"b":{}}}"#, tensor(first), tensor(second))
    };
    let good = entry("F32", "[2]", "[0,8]");
    assert_eq!(error_for_file(&file(None, &good, 8)), "no error");
    let deep = one(&format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)));
    let mut cases: Vec<Vec<u8>> = (0..8).map(|length| vec![0; length]).collect();
    cases.extend([
        file(Some(0), "", 0),
        file(Some(good.len() as u64 + 1), &good, 0),
        file(Some(1 << 30), &good, 8),
        file(Some(100_000_001), &good, 8),
        file(Some(u64::MAX), &good, 8),
        file(None, &deep, 0),
        file(None, "[]", 0),
        file(None, "\u{feff}{}", 0),
        file(None, &one("null"), 0),
        file(None, &entry("F32", "[2]", "[0,4]"), 4),
        file(None, &entry("F32", "[2]", "[8,0]"), 8),
        file(None, &entry("F32", "[2]", "[-8,0]"), 8),
        file(None, &entry("F32", "[2]", "[0,8]"), 7),
        file(None, &entry("F32", "[2]", "[0,8]"), 9),
        file(None, &entry("F32", "[2]", "[0,18446744073709551615]"), 8),
        file(None, &entry("F7", "[2]", "[0,8]"), 8),
        file(None, &entry("F32", "[-1]", "[0,8]"), 8),
        file(None, &entry("F32", "[4294967296,4294967296]", "[0,0]"), 0),
        file(None, &entry("F32", "[4611686018427387904]", "[0,0]"), 0),
        file(None, &two("[0,4]", "[0,4]"), 4),
        file(None, &two("[0,4]", "[2,6]"), 6),
        file(None, &two("[0,4]", "[8,12]"), 12),
        file(None, &two("[4,8]", "[8,12]"), 12),
        // Two tensors have the same name. The second replaces the first, whose data then belongs to no tensor.
        file(None, &two("[0,4]", "[4,8]").replace("\"b\"", "\"a\""), 8),
    ]);
    for bytes in cases {
        let error = error_for_file(&bytes);
        let head = String::from_utf8_lossy(&bytes[..bytes.len().min(120)]).into_owned();
        assert!(error.contains("model.safetensors is not a valid safetensors file: "), "{head:?}: {error}");
    }
}

#[test]
fn invalid_shard_indexes_are_errors() {
    let tensor =
        |name: &str| file(None, &format!(r#"{{"{name}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#), 1);
    let check = |index: &str, second: &str, want: &str| {
        let folder = TempDir::new().unwrap();
        let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
        write("1.safetensors", &tensor("a"));
        write("2.safetensors", &tensor(second));
        write("model.safetensors.index.json", index.as_bytes());
        let error = error(folder.path());
        assert!(error.contains(want), "{index}: expected {want:?} in {error}");
    };
    let both = r#"{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}"#;
    check(both, "b", "no error");
    check(both, "a", "tensor a is in two shards; the second is ");
    check(both, "c", "tensor b is missing from shard 2.safetensors, where the index lists it");
    let swapped = r#"{"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}"#;
    check(swapped, "b", "but the index lists it in shard ");
    let absent = r#"{"weight_map": {"a": "1.safetensors", "b": "3.safetensors"}}"#;
    check(absent, "b", "shard 3.safetensors is missing from ");
    for broken in ["", "[]", "{}", r#"{"weight_map": []}"#, r#"{"weight_map": {"a": 1}}"#, &"[".repeat(100_000)] {
        check(broken, "b", "cannot use ");
    }
    for outside in ["../1.safetensors", "/1.safetensors", ".", "..", "", "a/1.safetensors", "..\\\\1.safetensors"] {
        check(&format!(r#"{{"weight_map": {{"a": "{outside}"}}}}"#), "b", "which is not a plain file name");
    }
}

#[test]
fn packed_experts_of_the_wrong_shape_are_errors() {
    let error = |blocks: &str, scales: &str, columns: usize| {
        let (count, rows) = (2, 4);
        let bytes = |shape: &str| -> usize {
            shape.trim_matches(['[', ']']).split(',').map(|length| length.parse::<usize>().unwrap()).product()
        };
        let mut tensors = Vec::new();
        let mut end = 0;
        for (name, shape) in
            [("x_blocks", blocks), ("x_scales", scales)].into_iter().filter(|(_, shape)| !shape.is_empty())
        {
            let next = end + bytes(shape);
            tensors.push(format!(r#""{name}":{{"dtype":"U8","shape":{shape},"data_offsets":[{end},{next}]}}"#));
            end = next;
        }
        let folder = TempDir::new().unwrap();
        let file = file(None, &format!("{{{}}}", tensors.join(",")), end);
        std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let progress = LoadProgress::silent();
        let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress).build().unwrap();
        let experts = mxfp4::experts(&weights, "x", [count, rows, columns]);
        experts.err().map_or("no error".into(), |error| format!("{error:#}"))
    };
    let (blocks, scales) = ("[2,4,1,16]", "[2,4,1]");
    assert_eq!(error(blocks, scales, 32), "no error");
    for (blocks, scales, columns, want) in [
        (blocks, "[2,4,2]", 32, "x_scales: expected shape [2, 4, 1]"),
        (blocks, "[8]", 32, "x_scales: expected shape [2, 4, 1]"),
        (blocks, "", 32, "x_scales is missing"),
        ("[2,4,2,16]", scales, 32, "x_blocks: expected shape [2, 4, 1, 16]"),
        ("[2,4,1,15]", scales, 32, "x_blocks: expected shape [2, 4, 1, 16]"),
        ("[2,4,16]", scales, 32, "x_blocks: expected shape [2, 4, 1, 16]"),
        (blocks, scales, 64, "x_blocks: expected shape [2, 4, 2, 16]"),
        (blocks, scales, 33, "x: 33 columns are not a multiple of the MXFP4 block length 32"),
        ("", scales, 32, "tensor x is missing"),
    ] {
        let error = error(blocks, scales, columns);
        assert!(error.contains(want), "expected {want:?} in {error}");
    }
}
