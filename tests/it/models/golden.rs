//! Compares inferno with transformers for every model family. Scripts in `tests/golden` record the expected results.
//!
//! The tests compare logits, the residual stream after each layer, mean NLL, greedy continuations and RoPE frequencies.
//! Chunked prefill, batching, prefix reuse, forks and preemption may change the logits only by rounding errors.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor, safetensors};
use inferno::engine::blocks::{BlockHashes, BlockManager, SequenceBlocks};
use inferno::engine::sampling::argmax;
use inferno::kernels::SumOrder;
use inferno::models;
use inferno::nn::decoder::Decoder;
use inferno::nn::kv_cache::{BLOCK_TOKENS, BlockTables, KvCache};
use inferno::nn::pass::{PassBatch, RowSelection, SequenceSpan};
use inferno::nn::rope::{RopeConfig, RopeLengths};
use inferno::weights::{Checkpoint, LoadProgress, WeightsBuilder};

use crate::harness::TestCase;
use crate::support::{GOLDEN_MODELS, GoldenKind, GoldenModel, Random, TestDevice};
use crate::support::{golden, logits_tolerance, on_devices, relative_error, token_ids, values};

const CONTEXT: usize = 160;

/// A golden model, and the device and dtype with which a test runs it.
type ModelOnDevice = (&'static GoldenModel, TestDevice);

/// A loaded golden model, with the results of transformers.
struct Case {
    model: &'static GoldenModel,
    decoder: Decoder,
    device: Device,
    dtype: DType,
    ids: Vec<u32>,
    golden: HashMap<String, Tensor>,
}

fn load((model, device): ModelOnDevice) -> Case {
    let (device, dtype) = device.open();
    let dir = golden(model.name);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let progress = LoadProgress::silent();
    let weights = WeightsBuilder::new(&checkpoint, &device, dtype, &progress).build().unwrap();
    let decoder = models::read_config(&dir).unwrap().build(&weights, CONTEXT).unwrap();
    let golden = safetensors::load(dir.join("golden.safetensors"), &Device::Cpu).unwrap();
    let ids = token_ids(&golden["ids"]);
    Case { model, decoder, device, dtype, ids, golden }
}

/// A KV cache for one sequence, with `len` cached tokens.
struct OneSequence {
    cache: KvCache,
    tables: BlockTables,
    len: usize,
}

/// A KV cache for several sequences, with its block manager.
struct SharedCache<'c> {
    case: &'c Case,
    cache: KvCache,
    blocks: BlockManager,
    /// Whether `step` repeats each pass with [`RowSelection::Last`], and compares the last logits of each sequence.
    compares_last_rows: bool,
}

/// A sequence in a shared cache.
/// `logits` has a row for each token that `step` computed, but none for tokens that were cached at the start.
struct Member {
    ids: Vec<u32>,
    blocks: SequenceBlocks,
    logits: Vec<f32>,
}

impl Case {
    fn cache(&self) -> OneSequence {
        let (cache, tables) =
            KvCache::for_one_sequence(self.decoder.cache_layout(), CONTEXT, self.dtype, &self.device).unwrap();
        OneSequence { cache, tables, len: 0 }
    }

