//! Tests of queued steps, which are launched before the host knows the tokens of the previous step.
//!
//! Most of these tests run on the CPU. On a GPU, steps of several sequences are queued by default
//! (see docs/scheduling.md), so the tests of batches in `engine/generation/graph.rs` also cover queued steps.

use std::collections::BTreeMap;

use candle_core::DType;
use inferno::device::DeviceChoice;
use inferno::engine::sampling::{LogitRules, Sampler};
use inferno::engine::{Constraint, Engine, EngineBuilder, GenerateOptions, GrammarKind};
use inferno::runner::{TokenLogprobs, TokenSampler};
use inferno::{Event, RequestStream, SamplingParams};

use crate::support::engine::{Answer, GraphModel, assert_greedy_within, greedy, two_gpus};
use crate::support::{Random, demo_dir};

pub fn demo() -> EngineBuilder<'static> {
    Engine::builder(demo_dir()).device(DeviceChoice::Cpu).context(320).sequences(2).chunk(64)
}

/// Returns a prompt and options for request number `index`.
/// The requests differ in prompt length, sampling parameters, stop tokens and `max_tokens`.
fn request(engine: &Engine, index: usize) -> (Vec<u32>, GenerateOptions) {
    let sampling = match index % 3 {
        0 => SamplingParams::greedy(),
        1 => SamplingParams { temperature: 0.9, top_p: 0.95, seed: index as u64, ..SamplingParams::greedy() },
        _ => SamplingParams { temperature: 0.7, top_k: 30, seed: 9, ..SamplingParams::greedy() },
    };
    let shared = engine.random_tokens(1, 130);
    let own = engine.random_tokens(100 + index as u64, 1 + index * 17 % 120);
    let prompt = [&shared[..if index.is_multiple_of(2) { 130 } else { 0 }], &own].concat();
    // Choose five stop tokens, so that answers can end at steps that the engine cannot predict.
    let stop_token_ids = (0..2000).filter(|id| id % 400 == index as u32 * 16 % 400).collect();
    let max_tokens = Some(1 + index * 35 % 150);
    (prompt, GenerateOptions { ignore_eos: true, stop_token_ids, max_tokens, ..GenerateOptions::new(sampling) })
}

/// Checks that `engine` gives the same answers to 15 concurrent requests as `reference` gives to one request at a time.
/// Also checks that `engine` preempts sequences and reuses cached prefixes while it answers.
/// `change(index, options)` changes the options of request number `index`.
pub fn assert_same_answers(engine: Engine, reference: Engine, change: impl Fn(usize, &mut GenerateOptions)) {
    let requests = (0..15).map(|index| {
        let (prompt, mut options) = request(&engine, index);
        change(index, &mut options);
        (prompt, options)
    });
    let requests: Vec<_> = requests.collect();
    let submit =
        |(prompt, options): &(Vec<u32>, GenerateOptions)| engine.complete_ids(prompt, options.clone()).unwrap();
    let streams: Vec<_> = requests.iter().map(submit).collect();
    for (stream, (prompt, options)) in streams.into_iter().zip(&requests) {
        let alone = Answer::read(reference.complete_ids(prompt, options.clone()).unwrap());
        let answer = Answer::read(stream);
        assert_eq!(
            answer.tokens,
            alone.tokens,
            "the answer to {} prompt tokens with {:?} differs from the reference",
            prompt.len(),
            options.sampling
        );
        assert_eq!(answer.summary.finish_reason, alone.summary.finish_reason);
        // Tokens that are recomputed after a preemption must not count again.
        let usage = |answer: &Answer| (answer.summary.prompt_tokens, answer.summary.completion_tokens);
        assert_eq!(usage(&answer), usage(&alone));
        assert!(answer.summary.cached_tokens < prompt.len(), "{:?}", answer.summary);
    }
    engine.with_runner(|_| ()).unwrap();
    let stats = engine.stats();
    assert_eq!((stats.failed, stats.used_blocks, stats.tokens_after_cancel), (0, 0, 0), "{stats:?}");
    assert!(stats.preemptions > 0 && stats.hit_tokens > 0, "{stats:?}");
}

