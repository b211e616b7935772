//! Tests of requests: cancellation, concurrent requests, errors, and engines that stop.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use inferno::chat::Message;
use inferno::device::DeviceChoice;
use inferno::engine::{FinishReason, Summary};
use inferno::{Engine, EngineHandle, GenerateOptions, RequestStream, SamplingParams};

use super::{ask, break_embedding, different_prompts, endless, stats_when_idle};
use crate::support::engine::{Answer, demo, generate, generate_at_once, greedy, sampling};
use crate::support::program::copy_of_demo;
use crate::support::{demo_dir, wait_until};

#[test]
fn handle_is_clone_send_and_sync() {
    fn check<T: Clone + Send + Sync + 'static>() {}
    check::<EngineHandle>();
    fn check_stream<T: Send + futures::Stream + IntoIterator + 'static>() {}
    check_stream::<RequestStream>();
}

#[test]
fn dropped_stream_cancels_within_a_step() {
    let engine = demo(4096);
    let mut stream = endless(&engine, None);
    for _ in 0..3 {
        assert!(stream.next_blocking().unwrap().unwrap().token().is_some());
    }
    // The engine runs ahead of its client, so the test compares the engine's own token counts.
    drop(stream);
    let at_drop = engine.stats().generated_tokens;
    let idle = stats_when_idle(&engine);
    assert!(
        idle.generated_tokens <= at_drop + 2,
        "{at_drop} generated tokens when the stream was dropped, {} afterward",
        idle.generated_tokens
    );
    assert!(idle.generated_tokens < 4000);
    assert_eq!((idle.running, idle.waiting, idle.ended, idle.canceled), (0, 0, 1, 1));
}

#[test]
fn canceled_request_leaves_the_queue_at_once() {
    let engine = demo(4096);
    let mut running = endless(&engine, None);
    running.next_blocking().unwrap().unwrap();
    drop(endless(&engine, None));
    // The next step removes the dropped request from the queue, while the first request is still running.
    let deadline = Instant::now() + Duration::from_secs(60);
    while engine.stats().canceled == 0 && Instant::now() < deadline {
        running.next_blocking().unwrap().unwrap();
    }
    let stats = engine.stats();
    assert_eq!((stats.waiting, stats.running, stats.ended, stats.canceled), (0, 1, 1, 1));
}

#[test]
fn cancel_flag_ends_a_generation() {
    let engine = demo(4096);
    let cancel = Arc::new(AtomicBool::new(false));
    let options = GenerateOptions { ignore_eos: true, cancel: Some(cancel.clone()), ..greedy() };
    let mut stream = engine.complete("How do I", options).unwrap();
    let mut tokens = 0;
    for event in &mut stream {
        tokens += usize::from(event.unwrap().token().is_some());
        if tokens == 4 {
            cancel.store(true, Ordering::Relaxed);
        }
    }
    assert_eq!((stream.summary().finish_reason, tokens), (FinishReason::Canceled, 4));
    assert_eq!(stream.summary().completion_tokens, 4);
    assert!(stream.next_blocking().is_none());
    assert!(stats_when_idle(&engine).generated_tokens < 4000);
}

#[test]
fn canceled_prefill_stops_at_the_next_chunk() {
    let engine = Engine::builder(demo_dir()).device(DeviceChoice::Cpu).context(4096).chunk(16).load().unwrap();
    let prompt = engine.random_tokens(1, 4000);
    let stream = engine.complete_ids(&prompt, greedy()).unwrap();
    wait_until("the first chunk is counted", || engine.stats().prompt_tokens > 0);
    drop(stream);
    let at_drop = engine.stats().prompt_tokens;
    let idle = stats_when_idle(&engine);
    assert!(
        idle.prompt_tokens <= at_drop + 2 * 16,
        "{at_drop} prompt tokens when the stream was dropped, {} afterward",
        idle.prompt_tokens
    );
    assert_eq!((idle.generated_tokens, idle.canceled), (0, 1));
    assert_eq!(Answer::read(endless(&engine, Some(3))).tokens.len(), 3);
}

