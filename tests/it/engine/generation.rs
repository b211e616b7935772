//! Tests of generation with the demo model: stop strings, finish reasons, cancellation, concurrent requests.
//!
//! The last tests repeat checks of sampling and concurrency on a GPU, with tiny models that decode with a CUDA graph.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor, safetensors};
use futures::StreamExt;
use futures::executor::block_on;

use inferno::chat::{Message, ReasoningEffort, RenderOptions};
use inferno::device::DeviceChoice;
use inferno::engine::{EngineStats, FinishReason, Summary};
use inferno::nn::kv_cache::BLOCK_TOKENS;
use inferno::runner::ExecutionMode;
use inferno::{Engine, EngineHandle, Event, GenerateOptions, RequestStream, SamplingParams};

use crate::support::demo_dir;
use crate::support::engine::{Answer, GraphModel, assert_greedy, generate, generate_at_once};
use crate::support::engine::{demo, greedy, sampling};
use crate::support::program::copy_of_demo;

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

/// Waits until the engine is idle and returns its counters.
fn stats_when_idle(engine: &EngineHandle) -> EngineStats {
    engine.with_runner(|_| ()).unwrap();
    engine.stats()
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
    // The second prompt starts with the first prompt, which is still cached, but omits the first reasoning.
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
    // The prefill has begun once `prompt_tokens` counts its first chunk.
    while engine.stats().prompt_tokens == 0 {
        thread::yield_now();
    }
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
fn a_completed_generation_does_not_count_as_canceled() {
    let engine = demo(4096);
    for (complete, reason, canceled) in [(true, FinishReason::Stop, 0), (false, FinishReason::Canceled, 1)] {
        let mut stream = endless(&engine, None);
        stream.next_blocking().unwrap().unwrap();
        if complete {
            stream.complete()
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
fn async_stream_and_blocking_iterator_give_the_same_events() {
    let engine = demo(1024);
    let messages = [Message::user("How do I list my models?")];
    let submit = || {
        engine.with_runner(|runner| runner.reset()).unwrap();
        engine.chat(&messages, &render(), greedy()).unwrap()
    };
    // Compare everything except the timings.
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

/// Replaces a token's embedding with NaN. From that token on, all logits of a sequence are NaN.
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
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    }
    assert!(windows.iter().all(|nll| nll.is_finite() && *nll >= 0.0));
    // Each loss is the negative log-softmax of the logits.
    let logits = long.logits(&ids).unwrap().to_vec2::<f32>().unwrap();
    for (row, (&next, nll)) in logits.iter().zip(ids[1..].iter().zip(&whole)) {
        let sum: f64 = row.iter().map(|&logit| (logit as f64).exp()).sum();
        assert!((sum.ln() - row[next as usize] as f64 - *nll as f64).abs() < 1e-4);
    }
}

/// Tiny models that the decode graph supports. Every model has layers with a sliding window.
const GRAPH_MODELS: [&str; 3] = ["mistral", "gpt_oss_graph", "gemma3_graph"];

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

/// Returns the number of requests that `INFERNO_TEST_REQUESTS` specifies.
/// If `INFERNO_TEST_REQUESTS` is set, the memory tests also measure memory, so run only one test at a time.
fn requested_count() -> Option<usize> {
    let text = std::env::var("INFERNO_TEST_REQUESTS").ok()?;
    Some(text.parse().expect("INFERNO_TEST_REQUESTS must be a number"))
}

/// Asserts that many requests leave all blocks free.
/// With `INFERNO_TEST_REQUESTS`, also asserts that memory in use, `used_bytes`, grows by less than 8 MiB.
fn assert_memory_stays_flat(engine: &EngineHandle, prompts: Vec<Vec<u32>>, used_bytes: impl Fn() -> u64) {
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
    let mut expired = request(5, Some(std::time::Duration::ZERO), 1);
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
    assert!(summaries[2].queue_s > summaries[0].queue_s, "the third request must wait for the first one");
    assert!(summaries.iter().all(|summary| summary.queue_s <= summary.ttft_s));
    assert_eq!(stats_when_idle(&engine).tokens_after_cancel, 0);
    assert!(engine.is_responsive(Duration::from_secs(60)));
}

#[test]
fn a_stopped_engine_is_not_responsive() {
    let engine = demo(64);
    let handle = engine.handle();
    assert!(handle.is_responsive(Duration::from_secs(60)));
    drop(engine);
    assert!(!handle.is_responsive(Duration::from_secs(60)));
}

#[test(gpu)]
fn batches_continue_prompts_with_greedy_tokens() {
    for name in GRAPH_MODELS {
        let model = GraphModel::new(name);
        let builder = Engine::builder(&model.dir).device(DeviceChoice::FirstCuda).dtype(DType::F16);
        let engine = builder.context(120).chunk(64).sequences(8).load().unwrap();
        let prompts = different_prompts(&engine, 21, 80);
        // The batch shrinks as requests end, so the test runs the batch graphs of several batch sizes.
        let answers = generate_at_once(&engine, &prompts, &SamplingParams::greedy(), 24);
        for (prompt, answer) in prompts.iter().zip(&answers) {
            assert_eq!(answer.tokens.len(), 24, "{name}");
            assert_greedy(&engine, prompt, &answer.tokens);
        }
        // With a top-k of 1, the sampling kernel must also choose the most likely tokens.
        let sampled = SamplingParams { temperature: 1.0, top_k: 1, seed: 5, ..SamplingParams::greedy() };
        for (prompt, answer) in prompts.iter().zip(generate_at_once(&engine, &prompts, &sampled, 24)) {
            assert_greedy(&engine, prompt, &answer.tokens);
        }
        let stats = stats_when_idle(&engine);
        assert!(2 * stats.steps_queued_ahead > stats.steps, "{stats:?}");
    }
}

#[test(gpu)]
fn many_requests_leave_gpu_memory_flat() {
    let model = GraphModel::new(GRAPH_MODELS[0]);
    let builder = Engine::builder(&model.dir).device(DeviceChoice::FirstCuda).dtype(DType::F16);
    let engine = builder.context(120).chunk(64).sequences(8).load().unwrap();
    let used_bytes = || {
        let used = engine.with_runner(|runner| {
            let info = inferno::device::info_after_trim(runner.device()).unwrap();
            info.total_bytes - info.free_bytes
        });
        used.unwrap()
    };
    assert_memory_stays_flat(&engine, different_prompts(&engine, 24, 80), used_bytes);
}

#[test(gpu)]
fn graph_continues_a_prompt_with_greedy_tokens() {
    for name in GRAPH_MODELS {
        let model = GraphModel::new(name);
        let engine = model.graph();
        let tokens = generate(&engine, &model.prompt, SamplingParams::greedy(), 24).tokens;
        assert_eq!(tokens.len(), 24);
        assert_greedy(&engine, &model.prompt, &tokens);
    }
    let model = GraphModel::new("mistral");
    let engines = [model.graph(), model.load(110, ExecutionMode::Eager)];
    let [graph, eager] = engines.each_ref().map(|engine| generate(engine, &model.prompt, SamplingParams::greedy(), 24));
    assert_eq!(graph.tokens, eager.tokens);
    assert_eq!(
        (graph.summary.execution_mode, eager.summary.execution_mode),
        (ExecutionMode::Graph, ExecutionMode::Eager)
    );
}

#[test(gpu)]
fn graph_samples_the_same_tokens_with_the_same_seed() {
    for name in GRAPH_MODELS {
        let model = GraphModel::new(name);
        let engine = model.graph();
        let run = |seed| {
            engine.with_runner(|runner| runner.reset()).unwrap();
            let params = sampling(|p| {
                p.seed = seed;
                p.temperature = 3.0;
                p.top_p = 0.9;
                p.repetition_penalty = 1.1;
            });
            generate(&engine, &model.prompt, params, 40).tokens
        };
        let (a, b, c) = (run(5), run(5), run(6));
        assert_eq!(a, b, "{name}");
        assert_ne!(a, c, "{name}");
        // Greedy steps use a decode graph of their own, which must still work after sampled steps.
        let tokens = generate(&engine, &model.prompt, SamplingParams::greedy(), 8).tokens;
        assert_greedy(&engine, &model.prompt, &tokens);
    }
}

#[test(gpu)]
fn graph_step_without_a_token_fails_and_leaves_the_engine_usable() {
    // Use a model with a separate output head, so that a NaN in the embedding does not reach the head.
    let model = GraphModel::new("mistral");
    let prompt = &model.prompt;
    let tokens = generate(&model.graph(), prompt, SamplingParams::greedy(), 24).tokens;
    // Break the embedding of a generated token that does not occur earlier.
    // The step that takes the broken token as its input then fails.
    let is_new = |&index: &usize| !prompt.contains(&tokens[index]) && !tokens[..index].contains(&tokens[index]);
    let last = (1..tokens.len() - 3).find(is_new).unwrap();
    break_embedding(&model.dir, tokens[last]);
    let engine = model.graph();

    let options = || GenerateOptions { ignore_eos: true, max_tokens: Some(24), ..greedy() };
    let read = |prompt: &[u32], options| {
        let (mut seen, mut error) = (Vec::new(), None);
        for event in engine.complete_ids(prompt, options).unwrap() {
            match event {
                Ok(event) => seen.extend(event.token()),
                Err(failure) => error = Some(failure.to_string()),
            }
        }
        (seen, error.unwrap_or_default())
    };
    let (seen, error) = read(prompt, options());
    assert_eq!(seen, tokens[..=last]);
    assert!(error.contains("every logit is NaN or -inf"), "{error}");
    assert_eq!(engine.cached_tokens(), 0);
    // A request that ends before the broken step must succeed, with greedy decoding and with sampling.
    assert_eq!(generate(&engine, prompt, SamplingParams::greedy(), last + 1).tokens, tokens[..=last]);
    assert_eq!(generate(&engine, prompt, sampling(|p| p.top_k = 1), last + 1).tokens, tokens[..=last]);
    // A separate kernel chooses the first token after a prompt. With this kernel, NaN logits must also be an error.
    for sampling in [SamplingParams::greedy(), sampling(|p| p.seed = 1)] {
        let options = GenerateOptions { sampling, ..options() };
        let (seen, error) = read(&[&prompt[..], &tokens[last..=last]].concat(), options);
        assert!(seen.is_empty() && error.contains("every logit is NaN or -inf"), "{seen:?} {error}");
    }
    assert_eq!(generate(&engine, prompt, SamplingParams::greedy(), last + 1).tokens, tokens[..=last]);
    let idle = stats_when_idle(&engine);
    assert_eq!((idle.ended, idle.failed), (6, 3));
}

#[test(gpu)]
fn graph_ends_at_the_context_limit() {
    for name in GRAPH_MODELS {
        let model = GraphModel::new(name);
        let context = model.prompt.len() + 10;
        let engine = model.load(context, ExecutionMode::Graph);
        for _ in 0..2 {
            let options = GenerateOptions { ignore_eos: true, ..greedy() };
            let answer = Answer::read(engine.complete_ids(&model.prompt, options).unwrap());
            assert_eq!((answer.summary.finish_reason, answer.tokens.len()), (FinishReason::Length, 10), "{name}");
            assert_eq!(answer.summary.context_used, context, "{name}");
            assert_greedy(&engine, &model.prompt, &answer.tokens);
        }
    }
}

#[test(gpu)]
fn graph_reuses_the_prefix_of_an_earlier_request() {
    for name in GRAPH_MODELS {
        let model = GraphModel::new(name);
        let engine = model.load(128, ExecutionMode::Graph);
        // The prefix cache reuses whole blocks of 64 tokens, including blocks that the decode graph wrote.
        for kept in [50, 30] {
            engine.with_runner(|runner| runner.reset()).unwrap();
            let first = generate(&engine, &model.prompt, SamplingParams::greedy(), 60);
            assert_eq!(first.summary.cached_tokens, 0);
            let next = [&model.prompt[..], &first.tokens[..kept], &[1, 2, 3]].concat();
            let second = generate(&engine, &next, SamplingParams::greedy(), 8);
            assert!(second.summary.cached_tokens >= BLOCK_TOKENS, "{name}, {kept}: {:?}", second.summary);
            assert_greedy(&engine, &next, &second.tokens);
        }
    }
}

#[test(gpu)]
fn canceled_generation_leaves_the_graph_usable() {
    for name in GRAPH_MODELS {
        let model = GraphModel::new(name);
        let engine = model.graph();
        for tokens in 0..8 {
            let options = GenerateOptions { ignore_eos: true, ..greedy() };
            let mut stream = engine.complete_ids(&model.prompt, options).unwrap();
            for _ in 0..tokens {
                stream.next_blocking().unwrap().unwrap();
            }
            drop(stream);
            // Queued steps of a canceled request may still write to positions after its last token.
            let next = [&model.prompt[..], &[tokens, 7]].concat();
            let answer = generate(&engine, &next, SamplingParams::greedy(), 6);
            assert_greedy(&engine, &next, &answer.tokens);
        }
        let idle = stats_when_idle(&engine);
        assert_eq!((idle.running, idle.waiting, idle.ended, idle.failed), (0, 0, 16, 0), "{name}");
        assert!(idle.canceled > 0, "{name}: every request ended before it was canceled");
    }
}