#[test]
fn answers_are_the_same_as_without_queued_steps() {
    assert_same_answers(demo().queue_steps(true).load().unwrap(), demo().load().unwrap(), |_, _| ());
}

/// Changes the options of most requests so that their logits are edited before sampling.
/// Most of the edits depend on the earlier tokens of the answer.
fn edit_logits(index: usize, options: &mut GenerateOptions) {
    let sampling = &mut options.sampling;
    match index % 5 {
        0 => {}
        1 => sampling.repetition_penalty = 1.3,
        2 => {
            // The biases leave four likely tokens. Penalties change which of them is the most likely.
            options.logit_bias = [101, 203, 305, 407].map(|id| (id, 60.0)).into();
            (sampling.frequency_penalty, sampling.presence_penalty) = (1.7, 0.4);
        }
        3 => {
            (sampling.repetition_penalty, sampling.presence_penalty) = (0.8, -0.3);
            options.logit_bias = (0..300).map(|id| (id * 5, if id % 2 == 0 { 2.0 } else { -3.0 })).collect();
        }
        _ => (options.min_tokens, sampling.frequency_penalty) = (6, -0.2),
    }
}

#[test]
fn answers_with_edited_logits_are_the_same_as_without_queued_steps() {
    assert_same_answers(demo().queue_steps(true).load().unwrap(), demo().load().unwrap(), edit_logits);
}

/// Constrains the answer to any text of at least 400 characters.
fn constrain(options: &mut GenerateOptions) {
    options.constraint = Some(Constraint::new(GrammarKind::Regex("(?s:.){400,}".to_owned())));
    // A request with a constraint must not set `ignore_eos`, because a constrained answer must be able to end.
    (options.ignore_eos, options.min_tokens) = (false, 0);
}

#[test]
fn steps_are_queued_ahead_unless_a_constraint_needs_the_previous_token() {
    let share = |change: fn(&mut GenerateOptions)| {
        let engine = demo().queue_steps(true).load().unwrap();
        let mut options = GenerateOptions { ignore_eos: true, max_tokens: Some(50), ..greedy() };
        change(&mut options);
        let prompt = engine.random_tokens(1, 20);
        assert_eq!(Answer::read(engine.complete_ids(&prompt, options).unwrap()).tokens.len(), 50);
        engine.with_runner(|_| ()).unwrap();
        (engine.stats().steps_queued_ahead, engine.stats().steps)
    };
    // The first of the 50 steps is never queued ahead, because no step runs before it.
    assert_eq!(share(|_| ()), (49, 50));
    assert_eq!(share(|options| options.sampling.repetition_penalty = 1.2), (49, 50));
    assert_eq!(share(|options| options.logit_bias = BTreeMap::from([(9, 1.0)])), (49, 50));
    assert_eq!(share(|options| options.min_tokens = 30), (49, 50));
    assert_eq!(share(|options| options.logprobs = Some(2)), (49, 50));
    assert_eq!(share(constrain), (0, 50));
}

#[test]
fn answers_are_the_same_if_only_some_steps_are_queued() {
    // A step with a constrained request must wait for the tokens of the previous step, so it is not queued.
    let change = |index: usize, options: &mut GenerateOptions| {
        edit_logits(index, options);
        if index.is_multiple_of(7) {
            constrain(options);
        }
    };
    assert_same_answers(demo().queue_steps(true).load().unwrap(), demo().load().unwrap(), change);
}

#[test]
fn deterministic_answers_are_the_same_as_without_queued_steps() {
    let demo = || demo().deterministic(true);
    assert_same_answers(demo().queue_steps(true).load().unwrap(), demo().load().unwrap(), edit_logits);
}