#[test]
fn a_stopped_generation_does_not_count_as_canceled() {
    let engine = demo(4096);
    for (is_stopped, reason, canceled) in [(true, FinishReason::Stop, 0), (false, FinishReason::Canceled, 1)] {
        let mut stream = endless(&engine, None);
        stream.next_blocking().unwrap().unwrap();
        if is_stopped {
            stream.stop()
        } else {
            stream.cancel()
        }
        while stream.next_blocking().is_some() {}
        assert_eq!(stream.summary().finish_reason, reason);
        let idle = stats_when_idle(&engine);
        assert_eq!((idle.running, idle.canceled, idle.tokens_after_cancel), (0, canceled, 0));
    }
    assert!(engine.stats().generated_tokens < 4000);
}

#[test]
fn a_request_that_is_stopped_before_it_starts_does_not_count_as_canceled() {
    let engine = demo(1024);
    let (started, is_started) = mpsc::channel();
    let (release, is_released) = mpsc::channel();
    let handle = engine.handle();
    let call = thread::spawn(move || {
        let wait = handle.with_runner(move |_| {
            started.send(()).unwrap();
            is_released.recv().unwrap();
        });
        wait.unwrap();
    });
    is_started.recv().unwrap();
    // The engine thread receives the request only after the call.
    let mut stream = endless(&engine, None);
    stream.stop();
    release.send(()).unwrap();
    call.join().unwrap();
    let idle = stats_when_idle(&engine);
    assert_eq!((idle.ended, idle.canceled), (1, 0));
}

#[test]
fn concurrent_requests_get_the_same_answers_as_single_requests() {
    let questions = ["How do I download a model?", "What is a token?"];
    let alone = questions.map(|question| ask(&demo(1024), &[Message::user(question)], |_| ()));
    let engine = demo(1024);
    let together = thread::scope(|scope| {
        let threads = questions.map(|question| {
            let engine = engine.handle();
            scope.spawn(move || [(); 3].map(|()| ask(&engine, &[Message::user(question)], |_| ())))
        });
        threads.map(|thread| thread.join().unwrap())
    });
    for (alone, answers) in alone.iter().zip(together) {
        for answer in answers {
            assert_eq!((&answer.text, &answer.tokens), (&alone.text, &alone.tokens));
            assert_eq!(answer.summary.finish_reason, alone.summary.finish_reason);
        }
    }
    assert_eq!(stats_when_idle(&engine).ended, 6);
}

#[test]
fn requests_at_once_answer_as_one_after_another() {
    let engine = Engine::builder(demo_dir()).device(DeviceChoice::Cpu).context(320).sequences(2).load().unwrap();
    let prompts = different_prompts(&engine, 12, 260);
    let sampled = SamplingParams { temperature: 1.0, top_p: 0.9, seed: 5, ..SamplingParams::greedy() };
    let penalized = SamplingParams { repetition_penalty: 1.3, ..SamplingParams::greedy() };
    for sampling in [SamplingParams::greedy(), sampled, penalized] {
        // The KV cache has blocks for only some of the requests. Other requests wait, and some may be preempted.
        let at_once = generate_at_once(&engine, &prompts, &sampling, 30);
        for (prompt, answer) in prompts.iter().zip(&at_once) {
            engine.with_runner(|runner| runner.reset()).unwrap();
            let alone = generate(&engine, prompt, sampling.clone(), 30);
            assert_eq!(answer.tokens, alone.tokens, "{} tokens, {sampling:?}", prompt.len());
        }
    }
    let stats = stats_when_idle(&engine);
    assert_eq!((stats.ended, stats.failed, stats.waiting, stats.running), (72, 0, 0, 0));
    assert_eq!(stats.used_blocks, 0);
    assert!(stats.blocks >= 10 && stats.hit_tokens > 0 && stats.hit_tokens < stats.queried_tokens, "{stats:?}");
    // The 36 single requests take about 36 * 30 steps. The 36 batched requests must take less than half as many.
    assert!(stats.steps < 36 * 30 + 36 * 30 / 2, "{stats:?}");
}

