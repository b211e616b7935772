//! Tests that, with `deterministic`, the tokens and log probabilities of an answer depend only on its request.

use candle_core::DType;
use inferno::device::DeviceChoice;
use inferno::engine::EngineBuilder;
use inferno::kernels::attention::AttentionBackend;
use inferno::runner::ExecutionMode;
use inferno::weights::quantized::QuantizationTarget;
use inferno::{Engine, EngineHandle, GenerateOptions, Request, RequestStream, SamplingParams};

use crate::harness::TestCase;
use crate::support::engine::GraphModel;
use crate::support::{Random, demo_dir, on_gpu};

/// The tokens of an answer, with the bits of their log probabilities.
type Bits = Vec<(u32, u32)>;

fn read(stream: RequestStream) -> Bits {
    let events = stream.into_iter().map(|event| event.unwrap());
    events.filter_map(|event| Some((event.token()?, event.logprobs()?.chosen.to_bits()))).collect()
}

fn options(index: usize, count: usize) -> GenerateOptions {
    let sampling =
        SamplingParams { temperature: [0.0, 1.0][index % 2], seed: index as u64, ..SamplingParams::greedy() };
    let max_tokens = Some(count / 2 + index % (count / 2));
    GenerateOptions { ignore_eos: true, max_tokens, logprobs: Some(0), ..GenerateOptions::new(sampling) }
}

/// Asserts that batched answers, with and without cached prefixes, equal the answers of single, uncached requests.
/// Sends `count` different prompts of fewer than `longest` tokens, for answers of fewer than `longest / 4` tokens.
fn check(engine: &EngineHandle, count: usize, longest: usize) {
    assert!(engine.info().is_deterministic);
    let shared = engine.random_tokens(1, longest);
    let prompts: Vec<Vec<u32>> = (0..count)
        .map(|index| {
            let own = engine.random_tokens(100 + index as u64, 1 + index * 37 % (longest / 2));
            let common = if index.is_multiple_of(2) { index * 29 % (longest / 2) } else { 0 };
            [&shared[..common], &own].concat()
        })
        .collect();
    let submit = |index: usize| engine.complete_ids(&prompts[index], options(index, longest / 4)).unwrap();
    let alone: Vec<Bits> = (0..count)
        .map(|index| {
            engine.with_runner(|runner| runner.reset()).unwrap();
            read(submit(index))
        })
        .collect();
    assert!(alone.iter().all(|bits| !bits.is_empty()));
    let mut random = Random(5);
    for round in 0..3 {
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by_cached_key(|_| random.next());
        let streams: Vec<_> = order.iter().map(|&index| (index, submit(index))).collect();
        for (index, stream) in streams {
            assert_eq!(
                read(stream),
                alone[index],
                "round {round}: wrong answer to a prompt of {} tokens",
                prompts[index].len()
            );
        }
    }
    // The prompt of the next turn consists of the prompt and the answer of the previous turn.
    let turn: Vec<u32> = prompts[1].iter().copied().chain(alone[1].iter().map(|&(token, _)| token)).collect();
    let ask = || read(engine.complete_ids(&turn, options(1, longest / 4)).unwrap());
    let warm = ask();
    engine.with_runner(|runner| runner.reset()).unwrap();
    assert_eq!(ask(), warm, "the answer of the next turn depends on the prefix cache");
    // Several answers to one prompt share the keys and values of the prompt.
    let request = Request::ids(prompts[1].clone()).options(options(1, longest / 4));
    let answers: Vec<Bits> = engine.submit_n(request, 3).unwrap().into_iter().map(read).collect();
    assert_eq!(answers[0], alone[1], "the first of three answers differs from a single answer");
}

fn demo() -> EngineBuilder<'static> {
    Engine::builder(demo_dir()).device(DeviceChoice::Cpu).chunk(64).deterministic(true)
}

#[test]
fn answers_depend_only_on_their_request() {
    // The KV cache has room for only two full-context sequences, so some requests are preempted.
    let engine = demo().context(400).sequences(2).load().unwrap();
    check(&engine, 14, 300);
    let stats = engine.stats();
    assert!(stats.preemptions > 0 && stats.hit_tokens > 0, "{stats:?}");
}

