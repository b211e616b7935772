//! Tests of generation with the demo model: answers, finish reasons, stop strings, streams and likelihoods.
//!
//! - `requests`: cancellation, concurrent requests, errors, and engines that stop
//! - `graph`: tiny models that decode with a CUDA graph

mod graph;
mod requests;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use candle_core::{Device, Tensor, safetensors};
use futures::StreamExt;
use futures::executor::block_on;
use inferno::chat::{Message, ReasoningEffort, RenderOptions};
use inferno::engine::{EngineStats, FinishReason};
use inferno::nn::kv_cache::BLOCK_TOKENS;
use inferno::{EngineHandle, Event, GenerateOptions, RequestStream};

use super::F32_LOGPROB_TOLERANCE;
use crate::support::engine::{Answer, demo, greedy, sampling};

fn render() -> RenderOptions {
    RenderOptions {
        tools: Vec::new(),
        reasoning_effort: ReasoningEffort::Medium,
        date: "2026-01-31".into(),
        add_generation_prompt: true,
        template_variables: serde_json::Map::new(),
    }
}

fn ask(engine: &EngineHandle, messages: &[Message], change: impl FnOnce(&mut GenerateOptions)) -> Answer {
    let mut options = greedy();
    options.max_tokens = Some(300);
    change(&mut options);
    Answer::read(engine.chat(messages, &render(), options).unwrap())
}

/// Starts a greedy generation that stops only at `max_tokens` or at the end of the context.
fn endless(engine: &EngineHandle, max_tokens: Option<usize>) -> RequestStream {
    let options = GenerateOptions { ignore_eos: true, max_tokens, ..greedy() };
    engine.complete("How do I", options).unwrap()
}

/// Waits until all earlier requests have ended, and returns the engine's counters.
fn stats_when_idle(engine: &EngineHandle) -> EngineStats {
    engine.with_runner(|_| ()).unwrap();
    engine.stats()
}

/// Replaces a token's embedding with NaN.
/// All logits are then NaN at the positions of this token, and at later positions that attend to them.
fn break_embedding(dir: &Path, token: u32) {
    let file = dir.join("model.safetensors");
    let mut tensors = safetensors::load(&file, &Device::Cpu).unwrap();
    let embedding = tensors["model.embed_tokens.weight"].clone();
    let hidden_size = embedding.dim(1).unwrap();
    let row = Tensor::full(f32::NAN, (1, hidden_size), &Device::Cpu).unwrap().to_dtype(embedding.dtype()).unwrap();
    let broken = embedding.slice_scatter(&row, 0, token as usize).unwrap();
    tensors.insert("model.embed_tokens.weight".into(), broken);
    safetensors::save(&tensors, &file).unwrap();
}

/// Returns prompts of different lengths. Every third prompt starts with the same `longest / 2` tokens.
fn different_prompts(engine: &EngineHandle, count: usize, longest: usize) -> Vec<Vec<u32>> {
    let shared = engine.random_tokens(1, longest);
    let prompt = |index: usize| {
        let own = engine.random_tokens(100 + index as u64, 1 + index * 7 % (longest / 2));
        let common = if index.is_multiple_of(3) { longest / 2 } else { 0 };
        [&shared[..common], &own].concat()
    };
    (0..count).map(prompt).collect()
}

#[test]
fn demo_model_answers() {
    let answer = ask(&demo(2048), &[Message::user("How do I download a model?")], |_| ());
    assert!(answer.text.contains("inferno download"), "{}", answer.text);
    assert_eq!(answer.summary.finish_reason, FinishReason::Stop);
    assert_eq!(answer.summary.format_violations, 0);
    assert_eq!(answer.summary.completion_tokens, answer.tokens.len());
}