#[test]
fn requests_start_by_priority_and_expire() {
    let engine = demo(256);
    let request = |priority, max_wait, count| {
        let options = GenerateOptions { priority, max_wait, max_tokens: Some(count), ignore_eos: true, ..greedy() };
        engine.complete_ids(&engine.random_tokens(2 + count as u64, 200), options).unwrap()
    };
    // The first request uses most of the KV cache blocks, so all later requests must wait.
    let mut first = request(0, None, 50);
    first.next_blocking().unwrap().unwrap();
    let (last, urgent) = (request(0, None, 3), request(-1, None, 2));
    let mut expired = request(5, Some(Duration::ZERO), 1);
    let error = expired.next_blocking().unwrap().unwrap_err();
    assert!(error.to_string().contains("waited longer than its limit"), "{error}");
    assert!(Answer::read(urgent).summary.ttft_s < Answer::read(last).summary.ttft_s);
    assert_eq!(Answer::read(first).summary.completion_tokens, 50);
}

#[test]
fn at_most_max_sequences_run_at_once() {
    let builder = Engine::builder(demo_dir()).device(DeviceChoice::Cpu).context(128).sequences(4).max_sequences(2);
    let engine = builder.load().unwrap();
    assert_eq!(engine.info().max_sequences, 2);
    let options = GenerateOptions { max_tokens: Some(40), ignore_eos: true, ..greedy() };
    let mut streams: Vec<RequestStream> =
        (0..3).map(|seed| engine.complete_ids(&engine.random_tokens(seed, 20), options.clone()).unwrap()).collect();
    streams[0].next_blocking().unwrap().unwrap();
    streams[1].next_blocking().unwrap().unwrap();
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting), (2, 1), "{stats:?}");
    let summaries: Vec<Summary> = streams.into_iter().map(|stream| Answer::read(stream).summary).collect();
    assert!(summaries[2].queue_s > summaries[0].queue_s, "the third request must wait longer than the first one");
    assert!(summaries.iter().all(|summary| summary.queue_s <= summary.ttft_s));
    assert_eq!(stats_when_idle(&engine).tokens_after_cancel, 0);
    assert!(engine.is_responsive(Duration::from_secs(60)));
}

#[test]
fn error_of_one_request_leaves_the_engine_usable() {
    // The logits after a prompt that contains this token are all NaN, so the sampler cannot choose a token.
    const BROKEN_TOKEN: u32 = 1999;
    let (_folder, dir) = copy_of_demo();
    break_embedding(&dir, BROKEN_TOKEN);
    let engine = Engine::builder(&dir).device(DeviceChoice::Cpu).context(256).load().unwrap();

    let good = ask(&engine, &[Message::user("What is a token?")], |_| ());
    let mut stream = engine.complete_ids(&[1, BROKEN_TOKEN, 2], greedy()).unwrap();
    let error = stream.next_blocking().unwrap().unwrap_err();
    assert!(error.to_string().contains("every logit is NaN or -inf"), "{error}");
    assert!(stream.next_blocking().is_none());
    assert_eq!(engine.stats().cached_tokens, 0);
    // Requests with invalid token ids or options, or with an empty or too long prompt, never reach the engine thread.
    let error = engine.complete_ids(&[1, engine.info().vocab_size as u32, 2], greedy()).err().unwrap();
    assert!(error.to_string().contains("outside the model's vocabulary"), "{error}");
    let prompt = engine.random_tokens(1, 256);
    let error = engine.complete_ids(&prompt, greedy()).err().unwrap();
    assert!(matches!(error.downcast_ref(), Some(inferno::Error::ContextFull { prompt_tokens: 256, .. })), "{error}");
    assert!(engine.complete_ids(&[], greedy()).err().unwrap().to_string().contains("empty"));
    let bad_sampling = sampling(|p| p.top_p = 2.0);
    assert!(engine.complete("a", GenerateOptions::new(bad_sampling)).is_err());

    let idle = stats_when_idle(&engine);
    assert_eq!((idle.ended, idle.failed), (2, 1));
    assert_eq!(ask(&engine, &[Message::user("What is a token?")], |_| ()).tokens, good.tokens);
}

#[test]
fn drain_waits_for_submitted_requests_and_refuses_new_ones() {
    let engine = demo(1024);
    let (first, second) = (endless(&engine, Some(30)), endless(&engine, Some(30)));
    engine.drain().unwrap();
    let stats = engine.stats();
    assert_eq!((stats.waiting, stats.running, stats.ended, stats.generated_tokens), (0, 0, 2, 60));
    let refused = engine.complete("How do I", greedy()).err().unwrap();
    assert!(refused.to_string().contains("draining"), "{refused}");
    assert_eq!(Answer::read(first).tokens, Answer::read(second).tokens);
}

