//! Tests of a full-size model on a GPU. To run them:
//!
//!     INFERNO_FULL_SIZE=DIR cargo test --release --features cuda full_size -- --nocapture
//!
//! `scripts/reference_logits.py DIR` writes the reference logits for the first test.

use std::path::PathBuf;

use candle_core::{Device, Tensor, safetensors};
use inferno::device::{self, DeviceChoice};
use inferno::{Engine, GenerateOptions, LoadOptions, SamplingParams};

use crate::support::values;

fn model() -> PathBuf {
    PathBuf::from(std::env::var_os("INFERNO_FULL_SIZE").expect("INFERNO_FULL_SIZE must name a model directory"))
}

fn load() -> Engine {
    Engine::load(&model(), &LoadOptions { context: Some(8192), ..Default::default() }).unwrap()
}

/// Returns the mean of KL(want ‖ got) over all rows, and the share of rows with the same top token.
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

#[test(full_size)]
fn full_size_logits_agree_with_transformers() {
    let reference = safetensors::load(model().join("reference.safetensors"), &Device::Cpu).unwrap();
    let ids: Vec<u32> = reference["ids"].to_vec1::<i64>().unwrap().into_iter().map(|id| id as u32).collect();
    let engine = load();
    let (their_kl, their_top1) = compare(&reference["bf16"], &reference["f32"]);
    println!("positions {}", ids.len());
    println!("transformers bf16 against transformers f32: mean KL {their_kl:.3e}, top-1 {:.1} %", 100.0 * their_top1);
    let compare_with_reference = |what: &str, got: Tensor| {
        let got = got.to_device(&Device::Cpu).unwrap();
        let (kl, top1) = compare(&got, &reference["f32"]);
        let (kl_bf16, top1_bf16) = compare(&got, &reference["bf16"]);
        println!("{what}: mean KL {kl:.3e}, top-1 {:.1} %", 100.0 * top1);
        println!("  against transformers bf16: mean KL {kl_bf16:.3e}, top-1 {:.1} %", 100.0 * top1_bf16);
        // The limits are the errors of transformers in bf16, plus some tolerance for chance.
        assert!(kl <= 1.5 * their_kl, "{what}: the mean KL is {kl:e}, but {their_kl:e} in transformers with bf16");
        assert!(top1 >= their_top1 - 0.03, "{what}: top-1 is {top1}, but {their_top1} in transformers with bf16");
    };
    compare_with_reference("inferno bf16, prefill", engine.logits(&ids).unwrap());
    let steps = engine.with_runner(move |runner| runner.step_logits(&ids)).unwrap().unwrap();
    compare_with_reference(&format!("inferno bf16, decode steps ({})", engine.executor()), steps);
}

/// Returns the resident memory of this process in bytes.
fn host_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) * 1024
}

#[test(full_size)]
fn full_size_thousand_generations_leak_nothing() {
    let engine = load();
    let free = || device::info(&device::open(DeviceChoice::FirstCuda).unwrap()).unwrap().free_bytes;
    let vocab = engine.info().vocab_size as u32;
    let (mut after_warm_up, mut host_after_warm_up) = (0, 0);
    for round in 0..1000u32 {
        // Prompt lengths include 1 token, about one window and about one chunk. Each round has a new prompt.
        let length = [1, 17, 127, 128, 129, 700, 2048, 2049][round as usize % 8];
        let prompt: Vec<u32> = (0..length).map(|i| (i * 7919 + round * 104_729 + 1) % vocab).collect();
        let mut sampling = SamplingParams::greedy();
        sampling.temperature = if round % 2 == 0 { 0.0 } else { 1.0 };
        sampling.seed = round as u64;
        let mut options = GenerateOptions::new(sampling);
        options.max_tokens = Some(24);
        options.ignore_eos = true;
        let stream = engine.complete_ids(&prompt, options).unwrap();
        let tokens = stream.into_iter().filter_map(|event| event.unwrap().token()).count();
        assert_eq!(tokens, 24, "round {round}");
        if round == 8 {
            (after_warm_up, host_after_warm_up) = (free(), host_bytes());
        }
    }
    let lost = after_warm_up.saturating_sub(free());
    let host_lost = host_bytes().saturating_sub(host_after_warm_up);
    println!("memory leaked by 991 generations: {lost} bytes on the GPU, {host_lost} bytes on the host");
    assert!(host_lost < 32 << 20, "{host_lost} bytes of host memory leaked");
    assert!(lost < 64 << 20, "{lost} bytes of GPU memory leaked");
}

#[test(full_size)]
fn full_size_greedy_tokens_are_the_same_in_every_run() {
    let engine = load();
    let prompt: Vec<u32> = (0..300).map(|i| (i * 7919 + 3) % engine.info().vocab_size as u32).collect();
    let run = || -> Vec<u32> {
        let prompt = prompt.clone();
        let steps = engine.with_runner(move |runner| {
            runner.reset();
            runner.fill(&prompt).unwrap();
            runner.decode_steps(17, 512).unwrap()
        });
        steps.unwrap()
    };
    let (first, second) = (run(), run());
    let distinct = first.iter().collect::<std::collections::BTreeSet<_>>().len();
    println!("512 greedy tokens, {distinct} of them distinct; executor: {}", engine.executor());
    assert_eq!(first, second);
    #[cfg(feature = "cuda")]
    if engine.executor() == "graph" {
        let ungraphed = engine.with_runner(move |runner| {
            runner.reset();
            runner.fill(&prompt).unwrap();
            runner.decode_steps_ungraphed(17, 512).unwrap()
        });
        assert_eq!(ungraphed.unwrap(), first, "individual kernel launches give other tokens");
    }
}