    /// Creates a cache with blocks for `sequences` sequences of `CONTEXT` tokens.
    fn shared_cache(&self, sequences: usize) -> SharedCache<'_> {
        let layout = self.decoder.cache_layout();
        let blocks = 1 + sequences * layout.peak_blocks(CONTEXT, CONTEXT);
        let manager = BlockManager::new(layout.windows().to_vec(), blocks);
        let cache = KvCache::new(layout, blocks, self.dtype, &self.device).unwrap();
        SharedCache { case: self, cache, blocks: manager, compares_last_rows: false }
    }

    /// Runs `ids` in one pass, after the tokens that are already cached. Returns the logits of all `ids`.
    fn append(&self, sequence: &mut OneSequence, ids: &[u32]) -> Vec<f32> {
        let span = SequenceSpan { tokens: ids.len(), position: sequence.len, tables: &sequence.tables };
        let batch = PassBatch { ids, sequences: &[span], rows: RowSelection::All, sum_order: SumOrder::Fastest };
        sequence.len += ids.len();
        values(&self.decoder.forward(&batch, &sequence.cache).unwrap())
    }

    /// Runs `ids` in chunks of `chunk` tokens, starting with an empty cache. Returns the logits of all `ids`.
    fn logits(&self, ids: &[u32], chunk: usize) -> Vec<f32> {
        let mut sequence = self.cache();
        ids.chunks(chunk).flat_map(|part| self.append(&mut sequence, part)).collect()
    }

    /// Returns `count` random token ids from the model's vocabulary.
    fn random_ids(&self, random: &mut Random, count: usize) -> Vec<u32> {
        let vocab = self.golden["logits"].dim(1).unwrap();
        (0..count).map(|_| random.below(vocab) as u32).collect()
    }

    fn tolerance(&self) -> f32 {
        tolerance(self.model.name, self.dtype, self.device.is_cuda())
    }

    /// Asserts that two results differ at most by rounding errors. `what` describes `actual` in the error message.
    ///
    /// In f32, only the order of summation differs. The limit is about ten times the rounding error of transformers in
    /// f32, which is at most 2.4e-6 (`float64_relative_error` in `tests/golden/provenance.json`).
    fn assert_same(&self, what: &str, actual: &[f32], expected: &[f32]) {
        let error = relative_error(actual, expected);
        let tolerance = if self.dtype == DType::F32 { 2e-5 } else { self.tolerance() };
        assert!(error < tolerance, "relative error of {what}: {error:e}");
    }
}

/// Returns the largest allowed relative error of logits and of the residual stream, compared with transformers in f32.
/// In bf16 and f16, relative rounding errors of 2^-8 and 2^-11 accumulate over the layers.
fn tolerance(model: &str, dtype: DType, is_gpu: bool) -> f32 {
    match (dtype, model) {
        // transformers in bf16 differs from transformers in f32 by 3.3% (int8), 5.6% (fp8) and 9.1% (fp8_static).
        // The tolerances are about twice the errors of transformers in bf16.
        // On a GPU, f32 needs the FP8 tolerances too: tensor cores accumulate FP8 products with only about 13 bits,
        // so a quantized activation can change.
        (_, "compressed/fp8") if dtype != DType::F32 || is_gpu => 12e-2,
        (_, "compressed/fp8_static") if dtype != DType::F32 || is_gpu => 19e-2,
        (DType::BF16 | DType::F16, "compressed/int8") => 7e-2,
        (dtype, _) => logits_tolerance(dtype),
    }
}

fn models_on_devices(is_selected: impl Fn(&GoldenModel) -> bool) -> Vec<TestCase<ModelOnDevice>> {
    on_devices(GOLDEN_MODELS.iter().filter(|model| is_selected(model)).map(|model| (model.name, model)))
}

fn uncompressed() -> Vec<TestCase<ModelOnDevice>> {
    models_on_devices(|model| model.kind != GoldenKind::Compressed)
}

/// Like [`uncompressed`], but without MoE models in 16-bit dtypes. For tests that run random token ids in two ways:
/// if sums have another order, rounding can change the experts that a router chooses, and thereby all later logits.
fn with_stable_routing() -> Vec<TestCase<ModelOnDevice>> {
    let is_stable = |(model, device): ModelOnDevice| device.dtype == DType::F32 || !model.has_router;
    uncompressed().into_iter().filter(|case| is_stable(case.value)).collect()
}

/// Like [`uncompressed`], but includes compressed-tensors models. Tests that run the same tokens in two ways leave them
/// out: if sums have another order, quantized activations can change (see [`GoldenKind::Compressed`]).
fn all() -> Vec<TestCase<ModelOnDevice>> {
    models_on_devices(|_| true)
}

/// Like [`all`], but without the cases whose tolerance is above 1e-4.
/// In those cases, rounding may change the greedy token in a near tie.
fn accurate() -> Vec<TestCase<ModelOnDevice>> {
    let is_accurate = |(model, device): ModelOnDevice| tolerance(model.name, device.dtype, device.is_gpu) <= 1e-4;
    all().into_iter().filter(|case| is_accurate(case.value)).collect()
}