/// Checks that a non-deterministic engine gives deterministic requests the same answers alone and in batches.
fn check_requests(engine: &EngineHandle, count: usize, longest: usize) {
    assert!(!engine.info().is_deterministic);
    let shared = engine.random_tokens(1, longest / 2);
    let prompt = |index: usize| {
        let own = engine.random_tokens(100 + index as u64, 1 + index * 37 % (longest / 2));
        [&shared[..if index.is_multiple_of(3) { shared.len() } else { 0 }], &own].concat()
    };
    let submit = |index: usize, deterministic: bool| {
        let options = GenerateOptions { deterministic, ..options(index, longest / 4) };
        engine.complete_ids(&prompt(index), options).unwrap()
    };
    let alone = |deterministic: bool| -> Vec<Bits> {
        let answer = |index| {
            engine.with_runner(|runner| runner.reset()).unwrap();
            read(submit(index, deterministic))
        };
        (0..count).map(answer).collect()
    };
    let (deterministic, ordinary) = (alone(true), alone(false));
    let (mut random, mut differences) = (Random(6), 0);
    for round in 0..3 {
        // Ordinary requests with the same prompts leave cached prefixes that a deterministic request must not reuse.
        let mut order: Vec<(usize, bool)> = (0..2 * count).map(|index| (index / 2, index % 2 == 0)).collect();
        order.sort_by_cached_key(|_| random.next());
        let streams: Vec<_> = order.iter().map(|&(index, kind)| (index, kind, submit(index, kind))).collect();
        for (index, is_deterministic, stream) in streams {
            let bits = read(stream);
            if is_deterministic {
                assert_eq!(bits, deterministic[index], "round {round}: wrong answer to request {index}");
            } else {
                differences += usize::from(bits != ordinary[index]);
            }
        }
    }
    assert!(differences > 0, "no ordinary answer depended on other requests, so this test proves nothing");
}

#[test]
fn single_requests_can_be_deterministic() {
    let engine = || Engine::builder(demo_dir()).device(DeviceChoice::Cpu).chunk(128).context(400).sequences(2);
    for queue_steps in [false, true] {
        let engine = engine().queue_steps(queue_steps).load().unwrap();
        check_requests(&engine, 14, 300);
        let stats = engine.stats();
        assert!(stats.preemptions > 0 && stats.hit_tokens > 0, "{stats:?}");
        assert_eq!((stats.failed, stats.used_blocks), (0, 0), "{stats:?}");
    }
    // A deterministic request must get the same answer from an engine that is always deterministic.
    let options = || GenerateOptions { deterministic: true, ..options(1, 80) };
    let (one, all) = (engine().load().unwrap(), engine().deterministic(true).load().unwrap());
    let prompt = one.random_tokens(3, 300);
    let answer = |engine: &Engine| read(engine.complete_ids(&prompt, options()).unwrap());
    assert_eq!(answer(&one), answer(&all));
    let small = Engine::builder(demo_dir()).device(DeviceChoice::Cpu).chunk(63).load().unwrap();
    let error = small.complete_ids(&prompt, options()).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("deterministic"), "{error}");
}

#[test]
fn deterministic_engine_refuses_chunks_of_less_than_64_tokens() {
    for chunk in [1, 16, 63] {
        let error = demo().chunk(chunk).load().map(|_| ()).unwrap_err();
        let message = format!(
            "cannot use --deterministic with a chunk size of {chunk}: raise --chunk and --context to 64 or more"
        );
        assert_eq!(error.to_string(), message);
    }
}

#[test(flash_attn)]
fn deterministic_engine_refuses_candle_flash_attention() {
    let model = GraphModel::new("llama_graph");
    let builder = model.builder().dtype(DType::BF16).attention(AttentionBackend::CandleFlashAttn);
    let error = builder.deterministic(true).load().map(|_| ()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot use --deterministic: the attention kernel 'flash' does not support it; use --attention portable"
    );
}

/// The name of a tiny model, and the format to which its weights are quantized.
type QuantizedModel = (&'static str, Option<&'static str>);

fn models_on_a_gpu() -> Vec<TestCase<(QuantizedModel, DType)>> {
    let models: [QuantizedModel; 7] = [
        ("llama_graph", None),
        ("llama_graph", Some("q4_k")),
        ("llama_graph", Some("int8")),
        ("gpt_oss_graph", None),
        ("gemma3_graph", None),
        ("qwen3_moe_graph", None),
        ("gpt2", None),
    ];
    let named =
        |model: QuantizedModel| ([Some(model.0), model.1].into_iter().flatten().collect::<Vec<_>>().join("_"), model);
    on_gpu(models.map(named), &[DType::BF16, DType::F32])
}

#[test(each = models_on_a_gpu)]
fn answers_on_a_gpu_depend_only_on_their_request(((name, quantize), dtype): (QuantizedModel, DType)) {
    let model = GraphModel::new(name);
    let builder = || {
        let builder = model.builder().dtype(dtype).chunk(64).context(128).sequences(3);
        match quantize.map(|name: &str| name.parse::<QuantizationTarget>().unwrap()) {
            Some(quantize) => builder.quantize(quantize),
            None => builder,
        }
    };
    let engine = builder().deterministic(true).load().unwrap();
    assert_eq!(engine.execution_mode(), ExecutionMode::Graph);
    check(&engine, 20, 90);
    println!("{:?}", engine.stats());
    drop(engine);
    check_requests(&builder().load().unwrap(), 20, 90);
}