/// A sampler that does not know the last token must edit logits and choose tokens like a sampler that knows it.
#[test]
fn choices_with_a_token_in_flight_match_the_sampler_that_knows_the_token() {
    const VOCAB: usize = 40;
    let mut random = Random(3);
    let (mut repeated, mut new) = (0, 0);
    for seed in 0..500 {
        let (sampling, token) = (random.below(2), random.below(VOCAB) as u32);
        let mut penalty = |values: [f32; 3]| values[random.below(3)];
        let params = SamplingParams {
            temperature: sampling as f32,
            repetition_penalty: penalty([1.0, 1.4, 0.7]),
            frequency_penalty: penalty([0.0, 0.3, -0.2]),
            presence_penalty: penalty([0.0, 0.9, -0.5]),
            seed,
            ..SamplingParams::greedy()
        };
        let rules = LogitRules {
            bias: (0..random.below(4)).map(|_| (random.below(VOCAB + 5) as u32, random.normal())).collect(),
            stop_tokens: vec![2, 7],
            min_tokens: random.below(8),
            logprobs: None,
        };
        let prompt: Vec<u32> = (0..random.below(20)).map(|_| random.below(VOCAB) as u32).collect();
        let answer: Vec<u32> = (0..random.below(8)).map(|_| random.below(VOCAB) as u32).collect();
        if prompt.contains(&token) || answer.contains(&token) {
            repeated += 1;
        } else {
            new += 1;
        }
        let sampler = || {
            let mut sampler = Sampler::new(params.clone(), &prompt).with_rules(rules.clone());
            answer.iter().for_each(|&token| sampler.record(token));
            sampler
        };
        let logits: Vec<f32> = (0..VOCAB).map(|_| random.normal() * 4.0).collect();
        let queued = sampler();
        let mut edited = logits.clone();
        queued.queued_edits(1).apply(&mut edited, Some(token));
        let choice = queued.choose_queued(&edited, 1);

        let mut waiting = sampler();
        waiting.record(token);
        let mut want = logits;
        for (id, value) in waiting.logit_edits() {
            want.get_mut(id as usize).into_iter().for_each(|logit| *logit += value);
        }
        assert_eq!(choice, waiting.choose(&mut want), "{params:?}");
        assert_eq!(edited, want, "wrong logits: {params:?}, {rules:?}, token {token} after {prompt:?} and {answer:?}");
    }
    assert!(repeated > 100 && new > 100, "only {repeated} repeated and {new} new tokens were tested");
}

/// Returns the tokens of an answer with their log probabilities.
fn tokens_and_logprobs(stream: RequestStream) -> Vec<(u32, Option<TokenLogprobs>)> {
    let events = stream.into_iter().map(|event| event.unwrap());
    events.filter_map(|event: Event| Some((event.token()?, event.logprobs().cloned()))).collect()
}

#[test]
fn queued_steps_report_the_same_log_probabilities() {
    let answers = |queue_steps: bool| {
        // In deterministic mode, log probabilities do not depend on the batch.
        let engine = demo().deterministic(true).queue_steps(queue_steps).load().unwrap();
        let submit = |index: usize| {
            let (prompt, mut options) = request(&engine, index);
            edit_logits(index, &mut options);
            options.logprobs = (!index.is_multiple_of(3)).then_some(index % 4);
            engine.complete_ids(&prompt, options).unwrap()
        };
        let streams: Vec<_> = (0..10).map(submit).collect();
        let answers: Vec<_> = streams.into_iter().map(tokens_and_logprobs).collect();
        engine.with_runner(|_| ()).unwrap();
        (answers, engine.stats().steps_queued_ahead)
    };
    let ((want, waiting), (got, queued)) = (answers(false), answers(true));
    assert_eq!(got, want);
    assert!(waiting == 0 && queued > 50, "{queued} steps were queued ahead with `queue_steps`, {waiting} without");
}

