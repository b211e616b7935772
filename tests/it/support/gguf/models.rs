//! GGUF models for tests: small models with random quantized weights, and the demo model.

use std::path::PathBuf;

use inferno::weights::ggml::GgmlType;
use tempfile::TempDir;

use super::converter::convert;
use super::vocabulary::converted;
use super::writer::Writer;
use crate::support::{Random, demo_dir};

/// Writes a GGUF file to a temporary folder. Dropping the returned `TempDir` deletes the file.
pub fn saved(writer: &Writer) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, writer.bytes()).unwrap();
    (folder, path)
}

/// Returns blocks of random bytes. In Q8_0, Q4_K and Q6_K, small constants replace the f16 scales, so that activations
/// stay finite.
fn random_blocks(ggml_type: GgmlType, elements: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = vec![0; elements / ggml_type.block_length() * ggml_type.block_bytes()];
    bytes.fill_with(|| random.next() as u8);
    // The scales are 2^-12 in Q8_0, 2^-14 and 2^-13 in Q4_K, and 2^-15 in Q6_K.
    // The magnitude of a value is at most 128 · 2^-12 in Q8_0, 63 · 15 · 2^-14 in Q4_K and 128 · 32 · 2^-15 in Q6_K.
    let scales: &[(usize, u16)] = match ggml_type {
        GgmlType::Q8_0 => &[(0, 0x0c00)],
        GgmlType::Q4K => &[(0, 0x0400), (2, 0x0800)],
        GgmlType::Q6K => &[(208, 0x0200)],
        _ => &[],
    };
    for block in bytes.chunks_exact_mut(ggml_type.block_bytes()) {
        for (at, half) in scales {
            block[*at..at + 2].copy_from_slice(&half.to_le_bytes());
        }
    }
    bytes
}

/// Returns a Llama model whose matrices use three ggml types. The q, k and v projections differ in type.
#[cfg(feature = "cuda")]
pub fn llama_in_many_types() -> Writer {
    let type_of = |name: &str| match name.rsplit('.').nth(1).unwrap_or_default() {
        "attn_q" | "ffn_gate" | "ffn_up" => GgmlType::Q4K,
        "attn_k" | "attn_output" => GgmlType::Q8_0,
        _ => GgmlType::Q6K,
    };
    llama_with_types(type_of, false)
}

/// Returns a Llama model whose matrices are quantized blocks of one type.
/// If `dequantized` is true, the matrices hold the dequantized f32 values of these blocks instead.
pub fn quantized_llama(ggml_type: GgmlType, dequantized: bool) -> Writer {
    llama_with_types(|_| ggml_type, dequantized)
}

fn llama_with_types(ggml_type: impl Fn(&str) -> GgmlType, dequantized: bool) -> Writer {
    let (hidden, feed, vocab, layers) = (256, 512, 64, 2);
    let mut writer = Writer::new().string("general.architecture", "llama");
    for (key, value) in [
        ("context_length", 64),
        ("embedding_length", hidden),
        ("block_count", layers),
        ("feed_forward_length", feed),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 1),
    ] {
        writer = writer.u32(&format!("llama.{key}"), value as u32);
    }
    writer = writer.f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
    let mut random = Random(1);
    let mut matrix = |writer: Writer, name: &str, rows: usize, columns: usize| {
        let ggml_type = ggml_type(name);
        let blocks = random_blocks(ggml_type, rows * columns, &mut random);
        let shape = [columns as u64, rows as u64];
        if !dequantized {
            return writer.tensor(name, &shape, ggml_type.id(), &blocks);
        }
        let mut values = vec![0.0; rows * columns];
        ggml_type.dequantize(&blocks, &mut values).unwrap();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        writer.tensor(name, &shape, 0, &bytes)
    };
    writer = matrix(writer, "token_embd.weight", vocab, hidden);
    let ones: Vec<u8> = (0..hidden).flat_map(|_| 1f32.to_le_bytes()).collect();
    writer = writer.tensor("output_norm.weight", &[hidden as u64], 0, &ones);
    for layer in 0..layers {
        for norm in ["attn_norm", "ffn_norm"] {
            writer = writer.tensor(&format!("blk.{layer}.{norm}.weight"), &[hidden as u64], 0, &ones);
        }
        for (name, rows, columns) in [
            ("attn_q", hidden, hidden),
            ("attn_k", hidden / 4, hidden),
            ("attn_v", hidden / 4, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_gate", feed, hidden),
            ("ffn_up", feed, hidden),
            ("ffn_down", hidden, feed),
        ] {
            writer = matrix(writer, &format!("blk.{layer}.{name}.weight"), rows, columns);
        }
    }
    writer
}

/// Returns the demo model and its tokenizer as llama.cpp would convert them.
pub fn demo_as_gguf() -> Writer {
    let converted = converted(&demo_dir());
    let id = |token: &str| converted.tokens.iter().position(|other| other == token).unwrap() as u32;
    convert(&demo_dir())
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", "gpt-4o")
        .strings("tokenizer.ggml.tokens", &converted.tokens)
        .i32s("tokenizer.ggml.token_type", &converted.types)
        .strings("tokenizer.ggml.merges", &converted.merges)
        .u32("tokenizer.ggml.bos_token_id", id("<|startoftext|>"))
        .u32("tokenizer.ggml.eos_token_id", id("<|return|>"))
        .string("general.name", "demo")
}
