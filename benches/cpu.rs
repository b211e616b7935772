//! Benchmarks that need no GPU: the work per token on the CPU, and the run time of commands.
//!
//! - `sampler`: choosing a token from the logits of gpt-oss, with different sampling parameters
//! - `harmony`, `tokenizer`: parsing an answer of gpt-oss; turning its tokens into text
//! - `experts`: a matrix product of MXFP4 experts, which runs on the CPU only with `--device cpu`
//! - `terminal`: drawing formatted Markdown in the terminal (Unix only)
//! - `commands`: `inferno --help`, and `inferno list` with 200 models
//!
//! Run all groups, or those whose name contains a word. criterion compares each figure with the previous run.
//! Without `--quick`, the run takes longer, and figures vary less:
//!
//!     cargo bench --bench cpu -- --quick
//!     cargo bench --bench cpu -- --quick terminal

use std::fs::{self, File};
use std::hint::black_box;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use criterion::{Criterion, Throughput};
use inferno::SamplingParams;
use inferno::chat::{Message, ReasoningEffort, RenderOptions};
use inferno::engine::sampling::Sampler;
use inferno::kernels::moe::experts::{self, ExpertWeights};
use inferno::kernels::moe::mxfp4::MXFP4_BLOCK;
use inferno::language::Language;
use inferno::tokenizer::{ControlTokens, TextStream};

/// The vocabulary size of gpt-oss.
const VOCAB_SIZE: usize = 201_088;

fn main() -> Result<()> {
    let mut criterion = Criterion::default().configure_from_args();
    let demo = Language::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo"))?;
    sampler(&mut criterion);
    harmony(&mut criterion, &demo)?;
    text_stream(&mut criterion, &demo)?;
    expert_product(&mut criterion)?;
    #[cfg(unix)]
    terminal(&mut criterion)?;
    commands(&mut criterion)?;
    criterion.final_summary();
    Ok(())
}