#[test(each = all)]
fn logits_and_every_layer_agree_with_transformers(model: ModelOnDevice) {
    let case = load(model);
    let OneSequence { cache, tables, .. } = case.cache();
    let span = SequenceSpan { tokens: case.ids.len(), position: 0, tables: &tables };
    let batch = PassBatch { ids: &case.ids, sequences: &[span], rows: RowSelection::All, sum_order: SumOrder::Fastest };
    let mut taps = Vec::new();
    let mut tap = |_: usize, x: &Tensor| {
        taps.push(values(x));
        Ok(())
    };
    let logits = case.decoder.forward_tapped(&batch, &cache, Some(&mut tap)).unwrap();
    for (layer, tap) in taps.iter().enumerate() {
        let error = relative_error(tap, &values(&case.golden[&format!("hidden.{layer}")]));
        assert!(error < case.tolerance(), "relative error after layer {layer}: {error:e}");
    }
    let error = relative_error(&values(&logits), &values(&case.golden["logits"]));
    println!(
        "{} on {:?} in {:?}: relative error of the logits: {error:e}",
        case.model.name,
        case.device.location(),
        case.dtype
    );
    assert!(error < case.tolerance(), "relative error of the logits: {error:e}");
}

#[test(each = all)]
fn mean_nll_agrees_with_transformers(model: ModelOnDevice) {
    let case = load(model);
    let vocab = case.golden["logits"].dim(1).unwrap();
    let nll = |logits: &[f32]| {
        let rows = logits.chunks_exact(vocab).zip(&case.ids[1..]);
        let losses: Vec<f64> = rows
            .map(|(row, &next)| {
                let sum: f64 = row.iter().map(|&logit| (logit as f64).exp()).sum();
                sum.ln() - row[next as usize] as f64
            })
            .collect();
        losses.iter().sum::<f64>() / losses.len() as f64
    };
    let (actual, expected) = (nll(&case.logits(&case.ids, case.ids.len())), nll(&values(&case.golden["logits"])));
    // The errors of single logits partly cancel out in the mean. In bf16, transformers has a mean NLL that differs by at
    // most 0.023 (`bfloat16_mean_nll` in `provenance.json`), and the limit is 0.03.
    let tolerance = if case.tolerance() > 1e-4 { f64::from(case.tolerance()) / 2.0 } else { 1e-4 };
    assert!((actual - expected).abs() < tolerance, "mean NLL {actual}, expected {expected}");
}

#[test(each = accurate)]
fn greedy_tokens_agree_with_transformers(model: ModelOnDevice) {
    let case = load(model);
    let mut ids = token_ids(&case.golden["greedy_prompt"]);
    let expected = token_ids(&case.golden["greedy"]);
    let mut sequence = case.cache();
    let mut tokens = Vec::new();
    while tokens.len() < expected.len() {
        let logits = case.append(&mut sequence, &ids);
        let logits = &logits[logits.len() - case.golden["logits"].dim(1).unwrap()..];
        let best = argmax(logits);
        tokens.push(best);
        ids = vec![best];
    }
    assert_eq!(tokens, expected);
}

/// Includes MoE models in 16-bit dtypes, because all chunks have the golden token ids. `make.py` chooses these ids so
/// that rounding does not change the experts: in every layer, the score of the last chosen expert is at least 0.14
/// larger than the score of the next expert (`routing_gap_min` in `provenance.json`).
/// [`with_stable_routing`] is for tests with random ids, which can have near ties.
#[test(each = uncompressed)]
fn chunked_prefill_equals_whole_prefill(model: ModelOnDevice) {
    let case = load(model);
    let whole = case.logits(&case.ids, case.ids.len());
    for chunk in [1, 5, 7, 16, 33] {
        case.assert_same(&format!("prefill in chunks of {chunk}"), &case.logits(&case.ids, chunk), &whole);
    }
}

