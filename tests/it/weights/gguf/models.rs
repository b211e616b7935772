//! Tests of GGUF models: their logits, invalid files, and the demo model as a GGUF file.
//!
//! Golden logits come from transformers, which ran the safetensors checkpoints that the tests convert to GGUF.

use std::path::PathBuf;

use candle_core::{DType, Device};
use inferno::weights::ggml::GgmlType;
use inferno::weights::gguf::GgufCheckpoint;
use inferno::weights::{Checkpoint, LoadProgress, WeightsBuilder, WeightsSummary};
use tempfile::TempDir;

use crate::harness::TestCase;
use crate::support::gguf::converter::{convert, convert_with_separate_experts};
use crate::support::gguf::models::{demo_as_gguf, quantized_llama, saved};
use crate::support::gguf::writer::Writer;
use crate::support::program::{inferno, text};
use crate::support::{cases, checkpoint_logits, expected_logits, golden, golden_models, relative_error, values};

fn error(writer: &Writer) -> String {
    let (_folder, path) = saved(writer);
    format!("{:#}", checkpoint_logits(&path, &[1, 2, 3]).expect_err("an error"))
}

/// The largest allowed relative error of f32 logits, compared with transformers.
/// transformers in f32 differs from transformers in f64 by up to 2.4e-6 (`float64_relative_error` in
/// `tests/golden/provenance.json`), and inferno adds in yet another order.
const TOLERANCE: f32 = 1e-5;

fn converted_models() -> Vec<TestCase<&'static str>> {
    cases(golden_models(|model| model.has_gguf))
}

/// Converts a golden model to GGUF and compares its logits with transformers.
/// If `INFERNO_GGUF_OUT` names a folder, copies the GGUF file there for `tests/golden/check_gguf.py`.
#[test(each = converted_models)]
fn logits_agree_with_transformers(model: &'static str) {
    let dir = golden(model);
    let (_folder, path) = saved(&convert(&dir));
    let (ids, expected) = expected_logits(&dir.join("golden.safetensors"));
    let error = relative_error(&checkpoint_logits(&path, &ids).unwrap(), &expected);
    println!("{model}: relative error of the logits: {error:e}");
    assert!(error < TOLERANCE, "relative error of the logits: {error:e}");
    if let Some(out) = std::env::var_os("INFERNO_GGUF_OUT").map(PathBuf::from) {
        std::fs::copy(&path, out.join(format!("{model}.gguf"))).unwrap();
    }
}

/// llama.cpp ignores the factor of RoPE scaling if the scaling type is `none`, so inferno must ignore it too.
#[test]
fn rope_scaling_of_type_none_has_no_effect() {
    let unscaled = convert(&golden("llama2"));
    let logits = |writer: &Writer| {
        let (_folder, path) = saved(writer);
        checkpoint_logits(&path, &[1, 2, 3, 4, 5]).unwrap()
    };
    let scaled = |kind: &str| {
        let writer = unscaled.clone().string("llama.rope.scaling.type", kind);
        logits(&writer.f32("llama.rope.scaling.factor", 4.0))
    };
    assert_eq!(scaled("none"), logits(&unscaled));
    assert_ne!(scaled("linear"), logits(&unscaled), "the factor should have an effect with linear scaling");
}

/// Mixtral GGUF files from before April 2024 have one tensor per expert matrix. They must still load.
#[test]
fn experts_in_separate_tensors_load() {
    let dir = golden("mixtral");
    let (_folder, path) = saved(&convert_with_separate_experts(&dir));
    let (ids, expected) = expected_logits(&dir.join("golden.safetensors"));
    let error = relative_error(&checkpoint_logits(&path, &ids).unwrap(), &expected);
    assert!(error < TOLERANCE, "relative error of the logits: {error:e}");
}

/// Both files hold the same weights, so only the order of summation differs, and the logits differ only by rounding.
/// `gguf/blocks.rs` and `quantized/mod.rs` check dequantized values bit for bit.
#[test]
fn quantized_and_dequantized_weights_give_equal_logits() {
    let ids: Vec<u32> = (0..32).map(|i| i * 7 % 64).collect();
    for ggml_type in [GgmlType::Q8_0, GgmlType::Q4K, GgmlType::Q6K] {
        let (_a, quantized) = saved(&quantized_llama(ggml_type, false));
        let (_b, plain) = saved(&quantized_llama(ggml_type, true));
        let (got, want) = (checkpoint_logits(&quantized, &ids).unwrap(), checkpoint_logits(&plain, &ids).unwrap());
        assert!(want.iter().all(|value| value.is_finite()) && want.iter().any(|value| value.abs() > 1e-3));
        let error = relative_error(&got, &want);
        assert!(error < 2e-6, "{ggml_type}: relative error of the logits: {error:e}");
        let checkpoint = Checkpoint::open(&quantized).unwrap();
        let summary = WeightsSummary::from_gguf(&GgufCheckpoint::open(&quantized).unwrap());
        assert_eq!(
            (summary.parameters, summary.main_dtype.as_deref()),
            (checkpoint.parameters(), Some(ggml_type.name()))
        );
        let bytes = std::fs::metadata(&quantized).unwrap().len();
        assert!(checkpoint.bytes() < bytes && checkpoint.bytes() > bytes - 8192);
    }
}