/// Returns pseudo-random numbers in [-1, 1), the same in every run.
fn noise(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Measures how long it takes to sample one token, with different sampling parameters.
fn sampler(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sampler");
    // Cubes of uniform numbers give a few large logits and many small ones, as in a real model.
    let mut logits: Vec<f32> = noise(VOCAB_SIZE).into_iter().map(|x| 12.0 * x * x * x).collect();
    let greedy = SamplingParams::greedy();
    let sampled = SamplingParams { temperature: 1.0, ..greedy.clone() };
    let cases = [
        ("greedy", greedy),
        ("temperature", sampled.clone()),
        ("top-k 50", SamplingParams { top_k: 50, ..sampled.clone() }),
        ("top-p 0.95", SamplingParams { top_p: 0.95, ..sampled.clone() }),
        ("min-p 0.05", SamplingParams { min_p: 0.05, ..sampled }),
    ];
    for (name, params) in cases {
        let mut sampler = Sampler::new(params, &[]);
        group.bench_function(name, |bencher| bencher.iter(|| sampler.sample(black_box(&mut logits))));
    }
}

const SENTENCE: &str = "The KV cache keeps keys and values of past tokens – so each new token needs little work. ";

/// Measures the harmony parser on an answer that consists of reasoning and an equally long final message.
fn harmony(criterion: &mut Criterion, demo: &Language) -> Result<()> {
    let options = RenderOptions {
        tools: Vec::new(),
        reasoning_effort: ReasoningEffort::Medium,
        date: "2026-01-31".into(),
        add_generation_prompt: true,
        template_variables: serde_json::Map::new(),
    };
    let prompt = demo.render(&[Message::user("What is the KV cache?")], &options)?;
    let text = SENTENCE.repeat(60);
    let answer = format!(
        "<|channel|>analysis<|message|>{text}<|end|><|start|>assistant<|channel|>final<|message|>{text}<|return|>"
    );
    let ids = demo.tokenizer.encode(&answer, ControlTokens::Parse)?;
    let format = demo.chat.as_ref().context("the demo model has no chat format")?;
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

/// Measures streaming detokenization, one token at a time.
fn text_stream(criterion: &mut Criterion, demo: &Language) -> Result<()> {
    let ids = demo.tokenizer.encode(&SENTENCE.repeat(120), ControlTokens::Text)?;
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

/// Measures the CPU reference of the MXFP4 expert matmul, for one token that uses four of eight experts.
fn expert_product(criterion: &mut Criterion) -> Result<()> {
    let (experts, rows, columns) = (8, 512, 512);
    let ids = [1, 6, 3, 0];
    let bytes = |count: usize| noise(count).into_iter().map(|x| (127.5 * (x + 1.0)) as u8).collect::<Vec<_>>();
    let (groups, half) = (columns / MXFP4_BLOCK, MXFP4_BLOCK / 2);
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

/// Measures how long the chat takes to draw one token at 900 tokens/s.
/// A second thread discards what the chat writes to the pseudo terminal.
///
/// The target is at most 22 µs per token, which is 2% of the 1.1 ms between two tokens.
#[cfg(unix)]
fn terminal(criterion: &mut Criterion) -> Result<()> {
    use inferno::chat::{Channel, Delta};
    use inferno::terminal::{TurnView, WindowSize};
    use std::io::Read;
    use std::time::{Duration, Instant};

    let interval = Duration::from_secs(1) / 900;
    let window = WindowSize { rows: 50, columns: 120 };
    let pty = nix::pty::openpty(None, None)?;
    let (mut screen, mut reader) = (File::from(pty.slave), File::from(pty.master));
    std::thread::spawn(move || {
        let mut buffer = [0; 1 << 16];
        while reader.read(&mut buffer).is_ok_and(|count| count > 0) {}
    });
    let prose = SENTENCE.repeat(40);
    let code = format!("```rust\n{}```\n", "    println!(\"{}\", 1 + 2); // a line of a long file\n".repeat(120));
    let texts = [
        ("all of Markdown", include_str!("../tests/it/render/ordinary.md")),
        ("a long paragraph", &prose),
        ("a long file of code", &code),
    ];
    let mut group = criterion.benchmark_group("terminal");
    group.sample_size(10).warm_up_time(Duration::from_millis(20)).measurement_time(Duration::from_secs(5));
    for (name, text) in texts {
        // Split the text into pieces of four characters, the typical length of a token.
        let characters: Vec<char> = text.chars().collect();
        let pieces: Vec<String> = characters.chunks(4).map(|piece| piece.iter().collect()).collect();
        let pieces: Vec<Delta> = pieces.into_iter().map(|text| Delta { channel: Channel::Answer, text }).collect();
        // Draws 900 tokens at 900 tokens/s and returns the mean drawing time per token.
        let mut answer = || {
            let mut view = TurnView::new(window).with_keys(true);
            let (start, mut spent) = (Instant::now(), Duration::ZERO);
            for (token, delta) in pieces.iter().cycle().take(900).enumerate() {
                while start.elapsed() < interval * token as u32 {
                    std::hint::spin_loop();
                }
                let before = Instant::now();
                view.show(delta, window, &mut screen).expect("cannot write to the pseudo terminal");
                spent += before.elapsed();
            }
            spent / 900
        };
        group.bench_function(name, |bencher| bencher.iter_custom(|answers| (0..answers).map(|_| answer()).sum()));
    }
    Ok(())
}

/// Measures the run time of `inferno --help`, and of `inferno list` with 200 cached 8B models.
fn commands(criterion: &mut Criterion) -> Result<()> {
    let home = tempfile::tempdir()?;
    let tensors = llama_tensors();
    for model in 0..200 {
        let repo = home.path().join(format!("models--org--Llama-8B-{model}"));
        let commit = format!("{model:040x}");
        let snapshot = repo.join("snapshots").join(&commit);
        fs::create_dir_all(&snapshot)?;
        fs::create_dir_all(repo.join("refs"))?;
        fs::write(repo.join("refs/main"), &commit)?;
        fs::write(snapshot.join("config.json"), LLAMA)?;
        fs::write(snapshot.join("tokenizer.json"), "{}")?;
        let mut header = serde_json::Map::new();
        let mut end = 0;
        for (name, shape) in &tensors {
            let bytes = 2 * shape.iter().product::<u64>();
            let info = serde_json::json!({ "dtype": "BF16", "shape": shape, "data_offsets": [end, end + bytes] });
            header.insert(name.clone(), info);
            end += bytes;
        }
        let header = serde_json::to_vec(&header)?;
        let mut file = File::create(snapshot.join("model.safetensors"))?;
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        // Extend the file to its full size. The file is sparse, so the weights use no disk space.
        file.set_len(8 + header.len() as u64 + end)?;
    }
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_inferno"));
        command.args(args).env("INFERNO_CACHE", home.path()).env("HF_HUB_CACHE", home.path().join("none"));
        command.stderr(Stdio::inherit()).output()
    };
    let listed = run(&["list"])?;
    let lines = String::from_utf8_lossy(&listed.stdout).lines().filter(|line| line.contains("8.0B")).count();
    ensure!(lines == 200, "`inferno list` shows {lines} models with 8.0B parameters, expected 200");
    let mut group = criterion.benchmark_group("commands");
    group.sample_size(20);
    group.bench_function("inferno --help", |bencher| bencher.iter(|| run(&["--help"])));
    group.bench_function("inferno list, 200 models", |bencher| bencher.iter(|| run(&["list"])));
    Ok(())
}

const LLAMA: &str = r#"{ "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": false, "bos_token_id": 128000, "eos_token_id": 128001,
    "torch_dtype": "bfloat16" }"#;

/// Returns the name and shape of every tensor in Llama-3.1-8B.
fn llama_tensors() -> Vec<(String, Vec<u64>)> {
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_string(), vec![128_256, 4096]),
        ("lm_head.weight".to_string(), vec![128_256, 4096]),
        ("model.norm.weight".to_string(), vec![4096]),
    ];
    for layer in 0..32 {
        for (name, shape) in [
            ("self_attn.q_proj", vec![4096, 4096]),
            ("self_attn.k_proj", vec![1024, 4096]),
            ("self_attn.v_proj", vec![1024, 4096]),
            ("self_attn.o_proj", vec![4096, 4096]),
            ("mlp.gate_proj", vec![14336, 4096]),
            ("mlp.up_proj", vec![14336, 4096]),
            ("mlp.down_proj", vec![4096, 14336]),
            ("input_layernorm", vec![4096]),
            ("post_attention_layernorm", vec![4096]),
        ] {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    tensors
}