impl SharedCache<'_> {
    /// Starts a sequence that reuses the cached prefix of `ids`, if there is one.
    fn start(&mut self, ids: Vec<u32>) -> Member {
        Member { blocks: self.blocks.start(&ids, ids.len(), BlockHashes::default()), ids, logits: Vec::new() }
    }

    /// Runs the next tokens of each sequence in one pass: `steps[i]` tokens of `members[i]`.
    fn step(&mut self, members: &mut [&mut Member], steps: &[usize]) {
        let mut ids = Vec::new();
        for (member, &tokens) in members.iter_mut().zip(steps) {
            let start = member.blocks.computed();
            ids.extend(&member.ids[start..start + tokens]);
            for copy in self.blocks.grow(&mut member.blocks, start + tokens).expect("enough blocks") {
                self.cache.copy_block(copy.from, copy.to).unwrap();
            }
        }
        let spans: Vec<SequenceSpan> = members
            .iter()
            .zip(steps)
            .filter(|(_, tokens)| **tokens > 0)
            .map(|(member, &tokens)| {
                let (position, tables) = (member.blocks.computed(), member.blocks.tables());
                SequenceSpan { tokens, position, tables }
            })
            .collect();
        let batch = PassBatch { ids: &ids, sequences: &spans, rows: RowSelection::All, sum_order: SumOrder::Fastest };
        let logits = values(&self.case.decoder.forward(&batch, &self.cache).unwrap());
        let vocab = logits.len() / ids.len();
        if self.compares_last_rows {
            let batch = PassBatch { rows: RowSelection::Last, ..batch };
            let last = values(&self.case.decoder.forward(&batch, &self.cache).unwrap());
            let ends = spans.iter().scan(0, |end, span| {
                *end += span.tokens;
                Some(*end)
            });
            let want: Vec<f32> = ends.flat_map(|end| &logits[(end - 1) * vocab..end * vocab]).copied().collect();
            self.case.assert_same("the logits with RowSelection::Last", &last, &want);
        }
        let mut rows = logits.chunks(vocab);
        for (member, &tokens) in members.iter_mut().zip(steps) {
            member.logits.extend(rows.by_ref().take(tokens).flatten());
            let end = member.blocks.computed() + tokens;
            self.blocks.commit(&mut member.blocks, &member.ids[..end]);
        }
    }

    /// Runs the remaining tokens of a sequence in one pass.
    fn finish(&mut self, member: &mut Member) {
        let left = member.ids.len() - member.blocks.computed();
        self.step(&mut [member], &[left]);
    }

    /// Asserts that a sequence in a shared cache has the same logits as when it runs alone with an empty cache.
    fn assert_like_alone(&self, what: &str, member: &Member) {
        let alone = self.case.logits(&member.ids, CONTEXT);
        let first = alone.len() - member.logits.len();
        self.case.assert_same(what, &member.logits, &alone[first..]);
    }
}

/// Sequences of random lengths advance by random numbers of tokens.
/// A pass can therefore start and end anywhere in a block.
#[test(each = with_stable_routing)]
fn batch_equals_each_sequence_alone(model: ModelOnDevice) {
    let case = load(model);
    let mut random = Random(3);
    for size in [1, 2, 3, 5, 9] {
        let mut shared = case.shared_cache(size);
        let mut members: Vec<Member> = (0..size)
            .map(|_| {
                let length = 1 + random.below(CONTEXT);
                let ids = case.random_ids(&mut random, length);
                shared.start(ids)
            })
            .collect();
        shared.compares_last_rows = true;
        loop {
            let mut steps: Vec<usize> = Vec::new();
            for member in &members {
                let left = member.ids.len() - member.blocks.computed();
                let limit = [0, 1, 1, 7, 70][random.below(5)];
                steps.push(left.min(limit));
            }
            if members.iter().all(|member| member.ids.len() == member.blocks.computed()) {
                break;
            }
            if steps.iter().any(|&tokens| tokens > 0) {
                shared.step(&mut members.iter_mut().collect::<Vec<_>>(), &steps);
            }
        }
        for (index, member) in members.iter().enumerate() {
            shared.assert_like_alone(&format!("sequence {} of {size}", index + 1), member);
        }
    }
}

#[test(each = with_stable_routing)]
fn reused_prefix_equals_a_fresh_prefill(model: ModelOnDevice) {
    let case = load(model);
    let mut random = Random(5);
    let mut shared = case.shared_cache(2);
    let ids = case.random_ids(&mut random, 140);
    let mut first = shared.start(ids.clone());
    shared.finish(&mut first);
    shared.blocks.release(first.blocks);
    for common in [1, 63, 64, 65, 127, 128, 129, 139] {
        let mut tokens = ids[..common].to_vec();
        tokens.extend(case.random_ids(&mut random, 3));
        // The token after the common prefix must differ between the two sequences.
        tokens[common] = (ids[common] + 1) % case.golden["logits"].dim(1).unwrap() as u32;
        let mut second = shared.start(tokens);
        assert!(second.blocks.computed() <= common / BLOCK_TOKENS * BLOCK_TOKENS);
        if shared.cache.layout().windows().iter().all(Option::is_none) {
            assert_eq!(second.blocks.computed(), common / BLOCK_TOKENS * BLOCK_TOKENS);
        }
        shared.finish(&mut second);
        shared.assert_like_alone(&format!("the logits after a common prefix of {common} tokens"), &second);
        shared.blocks.release(second.blocks);
    }
}

