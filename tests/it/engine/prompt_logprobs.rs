//! Tests of the log probabilities of prompt tokens.

use candle_core::DType;
use inferno::device::DeviceChoice;
use inferno::runner::{ExecutionMode, TokenLogprobs};
use inferno::{Engine, EngineHandle, GenerateOptions, Request, RequestStream};

use super::{F16_LOGPROB_TOLERANCE, F32_LOGPROB_TOLERANCE, models};
use crate::harness::{Need, TestCase};
use crate::support::demo_dir;
use crate::support::engine::{GraphModel, demo, greedy};

/// The number of most likely tokens reported at each position.
const TOP: usize = 3;

fn options(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { ignore_eos: true, max_tokens: Some(max_tokens), prompt_logprobs: Some(TOP), ..greedy() }
}

/// Returns the log probabilities of the prompt tokens, and the ids of the generated tokens.
/// Checks that the log probabilities are complete when the first event arrives.
pub fn read(mut stream: RequestStream) -> (Vec<TokenLogprobs>, Vec<u32>) {
    let first = stream.next_blocking().unwrap().unwrap();
    let prompt = stream.scored_prompt().unwrap().logprobs.clone();
    let tokens = first.token().into_iter();
    let tokens = tokens.chain((&mut stream).into_iter().filter_map(|event| event.unwrap().token())).collect();
    assert_eq!(stream.scored_prompt().unwrap().logprobs.len(), prompt.len());
    (prompt, tokens)
}

/// Checks the log probabilities of a prompt's tokens against [`EngineHandle::logits`], which computes the whole prompt.
fn assert_close(engine: &EngineHandle, prompt: &[u32], got: &[TokenLogprobs], tolerance: f64) {
    assert_eq!(got.len(), prompt.len() - 1);
    let rows = engine.logits(prompt).unwrap().to_vec2::<f32>().unwrap();
    for (index, (row, got)) in rows.iter().zip(got).enumerate() {
        let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
        let logprob = |id: usize| f64::from(row[id]) - sum.ln();
        let is_close = |got: f32, want: f64| (f64::from(got) - want).abs() < tolerance;
        let want = logprob(prompt[index + 1] as usize);
        assert!(
            is_close(got.chosen, want),
            "log probability of the token at index {} in a prompt of {} tokens: got {}, expected {want}",
            index + 1,
            prompt.len(),
            got.chosen
        );
        let mut largest: Vec<f64> = (0..row.len()).map(logprob).collect();
        largest.sort_by(|a, b| b.total_cmp(a));
        assert_eq!(got.top.len(), TOP);
        for (&(id, logprob_got), largest) in got.top.iter().zip(largest) {
            assert!(is_close(logprob_got, largest) && is_close(logprob_got, logprob(id as usize)), "token {index}");
        }
        // If the prompt token is also in `top`, both log probabilities must be exactly equal.
        // Clients compare them to see whether the prompt token is the most likely token.
        for (_, logprob) in got.top.iter().filter(|(id, _)| *id == prompt[index + 1]) {
            assert_eq!(*logprob, got.chosen);
        }
    }
}

/// Checks the log probabilities of prompts with the given lengths, in a request for one answer and in one for three.
/// Neither request may reuse the prompt's blocks from the prefix cache.
fn check(engine: &EngineHandle, lengths: &[usize], tolerance: f64) {
    for &length in lengths {
        let prompt = engine.random_tokens(length as u64, length);
        let plain = |count| GenerateOptions { prompt_logprobs: None, ..options(count) };
        let generated = |options| -> Vec<u32> {
            let events = engine.complete_ids(&prompt, options).unwrap().into_iter();
            events.filter_map(|event| event.unwrap().token()).collect()
        };
        for (answers, count) in [(1, 0), (3, 4)] {
            // This request leaves the full blocks of the prompt in the prefix cache. `assert_close` removes them.
            let want = generated(plain(4));
            let request = Request::ids(prompt.clone()).options(options(count));
            let answers: Vec<_> = engine.submit_n(request, answers).unwrap().into_iter().map(read).collect();
            for (logprobs, tokens) in &answers {
                assert_eq!(logprobs, &answers[0].0, "the answers have different prompt log probabilities");
                assert_eq!(tokens, &want[..count]);
            }
            assert_close(engine, &prompt, &answers[0].0, tolerance);
        }
    }
}

fn tiny_models() -> Vec<TestCase<&'static str>> {
    models(&["llama_graph", "gpt_oss_graph", "gemma2_graph", "gemma3_graph"], None)
}

#[test(each = tiny_models)]
fn prompt_logprobs_equal_those_of_a_forward_pass(name: &'static str) {
    let model = GraphModel::new(name);
    let builder = || model.builder().device(DeviceChoice::Cpu).dtype(DType::F32).context(110);
    check(&builder().chunk(16).load().unwrap(), &[1, 2, 16, 17, 18, 65, 100], F32_LOGPROB_TOLERANCE);
    check(&builder().load().unwrap(), &[100], F32_LOGPROB_TOLERANCE);
}

