//! Tests of logit biases, log probabilities, `min_tokens` and stop tokens, and of several answers to one request.

use std::collections::BTreeMap;

use inferno::chat::Message;
use inferno::engine::FinishReason;
use inferno::runner::ExecutionMode;
use inferno::{EngineHandle, Event, GenerateOptions, Request, SamplingParams};

use super::{F16_LOGPROB_TOLERANCE, F32_LOGPROB_TOLERANCE, models};
use crate::harness::{Need, TestCase};
use crate::support::engine::{Answer, GraphModel, demo, greedy, sampling};

fn endless(count: usize) -> GenerateOptions {
    GenerateOptions { ignore_eos: true, max_tokens: Some(count), ..greedy() }
}

fn answer(engine: &EngineHandle, prompt: &[u32], options: GenerateOptions) -> Answer {
    Answer::read(engine.complete_ids(prompt, options).unwrap())
}

/// Returns the log probability of each vocabulary token at each position, computed in f64 from a prefill's logits.
fn logprobs(engine: &EngineHandle, ids: &[u32]) -> Vec<Vec<f64>> {
    let rows = engine.logits(ids).unwrap().to_vec2::<f32>().unwrap();
    let log_softmax = |row: Vec<f32>| {
        let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
        row.into_iter().map(|logit| f64::from(logit) - sum.ln()).collect()
    };
    rows.into_iter().map(log_softmax).collect()
}

/// Checks the reported log probabilities against a prefill. Logit biases and a penalty must not change them.
fn check_logprobs(engine: &EngineHandle, prompt: &[u32], tolerance: f64) {
    for (bias, penalty) in [(0.0, 0.0), (2.0, 1.0)] {
        let options = GenerateOptions {
            logprobs: Some(5),
            logit_bias: BTreeMap::from([(7, bias), (9, -bias)]),
            sampling: SamplingParams { presence_penalty: penalty, ..SamplingParams::greedy() },
            ..endless(12)
        };
        let events: Vec<Event> =
            engine.complete_ids(prompt, options).unwrap().into_iter().map(|event| event.unwrap()).collect();
        let tokens: Vec<u32> = events.iter().filter_map(Event::token).collect();
        let reported: Vec<_> = events.iter().filter_map(Event::logprobs).collect();
        assert_eq!((tokens.len(), reported.len()), (12, 12));
        let want = logprobs(engine, &[prompt, &tokens[..tokens.len() - 1]].concat());
        for ((row, token), got) in want[prompt.len() - 1..].iter().zip(tokens).zip(reported) {
            let is_close = |got: f32, want: f64| (f64::from(got) - want).abs() < tolerance;
            assert!(is_close(got.chosen, row[token as usize]), "{} {}", got.chosen, row[token as usize]);
            let mut largest = row.clone();
            largest.sort_by(|a, b| b.total_cmp(a));
            assert_eq!(got.top.len(), 5);
            for (&(id, logprob), want) in got.top.iter().zip(largest) {
                assert!(is_close(logprob, row[id as usize]) && is_close(logprob, want), "{id}: {logprob} {want}");
            }
            assert!(got.top.is_sorted_by(|a, b| a.1 >= b.1));
            if penalty == 0.0 {
                assert_eq!(got.top[0].0, token, "greedy sampling must choose the most likely token");
            }
        }
    }
    let without_top = GenerateOptions { logprobs: Some(0), ..endless(3) };
    for event in engine.complete_ids(prompt, without_top).unwrap() {
        assert!(event.unwrap().logprobs().is_none_or(|got| got.top.is_empty()));
    }
}

