//! Tests of tiny models that decode with a CUDA graph.

use candle_core::DType;
use inferno::device::DeviceChoice;
use inferno::engine::FinishReason;
use inferno::nn::kv_cache::BLOCK_TOKENS;
use inferno::runner::ExecutionMode;
use inferno::{Engine, GenerateOptions, SamplingParams};

use super::requests::assert_memory_stays_flat;
use super::{break_embedding, different_prompts, stats_when_idle};
use crate::engine::models;
use crate::harness::{Need, TestCase};
use crate::support::engine::{Answer, GraphModel, assert_greedy, generate, generate_at_once, greedy, sampling};

/// Returns tiny models that the decode graph supports. Every model has layers with a sliding window.
fn graph_models() -> Vec<TestCase<&'static str>> {
    models(&["mistral", "gpt_oss_graph", "gemma3_graph"], Some(Need::Gpu))
}

#[test(each = graph_models)]
fn graph_continues_a_prompt_with_greedy_tokens(name: &'static str) {
    let model = GraphModel::new(name);
    let engine = model.graph();
    let tokens = generate(&engine, &model.prompt, SamplingParams::greedy(), 24).tokens;
    assert_eq!(tokens.len(), 24);
    assert_greedy(&engine, &model.prompt, &tokens);
}

#[test(gpu)]
fn graph_and_eager_steps_give_the_same_tokens() {
    let model = GraphModel::new("mistral");
    let engines = [model.graph(), model.load(110, ExecutionMode::Eager)];
    let [graph, eager] = engines.each_ref().map(|engine| generate(engine, &model.prompt, SamplingParams::greedy(), 24));
    assert_eq!(graph.tokens, eager.tokens);
    assert_eq!(
        (graph.summary.execution_mode, eager.summary.execution_mode),
        (ExecutionMode::Graph, ExecutionMode::Eager)
    );
}

#[test(each = graph_models)]
fn graph_samples_the_same_tokens_with_the_same_seed(name: &'static str) {
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
    assert_eq!(a, b);
    assert_ne!(a, c);
    // Greedy steps use a decode graph of their own, which must still work after sampled steps.
    let tokens = generate(&engine, &model.prompt, SamplingParams::greedy(), 8).tokens;
    assert_greedy(&engine, &model.prompt, &tokens);
}

#[test(each = graph_models)]
fn graph_ends_at_the_context_limit(name: &'static str) {
    let model = GraphModel::new(name);
    let context = model.prompt.len() + 10;
    let engine = model.load(context, ExecutionMode::Graph);
    for _ in 0..2 {
        let options = GenerateOptions { ignore_eos: true, ..greedy() };
        let answer = Answer::read(engine.complete_ids(&model.prompt, options).unwrap());
        assert_eq!((answer.summary.finish_reason, answer.tokens.len()), (FinishReason::Length, 10));
        assert_eq!(answer.summary.context_used, context);
        assert_greedy(&engine, &model.prompt, &answer.tokens);
    }
}

#[test(each = graph_models)]
fn graph_reuses_the_prefix_of_an_earlier_request(name: &'static str) {
    let model = GraphModel::new(name);
    let engine = model.load(128, ExecutionMode::Graph);
    // The prefix cache reuses whole blocks of 64 tokens.
    // If the prompt is shorter, the decode graph has written the rest of the block.
    for kept in [50, 30] {
        engine.with_runner(|runner| runner.reset()).unwrap();
        let first = generate(&engine, &model.prompt, SamplingParams::greedy(), 60);
        assert_eq!(first.summary.cached_tokens, 0);
        let next = [&model.prompt[..], &first.tokens[..kept], &[1, 2, 3]].concat();
        let second = generate(&engine, &next, SamplingParams::greedy(), 8);
        assert!(second.summary.cached_tokens >= BLOCK_TOKENS, "{kept}: {:?}", second.summary);
        assert_greedy(&engine, &next, &second.tokens);
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
    // A request that ends before the failing step must succeed, with greedy decoding and with sampling.
    assert_eq!(generate(&engine, prompt, SamplingParams::greedy(), last + 1).tokens, tokens[..=last]);
    assert_eq!(generate(&engine, prompt, sampling(|p| p.top_k = 1), last + 1).tokens, tokens[..=last]);
    // The sampling kernel chooses the first token after an eager prefill, even with greedy decoding.
    // NaN logits must also be an error for this first token.
    for sampling in [SamplingParams::greedy(), sampling(|p| p.seed = 1)] {
        let options = GenerateOptions { sampling, ..options() };
        let (seen, error) = read(&[&prompt[..], &tokens[last..=last]].concat(), options);
        assert!(seen.is_empty() && error.contains("every logit is NaN or -inf"), "{seen:?} {error}");
    }
    assert_eq!(generate(&engine, prompt, SamplingParams::greedy(), last + 1).tokens, tokens[..=last]);
    let idle = stats_when_idle(&engine);
    assert_eq!((idle.ended, idle.failed), (6, 3));
}

#[test(each = graph_models)]
fn canceled_generation_leaves_the_graph_usable(name: &'static str) {
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
    assert_eq!((idle.running, idle.waiting, idle.ended, idle.failed), (0, 0, 16, 0));
    assert!(idle.canceled > 0, "every request ended before it was canceled");
}

#[test(each = graph_models)]
fn batches_continue_prompts_with_greedy_tokens(name: &'static str) {
    let model = GraphModel::new(name);
    let builder = Engine::builder(&model.dir).device(DeviceChoice::FirstCuda).dtype(DType::F16);
    let engine = builder.context(120).chunk(64).sequences(8).load().unwrap();
    let prompts = different_prompts(&engine, 21, 80);
    // The batch shrinks as requests end, so the test runs the batch graphs of several batch sizes.
    let answers = generate_at_once(&engine, &prompts, &SamplingParams::greedy(), 24);
    for (prompt, answer) in prompts.iter().zip(&answers) {
        assert_eq!(answer.tokens.len(), 24);
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

#[test(gpu)]
fn many_requests_leave_gpu_memory_flat() {
    let model = GraphModel::new("mistral");
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