#[test]
fn long_prompts_are_scored_in_slices() {
    check(&demo(512), &[65, 66, 130, 300], F32_LOGPROB_TOLERANCE);
    let deterministic = Engine::builder(demo_dir()).device(DeviceChoice::Cpu).context(300).chunk(64);
    check(&deterministic.deterministic(true).load().unwrap(), &[2, 64, 65, 66, 130], F32_LOGPROB_TOLERANCE);
}

fn tiny_models_on_a_gpu() -> Vec<TestCase<&'static str>> {
    models(&["llama_graph", "gpt_oss_graph"], Some(Need::Gpu))
}

#[test(each = tiny_models_on_a_gpu)]
fn prompt_logprobs_equal_those_of_a_forward_pass_on_a_gpu(name: &'static str) {
    let model = GraphModel::new(name);
    for mode in [ExecutionMode::Graph, ExecutionMode::Eager] {
        let engine = model.load(110, mode);
        for length in [1, 2, 16, 17, 18, 65, 100] {
            let prompt = engine.random_tokens(length as u64, length);
            for count in [0, 4] {
                let request = Request::ids(prompt.clone()).options(options(count));
                for stream in engine.submit_n(request, 3).unwrap() {
                    assert_close(&engine, &prompt, &read(stream).0, F16_LOGPROB_TOLERANCE);
                }
            }
        }
    }
}

/// Mixes requests with and without prompt log probabilities.
/// The requests share steps. Some requests wait for blocks or are preempted.
#[test]
fn requests_at_once_are_scored_like_single_ones() {
    let engine = Engine::builder(demo_dir()).device(DeviceChoice::Cpu).context(320).sequences(2).load().unwrap();
    let shared = engine.random_tokens(1, 150);
    let prompt = |index: usize| {
        let own = engine.random_tokens(index as u64 + 2, 5 + index * 17 % 100);
        [&shared[..if index.is_multiple_of(3) { 150 } else { 0 }], &own].concat()
    };
    let count = |index: usize| [0, 60][index % 2];
    for round in 0..2 {
        let streams: Vec<_> = (0..12)
            .map(|index| {
                let prompt_logprobs = (index % 4 != round).then_some(TOP);
                let options = GenerateOptions { prompt_logprobs, ..options(count(index)) };
                engine.complete_ids(&prompt(index), options).unwrap()
            })
            .collect();
        for (index, mut stream) in streams.into_iter().enumerate() {
            if index % 4 == round {
                let tokens = (&mut stream).into_iter().filter(|event| event.as_ref().unwrap().token().is_some());
                assert_eq!((tokens.count(), stream.scored_prompt().is_some()), (count(index), false));
                continue;
            }
            let (logprobs, tokens) = read(stream);
            assert_eq!(tokens.len(), count(index));
            assert_close(&engine, &prompt(index), &logprobs, F32_LOGPROB_TOLERANCE);
        }
    }
    engine.with_runner(|_| ()).unwrap();
    let stats = engine.stats();
    assert!(stats.preemptions > 0 && stats.used_blocks == 0, "{stats:?}");
}

/// If the answer that prefills the prompt is canceled, another answer takes over the prefill.
#[test]
fn canceled_answers_leave_the_scores_of_others_complete() {
    let engine = Engine::builder(demo_dir()).device(DeviceChoice::Cpu).context(320).chunk(16).load().unwrap();
    let prompt = engine.random_tokens(1, 300);
    for canceled in 1..3 {
        let mut streams = engine.submit_n(Request::ids(prompt.clone()).options(options(2)), 3).unwrap();
        let begin = engine.stats().prompt_tokens;
        while engine.stats().prompt_tokens < begin + 64 {
            std::thread::yield_now();
        }
        streams.drain(..canceled);
        for stream in streams {
            assert_close(&engine, &prompt, &read(stream).0, F32_LOGPROB_TOLERANCE);
        }
    }
}

/// With `deterministic`, prompt log probabilities do not depend on other requests.
#[test]
fn deterministic_prompt_logprobs_are_always_equal() {
    let builder = || Engine::builder(demo_dir()).device(DeviceChoice::Cpu).context(600);
    for engine in [builder().load().unwrap(), builder().chunk(64).deterministic(true).load().unwrap()] {
        let submit = |index: usize| {
            let options = GenerateOptions { deterministic: true, ..options(index % 3) };
            engine.complete_ids(&engine.random_tokens(index as u64 / 2, 100 + index * 60), options).unwrap()
        };
        let alone: Vec<_> = (0..6)
            .map(|index| {
                engine.with_runner(|runner| runner.reset()).unwrap();
                read(submit(index))
            })
            .collect();
        let at_once: Vec<_> = (0..6).map(submit).collect();
        for (stream, alone) in at_once.into_iter().zip(alone) {
            assert_eq!(read(stream), alone);
        }
    }
}
