//! Tests of ggml types. Compares dequantized blocks with the results of Python's gguf package.

use inferno::weights::ggml::GgmlType;
use safetensors::SafeTensors;

use crate::support::golden;

#[test]
fn dequantized_blocks_equal_those_of_the_gguf_package() {
    let file = std::fs::read(golden("gguf").join("blocks.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    assert_eq!(tensors.len(), 2 * GgmlType::ALL.len());
    for ggml_type in GgmlType::ALL {
        let blocks = tensors.tensor(&format!("{ggml_type}.blocks")).unwrap();
        let want = tensors.tensor(&format!("{ggml_type}.values")).unwrap();
        let count = blocks.shape()[0];
        assert_eq!(blocks.shape(), [count, ggml_type.block_bytes()], "{ggml_type}");
        assert_eq!(want.shape(), [count, ggml_type.block_length()], "{ggml_type}");
        let mut got = vec![f32::NAN; count * ggml_type.block_length()];
        ggml_type.dequantize(blocks.data(), &mut got).unwrap();
        let (mut finite, mut nan) = (0, 0);
        for (i, (got, want)) in got.iter().zip(want.data().as_chunks().0).enumerate() {
            let want = f32::from_le_bytes(*want);
            let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(same, "{ggml_type}, value {i}: expected {want:e}, found {got:e}");
            finite += usize::from(want.is_finite());
            nan += usize::from(want.is_nan());
        }
        println!("{ggml_type}: {} values, {finite} finite, {nan} NaN", got.len());
        assert!(2 * finite > got.len(), "{ggml_type}");
    }
}

#[test]
fn type_ids_and_names_match_ggml() {
    let ids = GgmlType::ALL.map(GgmlType::id);
    assert_eq!(ids, [0, 1, 30, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 39]);
    for ggml_type in GgmlType::ALL {
        assert_eq!(GgmlType::from_id(ggml_type.id()).unwrap(), ggml_type);
    }
    let error = GgmlType::from_id(16).unwrap_err().to_string();
    assert!(error.starts_with("type 16 (IQ2_XXS) is not supported; supported: F32, F16, BF16, Q4_0"), "{error}");
    let error = GgmlType::from_id(u32::MAX).unwrap_err().to_string();
    assert!(error.contains("unknown type 4294967295"), "{error}");
}

#[test]
fn partial_blocks_are_errors() {
    for ggml_type in GgmlType::ALL.into_iter().filter(|ggml_type| ggml_type.block_length() > 1) {
        let (length, bytes) = (ggml_type.block_length(), ggml_type.block_bytes());
        for (values, bytes) in
            [(length, bytes - 1), (length, bytes + 1), (length / 2, bytes), (length + 1, bytes), (0, bytes)]
        {
            let error = ggml_type.dequantize(&vec![0; bytes], &mut vec![0.0; values]).unwrap_err().to_string();
            assert_eq!(error, format!("{bytes} bytes do not match {values} elements of {ggml_type}"));
        }
        ggml_type.dequantize(&[], &mut []).unwrap();
        assert_eq!(ggml_type.bytes(length as u64 + 1, 1), None);
        assert_eq!(ggml_type.bytes(length as u64 * 3, u64::MAX), None);
    }
}
