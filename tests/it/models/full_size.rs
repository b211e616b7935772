//! Tests of a full-size model on a GPU. To run them:
//!
//!     INFERNO_FULL_SIZE=DIR cargo test --release --features cuda full_size -- --nocapture
//!
//! First run `tests/golden/reference_logits.py DIR`, which writes the logits of transformers to `DIR`.
//! `full_size_logits_agree_with_transformers` reads them.

use std::path::PathBuf;

use candle_core::{Device, Tensor, safetensors};
use inferno::device::{self, DeviceChoice};
use inferno::engine::sampling::argmax;
use inferno::{Engine, Event, GenerateOptions, LoadOptions, RequestStream, SamplingParams};

use crate::support::engine::two_gpus;
use crate::support::{token_ids, values};

fn model() -> PathBuf {
    PathBuf::from(std::env::var_os("INFERNO_FULL_SIZE").expect("INFERNO_FULL_SIZE must name a model directory"))
}

fn load() -> Engine {
    Engine::load(&model(), &LoadOptions { context: Some(8192), ..Default::default() }).unwrap()
}

/// Returns the mean KL(want ‖ got) over all rows, and the top-1 agreement (0 to 1).
fn compare(got: &Tensor, want: &Tensor) -> (f64, f64) {
    let probabilities = |row: &[f32]| -> Vec<f64> {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
        let exps: Vec<f64> = row.iter().map(|&logit| (logit as f64 - top).exp()).collect();
        let total: f64 = exps.iter().sum();
        exps.iter().map(|e| e / total).collect()
    };
    let (rows, vocab) = want.dims2().unwrap();
    let (got, want) = (values(got), values(want));
    let (mut kl, mut same) = (0.0, 0);
    for row in 0..rows {
        let (got, want) = (&got[row * vocab..][..vocab], &want[row * vocab..][..vocab]);
        let (p, q) = (probabilities(want), probabilities(got));
        kl += p.iter().zip(&q).filter(|(p, _)| **p > 0.0).map(|(p, q)| p * (p / q.max(1e-300)).ln()).sum::<f64>();
        same += usize::from(argmax(got) == argmax(want));
    }
    (kl / rows as f64, same as f64 / rows as f64)
}

#[test(full_size)]
fn full_size_logits_agree_with_transformers() {
    let reference = safetensors::load(model().join("reference.safetensors"), &Device::Cpu).unwrap();
    let ids = token_ids(&reference["ids"]);
    let engine = load();
    let (their_kl, their_top1) = compare(&reference["bf16"], &reference["f32"]);
    println!("positions {}", ids.len());
    println!(
        "transformers bf16 against transformers f32: mean KL {their_kl:.3e}, top-1 agreement {:.1}%",
        100.0 * their_top1
    );
    let compare_with_reference = |what: &str, got: Tensor| {
        let got = got.to_device(&Device::Cpu).unwrap();
        let (kl, top1) = compare(&got, &reference["f32"]);
        let (kl_bf16, top1_bf16) = compare(&got, &reference["bf16"]);
        println!("{what} against transformers f32: mean KL {kl:.3e}, top-1 agreement {:.1}%", 100.0 * top1);
        println!("{what} against transformers bf16: mean KL {kl_bf16:.3e}, top-1 agreement {:.1}%", 100.0 * top1_bf16);
        // Allow 1.5 times the error of transformers in bf16, because rounding depends on the order of summation.
        assert!(kl <= 1.5 * their_kl, "{what}: mean KL is {kl:e}, but {their_kl:e} for transformers in bf16");
        assert!(
            top1 >= their_top1 - 0.03,
            "{what}: top-1 agreement is {top1}, but {their_top1} for transformers in bf16"
        );
    };
    compare_with_reference("inferno bf16, prefill", engine.logits(&ids).unwrap());
    let steps = engine.with_runner(move |runner| runner.step_logits(&ids)).unwrap().unwrap();
    compare_with_reference(&format!("inferno bf16, decode steps ({})", engine.execution_mode()), steps);
}