#[test]
fn values_are_rounded_once_to_16_bits() {
    let (_folder, path) = saved(&quantized_llama(GgmlType::Q4K, false));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let progress = LoadProgress::silent();
    let load = |dtype| {
        let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, dtype, &progress).build().unwrap();
        weights.float("model.layers.1.self_attn.k_proj.weight", &[64, 256]).unwrap()
    };
    let exact = load(DType::F32);
    for dtype in [DType::F16, DType::BF16] {
        let got = load(dtype);
        assert_eq!(got.dtype(), dtype);
        assert_eq!(values(&got), values(&exact.to_dtype(dtype).unwrap()));
    }
}

#[test]
fn metadata_that_contradicts_the_tensors_is_an_error() {
    let llama = convert(&golden("llama2"));
    let cases: &[(&[(&str, u32)], &str)] = &[
        (&[("attention.head_count", 5)], "llama.attention.head_count"),
        (&[("attention.head_count", 0)], "llama.attention.head_count (0) and "),
        (&[("attention.head_count", 12)], "rotates 8 of 4 dimensions"),
        (&[("block_count", 2)], "llama.block_count is 2"),
        (&[("block_count", 4)], "model.layers.3."),
        (&[("block_count", 1 << 20)], "llama.block_count"),
        (&[("vocab_size", 96)], "embed_tokens"),
        (&[("embedding_length", 47)], "llama.embedding_length"),
        (&[("embedding_length", 96), ("rope.dimension_count", 16)], "token_embd.weight (type F32, shape [97, 48])"),
        (&[("feed_forward_length", 81)], "mlp.gate_proj"),
        (&[("feed_forward_length", 0)], "intermediate_size"),
        (&[("context_length", 0)], "max_position_embeddings is 0"),
        (&[("rope.dimension_count", 4)], "partial_rotary_factor"),
    ];
    for (changes, message) in cases {
        let change = |file: Writer, (key, value): &(&str, u32)| file.with_u32(&format!("llama.{key}"), *value);
        let error = error(&changes.iter().fold(llama.clone(), change));
        println!("{changes:?}: {error}");
        assert!(error.contains(message), "{changes:?}: expected {message:?} in {error}");
    }
    let grouped = convert(&golden("llama3"));
    for (kv_heads, message) in [(4, "attention.head_count_kv"), (1, "k_proj.weight: expected shape [10, 80]")] {
        let error = error(&grouped.clone().with_u32("llama.attention.head_count_kv", kv_heads));
        assert!(error.contains(message), "{kv_heads} KV heads: expected {message:?} in {error}");
    }
    let oss = convert(&golden("gpt_oss_graph"));
    for (key, value, message) in [
        ("gpt-oss.expert_count", 6, "gate_up_proj"),
        ("gpt-oss.expert_used_count", 8, "cannot route each token to 8 of 7 experts"),
        ("gpt-oss.attention.sliding_window", 0, "sliding_window is 0"),
    ] {
        let error = error(&oss.clone().with_u32(key, value));
        assert!(error.contains(message), "{key} = {value}: expected {message:?} in {error}");
    }
}

#[test]
fn unknown_tensors_and_architectures_are_errors() {
    let llama = convert(&golden("llama2"));
    let bytes = [0; 48 * 4];
    let extra = llama.clone().tensor("blk.0.attn_q_norm.weight", &[48], 0, &bytes);
    assert!(
        error(&extra).contains("blk.0.attn_q_norm.weight of shape [48] is not part of the llama architecture"),
        "{}",
        error(&extra)
    );
    let bias = convert(&golden("mixtral")).tensor("blk.0.ffn_gate_inp.bias", &[7], 0, &[0; 28]);
    assert!(error(&bias).contains("blk.0.ffn_gate_inp.bias of shape [7] is not part of"), "{}", error(&bias));
    let other = Writer::new().string("general.architecture", "mamba");
    let error = error(&other);
    assert!(error.contains("architecture 'mamba' is not supported") && error.contains("qwen3moe"), "{error}");
}

/// No known converter writes gpt-oss files with one tensor per expert matrix, so inferno does not support them.
#[test]
fn gpt_oss_experts_in_separate_tensors_are_an_error() {
    let mut file = Writer::new().string("general.architecture", "gpt-oss").u32("gpt-oss.block_count", 1);
    for name in ["gate", "up", "down"] {
        for expert in 0..2 {
            file = file.tensor(&format!("blk.0.ffn_{name}.{expert}.weight"), &[32, 32], 0, &[0; 4 * 32 * 32]);
        }
    }
    let (_folder, path) = saved(&file);
    let error = format!("{:#}", Checkpoint::open(&path).err().unwrap());
    assert!(error.contains("layer 0: gpt-oss needs all experts in one tensor, found 2 tensors"), "{error}");
}

