//! Tests of queued steps on the CPU. A queued step is planned before the tokens of the previous step are known.
//!
//! On a GPU, batches always run with queued steps, so the batch tests in `engine.rs` also cover queued steps.

use inferno::SamplingParams;
use inferno::device::DeviceChoice;
use inferno::engine::{Engine, EngineBuilder, GenerateOptions};

use crate::support::demo_dir;
use crate::support::engine::{Answer, greedy};

pub fn demo() -> EngineBuilder<'static> {
    Engine::builder(demo_dir()).device(DeviceChoice::Cpu).context(320).sequences(2).chunk(64)
}

/// Returns a request's prompt and options. Requests differ in length, sampling parameters and finish reason.
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

/// Checks that `engine` returns the same answers as `reference`, even after preemptions and prefix hits.
pub fn check(engine: Engine, reference: Engine, change: impl Fn(usize, &mut GenerateOptions)) {
    let requests = (0..24).map(|index| {
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
        assert_eq!(answer.tokens, alone.tokens, "{} prompt tokens, {:?}", prompt.len(), options.sampling);
        assert_eq!(answer.summary.finish_reason, alone.summary.finish_reason);
    }
    engine.with_runner(|_| ()).unwrap();
    let stats = engine.stats();
    assert_eq!((stats.failed, stats.used_blocks, stats.tokens_after_cancel), (0, 0, 0), "{stats:?}");
    assert!(stats.preemptions > 0 && stats.hit_tokens > 0, "{stats:?}");
}

#[test]
fn answers_are_the_same_as_without_queued_steps() {
    check(demo().queue_on_cpu(true).load().unwrap(), demo().load().unwrap(), |_, _| ());
}

#[test]
fn steps_are_queued_ahead_unless_a_choice_depends_on_the_token_before() {
    let share = |change: fn(&mut GenerateOptions)| {
        let engine = demo().queue_on_cpu(true).load().unwrap();
        let mut options = GenerateOptions { ignore_eos: true, max_tokens: Some(50), ..greedy() };
        change(&mut options);
        let prompt = engine.random_tokens(1, 20);
        assert_eq!(Answer::read(engine.complete_ids(&prompt, options).unwrap()).tokens.len(), 50);
        engine.with_runner(|_| ()).unwrap();
        (engine.stats().steps_queued_ahead, engine.stats().steps)
    };
    // The first step is not queued ahead, because no step runs before it.
    assert_eq!(share(|_| ()), (49, 50));
    assert_eq!(share(|options| options.sampling.repetition_penalty = 1.2), (0, 50));
    assert_eq!(share(|options| options.logprobs = Some(2)), (0, 50));
}

#[test]
fn queued_and_other_steps_mix() {
    // A step with a penalized request must wait for the previous tokens. Only some requests have penalties.
    let change = |index: usize, options: &mut GenerateOptions| {
        if index.is_multiple_of(5) {
            options.sampling.frequency_penalty = 0.5;
        }
        if index.is_multiple_of(7) {
            options.min_tokens = 4;
        }
    };
    check(demo().queue_on_cpu(true).load().unwrap(), demo().load().unwrap(), change);
}

#[test]
fn deterministic_answers_are_the_same_as_without_queued_steps() {
    let demo = || demo().deterministic(true);
    check(demo().queue_on_cpu(true).load().unwrap(), demo().load().unwrap(), |_, _| ());
}

#[test]
fn canceled_requests_free_their_blocks() {
    let engine = demo().queue_on_cpu(true).load().unwrap();
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