/// Returns the resident memory of this process in bytes, or 0 if it is unknown.
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
        // Some lengths are near gpt-oss's sliding window (128). The prompts differ from the first token on, so that no
        // round reuses a cached prefix.
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
    println!("growth of memory over 991 generations: {lost} bytes on the GPU, {host_lost} bytes on the host");
    assert!(host_lost < 32 << 20, "host memory grew by {host_lost} bytes");
    assert!(lost < 64 << 20, "GPU memory grew by {lost} bytes");
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
    println!("512 greedy tokens, {distinct} of them distinct; execution mode: {}", engine.execution_mode());
    assert_eq!(first, second);
    #[cfg(feature = "cuda")]
    if engine.execution_mode() == inferno::runner::ExecutionMode::Graph {
        let ungraphed = engine.with_runner(move |runner| {
            runner.reset();
            runner.fill(&prompt).unwrap();
            runner.decode_steps_ungraphed(17, 512).unwrap()
        });
        assert_eq!(ungraphed.unwrap(), first, "decoding without the CUDA graph produces different tokens");
    }
}

/// Returns the tokens of an answer, and the mean of KL(reported ‖ recomputed) over these tokens.
/// `reported` is the distribution in the token's event. `recomputed` is the distribution at the same position in a
/// prefill of the prompt and the answer. All but the 20 most likely tokens count as a single token.
fn tokens_and_divergence(engine: &Engine, prompt: &[u32], events: &[Event]) -> (Vec<u32>, f64) {
    let tokens: Vec<u32> = events.iter().filter_map(Event::token).collect();
    let logits = engine.logits(&[prompt, &tokens[..tokens.len() - 1]].concat()).unwrap();
    let term = |p: f64, q: f64| if p > 0.0 { p * (p / q.max(1e-12)).ln() } else { 0.0 };
    let mut total = 0.0;
    for (row, reported) in (prompt.len() - 1..).zip(events.iter().filter_map(Event::logprobs)) {
        let row: Vec<f32> = logits.get(row).unwrap().to_vec1().unwrap();
        let largest = row.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = row.iter().map(|logit| f64::from((logit - largest).exp())).sum();
        let (mut p_rest, mut q_rest) = (1.0, 1.0);
        for &(id, logprob) in &reported.top {
            let (p, q) = (f64::from(logprob).exp(), f64::from((row[id as usize] - largest).exp()) / sum);
            total += term(p, q);
            (p_rest, q_rest) = (p_rest - p, q_rest - q);
        }
        total += term(p_rest.max(0.0), q_rest.max(0.0));
    }
    let mean = total / tokens.len() as f64;
    (tokens, mean)
}

/// A prompt, the log probabilities of its tokens after the first, and the events of its greedy answer.
struct ScoredAnswer {
    prompt: Vec<u32>,
    prompt_logprobs: Vec<f64>,
    events: Vec<Event>,
}

/// Generates 64 tokens for each of 16 concurrent prompts of 40 to 640 tokens.
fn scored_answers(engine: &Engine) -> Vec<ScoredAnswer> {
    let options = || GenerateOptions {
        ignore_eos: true,
        max_tokens: Some(64),
        logprobs: Some(20),
        prompt_logprobs: Some(0),
        ..GenerateOptions::new(SamplingParams::greedy())
    };
    let prompts: Vec<_> = (1..=16).map(|seed| engine.random_tokens(seed, 40 * seed as usize)).collect();
    let streams: Vec<_> = prompts.iter().map(|ids| engine.complete_ids(ids, options()).unwrap()).collect();
    let read = |(prompt, mut stream): (Vec<u32>, RequestStream)| {
        let events = (&mut stream).into_iter().map(|event| event.unwrap()).collect();
        let prompt_logprobs =
            stream.scored_prompt().unwrap().logprobs.iter().map(|token| token.chosen.into()).collect();
        ScoredAnswer { prompt, prompt_logprobs, events }
    };
    prompts.into_iter().zip(streams).map(read).collect()
}

/// Compares the prompt's log probabilities in `answer` with a prefill. Returns the mean absolute difference.
fn prompt_difference(engine: &Engine, answer: &ScoredAnswer) -> f64 {
    let rows = engine.logits(&answer.prompt).unwrap().to_vec2::<f32>().unwrap();
    let differences = rows.iter().zip(&answer.prompt[1..]).zip(&answer.prompt_logprobs).map(|((row, &next), got)| {
        let largest = row.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = row.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
        (got - (f64::from(row[next as usize] - largest) - sum.ln())).abs()
    });
    differences.sum::<f64>() / answer.prompt_logprobs.len() as f64
}