#[test]
fn second_turn_reads_only_its_new_tokens_and_answers_like_a_fresh_engine() {
    let engine = demo(2048);
    let mut messages = vec![Message::user("How do I list my models?")];
    let first = ask(&engine, &messages, |_| ());
    assert_eq!(first.summary.cached_tokens, 0);
    messages.push(Message::assistant(&first.text));
    messages.push(Message::user("What is a token?"));
    let second = ask(&engine, &messages, |_| ());
    // The second prompt starts with the first prompt, which is still cached.
    // It omits the reasoning of the first answer, so only the blocks of the first prompt are certain to be reused.
    let whole_blocks = first.summary.prompt_tokens / BLOCK_TOKENS * BLOCK_TOKENS;
    assert!(second.summary.cached_tokens >= whole_blocks.max(1), "{:?}", second.summary);
    let fresh = ask(&demo(2048), &messages, |_| ());
    assert_eq!(fresh.summary.cached_tokens, 0);
    assert_eq!(second.tokens, fresh.tokens);
    assert_eq!(second.text, fresh.text);
}

#[test]
fn same_seed_gives_the_same_text() {
    let engine = demo(1024);
    let messages = [Message::user("What is temperature?")];
    let run = |seed| {
        engine.with_runner(|runner| runner.reset()).unwrap();
        ask(&engine, &messages, |options| {
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
fn finish_reason_says_why_a_generation_ended() {
    let engine = demo(512);
    let messages = [Message::user("How do I download a model?")];
    let limited = ask(&engine, &messages, |options| options.max_tokens = Some(5));
    assert_eq!((limited.summary.finish_reason, limited.tokens.len()), (FinishReason::Length, 5));
    let none = ask(&engine, &messages, |options| options.max_tokens = Some(0));
    assert_eq!((none.summary.finish_reason, none.tokens.len()), (FinishReason::Length, 0));
    let stopped = ask(&engine, &messages, |options| options.stop = vec!["download".into()]);
    assert_eq!(stopped.summary.finish_reason, FinishReason::Stop);
    assert!(!stopped.text.contains("download"), "{}", stopped.text);
    let full = ask(&engine, &messages, |options| {
        options.max_tokens = None;
        options.ignore_eos = true;
    });
    assert_eq!(full.summary.finish_reason, FinishReason::Length);
    assert_eq!(full.summary.context_used, 512);
    let cancel = Arc::new(AtomicBool::new(true));
    let canceled = ask(&engine, &messages, |options| options.cancel = Some(cancel));
    assert_eq!((canceled.summary.finish_reason, canceled.tokens.len()), (FinishReason::Canceled, 0));
    // After the canceled request, the engine must still answer like a new engine.
    let again = ask(&engine, &messages, |_| ());
    assert_eq!(again.tokens, ask(&demo(512), &messages, |_| ()).tokens);
}

#[test]
fn stop_strings_end_answers_only_after_min_tokens() {
    const STOP: &str = "e";
    let engine = demo(1024);
    let options = |stop: &[&str], min_tokens| GenerateOptions {
        ignore_eos: true,
        max_tokens: Some(40),
        stop: stop.iter().map(|stop| stop.to_string()).collect(),
        min_tokens,
        ..greedy()
    };
    let ask = |stop: &[&str], min_tokens| engine.complete("How do I list", options(stop, min_tokens)).unwrap();
    let stream = ask(&[], 0);
    let pieces: Vec<String> = stream
        .into_iter()
        .filter_map(|event| match event.unwrap() {
            Event::Token { deltas, .. } => Some(deltas.into_iter().map(|delta| delta.text).collect()),
            _ => None,
        })
        .collect();
    assert!(pieces.iter().filter(|piece| piece.contains(STOP)).count() > 2, "{pieces:?}");
    for min_tokens in 0..=40 {
        let answer = Answer::read(ask(&[STOP], min_tokens));
        let last = (min_tokens..40).find(|&index| pieces[index].contains(STOP));
        let (expected, tokens, reason) = match last {
            Some(last) => {
                let end = pieces[last].split(STOP).next().unwrap();
                (pieces[..last].concat() + end, last + 1, FinishReason::Stop)
            }
            None => (pieces.concat(), 40, FinishReason::Length),
        };
        assert_eq!((answer.text, answer.tokens.len()), (expected, tokens), "{min_tokens}");
        assert_eq!(answer.summary.finish_reason, reason, "{min_tokens}");
    }
}

#[test]
fn stop_string_ends_the_generation_without_counting_as_a_cancellation() {
    let engine = demo(4096);
    let options = GenerateOptions { ignore_eos: true, stop: vec!["inferno".into()], ..greedy() };
    let answer = Answer::read(engine.chat(&[Message::user("How do I list my models?")], &render(), options).unwrap());
    assert_eq!(answer.summary.finish_reason, FinishReason::Stop);
    assert!(!answer.text.contains("inferno"), "{}", answer.text);
    assert_eq!(answer.summary.completion_tokens, answer.tokens.len());
    let idle = stats_when_idle(&engine);
    assert!(idle.generated_tokens < 4000, "the engine generated {} tokens", idle.generated_tokens);
    assert_eq!((idle.ended, idle.running, idle.canceled), (1, 0, 0));
}

#[test]
fn async_stream_and_blocking_iterator_give_the_same_events() {
    let engine = demo(1024);
    let messages = [Message::user("How do I list my models?")];
    let submit = || {
        engine.with_runner(|runner| runner.reset()).unwrap();
        engine.chat(&messages, &render(), greedy()).unwrap()
    };
    // Set the timings to 0, because they differ between requests.
    let comparable = |events: &[Event]| {
        let mut answer = Answer::from_events(events);
        let summary = &mut answer.summary;
        (summary.queue_s, summary.ttft_s, summary.tok_per_s) = (0.0, 0.0, 0.0);
        let pieces: Vec<(Option<u32>, String)> = events.iter().map(|event| (event.token(), event.answer())).collect();
        (answer, pieces)
    };
    let blocking: Vec<Event> = submit().into_iter().map(|event| event.unwrap()).collect();
    let asynchronous: Vec<Event> = block_on(submit().map(|event| event.unwrap()).collect());
    assert_eq!(comparable(&blocking), comparable(&asynchronous));
    assert!(blocking.len() > 10);
}

#[test]
fn one_async_task_reads_two_streams() {
    let engine = demo(1024);
    let (first, second) = (endless(&engine, Some(20)), endless(&engine, Some(20)));
    let tokens = |stream: RequestStream| stream.filter_map(async |event| event.unwrap().token()).collect::<Vec<u32>>();
    let (first, second) = block_on(futures::future::join(tokens(first), tokens(second)));
    assert_eq!(first.len(), 20);
    assert_eq!(first, second);
}

#[test]
fn likelihoods_of_the_first_window_match_the_whole_text() {
    let text = "How do I download a model? Type inferno download and its name. ".repeat(12);
    let (long, short) = (demo(2048), demo(64));
    let ids = long.tokenizer().encode(&text, inferno::tokenizer::ControlTokens::Default).unwrap();
    assert!(ids.len() > 150);
    let whole = long.negative_log_likelihood(&ids).unwrap();
    let windows = short.negative_log_likelihood(&ids).unwrap();
    assert_eq!((whole.len(), windows.len()), (ids.len() - 1, ids.len() - 1));
    // In the first window, the losses agree. In later windows, each token has less context, so its loss may differ.
    for (a, b) in whole[..63].iter().zip(&windows) {
        assert!(
            f64::from((a - b).abs()) < F32_LOGPROB_TOLERANCE,
            "the loss is {a} with the whole text, but {b} in the first window"
        );
    }
    assert!(windows.iter().all(|nll| nll.is_finite() && *nll >= 0.0));
    // Each loss is the negative log probability of the next token.
    let logits = long.logits(&ids).unwrap().to_vec2::<f32>().unwrap();
    for (row, (&next, nll)) in logits.iter().zip(ids[1..].iter().zip(&whole)) {
        let sum: f64 = row.iter().map(|&logit| (logit as f64).exp()).sum();
        assert!((sum.ln() - row[next as usize] as f64 - *nll as f64).abs() < F32_LOGPROB_TOLERANCE);
    }
}
