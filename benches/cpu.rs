//! What the host does for each token, and the reference of the expert product: `cargo bench --bench cpu -- --quick`.

use std::hint::black_box;
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use criterion::{Criterion, Throughput};
use inferno::SamplingParams;
use inferno::chat::{Message, ReasoningEffort, RenderOptions};
use inferno::engine::Language;
use inferno::engine::sampler::Sampler;
use inferno::kernels::experts::{self, BLOCK, ExpertWeights};
use inferno::tokenizer::{Controls, TextStream};

/// Of gpt-oss.
const VOCAB_SIZE: usize = 201_088;

fn main() -> Result<()> {
    let mut criterion = Criterion::default().configure_from_args();
    let demo = Language::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo"))?;
    sampler(&mut criterion);
    harmony(&mut criterion, &demo)?;
    text_stream(&mut criterion, &demo)?;
    expert_product(&mut criterion)?;
    criterion.final_summary();
    Ok(())
}

/// Numbers in [-1, 1), the same each time.
fn noise(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// One draw.
fn sampler(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sampler");
    // As a model's logits are: most are hopeless, a few compete.
    let mut logits: Vec<f32> = noise(VOCAB_SIZE).into_iter().map(|x| 12.0 * x * x * x).collect();
    let greedy = SamplingParams::greedy();
    let warm = SamplingParams { temperature: 1.0, ..greedy.clone() };
    let cases = [
        ("greedy", greedy),
        ("temperature", warm.clone()),
        ("top-k 50", SamplingParams { top_k: 50, ..warm.clone() }),
        ("top-p 0.95", SamplingParams { top_p: 0.95, ..warm.clone() }),
        ("min-p 0.05", SamplingParams { min_p: 0.05, ..warm }),
    ];
    for (name, params) in cases {
        let mut sampler = Sampler::new(params, &[]);
        group.bench_function(name, |bencher| bencher.iter(|| sampler.sample(black_box(&mut logits))));
    }
}

const SENTENCE: &str = "The KV cache keeps keys and values of past tokens – so each new token needs little work. ";

/// An answer of some thousand tokens, with reasoning before it.
fn harmony(criterion: &mut Criterion, demo: &Language) -> Result<()> {
    let options = RenderOptions {
        tools: Vec::new(),
        reasoning_effort: ReasoningEffort::Medium,
        date: "2026-01-31".into(),
        add_generation_prompt: true,
    };
    let prompt = demo.render(&[Message::user("What is the KV cache?")], &options)?;
    let text = SENTENCE.repeat(60);
    let answer = format!(
        "<|channel|>analysis<|message|>{text}<|end|><|start|>assistant<|channel|>final<|message|>{text}<|return|>"
    );
    let ids = demo.tokenizer.encode(&answer, Controls::Parse)?;
    let format = demo.chat.as_ref().context("the demo has a chat format")?;
    let mut group = criterion.benchmark_group("harmony");
    group.throughput(Throughput::Elements(ids.len() as u64));
    group.bench_function("parser", |bencher| {
        bencher.iter(|| {
            let mut parser = format.parser(&prompt);
            ids.iter().map(|&id| parser.push(&demo.tokenizer, id).map_or(0, |deltas| deltas.len())).sum::<usize>()
        })
    });
    Ok(())
}

/// A text of some thousand tokens, as it comes.
fn text_stream(criterion: &mut Criterion, demo: &Language) -> Result<()> {
    let ids = demo.tokenizer.encode(&SENTENCE.repeat(120), Controls::Text)?;
    let mut group = criterion.benchmark_group("tokenizer");
    group.throughput(Throughput::Elements(ids.len() as u64));
    group.bench_function("stream", |bencher| {
        bencher.iter(|| {
            let mut stream = TextStream::new();
            ids.iter().map(|&id| stream.push(&demo.tokenizer, id).map_or(0, |text| text.len())).sum::<usize>()
        })
    });
    Ok(())
}

/// One token through four of eight experts.
fn expert_product(criterion: &mut Criterion) -> Result<()> {
    let (experts, rows, columns) = (8, 512, 512);
    let ids = [1, 6, 3, 0];
    let bytes = |count: usize| noise(count).into_iter().map(|x| (127.5 * (x + 1.0)) as u8).collect::<Vec<_>>();
    let (groups, half) = (columns / BLOCK, BLOCK / 2);
    let blocks = Tensor::from_vec(bytes(experts * rows * groups * half), (experts, rows, groups, half), &Device::Cpu)?;
    let scales = Tensor::full(120u8, (experts, rows, groups), &Device::Cpu)?;
    let weights = ExpertWeights::Mxfp4 { blocks, scales };
    let x = noise(columns);
    let mut group = criterion.benchmark_group("experts");
    group.throughput(Throughput::Bytes(weights.bytes() / experts as u64 * ids.len() as u64));
    group.bench_function("mxfp4 reference", |bencher| {
        bencher.iter(|| experts::reference(black_box(&x), &weights, None, &ids, ids.len()))
    });
    Ok(())
}
