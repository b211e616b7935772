//! Sampling, stopping, and generation with the demo model: what is chosen, when it ends, what the cache spares.

use std::collections::HashMap;

use inferno::chat::{Message, ReasoningEffort, RenderOptions};
use inferno::device::DeviceChoice;
use inferno::engine::sampler::{Sampler, candidates};
use inferno::engine::{FinishReason, StopStrings};
use inferno::{Engine, GenerateOptions, LoadOptions, SamplingParams};

use crate::support::demo_dir;

fn sampling(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    let mut params = SamplingParams { temperature: 1.0, ..SamplingParams::greedy() };
    change(&mut params);
    params
}

fn kept(logits: &[f32], params: &SamplingParams) -> Vec<u32> {
    let mut ids: Vec<u32> = candidates(logits, params).iter().map(|candidate| candidate.id).collect();
    ids.sort();
    ids
}

fn logs(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

#[test]
fn cuts_keep_what_their_definitions_say() {
    let logits = logs(&[0.1, 0.2, 0.3, 0.4]);
    assert_eq!(kept(&logits, &sampling(|p| p.top_k = 2)), [2, 3]);
    assert_eq!(kept(&logits, &sampling(|p| p.top_k = 9)), [0, 1, 2, 3]);
    assert_eq!(kept(&logits, &sampling(|p| p.top_p = 0.0)), [3]);
    assert_eq!(kept(&logits, &sampling(|p| p.top_p = 0.39)), [3]);
    assert_eq!(kept(&logits, &sampling(|p| p.top_p = 0.69)), [2, 3]);
    assert_eq!(kept(&logits, &sampling(|p| p.top_p = 0.75)), [1, 2, 3]);
    assert_eq!(kept(&logits, &sampling(|p| p.min_p = 0.49)), [1, 2, 3]);
    assert_eq!(kept(&logits, &sampling(|p| p.min_p = 0.51)), [2, 3]);
    // Temperature comes first: at 0.5 the odds are 1 : 4 : 9 : 16, so 0.8 is reached by the two likeliest.
    assert_eq!(
        kept(
            &logits,
            &sampling(|p| {
                p.temperature = 0.5;
                p.top_p = 0.8;
            })
        ),
        [2, 3]
    );
    // A nucleus far larger than the first sorted head.
    let flat = vec![0.0; 5000];
    assert_eq!(kept(&flat, &sampling(|p| p.top_p = 0.5)).len(), 2500);
}

#[test]
fn weights_are_the_softmax_at_the_temperature() {
    let logits = [1.0f32, -2.0, 0.5, f32::NAN, f32::NEG_INFINITY];
    let params = sampling(|p| p.temperature = 0.7);
    let all = candidates(&logits, &params);
    let total: f64 = all.iter().map(|c| c.weight).sum();
    let want: Vec<f64> = logits[..3].iter().map(|&logit| (logit as f64 / 0.7).exp()).collect();
    let want_total: f64 = want.iter().sum();
    assert_eq!(all.len(), 3);
    for candidate in all {
        let want = want[candidate.id as usize] / want_total;
        assert!((candidate.weight / total - want).abs() < 1e-7);
    }
}

#[test]
fn draws_follow_the_distribution_and_the_seed() {
    let logits = logs(&[0.1, 0.2, 0.3, 0.4]);
    let draw = |seed: u64, count: usize| -> Vec<u32> {
        let mut sampler = Sampler::new(sampling(|p| p.seed = seed), &[]);
        (0..count).map(|_| sampler.sample(&mut logits.clone())).collect()
    };
    assert_eq!(draw(7, 50), draw(7, 50));
    assert_ne!(draw(7, 50), draw(8, 50));
    let mut counts: HashMap<u32, usize> = HashMap::new();
    for token in draw(1, 20_000) {
        *counts.entry(token).or_default() += 1;
    }
    for (token, p) in [0.1, 0.2, 0.3, 0.4].into_iter().enumerate() {
        // Four standard deviations.
        let (got, want) = (counts[&(token as u32)] as f64, 20_000.0 * p);
        assert!((got - want).abs() < 4.0 * (want * (1.0 - p)).sqrt(), "{token}: {got} of {want}");
    }
    // The first draws of neighboring seeds are independent, too.
    let firsts: Vec<u32> = (0..2000).map(|seed| draw(seed, 1)[0]).collect();
    let threes = firsts.iter().filter(|&&token| token == 3).count() as f64;
    assert!((threes - 800.0).abs() < 4.0 * (480f64).sqrt(), "{threes}");
}

#[test]
fn penalties_change_the_logits_as_defined() {
    let greedy = SamplingParams::greedy();
    // Repetition: prompt tokens count; positive logits are divided, negative ones multiplied.
    let mut sampler = Sampler::new(SamplingParams { repetition_penalty: 2.0, ..greedy.clone() }, &[0, 1]);
    let mut logits = vec![4.0, -1.0, 3.0];
    assert_eq!(sampler.sample(&mut logits), 2);
    assert_eq!(logits, [2.0, -2.0, 3.0]);
    // Frequency and presence: only what was generated, once per time and once in all.
    let params = SamplingParams { frequency_penalty: 0.5, presence_penalty: 0.25, ..greedy };
    let mut sampler = Sampler::new(params, &[1]);
    for _ in 0..2 {
        sampler.sample(&mut [10.0, 0.0, 0.0]);
    }
    let mut logits = vec![1.0, 1.0, 1.0];
    sampler.sample(&mut logits);
    assert_eq!(logits, [-0.25, 1.0, 1.0]);
}

#[test]
fn stop_strings_are_found_across_pieces_and_nothing_else_is_held_for_good() {
    let run = |stops: &[&str], pieces: &[&str]| {
        let stops: Vec<String> = stops.iter().map(|stop| stop.to_string()).collect();
        let mut matcher = StopStrings::new(&stops);
        let shown: Vec<String> = pieces.iter().map(|piece| matcher.push(piece)).collect();
        (shown.concat(), matcher.finish(), matcher.hit())
    };
    assert_eq!(run(&["STOP"], &["a S", "T", "OP b"]), ("a ".into(), "".into(), true));
    assert_eq!(run(&["STOP"], &["a S", "T", "Ab"]), ("a STAb".into(), "".into(), false));
    assert_eq!(run(&["STOP"], &["a ST"]), ("a ".into(), "ST".into(), false));
    assert_eq!(run(&["aab"], &["aaaab"]), ("aa".into(), "".into(), true));
    assert_eq!(run(&["x", "yz"], &["ay", "zx"]), ("a".into(), "".into(), true));
    assert_eq!(run(&["é!"], &["caf", "é", "!"]), ("caf".into(), "".into(), true));
    assert_eq!(run(&[""], &["all"]), ("all".into(), "".into(), false));
}

fn demo(context: usize) -> Engine {
    let options = LoadOptions { device: DeviceChoice::Cpu, context: Some(context), ..Default::default() };
    Engine::load(&demo_dir(), &options).unwrap()
}

fn render() -> RenderOptions {
    RenderOptions {
        tools: Vec::new(),
        reasoning_effort: ReasoningEffort::Medium,
        date: "2026-01-31".into(),
        add_generation_prompt: true,
    }
}

struct Turn {
    answer: String,
    tokens: Vec<u32>,
    summary: inferno::engine::Summary,
}

fn ask(engine: &mut Engine, messages: &[Message], change: impl FnOnce(&mut GenerateOptions)) -> Turn {
    let mut options = GenerateOptions::new(SamplingParams::greedy());
    options.max_tokens = Some(300);
    change(&mut options);
    let mut generation = engine.chat(messages, &render(), options).unwrap();
    let (mut answer, mut tokens) = (String::new(), Vec::new());
    for chunk in generation.by_ref() {
        let chunk = chunk.unwrap();
        answer.push_str(&chunk.answer());
        tokens.extend(chunk.token);
    }
    Turn { answer, tokens, summary: generation.summary() }
}

#[test]
fn the_demo_answers() {
    let turn = ask(&mut demo(2048), &[Message::user("How do I download a model?")], |_| ());
    assert!(turn.answer.contains("inferno download"), "{}", turn.answer);
    assert_eq!(turn.summary.finish_reason, FinishReason::Stop);
    assert_eq!(turn.summary.malformed, 0);
    assert_eq!(turn.summary.completion_tokens, turn.tokens.len());
}

#[test]
fn a_second_turn_reads_only_its_tail_and_answers_as_a_fresh_engine_does() {
    let mut engine = demo(2048);
    let mut messages = vec![Message::user("How do I list my models?")];
    let first = ask(&mut engine, &messages, |_| ());
    assert_eq!(first.summary.cached_tokens, 0);
    messages.push(Message::assistant(&first.answer));
    messages.push(Message::user("What is a token?"));
    let second = ask(&mut engine, &messages, |_| ());
    // The first prompt is still there; the reasoning between it and the answer is no longer part of the conversation.
    assert!(second.summary.cached_tokens >= first.summary.prompt_tokens, "{:?}", second.summary);
    let fresh = ask(&mut demo(2048), &messages, |_| ());
    assert_eq!(fresh.summary.cached_tokens, 0);
    assert_eq!(second.tokens, fresh.tokens);
    assert_eq!(second.answer, fresh.answer);
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let mut engine = demo(1024);
    let messages = [Message::user("What is temperature?")];
    let mut run = |seed| {
        engine.forget();
        ask(&mut engine, &messages, |options| {
            options.sampling = sampling(|p| {
                p.seed = seed;
                p.temperature = 3.0;
            });
            options.max_tokens = Some(40);
        })
        .tokens
    };
    let (a, b, c) = (run(5), run(5), run(6));
    assert_eq!(a, b);
    assert_ne!(a, c);
}

#[test]
fn generation_ends_for_the_reasons_it_says() {
    let mut engine = demo(512);
    let messages = [Message::user("How do I download a model?")];
    let limited = ask(&mut engine, &messages, |options| options.max_tokens = Some(5));
    assert_eq!((limited.summary.finish_reason, limited.tokens.len()), (FinishReason::Length, 5));
    let none = ask(&mut engine, &messages, |options| options.max_tokens = Some(0));
    assert_eq!((none.summary.finish_reason, none.tokens.len()), (FinishReason::Length, 0));
    let stopped = ask(&mut engine, &messages, |options| options.stop = vec!["download".into()]);
    assert_eq!(stopped.summary.finish_reason, FinishReason::Stop);
    assert!(!stopped.answer.contains("download"), "{}", stopped.answer);
    let full = ask(&mut engine, &messages, |options| {
        options.max_tokens = None;
        options.ignore_eos = true;
    });
    assert_eq!(full.summary.finish_reason, FinishReason::Length);
    assert_eq!(full.summary.context_used, 512);
    let cancel = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let canceled = ask(&mut engine, &messages, |options| options.cancel = Some(cancel));
    assert_eq!((canceled.summary.finish_reason, canceled.tokens.len()), (FinishReason::Interrupted, 0));
    // And after all of that it still answers as at first.
    let after = ask(&mut engine, &messages, |_| ());
    assert_eq!(after.tokens, ask(&mut demo(512), &messages, |_| ()).tokens);
}

#[test]
fn likelihoods_of_windows_agree_with_the_whole() {
    let text = "How do I download a model? Type inferno download and its name. ".repeat(12);
    let (mut long, mut short) = (demo(2048), demo(64));
    let ids = long.tokenizer().encode(&text, inferno::tokenizer::ControlTokens::Default).unwrap();
    assert!(ids.len() > 150);
    let whole = long.negative_log_likelihood(&ids).unwrap();
    let windows = short.negative_log_likelihood(&ids).unwrap();
    assert_eq!((whole.len(), windows.len()), (ids.len() - 1, ids.len() - 1));
    // Within the first window they are the same; later ones have less behind them, but are of one kind.
    for (a, b) in whole[..63].iter().zip(&windows) {
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    }
    assert!(windows.iter().all(|nll| nll.is_finite() && *nll >= 0.0));
    // Chunks of prefill do not show.
    let logits = long.logits(&ids).unwrap().to_vec2::<f32>().unwrap();
    for (row, (&next, nll)) in logits.iter().zip(ids[1..].iter().zip(&whole)) {
        let sum: f64 = row.iter().map(|&logit| (logit as f64).exp()).sum();
        assert!((sum.ln() - row[next as usize] as f64 - *nll as f64).abs() < 1e-4);
    }
}