#[test]
fn streams_of_a_dropped_or_panicked_engine_end_with_an_error() {
    let last = |stream: RequestStream| stream.into_iter().last().unwrap().map(|_| ()).unwrap_err().to_string();
    let engine = demo(4096);
    let (running, waiting, handle) = (endless(&engine, None), endless(&engine, None), engine.handle());
    drop(engine);
    assert!(last(running).contains("engine stopped"));
    assert!(last(waiting).contains("engine stopped"));
    assert!(handle.complete("How do I", greedy()).is_err());

    let engine = demo(1024);
    let panicked = engine.with_runner(|_| panic!("a panic that this test expects"));
    assert!(panicked.unwrap_err().to_string().contains("engine stopped"));
    // If the engine thread is still unwinding, the request is accepted, and its stream ends with an error.
    match engine.complete("How do I", greedy()) {
        Ok(stream) => assert!(last(stream).contains("engine stopped")),
        Err(error) => assert!(error.to_string().contains("engine has stopped"), "{error}"),
    }
    assert!(engine.drain().is_err());
}

#[test]
fn a_stopped_engine_is_not_responsive() {
    let engine = demo(64);
    let handle = engine.handle();
    assert!(handle.is_responsive(Duration::from_secs(60)));
    drop(engine);
    assert!(!handle.is_responsive(Duration::from_secs(60)));
}

/// Runs `count` requests, 16 at a time. Drops every seventh answer stream after its first event.
fn run_many(engine: &EngineHandle, prompts: &[Vec<u32>], count: usize) {
    for first in (0..count).step_by(16) {
        let options = |index: usize| GenerateOptions { max_tokens: Some(1 + index % 5), ignore_eos: true, ..greedy() };
        let start = |index: usize| engine.complete_ids(&prompts[index % prompts.len()], options(index)).unwrap();
        let streams: Vec<_> = (first..count.min(first + 16)).map(|index| (index, start(index))).collect();
        for (index, mut stream) in streams {
            if index % 7 == 0 {
                stream.next_blocking().unwrap().unwrap();
            } else {
                assert_eq!(Answer::read(stream).tokens.len(), 1 + index % 5);
            }
        }
    }
}

/// Returns the number of requests that `INFERNO_TEST_REQUESTS` specifies, or `None` if the variable is not set.
/// If the variable is set, the memory tests also measure the memory in use.
/// Then run only one test at a time, because other tests would change the measured memory.
fn requested_count() -> Option<usize> {
    let text = std::env::var("INFERNO_TEST_REQUESTS").ok()?;
    Some(text.parse().expect("INFERNO_TEST_REQUESTS must be a number"))
}

/// Runs many requests, and asserts that they leave no block of the KV cache in use.
/// With `INFERNO_TEST_REQUESTS`, also asserts that `used_bytes`, the memory in use, grows by less than 8 MiB.
pub fn assert_memory_stays_flat(engine: &EngineHandle, prompts: Vec<Vec<u32>>, used_bytes: impl Fn() -> u64) {
    let (warm_up, requested) = (48, requested_count());
    let count = requested.unwrap_or(48);
    run_many(engine, &prompts, warm_up);
    let before = used_bytes();
    run_many(engine, &prompts, count);
    let stats = stats_when_idle(engine);
    assert_eq!((stats.used_blocks, stats.running, stats.waiting, stats.failed), (0, 0, 0, 0), "{stats:?}");
    assert_eq!(stats.ended, (warm_up + count) as u64);
    if requested.is_some() {
        let grown = used_bytes().saturating_sub(before);
        eprintln!("{count} requests: the memory in use grew by {grown} bytes");
        assert!(grown < 8 << 20, "after {count} requests, {grown} more bytes are in use");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn many_requests_leave_memory_flat() {
    let resident_bytes = || {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
        kilobytes.unwrap().parse::<u64>().unwrap() * 1024
    };
    let engine = Engine::builder(demo_dir()).device(DeviceChoice::Cpu).context(128).sequences(4).load().unwrap();
    assert_memory_stays_flat(&engine, different_prompts(&engine, 24, 100), resident_bytes);
}