#[test(full_size)]
fn full_size_figures() {
    let engine = load();
    let info = engine.info().clone();
    let now = device::info(engine.device()).unwrap();
    println!("{}, {} parameters, loaded in {:.2} s", info.device.name, info.parameters, info.load.total_s);
    println!("{:?}", info.load);
    println!("weights {} bytes, cache {} bytes", info.weight_bytes, info.cache_bytes);
    println!("GPU memory in use after loading: {} MiB", (info.device.free_bytes - now.free_bytes) >> 20);
    for (prompt_tokens, rounds) in [(1, 2), (512, 3), (2048, 3), (6000, 2)] {
        for round in 0..rounds {
            let prompt: Vec<u32> =
                (0..prompt_tokens).map(|i| (i * 7919 + round * 31 + 5) % info.vocab_size as u32).collect();
            let mut options = GenerateOptions::new(SamplingParams::greedy());
            options.max_tokens = Some(128);
            options.ignore_eos = true;
            let mut stream = engine.complete_ids(&prompt, options).unwrap();
            (&mut stream).into_iter().for_each(|event| drop(event.unwrap()));
            let summary = stream.summary();
            println!(
                "prompt {prompt_tokens:5}: first token after {:.4} s ({:.0} tok/s), then {:.1} tok/s",
                summary.ttft_s,
                prompt_tokens as f64 / summary.ttft_s,
                summary.tok_per_s
            );
        }
    }
    let end = device::info(engine.device()).unwrap();
    println!("GPU memory in use at the end: {} MiB", (info.device.free_bytes - end.free_bytes) >> 20);
}

/// Measures how fast weights load from the page cache and from disk, with different reader settings.
#[test(full_size)]
#[cfg(feature = "cuda")]
fn full_size_reading_figures() {
    use std::time::Instant;

    use candle_core::DType;
    use candle_core::cuda_backend::cudarc::cublas::CudaBlas;
    use candle_core::cuda_backend::cudarc::curand::CudaRng;
    use candle_core::cuda_backend::cudarc::driver;
    use inferno::kernels::upload::CopyStream;
    use inferno::nn::rope::{RopeFrequencies, RotaryEmbedding};
    use inferno::weights::Checkpoint;
    use inferno::weights::read_ahead::{ReadAhead, ReadAheadOptions};

    let mut last = Instant::now();
    let mut lap = |what: &str| {
        println!("{what}: {:.3} s", last.elapsed().as_secs_f64());
        last = Instant::now();
    };
    assert!(device::gpu_count() > 0);
    lap("NVIDIA libraries and driver");
    let context = driver::CudaContext::new(0).unwrap();
    lap("context");
    let stream = context.new_stream().unwrap();
    lap("stream");
    let _blas = CudaBlas::new(stream.clone()).unwrap();
    lap("cuBLAS");
    let _rng = CudaRng::new(1, stream).unwrap();
    lap("cuRAND");
    let device = device::open(DeviceChoice::FirstCuda).unwrap();
    lap("candle device, after all of the above");
    let frequencies = RopeFrequencies { inv_freq: vec![0.1; 32], attention_factor: 1.0 };
    RotaryEmbedding::new(&frequencies, 131_072, &device).unwrap();
    lap("RoPE tables for 131,072 positions");
    let Device::Cuda(gpu) = &device else { unreachable!() };
    let checkpoint = Checkpoint::open(&model()).unwrap();
    let read = |settings: ReadAheadOptions| {
        let started = Instant::now();
        let reader =
            ReadAhead::start(CopyStream::new(gpu).unwrap(), checkpoint.read_requests(DType::BF16), settings).unwrap();
        let mut tensors = Vec::new();
        for (name, info) in checkpoint.tensors() {
            tensors.push(reader.take(name, info.candle_dtype().unwrap(), &info.shape).unwrap());
        }
        let handed_out = started.elapsed().as_secs_f64();
        device.synchronize().unwrap();
        let arrived = started.elapsed().as_secs_f64();
        drop(reader);
        let dropped = started.elapsed().as_secs_f64();
        drop(tensors);
        device.synchronize().unwrap();
        println!(
            "{:2} threads, {:5} KiB pieces: tensors returned {handed_out:.3} s, copied {arrived:.3} s = {:.1} GB/s, \
             threads joined {dropped:.3} s",
            settings.threads,
            settings.piece_bytes >> 10,
            checkpoint.bytes() as f64 / 1e9 / arrived,
        );
    };
    let standard = ReadAheadOptions::default();
    println!("the first run allocates GPU memory from the driver, later runs from the pool");
    read(standard);
    for threads in [4, 8, 16] {
        for piece_bytes in [2 << 20, 4 << 20] {
            read(ReadAheadOptions { threads, piece_bytes, ..standard });
        }
    }
    if cfg!(target_os = "linux") {
        for threads in [8, 16] {
            for file in std::fs::read_dir(model()).unwrap() {
                let status = std::process::Command::new("dd")
                    .arg(format!("of={}", file.unwrap().path().display()))
                    .args(["oflag=nocache", "conv=notrunc,fdatasync", "count=0", "status=none"])
                    .status();
                assert!(status.is_ok_and(|status| status.success()));
            }
            println!("after eviction from the page cache:");
            read(ReadAheadOptions { threads, ..standard });
        }
    }
}