/// Runs inferno in its home directory, with the Hugging Face cache `hf` in this directory and without a network.
/// Returns the exit code, stdout and stderr.
fn run(home: &TempDir, args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = inferno(home);
    command.current_dir(home.path()).env("HF_HOME", home.path().join("hf")).env("HF_HUB_OFFLINE", "1");
    let output = command.args(args).output().unwrap();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

const QUESTION: &str = "How do I download a model?";

/// Returns the answer of a model to [`QUESTION`].
fn ask(home: &TempDir, model: &str) -> String {
    let (code, answer, message) = run(home, &["play", model, "--device", "cpu", "--prompt", QUESTION]);
    assert_eq!(code, Some(0), "{model}: {message}");
    answer
}

#[test]
fn demo_model_in_a_gguf_file_answers_like_the_original() {
    let home = TempDir::new().unwrap();
    let want = ask(&home, "demo");
    assert!(want.contains("inferno download"), "{want}");
    let (folder, file) = saved(&demo_as_gguf());
    assert_eq!(ask(&home, file.to_str().unwrap()), want);
    assert_eq!(ask(&home, folder.path().to_str().unwrap()), want);
    std::fs::copy(&file, home.path().join("copy.gguf")).unwrap();
    assert_eq!(ask(&home, "copy.gguf"), want);
}

/// A snapshot in the Hugging Face cache has two GGUF files. The tag after the name of the model chooses one.
#[test]
fn gguf_file_in_the_cache_is_chosen_by_its_tag() {
    let home = TempDir::new().unwrap();
    let (_folder, file) = saved(&demo_as_gguf());
    let commit = "0123456789012345678901234567890123456789";
    let snapshot = home.path().join("hf/hub/models--some--demo-GGUF/snapshots").join(commit);
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::copy(&file, snapshot.join("demo-Q8_0.gguf")).unwrap();
    std::fs::copy(&file, snapshot.join("demo-MXFP4.gguf")).unwrap();
    let want = ask(&home, file.to_str().unwrap());
    assert_eq!(ask(&home, "some/demo-GGUF:mxfp4"), want);
    assert_eq!(ask(&home, &format!("{}:MXFP4", snapshot.display())), want);
    let (code, _, message) = run(&home, &["play", "some/demo-GGUF", "--device", "cpu", "--prompt", "Hello"]);
    assert_eq!(code, Some(2), "{message}");
    assert!(message.contains("inferno play some/demo-GGUF:MXFP4"), "{message}");
    let (code, _, message) = run(&home, &["play", "some/demo-GGUF:Q2_K", "--device", "cpu", "--prompt", "a"]);
    assert_eq!(code, Some(3), "{message}");
    let (_, list, _) = run(&home, &["list"]);
    assert!(list.contains("some/demo-GGUF:Q8_0") && list.contains("gpt_oss"), "{list}");
}

#[test]
fn demo_model_in_a_gguf_file_has_the_same_description_and_token_ids() {
    let home = TempDir::new().unwrap();
    let (_folder, file) = saved(&demo_as_gguf());
    let path = file.to_str().unwrap();
    let show = |model: &str| -> serde_json::Value {
        let (code, json, message) = run(&home, &["show", model, "--json"]);
        assert_eq!(code, Some(0), "{message}");
        serde_json::from_str(&json).unwrap()
    };
    let (shown, of_demo) = (show(path), show("demo"));
    for field in
        ["family", "supported", "parameters", "active_parameters", "layers", "heads", "context", "rope", "chat"]
    {
        assert_eq!(shown[field], of_demo[field], "{field}");
    }
    assert_eq!(shown["needs"]["weight_bytes"], of_demo["needs"]["weight_bytes"]);
    let [ids, want] = [path, "demo"].map(|model| {
        let (code, ids, message) = run(&home, &["tokenize", model, QUESTION]);
        assert_eq!(code, Some(0), "{message}");
        ids
    });
    assert_eq!(ids, want);
}

/// inferno opens a GGUF file once per load, because each opening parses the whole header.
/// The config, vocabulary, chat template, sampling defaults and tensors all come from the same open file.
#[test]
fn loading_a_model_opens_its_gguf_file_once() {
    let home = TempDir::new().unwrap();
    let (_folder, file) = saved(&demo_as_gguf());
    let path = file.to_str().unwrap();
    let (code, _, log) = run(&home, &["-v", "play", path, "--device", "cpu", "--prompt", "Hi"]);
    assert_eq!(code, Some(0), "{log}");
    let opened = log.lines().filter(|line| line.contains("opened") && line.contains(path)).count();
    assert_eq!(opened, 1, "{log}");
}
