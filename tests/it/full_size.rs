//! Checks on a model of real size, on a GPU. They are ignored unless asked for, and say nothing of a model they are not
//! given:
//!
//!     INFERNO_FULL_SIZE=DIR cargo test --release --features cuda -- --ignored --nocapture full_size
//!
//! `scripts/reference_logits.py DIR` writes what the first one compares with.

use std::path::PathBuf;

use candle_core::{Device, Tensor, safetensors};
use inferno::device::{self, DeviceChoice};
use inferno::{Engine, GenerateOptions, LoadOptions, SamplingParams};

use crate::support::values;

fn model() -> PathBuf {
    PathBuf::from(std::env::var_os("INFERNO_FULL_SIZE").expect("INFERNO_FULL_SIZE names a model directory"))
}

fn load() -> Engine {
    Engine::load(&model(), &LoadOptions { context: Some(8192), ..Default::default() }).unwrap()
}

/// Mean KL divergence of each row of `got` from the same row of `want`, and how often both have the same likeliest token.
fn compare(got: &Tensor, want: &Tensor) -> (f64, f64) {
    let probabilities = |row: &[f32]| -> Vec<f64> {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
        let exps: Vec<f64> = row.iter().map(|&logit| (logit as f64 - top).exp()).collect();
        let total: f64 = exps.iter().sum();
        exps.iter().map(|e| e / total).collect()
    };
    let best = |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
    let (rows, vocab) = want.dims2().unwrap();
    let (got, want) = (values(got), values(want));
    let (mut kl, mut same) = (0.0, 0);
    for row in 0..rows {
        let (got, want) = (&got[row * vocab..][..vocab], &want[row * vocab..][..vocab]);
        let (p, q) = (probabilities(want), probabilities(got));
        kl += p.iter().zip(&q).filter(|(p, _)| **p > 0.0).map(|(p, q)| p * (p / q.max(1e-300)).ln()).sum::<f64>();
        same += usize::from(best(got) == best(want));
    }
    (kl / rows as f64, same as f64 / rows as f64)
}

#[test]
#[ignore = "needs a GPU and a model of real size"]
fn full_size_logits_agree_with_transformers() {
    let reference = safetensors::load(model().join("reference.safetensors"), &Device::Cpu).unwrap();
    let ids: Vec<u32> = reference["ids"].to_vec1::<i64>().unwrap().into_iter().map(|id| id as u32).collect();
    let mut engine = load();
    let got = engine.logits(&ids).unwrap().to_device(&Device::Cpu).unwrap();
    let (kl, top1) = compare(&got, &reference["f32"]);
    let (their_kl, their_top1) = compare(&reference["bf16"], &reference["f32"]);
    let (kl_bf16, top1_bf16) = compare(&got, &reference["bf16"]);
    println!("positions {}", ids.len());
    println!("inferno bf16 against transformers f32:       mean KL {kl:.3e}, top-1 {:.1} %", 100.0 * top1);
    println!("transformers bf16 against transformers f32:  mean KL {their_kl:.3e}, top-1 {:.1} %", 100.0 * their_top1);
    println!("inferno bf16 against transformers bf16:      mean KL {kl_bf16:.3e}, top-1 {:.1} %", 100.0 * top1_bf16);
    // No further from the truth than the reference implementation is in the same dtype, with room for chance.
    assert!(kl <= 1.5 * their_kl, "mean KL {kl:e}, transformers' own in bf16 is {their_kl:e}");
    assert!(top1 >= their_top1 - 0.03, "top-1 agreement {top1}, transformers' own in bf16 is {their_top1}");
}

#[test]
#[ignore = "needs a GPU and a model of real size"]
fn full_size_hundred_generations_leak_nothing() {
    let mut engine = load();
    let free = || device::info(&device::open(DeviceChoice::FirstCuda).unwrap()).unwrap().free_bytes;
    let vocab = engine.info().vocab_size as u32;
    let mut after_warm_up = 0;
    for round in 0..100u32 {
        // Lengths around the window, a chunk's end and one token, ever new texts, sampled and greedy.
        let length = [1, 17, 127, 128, 129, 700, 2048, 2049][round as usize % 8];
        let prompt: Vec<u32> = (0..length).map(|i| (i * 7919 + round * 104_729 + 1) % vocab).collect();
        let mut sampling = SamplingParams::greedy();
        sampling.temperature = if round % 2 == 0 { 0.0 } else { 1.0 };
        sampling.seed = round as u64;
        let mut options = GenerateOptions::new(sampling);
        options.max_tokens = Some(24);
        options.ignore_eos = true;
        let mut generation = engine.complete_ids(&prompt, options).unwrap();
        let tokens = generation.by_ref().filter(|chunk| chunk.as_ref().unwrap().token.is_some()).count();
        assert_eq!(tokens, 24, "round {round}");
        if round == 8 {
            after_warm_up = free();
        }
    }
    let lost = after_warm_up.saturating_sub(free());
    println!("memory lost over 91 generations: {lost} bytes");
    assert!(lost < 64 << 20, "{lost} bytes of GPU memory lost");
}

#[test]
#[ignore = "needs a GPU and a model of real size"]
fn full_size_figures() {
    let engine = load();
    let info = engine.info().clone();
    let now = device::info(engine.device()).unwrap();
    println!("{}, {} parameters, loaded in {:.2} s", info.device.name, info.parameters, info.load_s);
    println!("weights {} bytes, cache {} bytes", info.weight_bytes, info.cache_bytes);
    println!("in use after loading: {} MiB", (info.device.free_bytes - now.free_bytes) >> 20);
    let mut engine = engine;
    for (prompt_tokens, rounds) in [(1, 2), (512, 3), (2048, 3), (6000, 2)] {
        for round in 0..rounds {
            let prompt: Vec<u32> =
                (0..prompt_tokens).map(|i| (i * 7919 + round * 31 + 5) % info.vocab_size as u32).collect();
            let mut options = GenerateOptions::new(SamplingParams::greedy());
            options.max_tokens = Some(128);
            options.ignore_eos = true;
            let mut generation = engine.complete_ids(&prompt, options).unwrap();
            generation.by_ref().for_each(|chunk| {
                chunk.unwrap();
            });
            let summary = generation.summary();
            println!(
                "prompt {prompt_tokens:5}: first token after {:.4} s ({:.0} tok/s), then {:.1} tok/s",
                summary.ttft_s,
                prompt_tokens as f64 / summary.ttft_s,
                summary.tok_per_s
            );
        }
    }
    let end = device::info(engine.device()).unwrap();
    println!("in use at the end: {} MiB", (info.device.free_bytes - end.free_bytes) >> 20);
}