/// Checks logit biases, `min_tokens` and stop token ids.
fn check_rules(engine: &EngineHandle, prompt: &[u32]) {
    let plain = answer(engine, prompt, endless(12)).tokens;
    let bias = |token, value| GenerateOptions { logit_bias: BTreeMap::from([(token, value)]), ..endless(12) };
    assert!(!answer(engine, prompt, bias(plain[0], -100.0)).tokens.contains(&plain[0]));
    assert_eq!(answer(engine, prompt, bias(11, 100.0)).tokens, [11; 12]);
    assert_eq!(answer(engine, prompt, bias(11, 0.0)).tokens, plain);

    // The stop token is the answer's token at index `last`, which does not occur earlier in the answer.
    let last = (2..12).find(|&last| !plain[..last].contains(&plain[last])).unwrap_or(0);
    let stop = |min_tokens| GenerateOptions { stop_token_ids: vec![plain[last]], min_tokens, ..endless(12) };
    let stopped = answer(engine, prompt, stop(0));
    assert_eq!((&stopped.tokens[..], stopped.summary.finish_reason), (&plain[..=last], FinishReason::Stop));
    let stopped = answer(engine, prompt, stop(last));
    assert_eq!(stopped.tokens, plain[..=last], "the first stop token after `min_tokens` must end the answer");
    let longer = answer(engine, prompt, stop(last + 1));
    assert!(longer.tokens.len() > last + 1 && !longer.tokens[..=last].contains(&plain[last]), "{:?}", longer.tokens);
    assert_eq!(longer.tokens[..last], plain[..last]);
}

/// Checks that several answers to one request equal the answers to separate requests with consecutive seeds.
fn check_forks(engine: &EngineHandle, prompt: &[u32]) {
    // The high temperature makes it very likely that different seeds produce different tokens.
    let options = |seed| GenerateOptions {
        sampling: sampling(|p| {
            p.seed = seed;
            p.temperature = 3.0;
        }),
        ..endless(9)
    };
    for n in [2, 5] {
        let request = Request::ids(prompt).options(options(40));
        let streams = engine.submit_n(request, n).unwrap();
        let answers: Vec<Answer> = streams.into_iter().map(Answer::read).collect();
        assert!(
            answers[1..].iter().any(|other| other.tokens != answers[0].tokens),
            "all {n} answers are equal, although their seeds differ"
        );
        for (seed, got) in (40..).zip(&answers) {
            assert_eq!(got.tokens, answer(engine, prompt, options(seed)).tokens, "seed {seed}");
        }
        assert!(answers[1..].iter().all(|fork| fork.summary.cached_tokens == prompt.len() - 1));
    }
}

/// Runs `check` with prompts that end in the first block of the KV cache, at its end, and in the second block.
fn with_prompts(check: impl Fn(&EngineHandle, &[u32])) {
    let engine = demo(512);
    for length in [1, 64, 65, 100] {
        check(&engine, &engine.random_tokens(length, length as usize));
    }
    assert_eq!(engine.stats().used_blocks, 0);
}

#[test]
fn reported_log_probabilities_equal_those_of_a_prefill() {
    with_prompts(|engine, prompt| check_logprobs(engine, prompt, F32_LOGPROB_TOLERANCE));
}

#[test]
fn logit_biases_and_stop_tokens_choose_and_end_the_answer() {
    with_prompts(check_rules);
}

#[test]
fn several_answers_to_a_request_equal_answers_to_consecutive_seeds() {
    with_prompts(check_forks);
}

fn tiny_models() -> Vec<TestCase<&'static str>> {
    models(&["llama_graph", "gpt_oss_graph"], Some(Need::Gpu))
}

#[test(each = tiny_models)]
fn reported_log_probabilities_equal_those_of_a_prefill_on_a_gpu(name: &'static str) {
    let model = GraphModel::new(name);
    check_logprobs(&model.graph(), &model.prompt, F16_LOGPROB_TOLERANCE);
}

/// Runs all steps eagerly. With CUDA graphs, steps with a bias or an unreached `min_tokens` would use other kernels than
/// plain steps, and these kernels round differently.
#[test(each = tiny_models)]
fn logit_biases_and_stop_tokens_choose_and_end_the_answer_on_a_gpu(name: &'static str) {
    let model = GraphModel::new(name);
    check_rules(&model.load(110, ExecutionMode::Eager), &model.prompt);
}

