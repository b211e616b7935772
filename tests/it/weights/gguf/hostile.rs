//! Tests of invalid, truncated, very large and unusual GGUF files.
//!
//! An invalid header must be rejected within 10 s, with an error that names the invalid part.

use std::time::{Duration, Instant};

use candle_core::DType;
use inferno::weights::gguf::limits::{MAX_BLOCKS, MAX_KEYS, MAX_TENSORS};
use inferno::weights::gguf::{GgufCheckpoint, GgufHeader, GgufModel};

use crate::support::gguf::writer::{ARRAY, BOOL, STRING, U32, Writer, string};
use crate::support::golden;

/// Returns the error from parsing a header, or `no error`. Panics if parsing takes 10 s or longer.
fn error(bytes: &[u8]) -> String {
    let begin = Instant::now();
    let error = GgufHeader::parse(bytes).err().map_or("no error".into(), |error| format!("{error:#}"));
    assert!(begin.elapsed() < Duration::from_secs(10), "{error}: took {:?}", begin.elapsed());
    error
}

fn check(cases: Vec<(Writer, &str)>) {
    for (writer, want) in cases {
        let error = error(&writer.bytes());
        assert!(error.contains(want), "expected {want:?}, found {error:?}");
    }
}

#[test]
fn invalid_headers_are_errors() {
    let writer = || Writer::new().string("general.architecture", "llama");
    assert_eq!(error(&writer().bytes()), "no error");
    check(vec![
        (
            Writer { magic: *b"GGML", ..writer() },
            "the file does not begin with the letters GGUF, so it is not a GGUF file",
        ),
        (Writer { version: 0, ..writer() }, "GGUF version 0 is not supported; supported: 2 and 3"),
        (Writer { version: 1, ..writer() }, "GGUF version 1 is not supported"),
        (Writer { version: 4, ..writer() }, "GGUF version 4 is not supported"),
        (Writer { version: 3u32.swap_bytes(), ..writer() }, "big-endian GGUF files are not supported"),
        (Writer { tensor_count: Some(MAX_TENSORS + 1), ..writer() }, "131073 tensors exceed the limit of 131072"),
        (Writer { tensor_count: Some(u64::MAX), ..writer() }, "18446744073709551615 tensors exceed the limit"),
        (Writer { key_count: Some(MAX_KEYS + 1), ..writer() }, "65537 metadata keys exceed the limit of 65536"),
        (Writer { key_count: Some(u64::MAX), ..writer() }, "18446744073709551615 metadata keys exceed the limit"),
        (Writer { key_count: Some(2), ..writer() }, "metadata key 2 of 2: the name has 0 bytes"),
        (Writer { tensor_count: Some(1), ..writer() }, "tensor 1 of 1: the name has 0 bytes"),
    ]);
    let big_endian = std::fs::read(golden("gguf").join("big-endian.gguf")).unwrap();
    assert_eq!(error(&big_endian), "big-endian GGUF files are not supported");
}

#[test]
fn truncated_files_are_errors() {
    let whole = std::fs::read(golden("gguf").join("tiny.gguf")).unwrap();
    for length in 0..whole.len() {
        let padding = whole[length..].iter().all(|&byte| byte == 0);
        assert!(
            padding || GgufHeader::parse(&whole[..length]).is_err(),
            "the first {length} of {} bytes must not parse",
            whole.len()
        );
    }
    assert!(error(&whole[..whole.len() - 500]).ends_with("(is the download complete?)"));
}