/// Batches of 1 to 9 requests get the same answers and log probabilities whether or not their steps are queued.
/// The engines are deterministic, so an answer does not depend on its batch.
#[test(gpu)]
fn answers_with_edited_logits_are_the_same_on_a_gpu() {
    for name in ["mistral", "gpt_oss_graph"] {
        let model = GraphModel::new(name);
        // For each batch of 1 to 9 requests, returns the answers and the number of steps that were queued ahead.
        let answers = |queue_steps: bool, logprobs: fn(usize) -> Option<usize>| {
            let builder = model.builder().context(128).chunk(64).sequences(9).deterministic(true);
            let engine = builder.queue_steps(queue_steps).load().unwrap();
            let vocabulary = engine.with_runner(|runner| runner.vocab_size()).unwrap() as u32;
            let of_count = |count: usize| {
                let before = engine.stats().steps_queued_ahead;
                let submit = |index: usize| {
                    let (prompt, mut options) = request(&engine, index);
                    edit_logits(index + count, &mut options);
                    let bias = options.logit_bias.into_iter().map(|(id, bias)| (id % vocabulary, bias));
                    options.logit_bias = bias.collect();
                    options.stop_token_ids.retain(|&id| id < vocabulary);
                    (options.logprobs, options.max_tokens) = (logprobs(index), Some(30));
                    engine.complete_ids(&prompt[..prompt.len().min(90)], options).unwrap()
                };
                let streams: Vec<_> = (0..count).map(submit).collect();
                let answers: Vec<_> = streams.into_iter().map(tokens_and_logprobs).collect();
                engine.with_runner(|_| ()).unwrap();
                (answers, engine.stats().steps_queued_ahead - before)
            };
            (1..=9).map(of_count).collect::<Vec<_>>()
        };
        for logprobs in [|_| None, |index: usize| (!index.is_multiple_of(3)).then_some(index % 7 * 3)] {
            for (index, (got, want)) in answers(true, logprobs).iter().zip(answers(false, logprobs)).enumerate() {
                let ((got, queued), (want, waiting)) = (got, want);
                let count = index + 1;
                assert_eq!(*got, want, "{name}, {count} requests");
                let longest = got.iter().map(Vec::len).max().unwrap();
                assert!(
                    waiting == 0 && 2 * queued + 4 > longest as u64,
                    "{name}, {count} requests with up to {longest} tokens: \
                     {queued} steps were queued ahead with `queue_steps`, {waiting} without"
                );
            }
        }
    }
}

/// The steps of a single request are queued if the request has a logit bias or asks for log probabilities.
/// They give the same tokens and log probabilities as steps that are not queued.
#[test(gpu)]
fn steps_of_one_request_that_edits_or_reports_logits_are_queued_on_a_gpu() {
    let model = GraphModel::new("mistral");
    let bias = BTreeMap::from([(9, 1.5), (40, -2.0)]);
    let requests = [(bias.clone(), None), (bias, Some(2)), (BTreeMap::new(), Some(2))];
    // Returns the answers to `requests`, and the number of steps that were queued ahead.
    let answers = |queue_steps: bool| {
        let engine = model.builder().dtype(DType::F16).context(110).chunk(16).queue_steps(queue_steps).load().unwrap();
        let answer = |(logit_bias, logprobs): &(BTreeMap<u32, f32>, Option<usize>)| {
            let (logit_bias, logprobs) = (logit_bias.clone(), *logprobs);
            let options = GenerateOptions { ignore_eos: true, max_tokens: Some(30), logit_bias, logprobs, ..greedy() };
            tokens_and_logprobs(engine.complete_ids(&model.prompt, options).unwrap())
        };
        let answers = requests.each_ref().map(answer);
        engine.with_runner(|_| ()).unwrap();
        (answers, engine.stats().steps_queued_ahead)
    };
    let ((want, waiting), (got, queued)) = (answers(false), answers(true));
    assert_eq!(got, want);
    assert!(waiting == 0 && queued >= 3 * 29, "{queued} steps were queued ahead with `queue_steps`, {waiting} without");
}

