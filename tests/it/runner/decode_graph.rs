//! Tests of the decode graph. All tests in this file need a GPU.
//!
//! - The logits match transformers and the eager decoder.
//! - Graph replay matches individual kernel launches.
//! - Sampling on the GPU matches the sampler on the host, also for NaN, infinite and equal logits.
//!   The exceptions that `sample.cu` lists are not tested.
//! - A graph can be captured while another thread opens and drops devices.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use candle_core::{DType, Device, Tensor, safetensors};
use inferno::SamplingParams;
use inferno::engine::sampling::{Sampler, argmax};
use inferno::kernels::SumOrder;
use inferno::kernels::launch::LaunchGraph;
use inferno::models;
use inferno::nn::decoder::Decoder;
use inferno::nn::kv_cache::{BlockTables, KvCache};
use inferno::nn::pass::{PassBatch, RowSelection, SequenceSpan};
use inferno::runner::{DecodeGraph, TokenSampler};
use inferno::weights::quantized::QuantizationTarget;
use inferno::weights::{Checkpoint, LoadProgress, WeightsBuilder};

use crate::harness::TestCase;
use crate::support::gguf::models::{llama_in_many_types, saved};
use crate::support::random_models::{LLAMAS, Llama, QUANTIZED_LLAMA, write_qwen3_moe};
use crate::support::{
    DTYPES_OF_16_BITS, GOLDEN_MODELS, GoldenModel, golden, gpu, logits_tolerance, on_gpu, relative_error, token_ids,
    values,
};

const CONTEXT: usize = 160;
const CHUNK: usize = 32;
const INF: f32 = f32::INFINITY;

struct Model {
    decoder: Decoder,
    cache: KvCache,
    /// The block tables of the only sequence. They list the blocks in reverse order, so that the tests fail if a kernel
    /// ignores the tables.
    tables: BlockTables,
    device: Device,
    dtype: DType,
}

impl Model {
    fn load(dir: &Path, device: &Device, dtype: DType) -> Self {
        Self::load_quantized(dir, device, dtype, None)
    }

    fn load_quantized(dir: &Path, device: &Device, dtype: DType, quantize: Option<QuantizationTarget>) -> Self {
        let checkpoint = Checkpoint::open(dir).unwrap();
        let progress = LoadProgress::silent();
        let weights = WeightsBuilder::new(&checkpoint, device, dtype, &progress).quantize(quantize).build().unwrap();
        let decoder = models::read_config(dir).unwrap().build(&weights, CONTEXT).unwrap();
        let (cache, mut tables) = KvCache::for_one_sequence(decoder.cache_layout(), CONTEXT, dtype, device).unwrap();
        for group in 0..cache.layout().groups() {
            for (index, block) in tables.table(group).to_vec().into_iter().rev().enumerate() {
                tables.set(group, index, block);
            }
        }
        Self { decoder, cache, tables, device: device.clone(), dtype }
    }

    fn fresh_cache(&self) -> KvCache {
        let layout = self.cache.layout().clone();
        KvCache::new(layout, self.cache.blocks(), self.dtype, &self.device).unwrap()
    }

    fn graph(&self) -> DecodeGraph {
        match DecodeGraph::plan(&self.decoder, &self.cache, CONTEXT).unwrap() {
            Ok(graph) => *graph,
            Err(reason) => panic!("the model has no decode graph: {reason}"),
        }
    }

    /// Prefills a prompt into the KV cache of the graph.
    fn prefill(&self, prompt: &[u32]) {
        self.forward(prompt, 0, &self.cache);
    }

    /// Runs the eager decoder on the tokens `ids`, the first of which is at `position`.
    /// Returns the logits of the last token.
    fn forward(&self, ids: &[u32], position: usize, cache: &KvCache) -> Tensor {
        let mut logits = None;
        for (index, chunk) in ids.chunks(CHUNK).enumerate() {
            let position = position + index * CHUNK;
            let span = SequenceSpan { tokens: chunk.len(), position, tables: &self.tables };
            let batch =
                PassBatch { ids: chunk, sequences: &[span], rows: RowSelection::Last, sum_order: SumOrder::Fastest };
            logits = Some(self.decoder.forward(&batch, cache).unwrap());
        }
        logits.unwrap()
    }
}