#[test(each = with_stable_routing)]
fn forked_sequences_equal_separate_ones(model: ModelOnDevice) {
    let case = load(model);
    let mut random = Random(6);
    for prompt in [1, 50, 64, 70, 128] {
        let mut shared = case.shared_cache(3);
        let ids = case.random_ids(&mut random, prompt);
        let mut parent = shared.start(ids.clone());
        shared.finish(&mut parent);
        let mut forks: Vec<Member> = (0..2)
            .map(|_| {
                let mut ids = ids.clone();
                ids.extend(case.random_ids(&mut random, 20));
                Member { ids, blocks: shared.blocks.fork(&parent.blocks), logits: Vec::new() }
            })
            .collect();
        parent.ids.extend(case.random_ids(&mut random, 20));
        for _ in 0..20 {
            let mut members: Vec<&mut Member> = forks.iter_mut().collect();
            members.push(&mut parent);
            shared.step(&mut members, &[1, 1, 1]);
        }
        for member in forks.iter().chain([&parent]) {
            shared.assert_like_alone(&format!("a sequence forked after {prompt} tokens, or its parent"), member);
        }
    }
}

/// A preempted sequence gives up its blocks. Later, it recomputes the tokens that are not in a cached block.
#[test(each = with_stable_routing)]
fn preempted_sequence_continues_as_before(model: ModelOnDevice) {
    let case = load(model);
    let mut random = Random(8);
    let mut shared = case.shared_cache(2);
    for preempted_at in [1, 20, 63, 64, 65, 100, 128, 150] {
        let ids = case.random_ids(&mut random, 155);
        let mut member = shared.start(ids.clone());
        shared.step(&mut [&mut member], &[preempted_at]);
        shared.blocks.release(member.blocks);
        // Meanwhile, another sequence runs, and may take blocks of the preempted sequence.
        let other = case.random_ids(&mut random, preempted_at);
        let mut other = shared.start(other);
        shared.finish(&mut other);
        shared.blocks.release(other.blocks);
        let mut again = shared.start(ids);
        shared.finish(&mut again);
        shared.assert_like_alone(&format!("a sequence preempted after {preempted_at} tokens"), &again);
        shared.blocks.release(again.blocks);
    }
}

#[test]
fn rope_frequencies_agree_with_transformers() {
    let text = std::fs::read_to_string(golden("rope.json")).unwrap();
    let file: serde_json::Value = serde_json::from_str(&text).unwrap();
    let variants = file["variants"].as_array().unwrap();
    assert!(variants.len() > 10);
    for variant in variants {
        let (name, config) = (&variant["name"], &variant["config"]);
        let size = |field: &str| config[field].as_u64().map(|value| value as usize);
        let dim =
            size("head_dim").unwrap_or_else(|| size("hidden_size").unwrap() / size("num_attention_heads").unwrap());
        let rope: RopeConfig = serde_json::from_value(config.clone()).unwrap();
        let theta = if config["model_type"] == "gpt_oss" { 150_000.0 } else { 10_000.0 };
        let max_position_embeddings = size("max_position_embeddings").unwrap();
        let lengths = RopeLengths { max_position_embeddings, context: max_position_embeddings };
        let actual = rope.frequencies(dim, lengths, theta).unwrap();
        let expected: Vec<f32> =
            variant["inv_freq"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect();
        assert_eq!(actual.inv_freq.len(), expected.len(), "{name}");
        for (actual, expected) in actual.inv_freq.iter().zip(&expected) {
            assert!(
                (actual - expected).abs() <= 4.0 * f32::EPSILON * expected,
                "{name}: RoPE frequency {actual}, expected {expected}"
            );
        }
        let scaling = variant["attention_scaling"].as_f64().unwrap() as f32;
        assert!((actual.attention_factor - scaling).abs() <= 1e-6, "{name}");
    }
}
