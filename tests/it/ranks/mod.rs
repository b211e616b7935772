//! Tests of several ranks that run one model together, as threads on the CPU. `on_gpus` has the tests on GPUs.
//!
//! The ranks hold different parts of the model. Two checks apply to their logits:
//! - The logits agree with transformers, or with the logits of one rank.
//! - The logits are equal bit for bit on all ranks. Otherwise, the ranks could choose different tokens.

mod faults;
mod mistakes;
#[cfg(feature = "cuda")]
mod on_gpus;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::Output;

use candle_core::{DType, Device};
use inferno::device::{self, Devices, Split};
use inferno::engine::{EngineBuilder, Request};
use inferno::kernels::exchange::{self, ExchangePath};
use inferno::models;
use inferno::nn::kv_cache::KvCache;
use inferno::runner::{RankModel, Runner, RunnerLimits, RunnerOptions};
use inferno::weights::ggml::GgmlType;
use inferno::weights::quantized::QuantizationTarget;
use inferno::weights::{Checkpoint, LoadProgress, StoredBytes, WeightsBuilder};
use inferno::world::{World, share};
use inferno::{GenerateOptions, SamplingParams};

use crate::engine::prompt_logprobs;
use crate::harness::TestCase;
use crate::runner::queued_steps;
use crate::support::engine::{Answer, cpus};
use crate::support::gguf::converter::convert;
use crate::support::gguf::models::{quantized_llama, saved};
use crate::support::program::{run, text};
use crate::support::{
    GoldenKind, QUANTIZED_GGUF_MODELS, cases, demo_dir, expected_logits, golden, golden_models, logits_of, named_cases,
    relative_error, values,
};

/// The world sizes of the tests. Depending on the model, the ranks divide the heads, the quantization blocks and the
/// vocabulary evenly or unevenly, and some ranks hold no heads or no blocks.
const SIZES: [usize; 5] = [1, 2, 3, 4, 8];

/// The context length for safetensors models, as in `models/golden.rs`.
/// LongRoPE chooses its factors by this length: at 160, phi3 uses the long factors and phi4 the short ones.
pub const CONTEXT: usize = 160;