/// The results of two GPUs may differ from the results of one GPU only by rounding errors.
/// On one GPU, two computations of the same values also differ by rounding, for example decode steps and a prefill.
/// The limits are 1.5 or 2.5 times these differences.
#[test(full_size)]
fn full_size_two_gpus_agree_with_one() {
    let builder = || Engine::builder(model()).context(1024).sequences(16);
    // Drop the first engine before loading the second: a GPU that waits for another GPU cannot load kernels.
    let two = builder().devices(two_gpus()).load().unwrap();
    let ids = two.random_tokens(99, 512);
    let prefill_of_two = two.logits(&ids).unwrap().to_device(&Device::Cpu).unwrap();
    let answers_of_two = scored_answers(&two);
    drop(two);

    let one = builder().load().unwrap();
    let prefill = one.logits(&ids).unwrap().to_device(&Device::Cpu).unwrap();
    let steps = one.with_runner(move |runner| runner.step_logits(&ids)).unwrap().unwrap();
    let (kl, top1) = compare(&prefill_of_two, &prefill);
    let (rounding, rounding_top1) = compare(&steps.to_device(&Device::Cpu).unwrap(), &prefill);
    println!("prefill on two GPUs against one GPU: mean KL {kl:.3e}, top-1 agreement {:.1}%", 100.0 * top1);
    println!(
        "decode steps against prefill on one GPU: mean KL {rounding:.3e}, top-1 agreement {:.1}%",
        100.0 * rounding_top1
    );
    assert!(kl <= 1.5 * rounding && top1 >= rounding_top1 - 0.03);

    let answers = [answers_of_two, scored_answers(&one)];
    let compared = answers.each_ref().map(|answers| {
        let count = answers.len() as f64;
        let of_prompts = answers.iter().map(|answer| prompt_difference(&one, answer)).sum::<f64>() / count;
        let (tokens, divergences): (Vec<_>, Vec<_>) =
            answers.iter().map(|answer| tokens_and_divergence(&one, &answer.prompt, &answer.events)).unzip();
        (tokens, divergences.iter().sum::<f64>() / count, of_prompts)
    });
    let [(tokens_of_two, kl_of_two, prompts_of_two), (tokens, kl, prompts)] = compared;
    let same = tokens_of_two.iter().zip(&tokens).filter(|(two, one)| two == one).count();
    println!("answers against a prefill on one GPU: mean KL {kl_of_two:.3e} on two GPUs, {kl:.3e} on one GPU");
    println!("{same} of {} greedy answers are the same on one GPU and on two GPUs", tokens.len());
    println!(
        "log probabilities of prompts against a prefill on one GPU: mean difference {prompts_of_two:.2e} on two GPUs, {prompts:.2e} on one"
    );
    // Below 1e-4, the mean KL can change by a factor of two if cuBLASLt chooses other algorithms.
    assert!(kl_of_two <= 1.5 * kl.max(1e-4), "mean KL is {kl_of_two:e} on two GPUs, but {kl:e} on one GPU");
    assert!(
        // On one GPU, batched prompts mostly use the same kernels as the reference prefill, so `prompts` is small.
        // The limit is therefore 2.5 times `prompts`, not 1.5 times.
        prompts_of_two <= 2.5 * prompts.max(1e-3),
        "the log probabilities of batched prompts differ from those of single prompts on one GPU: by {prompts_of_two:e} on \
         two GPUs, but by {prompts:e} on one GPU"
    );
}

/// With `deterministic`, each of 64 requests gets the same tokens and log probabilities,
/// whether the requests run concurrently or one at a time.
#[test(full_size)]
fn full_size_answers_at_once_equal_answers_alone_if_deterministic() {
    for eager in [false, true] {
        check_deterministic_answers(eager);
    }
}