#[test]
fn invalid_metadata_is_an_error() {
    let huge = u64::MAX.to_le_bytes();
    let count = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let w = Writer::new;
    check(vec![
        (w().raw("a", 13, [0; 8]), "metadata key a: unknown value type 13"),
        (w().raw("a", u32::MAX, [0; 8]), "metadata key a: unknown value type 4294967295"),
        (w().raw("a", STRING, huge), "metadata key a: expected 18446744073709551615 bytes at offset"),
        (w().raw("a", STRING, (1u64 << 40).to_le_bytes()), "metadata key a: expected 1099511627776 bytes at offset"),
        (
            w().raw("a", ARRAY, count(U32, u64::MAX)),
            "metadata key a: an array of 18446744073709551615 U32 values does not fit",
        ),
        (w().raw("a", ARRAY, count(U32, 1 << 62)), "an array of 4611686018427387904 U32 values does not fit in the"),
        (w().raw("a", ARRAY, count(STRING, 1 << 20)), "an array of 1048576 String values does not fit in the"),
        (w().raw("a", ARRAY, count(BOOL, 1 << 50)), "an array of 1125899906842624 Bool values does not fit in the"),
        (w().raw("a", ARRAY, count(ARRAY, 1)), "metadata key a: arrays of arrays are not supported"),
        (w().raw("a", ARRAY, count(13, 0)), "metadata key a: unknown value type 13"),
        (
            w().array("a", STRING, 2, [string("b"), huge.to_vec()].concat()),
            "metadata key a: expected 18446744073709551615 bytes",
        ),
        (w().raw("a", BOOL, [2]), "metadata key a: expected a boolean (0 or 1), found 2"),
        (w().array("a", BOOL, 2, vec![1, 7]), "metadata key a: expected a boolean (0 or 1), found 7"),
        (w().u32("a", 1).u32("b", 1).u32("a", 1), "metadata key a occurs twice"),
        (w().u32("", 1), "metadata key 1 of 1: the name has 0 bytes; 1 to 65535 are allowed"),
        (w().u32(&"a".repeat(65536), 1), "metadata key 1 of 1: the name has 65536 bytes"),
        (w().raw([0xff], U32, [0; 4]), "metadata key 1 of 1: the name is not UTF-8"),
        (w().u32("general.alignment", 0), "metadata key general.alignment: 0 is not a power of two"),
        (w().u32("general.alignment", 24), "metadata key general.alignment: 24 is not a power of two"),
        (w().string("general.alignment", "32"), "metadata key general.alignment: expected U32, found String"),
        (
            w().raw("general.alignment", 10, 32u64.to_le_bytes()),
            "metadata key general.alignment: expected U32, found U64",
        ),
    ]);
}

#[test]
fn invalid_tensor_tables_are_errors() {
    let w = Writer::new;
    let alignment = |alignment: u32| w().u32("general.alignment", alignment);
    check(vec![
        (w().row("a", &[1; 5], 0, 0), "tensor a: 5 dimensions exceed the limit of 4"),
        (w().row("a", &[1 << 32, 1 << 32], 0, 0), "tensor a: shape [4294967296, 4294967296] has too many elements"),
        (w().row("a", &[u64::MAX], 0, 0), "tensor a: shape [18446744073709551615] has too many elements"),
        (w().row("a", &[1 << 62, 2, 0], 0, 0), "tensor a: shape [4611686018427387904, 2, 0] has too many elements"),
        (w().row("a", &[1 << 62], 0, 0), "tensor a: shape [4611686018427387904] has too many bytes"),
        (w().row("a", &[1 << 62, 0], 0, 0), "tensor a: shape [4611686018427387904, 0] has too many bytes"),
        (w().row("a", &[33], 8, 0), "tensor a: row length 33 is not a multiple of the Q8_0 block length 32"),
        (w().row("a", &[32, 8], 12, 0), "tensor a: row length 32 is not a multiple of the Q4_K block length 256"),
        (w().row("a", &[], 39, 0), "tensor a: row length 1 is not a multiple of the MXFP4 block length 32"),
        (w().row("a", &[32], 20, 0), "tensor a: type 20 (IQ4_NL) is not supported; supported: F32, F16, BF16"),
        (w().row("a", &[32], 4, 0), "tensor a: type 4 (Q4_2, removed in 2023) is not supported"),
        (w().row("a", &[32], 999, 0), "tensor a: unknown type 999; supported: F32"),
        (w().row("a", &[32], 0, 32), "tensor a: the data ends at byte 224, but the file has"),
        (w().row("a", &[32], 0, 0).data(127), "tensor a: the data ends at byte 192, but the file has 191 bytes"),
        (w().row("a", &[32], 0, u64::MAX - 31), "tensor a: offset 18446744073709551584 is too large"),
        (
            w().row("a", &[32], 0, u64::MAX),
            "tensor a: offset 18446744073709551615 is not a multiple of the alignment 32",
        ),
        (w().row("a", &[32], 0, 8).data(256), "tensor a: offset 8 is not a multiple of the alignment 32"),
        (alignment(64).row("a", &[8], 0, 32).data(256), "tensor a: offset 32 is not a multiple of the alignment 64"),
        (alignment(1 << 31).row("a", &[8], 0, 0).data(256), "tensor a: the data ends at byte 2147483680, but"),
        (w().row("a", &[32], 0, 0).row("b", &[8], 0, 96).data(256), "tensors a and b overlap at byte"),
        (w().row("b", &[8], 0, 0).row("a", &[8], 0, 0).data(256), "tensors a and b overlap at byte"),
        (w().row("a", &[8], 0, 0).row("a", &[8], 0, 32).data(256), "tensor a occurs twice"),
        (w().row("", &[8], 0, 0), "tensor 1 of 1: the name has 0 bytes; 1 to 64 are allowed"),
        (w().row("a".repeat(65), &[8], 0, 0), "tensor 1 of 1: the name has 65 bytes"),
        (w().row([0xc0, 0x80], &[8], 0, 0), "tensor 1 of 1: the name is not UTF-8"),
    ]);
    // Unusual but valid headers: an empty tensor, a tensor without dimensions, a gap between tensors, alignment 1.
    for writer in [
        w().row("a", &[0, 7], 0, 0),
        w().tensor("a", &[], 0, &[0; 4]),
        w().row("a", &[8], 0, 0).row("b", &[0], 0, 0).row("c", &[8], 0, 128).data(160),
        Writer { alignment: 1, ..w().u32("general.alignment", 1) }.row("a", &[1], 0, 1).row("b", &[1], 0, 5).data(9),
    ] {
        assert_eq!(error(&writer.bytes()), "no error");
    }
}