/// Requests with and without log probabilities share the steps of a batch.
/// Each request must get exactly the log probabilities that it asks for.
#[test(gpu)]
fn logprobs_of_a_batch_belong_to_their_requests() {
    let model = GraphModel::new("llama_graph");
    let engine = model.graph();
    let prompts: Vec<Vec<u32>> = (0..9).map(|seed| engine.random_tokens(seed, 20 + seed as usize)).collect();
    let options = |index: usize| GenerateOptions { logprobs: index.is_multiple_of(3).then_some(index), ..endless(6) };
    let streams: Vec<_> =
        (0..).zip(&prompts).map(|(index, prompt)| engine.complete_ids(prompt, options(index)).unwrap()).collect();
    for ((index, prompt), stream) in prompts.iter().enumerate().zip(streams) {
        let events: Vec<Event> = stream.into_iter().map(|event| event.unwrap()).collect();
        let tokens: Vec<u32> = events.iter().filter_map(Event::token).collect();
        let reported: Vec<_> = events.iter().filter_map(Event::logprobs).collect();
        assert_eq!(reported.len(), if index.is_multiple_of(3) { 6 } else { 0 });
        let want = logprobs(&engine, &[prompt, &tokens[..5]].concat());
        for ((row, token), got) in want[prompt.len() - 1..].iter().zip(tokens).zip(reported) {
            assert!((f64::from(got.chosen) - row[token as usize]).abs() < F16_LOGPROB_TOLERANCE);
            assert_eq!(got.top.len(), index);
        }
    }
}

#[test]
fn a_stop_token_id_ends_the_answer() {
    let engine = demo(1024);
    let ask = |stop_token_ids| {
        let options = GenerateOptions { stop_token_ids, max_tokens: Some(100), ..greedy() };
        let request = Request::chat([Message::user("How do I download a model?")]).options(options);
        let events: Vec<Event> = engine.submit(request).unwrap().into_iter().map(|event| event.unwrap()).collect();
        let texts: Vec<String> = events.iter().filter(|event| event.token().is_some()).map(Event::answer).collect();
        (Answer::from_events(&events), texts)
    };
    let (whole, texts) = ask(Vec::new());
    let last = whole.tokens.len() - 4;
    let (stopped, _) = ask(vec![whole.tokens[last]]);
    let end = whole.tokens.iter().position(|token| *token == whole.tokens[last]).unwrap();
    assert_eq!(stopped.tokens, whole.tokens[..=end]);
    assert_eq!(stopped.text, texts[..end].concat());
    assert!(!texts[end].is_empty(), "the stop token has no text, so the test does not show that its text is left out");
    assert_eq!(stopped.summary.finish_reason, FinishReason::Stop);
}

#[test]
fn options_out_of_range_are_errors() {
    let engine = demo(128);
    let vocab = engine.info().vocab_size as u32;
    let error = |change: &dyn Fn(&mut GenerateOptions)| {
        let mut options = greedy();
        change(&mut options);
        engine.complete("a", options).err().unwrap().to_string()
    };
    let outside = format!("token id {vocab} in the options is outside the model's vocabulary of {vocab} tokens");
    assert_eq!(error(&|options| options.stop_token_ids = vec![vocab]), outside);
    assert_eq!(error(&|options| options.logit_bias = BTreeMap::from([(vocab, 1.0)])), outside);
    for bias in [101.0, f32::NAN, f32::NEG_INFINITY] {
        let message = error(&|options| options.logit_bias = BTreeMap::from([(3, bias)]));
        assert_eq!(message, format!("the logit bias of token id 3 is {bias}: expected a number from -100 to 100"));
    }
    assert_eq!(error(&|options| options.logprobs = Some(21)), "logprobs is 21: expected a number from 0 to 20");
    for n in [0, 129] {
        let message = engine.submit_n(Request::text("a"), n).err().unwrap().to_string();
        assert_eq!(message, format!("n is {n}: expected a number from 1 to 128"));
    }
}