fn check_deterministic_answers(eager: bool) {
    let options = LoadOptions { context: Some(1024), sequences: 64, eager, deterministic: true, ..Default::default() };
    let engine = Engine::load(&model(), &options).unwrap();
    let prompts: Vec<Vec<u32>> = (0..64).map(|seed| engine.random_tokens(seed, 20 + 11 * seed as usize)).collect();
    let submit = |prompt: &[u32]| {
        let greedy = GenerateOptions::new(SamplingParams::greedy());
        let options = GenerateOptions { ignore_eos: true, max_tokens: Some(64), logprobs: Some(0), ..greedy };
        engine.complete_ids(prompt, options).unwrap()
    };
    let read = |stream: RequestStream| -> Vec<(u32, u32)> {
        let events = stream.into_iter().map(|event| event.unwrap());
        events.filter_map(|event| Some((event.token()?, event.logprobs()?.chosen.to_bits()))).collect()
    };
    let streams: Vec<_> = prompts.iter().map(|prompt| submit(prompt)).collect();
    let at_once: Vec<_> = streams.into_iter().map(read).collect();
    let mut differences = Vec::new();
    for (prompt, at_once) in prompts.iter().zip(at_once) {
        engine.with_runner(|runner| runner.reset()).unwrap();
        let alone = read(submit(prompt));
        assert_eq!(alone.len(), at_once.len());
        if let Some(token) = alone.iter().zip(&at_once).position(|(alone, at_once)| alone != at_once) {
            differences.push((prompt.len(), token));
        }
    }
    assert!(
        differences.is_empty(),
        "eager {eager}: concurrent and single answers differ at (prompt length, token index): {differences:?}"
    );
}

/// Generates 64 answers concurrently, then one at a time.
/// The mean KL divergence from a prefill may be at most twice as large for the concurrent answers.
#[test(full_size)]
fn full_size_answers_at_once_are_as_exact_as_answers_alone() {
    const TOKENS: usize = 64;
    let options = LoadOptions { context: Some(1024), sequences: 64, ..Default::default() };
    let engine = Engine::load(&model(), &options).unwrap();
    let prompts: Vec<Vec<u32>> = (0..64).map(|seed| engine.random_tokens(seed, 20 + 7 * seed as usize)).collect();
    let submit = |prompt: &[u32], logprobs| {
        let greedy = GenerateOptions::new(SamplingParams::greedy());
        let options = GenerateOptions { ignore_eos: true, max_tokens: Some(TOKENS), logprobs, ..greedy };
        engine.complete_ids(prompt, options).unwrap()
    };
    let read = |stream: RequestStream| -> Vec<Event> { stream.into_iter().map(|event| event.unwrap()).collect() };
    let streams: Vec<_> = prompts.iter().map(|prompt| submit(prompt, Some(20))).collect();
    let at_once: Vec<_> = streams.into_iter().map(read).collect();
    let (mut first_differences, mut divergences) = (Vec::new(), [0.0, 0.0]);
    for (prompt, events) in prompts.iter().zip(at_once) {
        let on_graph: Vec<u32> = read(submit(prompt, None)).iter().filter_map(Event::token).collect();
        let (tokens, at_once) = tokens_and_divergence(&engine, prompt, &events);
        let (_, alone) = tokens_and_divergence(&engine, prompt, &read(submit(prompt, Some(20))));
        divergences = [divergences[0] + at_once / 64.0, divergences[1] + alone / 64.0];
        first_differences.extend((0..TOKENS).find(|&index| on_graph[index] != tokens[index]));
    }
    first_differences.sort_unstable();
    let [at_once, alone] = divergences;
    println!("answers against a prefill: mean KL {at_once:.3e} if generated at once, {alone:.3e} if one at a time");
    println!(
        "{} of 64 answers differ from the answer to the same prompt alone; indices of the first different tokens: \
         {first_differences:?}",
        first_differences.len()
    );
    // The prefill of a request that runs alone mostly uses the same kernels as the reference prefill, with the same
    // rounding. Concurrent prompts share steps and are rounded differently, so the error of their answers may be twice
    // as large.
    assert!(
        at_once <= 2.0 * alone,
        "mean KL is {at_once:e} for concurrent requests, but {alone:e} for single requests"
    );
}