#[test]
fn too_many_layers_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.gguf");
    for (blocks, want) in
        [(MAX_BLOCKS, None), (MAX_BLOCKS + 1, Some("1025 layers exceed the limit of 1024")), (u32::MAX, Some("layers"))]
    {
        let writer = Writer::new().string("general.architecture", "llama").u32("llama.block_count", blocks);
        std::fs::write(&path, writer.bytes()).unwrap();
        let result = GgufCheckpoint::open(&path).unwrap().block_count();
        match want {
            None => assert_eq!(result.unwrap(), blocks as usize),
            Some(want) => assert!(result.unwrap_err().to_string().contains(want)),
        }
    }
}

/// Empty experts take no space, so a small file can declare huge shapes for them.
/// The check for overflow counts a length of 0 as 1, so it must reject the stacked experts although they are empty.
#[test]
fn experts_with_too_many_elements_are_an_error() {
    let mut writer = Writer::new().string("general.architecture", "llama").u32("llama.block_count", 1);
    for matrix in ["gate", "up", "down"] {
        for expert in 0..2 {
            writer = writer.row(format!("blk.0.ffn_{matrix}.{expert}.weight"), &[0, 1 << 62], 0, 0);
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.gguf");
    std::fs::write(&path, writer.bytes()).unwrap();
    let error = format!("{:#}", GgufCheckpoint::open(&path).and_then(GgufModel::new).err().unwrap());
    assert!(error.contains("2 experts of shape [4611686018427387904, 0] have too many elements"), "{error}");
}

/// The loader must not allocate a row buffer for a tensor without rows. Fuzzing found this case.
#[test]
fn empty_tensor_with_huge_rows_loads() {
    let writer = Writer::new().string("general.architecture", "llama").u32("llama.block_count", 1);
    let writer = writer.row("blk.0.attn_output.weight", &[1 << 48, 0], 8, 0);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.gguf");
    std::fs::write(&path, writer.bytes()).unwrap();
    let model = GgufCheckpoint::open(&path).and_then(GgufModel::new).unwrap();
    let tensor = model.float("model.layers.0.self_attn.o_proj.weight", DType::BF16).unwrap();
    assert_eq!(tensor.dims(), [0, 1 << 48]);
}

/// Parses a file with the maximum number of tensors and 60,001 metadata keys.
/// The value of one key is an array of a million strings.
#[test]
fn large_valid_tables_parse_quickly() {
    let mut writer = Writer::new().strings("many", &vec!["x"; 1_000_000]);
    for i in 0..60_000 {
        writer = writer.u32(&format!("key.{i}"), i);
    }
    for i in 0..MAX_TENSORS {
        writer = writer.row(format!("tensor.{i}"), &[8], 0, i * 32);
    }
    let bytes = writer.data(32 * MAX_TENSORS as usize).bytes();
    assert_eq!(error(&bytes), "no error");
}

#[test]
fn missing_and_empty_files_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let error = GgufCheckpoint::open(folder.path()).err().unwrap();
    assert!(format!("{error:#}").starts_with("cannot "), "{error:#}");
    let empty = folder.path().join("empty.gguf");
    std::fs::write(&empty, "").unwrap();
    let error = format!("{:#}", GgufCheckpoint::open(&empty).err().unwrap());
    assert!(error.starts_with("cannot read the GGUF header of ") && error.contains("not a GGUF file"), "{error}");
    let error = format!("{:#}", GgufCheckpoint::open(&folder.path().join("absent.gguf")).err().unwrap());
    assert!(error.starts_with("cannot read ") && error.contains("absent.gguf"), "{error}");
}