/// Where the weights of a test case come from.
#[derive(Clone, Copy)]
enum WeightSource {
    Golden(&'static GoldenModel),
    RandomLlama(&'static Llama),
    /// [`QUANTIZED_LLAMA`], quantized while loading.
    QuantizedLlama(QuantizationTarget),
    /// A Qwen3 MoE model with random weights, quantized while loading.
    QuantizedExperts(QuantizationTarget),
    /// A GGUF file in which the q, k and v projections have three different formats, and the embedding is quantized.
    MixedTypes,
}

impl WeightSource {
    fn load(self, dtype: DType) -> Model {
        let (device, folder) = (gpu(), tempfile::tempdir().unwrap());
        let dir = folder.path();
        match self {
            WeightSource::Golden(model) => Model::load(&golden(model.name), &device, dtype),
            WeightSource::RandomLlama(llama) => {
                llama.write(dir);
                Model::load(dir, &device, dtype)
            }
            WeightSource::QuantizedLlama(quantize) => {
                QUANTIZED_LLAMA.write(dir);
                Model::load_quantized(dir, &device, dtype, Some(quantize))
            }
            WeightSource::QuantizedExperts(quantize) => {
                write_qwen3_moe(dir);
                Model::load_quantized(dir, &device, dtype, Some(quantize))
            }
            WeightSource::MixedTypes => {
                let (_folder, file) = saved(&llama_in_many_types());
                Model::load(&file, &device, dtype)
            }
        }
    }

    /// Like [`load`](Self::load), but if the graph can choose other experts than the eager decoder,
    /// first [changes the weights](fix_experts) so that both must choose the same experts.
    fn load_with_fixed_experts(self, dtype: DType) -> Model {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let quantize = match self {
            WeightSource::Golden(model) if model.can_graph_choose_other_experts => {
                for file in ["config.json", "model.safetensors"] {
                    fs::copy(golden(model.name).join(file), dir.join(file)).unwrap();
                }
                None
            }
            WeightSource::QuantizedExperts(quantize) => {
                write_qwen3_moe(dir);
                Some(quantize)
            }
            _ => return self.load(dtype),
        };
        fix_experts(dir);
        Model::load_quantized(dir, &gpu(), dtype, quantize)
    }
}

/// Changes the weights of the checkpoint in `dir` so that the input token alone determines which experts run.
/// Rounding cannot change the choice, because no two router logits are close. All experts run about equally often.
///
/// - The router logit of expert e is element e of the normalized residual stream.
/// - In an embedding, the elements for the experts are evenly spaced numbers from -1 to 1.
///   Their order depends on the token.
/// - Attention and MLPs add zeros to these elements, so all layers receive the elements of the embedding.
fn fix_experts(dir: &Path) {
    let file = dir.join("model.safetensors");
    let mut tensors = safetensors::load(&file, &Device::Cpu).unwrap();
    let (_, router) = tensors.iter().find(|(name, _)| name.ends_with(".gate.weight")).unwrap();
    let experts = router.dim(0).unwrap();
    for (name, tensor) in &mut tensors {
        let columns = *tensor.dims().last().unwrap();
        let fixed = |row: usize, column: usize| match name.trim_end_matches(".weight").rsplit('.').next().unwrap() {
            "gate" => Some(f32::from(row == column)),
            "post_attention_layernorm" if column < experts => Some(1.0),
            "embed_tokens" if column < experts => {
                Some(((row + column) % experts) as f32 / (experts - 1) as f32 * 2.0 - 1.0)
            }
            // Mixtral calls down_proj `w2`.
            "o_proj" | "down_proj" | "w2" if row < experts => Some(0.0),
            _ => None,
        };
        let mut elements = values(tensor);
        for (index, element) in elements.iter_mut().enumerate() {
            *element = fixed(index / columns, index % columns).unwrap_or(*element);
        }
        let changed = Tensor::from_vec(elements, tensor.shape(), &Device::Cpu).unwrap();
        *tensor = changed.to_dtype(tensor.dtype()).unwrap();
    }
    safetensors::save(&tensors, &file).unwrap();
}

/// Returns the golden models that the graph supports, with their names.
fn golden_models() -> impl Iterator<Item = (String, &'static GoldenModel)> {
    GOLDEN_MODELS.iter().filter(|model| model.graph_ranks > 0).map(|model| (model.name.to_string(), model))
}

/// Returns [`golden_models`], and models with random weights, some of them quantized.
fn sources() -> Vec<(String, WeightSource)> {
    let llamas = LLAMAS.iter().map(|(name, llama)| (format!("llama_{name}"), WeightSource::RandomLlama(llama)));
    let quantized =
        |model: &'static str, names: &'static [&'static str], source: fn(QuantizationTarget) -> WeightSource| {
            names.iter().map(move |name| (format!("{model}_in_{name}"), source(name.parse().unwrap())))
        };
    let llama_formats = &["q8_0", "q4_k", "q2_k", "q3_k", "q5_1", "fp8", "int8"];
    let expert_formats = &["q8_0", "q4_k", "q6_k", "q5_0", "fp8", "int8"];
    golden_models()
        .map(|(name, model)| (name, WeightSource::Golden(model)))
        .chain(llamas)
        .chain(quantized("llama", llama_formats, WeightSource::QuantizedLlama))
        .chain(quantized("experts", expert_formats, WeightSource::QuantizedExperts))
        .chain([("llama_with_mixed_types".to_string(), WeightSource::MixedTypes)])
        .collect()
}

fn golden_models_in_16_bits() -> Vec<TestCase<(&'static GoldenModel, DType)>> {
    on_gpu(golden_models(), &DTYPES_OF_16_BITS)
}

fn models_in_16_bits() -> Vec<TestCase<(WeightSource, DType)>> {
    on_gpu(sources(), &DTYPES_OF_16_BITS)
}

/// Returns the largest allowed relative error between the logits of the graph and of the eager decoder.
/// The two round at different places, and the errors accumulate over the layers. One rounding changes a value by up to
/// 2^-11 of its size in f16 and 2^-8 in bf16. The limits are 20 and 13 such errors.
fn eager_tolerance(dtype: DType) -> f32 {
    if dtype == DType::F16 { 1e-2 } else { 5e-2 }
}

fn prompt(model: &Model, tokens: usize) -> Vec<u32> {
    let vocab = model.decoder.vocab_size() as u32;
    (0..tokens as u32).map(|i| (i * 31 + 7) % vocab).collect()
}

/// Compares the logits of all steps with transformers. In f16, also compares greedy tokens.
#[test(each = golden_models_in_16_bits)]
fn graph_steps_match_transformers((case, dtype): (&'static GoldenModel, DType)) {
    let model = WeightSource::Golden(case).load(dtype);
    let golden = safetensors::load(golden(case.name).join("golden.safetensors"), &Device::Cpu).unwrap();
    let ids = |name: &str| token_ids(&golden[name]);
    let mut graph = model.graph();
    let mut got = Vec::new();
    for (position, &id) in ids("ids").iter().enumerate() {
        graph.start(0, position, id, None, &model.tables).unwrap();
        graph.next(1).unwrap();
        got.extend(values(graph.logits()));
    }
    let error = relative_error(&got, &values(&golden["logits"]));
    println!("relative error of the logits: {error:e}");
    let limit = logits_tolerance(dtype);
    assert!(error < limit, "relative error of the logits: {error:e}, limit: {limit:e}");

    // In bf16, rounding may change the greedy token in a near tie, so compare greedy tokens only in f16.
    if dtype == DType::F16 {
        let (prompt, want) = (ids("greedy_prompt"), ids("greedy"));
        let (last, rest) = prompt.split_last().unwrap();
        model.prefill(rest);
        graph.start(0, rest.len(), *last, None, &model.tables).unwrap();
        let tokens: Vec<u32> = (1..=want.len()).rev().map(|left| graph.next(left).unwrap()).collect();
        assert_eq!(tokens, want);
    }
}

#[test(gpu)]
fn unsupported_models_get_a_reason() {
    let device = gpu();
    let reason = |case, dtype| {
        let model = Model::load(&golden(case), &device, dtype);
        match DecodeGraph::plan(&model.decoder, &model.cache, CONTEXT).unwrap() {
            Ok(_) => String::new(),
            Err(reason) => reason.to_string(),
        }
    };
    assert!(reason("gpt_oss", DType::BF16).contains("MXFP4 scale"));
    assert!(reason("llama2", DType::BF16).contains("head size 8"));
    assert!(reason("gemma2", DType::BF16).contains("head size 10"));
    assert!(reason("gpt2", DType::BF16).contains("LayerNorm"));
    assert!(reason("mixtral", DType::BF16).contains("head size 6"));
    assert!(reason("llama_graph", DType::F32).contains("F32"));
}

/// Decodes beyond the sliding windows and across blocks, up to the end of the context.
#[test(each = models_in_16_bits)]
fn graph_steps_match_the_eager_decoder((source, dtype): (WeightSource, DType)) {
    let model = source.load_with_fixed_experts(dtype);
    let mut graph = model.graph();
    let prompt = prompt(&model, 21);
    let eager = model.fresh_cache();
    model.prefill(&prompt);
    model.forward(&prompt, 0, &eager);
    let (allowed, mut token) = (eager_tolerance(dtype), 3);
    for position in prompt.len()..CONTEXT {
        // Restart the graph at each position, because the test itself chooses each input token.
        graph.start(0, position, token, None, &model.tables).unwrap();
        let next = graph.next(1).unwrap();
        let got = values(graph.logits());
        let want = values(&model.forward(&[token], position, &eager));
        let error = relative_error(&got, &want);
        assert!(error < allowed, "position {position}: relative error of the logits: {error:e}");
        assert_eq!(next, argmax(&got), "position {position}");
        token = (next * 7 + position as u32) % got.len() as u32;
    }
}

#[test(each = models_in_16_bits)]
fn graph_replay_matches_single_launches((source, dtype): (WeightSource, DType)) {
    let model = source.load(dtype);
    let prompt = prompt(&model, 40);
    let steps = CONTEXT - prompt.len();
    let mut graph = model.graph();
    let mut runs = Vec::new();
    for use_graph in [true, false, true] {
        model.prefill(&prompt);
        graph.start(0, prompt.len(), 5, None, &model.tables).unwrap();
        let step = |left: usize| if use_graph { graph.next(left).unwrap() } else { graph.next_ungraphed().unwrap() };
        let tokens: Vec<u32> = (1..=steps).rev().map(step).collect();
        runs.push((tokens, values(graph.logits())));
    }
    assert!(runs[0] == runs[1], "the tokens or logits of the graph and of single launches differ");
    assert!(runs[0] == runs[2], "the tokens or logits of two graph runs differ");
}

/// Simulates the next turn of a chat: an eager prefill continues from keys and values that the graph wrote.
/// The graph has also written keys and values at later positions, partly in queued steps. The prefill must ignore them.
#[test(each = models_in_16_bits)]
fn next_turn_continues_from_the_cache_of_graph_steps((source, dtype): (WeightSource, DType)) {
    let model = source.load_with_fixed_experts(dtype);
    let (opening, steps) = (prompt(&model, 37), 45);
    let mut graph = model.graph();
    for length in [opening.len() + steps - 2, opening.len() + 20, opening.len()] {
        model.prefill(&opening);
        graph.start(0, opening.len(), 5, None, &model.tables).unwrap();
        let answer: Vec<u32> = (0..steps).map(|_| graph.next(CONTEXT - opening.len() - steps).unwrap()).collect();
        assert!(graph.queued_steps() > 0);
        graph.drain().unwrap();
        let mut ids = [&opening[..], &[5], &answer[..]].concat();
        ids.truncate(length);
        ids.extend(prompt(&model, 9));
        let want = values(&model.forward(&ids, 0, &model.fresh_cache()));
        let error = relative_error(&values(&model.forward(&ids[length..], length, &model.cache)), &want);
        let allowed = eager_tolerance(dtype);
        assert!(error < allowed, "after {length} tokens: relative error of the logits: {error:e}");
    }
}

#[test(each = models_in_16_bits)]
fn device_sampling_matches_host_sampling((source, dtype): (WeightSource, DType)) {
    let base = SamplingParams { temperature: 1.0, seed: 11, ..SamplingParams::greedy() };
    let cases = [
        base.clone(),
        SamplingParams { temperature: 0.6, seed: 1 << 40, ..base.clone() },
        SamplingParams { top_k: 7, temperature: 1.7, ..base.clone() },
        SamplingParams { top_p: 0.7, ..base.clone() },
        SamplingParams { top_p: 0.0, ..base.clone() },
        SamplingParams { min_p: 0.3, ..base.clone() },
        SamplingParams { top_k: 50, top_p: 0.9, min_p: 0.02, temperature: 1.3, ..base.clone() },
        SamplingParams { repetition_penalty: 1.3, frequency_penalty: 0.2, presence_penalty: -0.1, ..base.clone() },
        SamplingParams { temperature: 0.0, repetition_penalty: 1.5, ..base.clone() },
    ];
    let model = source.load(dtype);
    let prompt = prompt(&model, 21);
    let mut graph = model.graph();
    for params in &cases {
        model.prefill(&prompt);
        let mut host = Sampler::new(params.clone(), &prompt);
        let mut token = 3;
        for position in prompt.len()..CONTEXT {
            graph.start(0, position, token, host.on_device(), &model.tables).unwrap();
            token = graph.next(1).unwrap();
            let want = host.sample(&mut values(graph.logits()));
            assert_eq!(token, want, "wrong token at position {position}, {params:?}");
        }
        // Two runs with the same parameters and seed must generate the same tokens.
        let host = Sampler::new(params.clone(), &prompt);
        let run = |graph: &mut DecodeGraph| -> Vec<u32> {
            graph.start(0, prompt.len(), 3, host.on_device(), &model.tables).unwrap();
            (0..30).map(|step| graph.next(30 - step).unwrap()).collect()
        };
        assert_eq!(run(&mut graph), run(&mut graph), "two runs differ: {params:?}");
    }
}

/// Returns 301 logits: the logits in `special`, and -3 for all other tokens.
fn logits_with(special: &[(usize, f32)]) -> Vec<f32> {
    let mut logits = vec![-3.0; LLAMAS[0].1.vocab_size];
    special.iter().for_each(|&(token, logit)| logits[token] = logit);
    logits
}

/// The sampling kernel treats NaN, infinite and equal logits as the sampler on the host does.
/// The cases include greedy sampling, because this kernel also chooses the first greedy token after an eager prefill:
/// the greedy kernel needs maxima that an eager prefill does not compute.
#[test(gpu)]
fn special_logits_are_sampled_as_on_the_host() {
    let (device, dir) = (gpu(), tempfile::tempdir().unwrap());
    LLAMAS[0].1.write(dir.path());
    let model = Model::load(dir.path(), &device, DType::BF16);
    let mut graph = model.graph();
    let vocab = model.decoder.vocab_size();
    let mut start = |logits: &[f32], host: &Sampler| {
        let logits = Tensor::new(logits, &device).unwrap().unsqueeze(0).unwrap();
        graph.start_from(0, 1, &logits, host.on_device(), &model.tables).unwrap();
        graph.next(1)
    };

    let greedy = SamplingParams::greedy();
    let penalties = SamplingParams { repetition_penalty: 1.5, presence_penalty: 0.5, ..greedy.clone() };
    let mut all_params = vec![greedy.clone(), penalties];
    for seed in 0..20 {
        all_params.push(SamplingParams { temperature: 1.0, seed, ..greedy.clone() });
        // No case uses top-k or top-p, because the kernel keeps all tokens that tie at the cutoff, unlike the host.
        all_params.push(SamplingParams { temperature: 0.5, min_p: 0.1, seed, ..greedy.clone() });
    }
    let mut only_one = vec![-INF; vocab];
    only_one[9] = -40.0;
    let cases = [
        ("NaN", logits_with(&[(0, f32::NAN), (7, f32::NAN), (5, 2.0), (6, 1.5), (300, f32::NAN)])),
        ("-inf", logits_with(&[(0, -INF), (299, 2.0), (300, -INF)])),
        ("-inf except for one logit", only_one),
        ("inf", logits_with(&[(11, INF), (200, f32::NAN), (280, 9.0)])),
        ("two inf", logits_with(&[(11, INF), (280, INF)])),
        ("ties", logits_with(&[(4, 5.0), (200, 5.0), (300, 5.0)])),
        ("all equal", vec![1.0; vocab]),
        ("zeros", logits_with(&[(3, -0.0), (8, 0.0), (250, -0.0)])),
    ];
    for (name, logits) in &cases {
        for params in &all_params {
            let mut host = Sampler::new(params.clone(), &[1, 2]);
            let token = start(logits, &host).unwrap();
            let want = host.sample(&mut logits.clone());
            assert_eq!(token, want, "{name}, {params:?}");
            assert!(logits[token as usize] > -INF, "{name}, {params:?}");
        }
    }
    // If all logits are NaN or -inf, the step fails. Afterward, the graph can be started again.
    for logits in [vec![f32::NAN; vocab], vec![-INF; vocab], [vec![f32::NAN; 150], vec![-INF; 151]].concat()] {
        for params in [&all_params[0], &all_params[1], &all_params[2]] {
            let host = Sampler::new(params.clone(), &[1, 2]);
            let error = start(&logits, &host).unwrap_err();
            assert!(error.to_string().contains("every logit is NaN or -inf"), "{error}");
            assert_eq!(start(&cases[2].1, &host).unwrap(), 9);
        }
    }
}

/// Like `argmax` on the host, the greedy kernel chooses the lowest id in a tie and ignores NaN logits.
/// If all logits are NaN, the step fails.
#[test(gpu)]
fn special_logits_of_greedy_steps_follow_the_host() {
    let device = gpu();
    let (_, llama) = &LLAMAS[0];
    assert!(!llama.tied);
    // Returns a model in which each row `row` of the output head is row `row_of(row)` of the original head,
    // or NaN if `row_of` returns `None`.
    let graph_with_head = |row_of: &dyn Fn(usize) -> Option<usize>| {
        let dir = tempfile::tempdir().unwrap();
        llama.write(dir.path());
        let file = dir.path().join("model.safetensors");
        let mut tensors = safetensors::load(&file, &Device::Cpu).unwrap();
        let head = tensors["lm_head.weight"].to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
        let nan = vec![f32::NAN; llama.hidden_size];
        let rows: Vec<f32> =
            (0..head.len()).flat_map(|row| row_of(row).map_or(&nan, |row| &head[row]).clone()).collect();
        let head = Tensor::from_vec(rows, (llama.vocab_size, llama.hidden_size), &Device::Cpu).unwrap();
        tensors.insert("lm_head.weight".into(), head.to_dtype(DType::BF16).unwrap());
        safetensors::save(&tensors, &file).unwrap();
        Model::load(dir.path(), &device, DType::BF16)
    };
    // Rows 150 to 299 of the output head equal rows 0 to 149, so most steps have a tie for the largest logit.
    let model = graph_with_head(&|row| Some(if (150..300).contains(&row) { row - 150 } else { row }));
    let mut graph = model.graph();
    let (mut token, mut ties) = (3, 0);
    for position in 0..40 {
        graph.start(0, position, token, None, &model.tables).unwrap();
        let next = graph.next(1).unwrap();
        let logits = values(graph.logits());
        assert_eq!(next, argmax(&logits), "at {position}");
        ties += usize::from(logits.iter().filter(|&&logit| logit == logits[next as usize]).count() > 1);
        token = (next * 7 + position as u32) % logits.len() as u32;
    }
    assert!(ties > 20, "only {ties} of 40 steps had a tie for the largest logit");

    let model = graph_with_head(&|row| (row % 3 != 0).then_some(row));
    let mut graph = model.graph();
    for position in 0..10 {
        graph.start(0, position, 5, None, &model.tables).unwrap();
        let next = graph.next(1).unwrap();
        let logits = values(graph.logits());
        assert!(logits[0].is_nan() && logits[300].is_nan());
        assert_eq!(next, argmax(&logits), "at {position}");
    }

    let model = graph_with_head(&|_| None);
    let mut graph = model.graph();
    for use_graph in [true, false] {
        graph.start(0, 0, 5, None, &model.tables).unwrap();
        let token = if use_graph { graph.next(1) } else { graph.next_ungraphed() };
        let error = token.unwrap_err();
        assert!(error.to_string().contains("every logit is NaN or -inf"), "{error}");
    }
}

/// Without `capture_lock`, most of these captures would fail with `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`.
#[test(gpu_alone)]
fn graphs_are_captured_while_another_thread_opens_and_drops_devices() {
    let device = gpu();
    let ones = Tensor::ones(64, DType::F32, &device).unwrap();
    let stop = AtomicBool::new(false);
    let opened = thread::scope(|scope| {
        let opener = scope.spawn(|| {
            let mut opened = 0;
            while !stop.load(Ordering::Relaxed) {
                drop(gpu());
                opened += 1;
            }
            opened
        });
        let enqueue = || {
            for _ in 0..50 {
                ones.zero_set()?;
                thread::sleep(Duration::from_micros(20));
            }
            Ok(())
        };
        let captures = (0..200).map(|_| {
            thread::sleep(Duration::from_millis(2)); // gives the other thread a chance to acquire the lock
            // SAFETY: the launches only use `ones`, which outlives the graphs. No other thread uses this stream.
            unsafe { LaunchGraph::capture_with(device.as_cuda_device()?, enqueue) }
        });
        let graphs = captures.collect::<Result<Vec<_>, _>>();
        stop.store(true, Ordering::Relaxed);
        let opened = opener.join().unwrap();
        let graphs = graphs.unwrap();
        assert_eq!(graphs[0].nodes().unwrap(), 50);
        graphs[0].enqueue().unwrap();
        opened
    });
    assert!(opened > 5, "only {opened} devices were opened during the captures");
    assert_eq!(values(&ones), [0.0; 64]);
}