/// Most steps run three requests. A step needs all logits while the request of lane 0 asks for log probabilities,
/// and otherwise only the largest logits. In a prefill of the answer, each token must have nearly the largest logit.
/// If log probabilities are reported, the chosen token must have the largest one.
#[test(gpu_alone)]
fn steps_with_and_without_log_probabilities_alternate_on_a_gpu() {
    const LANES: usize = 3;
    let one = || DeviceChoice::FirstCuda.into();
    for (name, dtype, devices) in [
        ("mistral", DType::F16, one()),
        ("gpt_oss_graph", DType::F16, one()),
        ("gpt_oss_graph", DType::BF16, two_gpus()),
    ] {
        let model = GraphModel::new(name);
        let builder = model.builder().devices(devices).dtype(dtype);
        let engine = builder.context(110).chunk(16).sequences(LANES).load().unwrap();
        // Each lane sends its requests one after another, so most steps run one request of each lane.
        let answers_of_lane = |lane: usize| {
            let answer = |round: usize| {
                let logprobs = (lane == 0 && round % 2 == 1).then_some(2);
                let prompt = model.prompt[lane..].to_vec();
                let max_tokens = Some([7, 31, 40][lane]);
                let options = GenerateOptions { ignore_eos: true, max_tokens, logprobs, ..greedy() };
                let answer = tokens_and_logprobs(engine.complete_ids(&prompt, options).unwrap());
                (prompt, answer, logprobs.is_some())
            };
            (0..[12, 3, 2][lane]).map(answer).collect::<Vec<_>>()
        };
        let answers: Vec<_> = std::thread::scope(|scope| {
            let lanes: Vec<_> = (0..LANES).map(|lane| scope.spawn(move || answers_of_lane(lane))).collect();
            lanes.into_iter().flat_map(|lane| lane.join().unwrap()).collect()
        });
        for (prompt, answer, has_logprobs) in answers {
            let tokens: Vec<u32> = answer.iter().map(|&(token, _)| token).collect();
            // bf16 rounds more than f16.
            let tolerance = if dtype == DType::BF16 { 5e-2 } else { 2e-2 };
            assert_greedy_within(&engine, &prompt, &tokens, tolerance);
            assert!(answer.iter().all(|(_, logprobs)| logprobs.is_some() == has_logprobs), "{name}");
            for (token, logprobs) in answer {
                let Some(TokenLogprobs { chosen, top }) = logprobs else { continue };
                assert_eq!((token, chosen), top[0], "{name}: the chosen token is not reported as the most likely one");
            }
        }
    }
}

#[test]
fn canceled_requests_free_their_blocks() {
    let engine = demo().queue_steps(true).load().unwrap();
    for index in 0..40 {
        let (prompt, options) = request(&engine, index);
        let options = GenerateOptions { ignore_eos: true, stop_token_ids: Vec::new(), max_tokens: None, ..options };
        let mut stream = engine.complete_ids(&prompt, options).unwrap();
        let others: Vec<_> =
            (0..index % 3).map(|other| engine.complete_ids(&prompt, request(&engine, other).1)).collect();
        for _ in 0..index % 4 {
            stream.next_blocking().unwrap().unwrap();
        }
        drop(stream);
        others.into_iter().for_each(|other| drop(Answer::read(other.unwrap())));
    }
    engine.with_runner(|_| ()).unwrap();
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.failed), (0, 0, 0), "{stats:?}");
    assert_eq!((stats.used_blocks, stats.tokens_after_cancel), (0, 0), "{stats:?}");
    assert!(stats.steps_queued_ahead > 40, "{stats:?}");
}