/// Runs `work` on one thread per rank. Returns the results in the order of the ranks.
pub fn on_ranks<T: Send>(size: usize, work: impl Fn(&World) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = |world: World| {
            catch_unwind(AssertUnwindSafe(|| work(&world))).unwrap_or_else(|panic| {
                world.end("another rank panicked"); // otherwise, the other ranks would wait
                resume_unwind(panic)
            })
        };
        let threads: Vec<_> = World::threads(size).into_iter().map(|world| scope.spawn(move || run(world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns the f32 logits of all `ids` on each of `size` ranks that divide every layer and run on the CPU.
fn logits(path: &Path, size: usize, quantize: Option<QuantizationTarget>, ids: &[u32]) -> Vec<Vec<f32>> {
    logits_on(&cpus(size), Split::Tensor, DType::F32, path, quantize, ids)
}

/// Returns `world` with the given split. `Split::Layers` gives each rank about the same number of layers.
pub fn split_world(world: &World, split: Split, layers: usize) -> World {
    let stages = |size| (0..size).map(|rank| share(layers, 1, rank, size)).collect::<Vec<_>>();
    match split {
        Split::Tensor => world.clone(),
        Split::Layers => world.clone().with_stages(&stages(world.size())),
    }
}

/// Returns the logits of all `ids`, as computed by each rank, in the order of the ranks.
/// With bf16, ranks on separate GPUs may round partial results of any size to bf16, so that small models test rounding.
pub fn logits_on(
    devices: &Devices,
    split: Split,
    dtype: DType,
    path: &Path,
    quantize: Option<QuantizationTarget>,
    ids: &[u32],
) -> Vec<Vec<f32>> {
    let config = models::read_config(path).unwrap();
    let checkpoint = Checkpoint::open(path).unwrap();
    on_ranks(devices.count(), |world| {
        let device = device::open(devices.iter().nth(world.rank()).unwrap()).unwrap();
        let progress = LoadProgress::silent();
        let world = split_world(world, split, config.architecture.cache_layers().len());
        let world = if dtype == DType::BF16 { world.with_rounded_partials(0) } else { world };
        let world = exchange::connect(world, &device, &[ExchangePath::Direct]).unwrap();
        let weights = WeightsBuilder::new(&checkpoint, &device, dtype, &progress)
            .world(world)
            .quantize(quantize)
            .build()
            .unwrap();
        let context = if path.is_dir() { CONTEXT } else { ids.len() };
        let decoder = config.build(&weights, context).unwrap();
        values(&logits_of(&decoder, ids, dtype, &device).unwrap())
    })
}

/// Asserts that the logits of all ranks are equal bit for bit, and that they agree with `expected`.
pub fn assert_ranks_agree(name: &str, ranks: &[Vec<f32>], expected: &[f32], tolerance: f32) {
    let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
    assert!(ranks.iter().all(|logits| bits(logits) == bits(&ranks[0])), "{name}: the logits of the ranks differ");
    let error = relative_error(&ranks[0], expected);
    println!("{name} on {} ranks: relative error of the logits: {error:e}", ranks.len());
    assert!(error < tolerance, "{name} on {} ranks: relative error of the logits: {error:e}", ranks.len());
}

/// A model, and the logits that its ranks must compute.
struct ExpectedLogits {
    name: &'static str,
    /// The folder of the checkpoint, or the GGUF file.
    path: PathBuf,
    /// The file with the token ids and the logits of transformers.
    results: PathBuf,
    tolerance: f32,
}

impl ExpectedLogits {
    fn of_golden(name: &'static str, tolerance: f32) -> Self {
        Self { name, path: golden(name), results: golden(name).join("golden.safetensors"), tolerance }
    }

    fn of_gguf(name: &'static str) -> Self {
        let folder = golden("gguf_quantized");
        let results = folder.join(format!("{name}.safetensors"));
        Self { name, path: folder.join(format!("{name}.gguf")), results, tolerance: 1e-4 }
    }

    /// Compares the ranks of worlds of all [`SIZES`] with the expected logits.
    fn check_all_sizes(&self) {
        let (ids, expected) = expected_logits(&self.results);
        for size in SIZES {
            assert_ranks_agree(self.name, &logits(&self.path, size, None, &ids), &expected, self.tolerance);
        }
    }
}

fn families() -> Vec<TestCase<ExpectedLogits>> {
    let names = golden_models(|model| model.kind != GoldenKind::Compressed);
    named_cases(names.into_iter().map(|name| (name, ExpectedLogits::of_golden(name, 1e-4))))
}

#[test(each = families)]
fn logits_of_every_family_agree_with_transformers(model: ExpectedLogits) {
    model.check_all_sizes();
}

fn models_with_whole_layers() -> Vec<TestCase<ExpectedLogits>> {
    let compressed = [("compressed/int8_packed", 1e-4), ("compressed/fp8", 12e-2)];
    let compressed = compressed.map(|(name, tolerance)| (name, ExpectedLogits::of_golden(name, tolerance)));
    let ggufs = ["llama", "qwen3_moe", "gemma3", "gpt2", "gpt_oss"];
    let ggufs = ggufs.map(|name| (format!("{name}.gguf"), ExpectedLogits::of_gguf(name)));
    families().into_iter().chain(named_cases(compressed)).chain(named_cases(ggufs)).collect()
}

/// With `Split::Layers`, a rank computes its layers exactly as a single rank does.
/// The output head is the only matrix that is divided: each rank computes the logits of its own vocabulary range.
/// The bits of a logit do not depend on the size of this range, so all ranks get exactly the logits of a single rank.
#[test(each = models_with_whole_layers)]
fn ranks_with_whole_layers_have_exactly_the_logits_of_one_rank(model: ExpectedLogits) {
    let ExpectedLogits { name, path, results, tolerance } = &model;
    let (ids, expected) = expected_logits(results);
    let layers = models::read_config(path).unwrap().architecture.cache_layers().len();
    let one = logits(path, 1, None, &ids).remove(0);
    for size in 2..=layers {
        let ranks = logits_on(&cpus(size), Split::Layers, DType::F32, path, None, &ids);
        assert_ranks_agree(name, &ranks, &expected, *tolerance);
        assert_eq!(ranks[0], one, "the logits of {size} ranks and of one rank differ");
    }
}

fn models_of_8_bits() -> Vec<TestCase<ExpectedLogits>> {
    let models = [
        ("compressed/int8_weights", 1e-4),
        ("compressed/int8_packed", 1e-4),
        ("compressed/int8", 7e-2),
        ("compressed/fp8", 12e-2),
        ("compressed/fp8_static", 1e-4),
    ];
    named_cases(models.map(|(name, tolerance)| (name, ExpectedLogits::of_golden(name, tolerance))))
}

/// With dynamic scales, the logits of several ranks differ from transformers by about 2% (int8) and 4% (fp8):
/// as in vLLM, each rank scales the inputs of o_proj and down_proj by the largest value in its own columns.
/// With scales from the file (fp8_static), every rank uses the same scales as a single rank,
/// so dividing the model does not change how equal inputs are rounded.
/// For fp8_static, make_compressed.py chooses tokens for which the order of summation changes no rounded input.
#[test(each = models_of_8_bits)]
fn logits_of_8_bit_models_agree_with_transformers(model: ExpectedLogits) {
    model.check_all_sizes();
}

fn quantized_gguf_files() -> Vec<TestCase<ExpectedLogits>> {
    named_cases(QUANTIZED_GGUF_MODELS.map(|name| (name, ExpectedLogits::of_gguf(name))))
}

/// A quantization block in these files has 32 columns, so a block is wider than an attention head (8 to 16 columns).
/// Ranks therefore cannot divide the columns of o_proj between any two heads.
#[test(each = quantized_gguf_files)]
fn logits_of_quantized_gguf_files_agree_with_transformers(model: ExpectedLogits) {
    model.check_all_sizes();
}

fn converted_models() -> Vec<TestCase<&'static str>> {
    cases(golden_models(|model| model.has_gguf))
}

/// Compares several ranks only with one rank, because `weights/gguf/models.rs` compares one rank with transformers.
#[test(each = converted_models)]
fn gguf_files_with_floats_give_the_same_logits_as_one_rank(name: &'static str) {
    let (_folder, path) = saved(&convert(&golden(name)));
    let (ids, _) = expected_logits(&golden(name).join("golden.safetensors"));
    let one = logits(&path, 1, None, &ids).remove(0);
    for size in SIZES {
        assert_ranks_agree(name, &logits(&path, size, None, &ids), &one, 1e-4);
    }
}

fn block_formats() -> Vec<TestCase<GgmlType>> {
    cases([GgmlType::Q8_0, GgmlType::Q4K, GgmlType::Q6K])
}

#[test(each = block_formats)]
fn blocks_of_random_bits_give_the_same_logits_as_one_rank(ggml_type: GgmlType) {
    let ids: Vec<u32> = (0..20).map(|i| i * 7 % 64).collect();
    let (_folder, path) = saved(&quantized_llama(ggml_type, false));
    let expected = logits(&path, 1, None, &ids).remove(0);
    for size in SIZES {
        assert_ranks_agree(ggml_type.name(), &logits(&path, size, None, &ids), &expected, 2e-5);
    }
}

fn quantized_models() -> Vec<TestCase<(&'static str, QuantizationTarget)>> {
    let targets = ["q8_0", "q6_k", "q5_1", "q4_k", "q4_0", "q2_k", "int8", "fp8"];
    let models = ["llama_graph", "mixtral_graph", "gpt2"];
    let case = |name, target: &str| (format!("{name}::{target}"), (name, target.parse().unwrap()));
    named_cases(models.into_iter().flat_map(|name| targets.map(|target| case(name, target))))
}

#[test(each = quantized_models)]
fn quantizing_while_loading_gives_the_same_logits_as_one_rank((name, target): (&'static str, QuantizationTarget)) {
    let dir = golden(name);
    let (ids, _) = expected_logits(&dir.join("golden.safetensors"));
    let expected = logits(&dir, 1, Some(target), &ids).remove(0);
    for size in SIZES {
        assert_ranks_agree(name, &logits(&dir, size, Some(target), &ids), &expected, 2e-5);
    }
}

/// Returns the number of bytes read so far from the files that contain a checkpoint's tensors.
pub fn read_bytes(checkpoint: &Checkpoint) -> u64 {
    let tensors: Vec<StoredBytes> = match checkpoint {
        Checkpoint::Gguf(model) => {
            let tensors = model.file().tensors();
            tensors.map(|(name, _)| model.file().view(name).unwrap().bytes).collect()
        }
        Checkpoint::Safetensors(_) => {
            checkpoint.tensors().map(|(name, _)| checkpoint.view(name).unwrap().bytes).collect()
        }
    };
    let sources = tensors.iter().filter_map(|bytes| match bytes {
        StoredBytes::File(range) => Some(&range.source),
        StoredBytes::Memory(_) => None,
    });
    let sources: BTreeMap<_, _> = sources.map(|source| (&source.path, source.read_bytes())).collect();
    sources.into_values().sum()
}

#[test(each = families)]
fn all_ranks_together_read_every_byte_of_the_weights_once(model: ExpectedLogits) {
    let ExpectedLogits { name, path, results, tolerance } = &model;
    let config = models::read_config(path).unwrap();
    let (ids, expected) = expected_logits(results);
    // Loads the model on `size` ranks. Returns their logits and the number of tensor bytes read from the files.
    let load = |size: usize, split: Split, is_shared: bool| {
        let checkpoint = Checkpoint::open(path).unwrap();
        let before = read_bytes(&checkpoint);
        let logits = on_ranks(size, |world| {
            let progress = LoadProgress::silent();
            let world = split_world(world, split, config.architecture.cache_layers().len());
            let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress)
                .world(world)
                .share_reads(is_shared)
                .build()
                .unwrap();
            let decoder = config.build(&weights, CONTEXT).unwrap();
            values(&logits_of(&decoder, &ids, DType::F32, &Device::Cpu).unwrap())
        });
        (logits, read_bytes(&checkpoint) - before)
    };
    let (_, once) = load(1, Split::Tensor, false);
    assert_eq!(once, Checkpoint::open(path).unwrap().bytes());
    for (size, split) in
        [(2, Split::Tensor), (3, Split::Tensor), (4, Split::Tensor), (8, Split::Tensor), (2, Split::Layers)]
    {
        let (logits, bytes) = load(size, split, true);
        assert_eq!(bytes, once, "wrong number of bytes read on {size} ranks, {split:?}");
        assert_ranks_agree(name, &logits, &expected, *tolerance);
        assert!(load(size, split, false).1 > once, "{size} ranks: unshared reads read nothing twice");
    }
}

/// Compares answers on several ranks with answers on one rank.
/// Covers preemptions, prefix hits, stop tokens and sampling.
#[test]
fn engines_of_several_ranks_answer_like_one_rank() {
    for (size, split) in [(2, Split::Tensor), (3, Split::Tensor), (2, Split::Layers), (4, Split::Layers)] {
        let engine = queued_steps::demo().devices(cpus(size)).split(split).load().unwrap();
        assert_eq!(engine.info().ranks, size);
        queued_steps::assert_same_answers(engine, queued_steps::demo().load().unwrap(), |_, _| ());
    }
}

/// With `Split::Layers`, every rank needs a layer, so loading fails with more ranks than layers.
/// With `Split::Tensor`, a rank may hold no part of a matrix.
#[test]
fn layers_are_divided_among_no_more_ranks_than_there_are_layers() {
    let layers = models::read_config(&demo_dir()).unwrap().architecture.cache_layers().len();
    let load = |split, ranks| queued_steps::demo().devices(cpus(ranks)).split(split).load();
    assert!(load(Split::Tensor, layers + 1).is_ok() && load(Split::Layers, layers).is_ok());
    let error = load(Split::Layers, layers + 1).err().unwrap();
    let message = format!("cannot divide {layers} layers among {} devices", layers + 1);
    assert!(error.to_string().contains(&message), "{error:#}");
}

/// The progress counts the tensors that the first rank loads, each with its whole size.
/// With `Split::Layers`, the first rank loads only its own layers and the tensors that belong to no layer.
#[test]
fn load_progress_ends_at_its_total() {
    let last_progress = |split, ranks| {
        let last = Cell::new((0, 0));
        queued_steps::demo()
            .devices(cpus(ranks))
            .split(split)
            .progress(&|bytes, total| last.set((bytes, total)))
            .load()
            .unwrap();
        last.get()
    };
    let whole = Checkpoint::open(&demo_dir()).unwrap().bytes();
    assert_eq!(last_progress(Split::Tensor, 1), (whole, whole));
    assert_eq!(last_progress(Split::Tensor, 2), (whole, whole));
    let (bytes, total) = last_progress(Split::Layers, 2);
    assert!(bytes == total && total < whole, "{bytes} of {total} bytes; the checkpoint has {whole}");
}

/// The answers share the blocks of their prompt. The prompt fills its last block only in part, so every rank must copy
/// that block before an answer that shares it writes to it.
#[test]
fn several_answers_on_two_ranks_share_their_prompt_and_equal_those_of_one() {
    let answers = |builder: EngineBuilder| {
        let engine = builder.load().unwrap();
        let prompt = engine.random_tokens(3, 100);
        let cached = prompt.len() - 1;
        let sampling = SamplingParams { temperature: 1.0, ..SamplingParams::greedy() };
        let options = GenerateOptions { ignore_eos: true, max_tokens: Some(40), ..GenerateOptions::new(sampling) };
        let streams = engine.submit_n(Request::ids(prompt).options(options), 3).unwrap();
        let answers: Vec<Answer> = streams.into_iter().map(Answer::read).collect();
        assert!(answers[1..].iter().all(|answer| answer.summary.cached_tokens == cached), "{answers:?}");
        engine.with_runner(|_| ()).unwrap();
        let stats = engine.stats();
        // The second and the third answer compute the last token of the prompt again.
        assert_eq!((stats.prompt_tokens, stats.used_blocks), (102, 0), "{stats:?}");
        answers.into_iter().map(|answer| answer.tokens).collect::<Vec<_>>()
    };
    let one = answers(queued_steps::demo());
    assert!(one[0] != one[1] && one[0] != one[2], "the first answer equals another answer, so the test proves nothing");
    for split in [Split::Tensor, Split::Layers] {
        assert_eq!(answers(queued_steps::demo().devices(cpus(2)).split(split)), one, "{split:?}");
    }
}

/// Scores two prompts at once and generates a few tokens after each prompt.
/// The longer prompt takes several chunks, and the shorter prompt takes one.
#[test]
fn several_ranks_score_prompts_like_one_rank() {
    let logprobs = |builder: EngineBuilder| {
        let engine = builder.load().unwrap();
        let prompts = [engine.random_tokens(3, 200), engine.random_tokens(4, 30)];
        let options = GenerateOptions {
            prompt_logprobs: Some(2),
            max_tokens: Some(5),
            ignore_eos: true,
            ..GenerateOptions::new(SamplingParams::greedy())
        };
        let streams: Vec<_> = prompts.iter().map(|ids| engine.complete_ids(ids, options.clone()).unwrap()).collect();
        streams.into_iter().map(prompt_logprobs::read).collect::<Vec<_>>()
    };
    let one = logprobs(queued_steps::demo());
    for (size, split) in [(2, Split::Tensor), (3, Split::Tensor), (3, Split::Layers)] {
        let several = logprobs(queued_steps::demo().devices(cpus(size)).split(split));
        for ((scores, tokens), (expected, expected_tokens)) in several.iter().zip(&one) {
            assert_eq!(tokens, expected_tokens);
            assert_eq!(scores.len(), expected.len());
            for (score, expected) in scores.iter().zip(expected) {
                let is_near = |a: f32, b: f32| (a - b).abs() < 1e-3;
                assert!(is_near(score.chosen, expected.chosen), "{size} ranks, {split:?}: {score:?}, not {expected:?}");
                assert!(score.top.iter().zip(&expected.top).all(|(a, b)| a.0 == b.0 && is_near(a.1, b.1)));
            }
        }
    }
}

/// The KV cache of the second rank has too few blocks, so the first pass fails on that rank.
/// All later passes must also report the failure of that rank.
#[test]
fn if_a_rank_fails_all_passes_fail_with_its_error() {
    let dir = golden("llama_new");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let config = models::read_config(&dir).unwrap();
    let mut ranks: Vec<_> = World::threads(2)
        .into_iter()
        .map(|world| {
            let progress = LoadProgress::silent();
            let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress);
            let weights = weights.world(world.clone()).share_reads(false).build().unwrap();
            let decoder = config.build(&weights, CONTEXT).unwrap();
            let blocks = if world.is_first() { 8 } else { 1 };
            let layout = decoder.cache_layout();
            let cache = KvCache::new(layout, blocks, DType::F32, &Device::Cpu).unwrap();
            (world, RankModel { decoder, cache })
        })
        .collect();
    let (world, parts) = ranks.remove(0);
    let limits = RunnerLimits { context: CONTEXT, chunk: 64 };
    let mut runner = Runner::with_ranks(world, parts, ranks, limits, Device::Cpu, RunnerOptions::default()).unwrap();
    assert!(!runner.has_failed_rank());
    for _ in 0..3 {
        let error = runner.logits(&[1, 2, 3]).unwrap_err();
        assert_eq!(error.downcast_ref::<inferno::Error>().map(inferno::Error::exit_code), Some(7));
        let error = format!("{error:#}");
        assert!(error.contains("GPU 2 of 2 failed: ") && error.contains("the other GPUs were stopped"), "{error}");
    }
    assert!(runner.has_failed_rank());
    drop(runner); // waits for the thread of the second rank
}

/// Runs `inferno play` with a short answer.
fn play(arguments: &[&str]) -> Output {
    let prompt = ["play", "demo", "--prompt", "Hello", "--temperature", "0", "--max-tokens", "20"];
    run(&[&prompt, arguments].concat())
}

#[test]
fn play_on_a_list_of_devices_gives_the_same_answer() {
    let one = play(&["--device", "cpu"]);
    for arguments in [&["--device", "cpu,cpu"][..], &["--device", "cpu,cpu", "--split", "layers"]] {
        let two = play(arguments);
        assert!(one.status.success() && two.status.success(), "{}", text(&two.stderr));
        assert_eq!(text(&one.stdout), text(&two.stdout));
    }
}

#[test]
fn invalid_lists_of_devices_are_usage_errors() {
    for (arguments, message) in [
        (["--device", "cpu,cuda"], "a model runs on GPUs or on the CPU, not on both"),
        (["--device", "cpu,gpu"], "unknown device 'gpu'"),
        (["--gpus", "0"], "choose 1 to 8"),
        (["--gpus", "9"], "choose 1 to 8"),
        (["--device", "cuda:0,1,2,3,4,5,6,7,8"], "at most 8 devices"),
        (["--gpus", "two"], "'two' is not a number of GPUs"),
        (["--split", "rows"], "[possible values: tensor, layers]"),
    ] {
        let output = play(&arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output.stderr).contains(message), "{arguments:?}: {}", text(&output.stderr));
    }
    let both = play(&["--device", "cpu", "--gpus", "2"]);
    assert!(text(&both.stderr).contains("cannot be used with"), "{}", text(&both.stderr));
}
