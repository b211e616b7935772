//! Tests of `inferno bench`: its report, the steps that it times, and the bytes that a step reads.

use candle_core::{DType, Device};
use inferno::device::DeviceChoice;
use inferno::models;
use inferno::nn::decoder::Decoder;
use inferno::nn::kv_cache;
use inferno::weights::{Checkpoint, LoadProgress, WeightsBuilder};
use inferno::{Engine, GenerateOptions, LoadOptions, SamplingParams};
use serde_json::Value;

use crate::support::program::{assert_fails, run, text};
use crate::support::{demo_dir, golden};

fn bench(more: &[&str]) -> std::process::Output {
    run(&[&["bench", "demo", "--device", "cpu"], more].concat())
}

#[test]
fn bench_json_has_all_figures() {
    let output = bench(&["-p", "24,16", "-n", "6", "-d", "0,40", "-r", "2", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let positive = |value: &Value| value.as_f64().is_some_and(|value| value > 0.0 && value.is_finite());

    assert_eq!(json["command"], "inferno bench demo --device cpu -p 24,16 -n 6 -d 0,40 -r 2 --json");
    assert!(json["date"].as_str().unwrap().parse::<jiff::Timestamp>().is_ok(), "{}", json["date"]);
    assert_eq!(json["inferno"]["version"], env!("CARGO_PKG_VERSION"));
    assert!(!json["inferno"]["commit"].as_str().unwrap().is_empty());
    assert_eq!(json["inferno"]["executor"], "eager");
    let model = &json["model"];
    assert_eq!(
        (&model["name"], &model["quantization"], &model["dtype"]),
        (&"demo".into(), &"mxfp4".into(), &"f32".into())
    );
    for figure in ["parameters", "context", "weight_bytes", "cache_bytes"] {
        assert!(positive(&model[figure]), "{figure}");
    }
    assert!(json["device"]["name"].as_str().unwrap().starts_with("CPU"));
    // On a CPU, `bench` does not measure bandwidth or memory, and does not count or time kernels.
    for unknown in ["bandwidth", "memory", "launches_per_token", "kernels"] {
        assert!(json.get(unknown).unwrap().is_null(), "{unknown}");
    }
    assert!(positive(&json["load"]["total_s"]) && json["seed"].is_u64() && json["repetitions"] == 2);

    let tests = json["tests"].as_array().unwrap();
    let names: Vec<String> = tests.iter().map(|t| format!("{} {} {}", t["kind"], t["tokens"], t["depth"])).collect();
    let of_depth =
        |depth: u32| ["\"pp\" 24", "\"pp\" 16", "\"tg\" 6", "\"chat\" 6"].map(|test| format!("{test} {depth}"));
    assert_eq!(names, [of_depth(0), of_depth(40)].concat());
    for test in tests {
        let speed = &test["tok_per_s"];
        let samples: Vec<f64> = speed["samples"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
        let (mean, sd) = (speed["mean"].as_f64().unwrap(), speed["sd"].as_f64().unwrap());
        assert_eq!(samples.len(), 2);
        assert!(mean > 0.0 && (mean - (samples[0] + samples[1]) / 2.0).abs() < 1e-9 * mean);
        assert!((sd - (samples[0] - samples[1]).abs() / 2f64.sqrt()).abs() < 1e-9 * mean, "{speed}");
        let decodes = test["kind"] != "pp";
        assert_eq!(positive(&test["bytes_per_s"]), decodes);
        assert_eq!(positive(&test["step_bytes"]["weights"]) && positive(&test["step_bytes"]["cache"]), decodes);
        assert!(test["share_of_read_bandwidth"].is_null());
        if test["kind"] == "chat" {
            let gap = |name: &str| test["gaps"][name].as_f64().unwrap();
            assert!(0.0 < gap("p50_ms") && gap("p50_ms") <= gap("p99_ms") && gap("p99_ms") <= gap("max_ms"));
        }
    }
    let deeper =
        |kind: usize| tests[4 + kind]["step_bytes"]["cache"].as_u64() > tests[kind]["step_bytes"]["cache"].as_u64();
    assert!(deeper(2) && deeper(3));

    let first = &json["first_token"];
    assert!(first["cold"]["prompt_tokens"] == 512 && positive(&first["cold"]["ms"]));
    let warm = first["warm"].as_array().unwrap();
    let prompts: Vec<u64> = warm.iter().map(|warm| warm["prompt_tokens"].as_u64().unwrap()).collect();
    assert_eq!(prompts, [1, 16, 24, 512]);
    assert!(
        warm.iter().all(|warm| positive(&warm["ms"]["mean"]) && warm["ms"]["samples"].as_array().unwrap().len() == 2)
    );
}

#[test]
fn bench_table_has_a_line_for_each_test() {
    let output = bench(&["-p", "8", "-n", "4", "-d", "0,9", "-r", "1", "--kernels"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "", "inferno wrote to stderr although stderr is not a terminal");
    let table = text(&output.stdout);
    let lines: Vec<&str> = table.lines().collect();
    for start in
        ["demo: gpt_oss mxfp4", "CPU", "loaded in", "memory bandwidth: not measured", "kernel times: not available"]
    {
        assert!(lines.iter().any(|line| line.starts_with(start)), "no line begins with {start:?}\n{table}");
    }
    assert!(lines.iter().any(|line| line.ends_with(", 1 repetition")), "{table}");
    for test in ["pp8", "tg4", "chat4", "pp8 @ d9", "tg4 @ d9", "chat4 @ d9", "1 token", "512 tokens, cold"] {
        assert!(lines.iter().any(|line| line.starts_with(&format!("{test}  "))), "no line for {test} in\n{table}");
    }
    assert!(lines.iter().all(|line| line.chars().count() <= 120), "{table}");
}

#[test]
fn bench_skips_lengths_of_zero() {
    let tests = |more: &[&str]| {
        let output = bench(&[more, &["-r", "1", "--json"]].concat());
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        json["tests"].as_array().unwrap().iter().map(|test| test["kind"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(tests(&["-p", "4", "-n", "0"]), ["\"pp\""]);
    assert_eq!(tests(&["-p", "0", "-n", "2"]), ["\"tg\"", "\"chat\""]);
    assert_fails(&bench(&["-p", "0", "-n", "0"]), 2, &["nothing to measure"]);
}

#[test]
fn bench_names_the_context_that_it_needs() {
    for wrong in [["-r", "0"], ["-p", "many"], ["-n", "-1"], ["-d", ""]] {
        assert_eq!(bench(&wrong).status.code(), Some(2), "{wrong:?}");
    }
    // The longest test has 900 prompt tokens at depth 700. `bench` always adds two positions, for the two tokens that a
    // chat test generates but does not time.
    let too_small = bench(&["-p", "16,900", "-n", "8", "-d", "0,700", "--context", "1024"]);
    assert_fails(&too_small, 2, &["--context 1602", "1024"]);
    // A depth of 100,000 tokens exceeds the longest context of the demo model.
    assert_fails(&bench(&["-d", "100000"]), 2, &["--context 100514", "4096"]);
}

fn demo() -> Engine {
    let options = LoadOptions { devices: DeviceChoice::Cpu.into(), context: Some(700), ..Default::default() };
    Engine::load(&demo_dir(), &options).unwrap()
}

#[test]
fn bare_steps_choose_the_tokens_of_a_greedy_generation() {
    let engine = demo();
    let prompt = engine.random_tokens(3, 40);
    assert_eq!(prompt, engine.random_tokens(3, 40));
    assert_ne!(prompt, engine.random_tokens(4, 40));
    let mut options = GenerateOptions::new(SamplingParams::greedy());
    (options.max_tokens, options.ignore_eos) = (Some(12), true);
    let stream = engine.complete_ids(&prompt, options).unwrap();
    let generated: Vec<u32> = stream.into_iter().filter_map(|event| event.unwrap().token()).collect();
    let steps = engine.with_runner(move |runner| {
        runner.reset();
        runner.fill(&prompt[..39]).unwrap();
        runner.decode_steps(prompt[39], 12).unwrap()
    });
    assert_eq!(steps.unwrap(), generated);
}

#[test]
fn rewind_restores_the_same_state() {
    let engine = demo();
    let (tokens, more) = (engine.random_tokens(5, 200), engine.random_tokens(6, 480));
    let rewinds = engine.with_runner(move |runner| {
        runner.fill(&tokens).unwrap();
        let first = runner.decode_steps(7, 8).unwrap();
        // After 1 or 3 more tokens, the sliding-window layers still hold the window before position 200.
        // After 400 or 480 more tokens, the layers have overwritten this window, so the rewind prefills all 200 tokens.
        for behind in [1, 400, 480, 3] {
            runner.fill(&more[..behind]).unwrap();
            runner.rewind(200).unwrap();
            assert_eq!(runner.cached_tokens(), 200);
            assert_eq!(runner.decode_steps(7, 8).unwrap(), first, "after {behind}");
        }
        runner.fill(&more[..450]).unwrap();
        runner.rewind(150).unwrap();
        runner.fill(&tokens[150..]).unwrap();
        assert_eq!(runner.decode_steps(7, 8).unwrap(), first);
        assert!(runner.rewind(500).is_err());
    });
    rewinds.unwrap();
}

fn build(case: &str) -> Decoder {
    let dir = golden(case);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let progress = LoadProgress::silent();
    let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::BF16, &progress).build().unwrap();
    models::read_config(&dir).unwrap().build(&weights, 64).unwrap()
}

/// The sizes in the test come from tests/golden/*/config.json. bf16 weights have 2 bytes per value.
/// Norms, attention biases, sinks and the router are f32, with 4 bytes per value.
#[test]
fn step_bytes_match_a_count_by_hand() {
    // gpt_oss: vocabulary 113, hidden size 64, expert size 96, 10 heads, 2 KV heads, head dim 16, 4 of 7 experts,
    // 3 layers. The second layer has a sliding window of 9 positions.
    let q_and_o = 2 * (160 * 64 * 2) + (160 + 64) * 4;
    let k_and_v = 2 * (32 * 64 * 2 + 32 * 4);
    let attention = q_and_o + k_and_v + 10 * 4;
    let router = 7 * 64 * 4 + 7 * 4;
    // An MXFP4 block has 32 values in 16 bytes and a 1-byte scale. A row of 64 values has 2 blocks; a row of 96 has 3.
    let expert = 192 * 2 * 17 + 192 * 2 + 64 * 3 * 17 + 64 * 2;
    let layer = 2 * 64 * 4 + attention + router + 4 * expert;
    let decoder = build("gpt_oss");
    assert_eq!(decoder.step_bytes(), 64 * 2 + 3 * layer + 64 * 4 + 113 * 64 * 2);
    let row = 2 * 2 * 16 * 2;
    let cache = |depth| kv_cache::step_bytes(decoder.cache_layers(), depth, DType::BF16);
    assert_eq!(cache(0), 3 * row);
    assert_eq!(cache(8), (9 + 9 + 9) * row);
    assert_eq!(cache(30), (31 + 9 + 31) * row);

    // llama3: vocabulary 137, hidden size 80, MLP size 56, 8 heads, 2 KV heads, head dim 10, 3 layers.
    // The output head uses the embedding matrix. A step reads the whole matrix for the head and one row for the token.
    let layer = 2 * 80 * 4 + (2 * 80 * 80 + 2 * 20 * 80 + 3 * 56 * 80) * 2;
    let decoder = build("llama3");
    assert_eq!(decoder.step_bytes(), 80 * 2 + 3 * layer + 80 * 4 + 137 * 80 * 2);
    assert_eq!(kv_cache::step_bytes(decoder.cache_layers(), 30, DType::BF16), 3 * 31 * 2 * 2 * 10 * 2);
}

#[test]
fn requests_at_once_are_measured() {
    let output = bench(&["--concurrency", "1,3", "--input", "20", "--output", "5", "--requests", "4", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let serving = json["serving"].as_array().unwrap();
    assert_eq!(serving.len(), 2);
    for (serving, concurrency) in serving.iter().zip([1u64, 3]) {
        assert_eq!((&serving["concurrency"], &serving["requests"]), (&concurrency.into(), &4.into()));
        assert_eq!((&serving["input_tokens"], &serving["output_tokens"]), (&80.into(), &20.into()));
        assert_eq!(serving["cached_tokens"], 0, "all prompts differ, so no prompt should hit the cache");
        for figure in ["/output_tok_per_s", "/ttft_ms/p50", "/ttft_ms/p99", "/itl_ms/p50", "/itl_ms/p99"] {
            assert!(serving.pointer(figure).unwrap().as_f64().unwrap() > 0.0, "{figure}");
        }
        assert_eq!((&serving["hit_rate"], &serving["preemptions"]), (&0.0.into(), &0.into()));
        let steps: Vec<_> = serving["steps"].as_array().unwrap().iter().collect();
        let decoded = steps.iter().filter(|step| step["has_prompts"] == false);
        assert!(decoded.map(|step| step["steps"].as_u64().unwrap()).sum::<u64>() >= 4, "{steps:?}");
        assert!(steps.iter().all(|step| step["mean_ms"].as_f64().unwrap() > 0.0), "{steps:?}");
        // The demo model has experts. On a CPU, `bench` does not count the distinct experts that a step uses, so it can
        // compute the bytes that a step reads only for a single request.
        assert_eq!(serving["step_bytes"].is_null(), concurrency > 1, "{}", serving["step_bytes"]);
        assert!(serving["experts_per_step"].is_null());
    }
    assert!(json["first_token"].is_null() && json["tests"].as_array().unwrap().is_empty());

    let lengths = ["--lengths", "sharegpt-like", "--rate", "50"];
    let output = bench(&[&["--concurrency", "4", "--input", "30", "--output", "8"][..], &lengths].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("requests at once"), "{}", text(&output.stdout));
    assert_fails(&bench(&["--concurrency", "2", "-p", "16"]), 2, &["cannot be used with"]);
    assert_fails(&bench(&["--concurrency", "2", "--rate", "0"]), 2, &["above 0"]);
}

#[test]
fn gpu_memory_gives_the_rest_of_the_limit_to_the_cache() {
    let model = |more: &[&str]| -> Value {
        let output = bench(&[&["-p", "16", "-n", "2", "-r", "1", "--context", "600", "--json"], more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["model"].take()
    };
    let figure = |model: &Value, name: &str| model[name].as_u64().unwrap();
    let plain = model(&[]);
    assert_eq!(figure(&plain, "cache_sequences"), 1);
    // Each cache size is a whole number of blocks, so the difference can deviate from 200 MB by up to one block.
    let [small, large] = ["1000MB", "1200MB"].map(|limit| model(&["--gpu-memory", limit]));
    let block_bytes = figure(&plain, "cache_bytes") / figure(&plain, "cache_blocks");
    let added = figure(&large, "cache_bytes") - figure(&small, "cache_bytes");
    assert!((200_000_000 - block_bytes..=200_000_000 + block_bytes).contains(&added), "{added}");
    assert!(figure(&large, "cache_sequences") > figure(&small, "cache_sequences"));
    assert_fails(
        &bench(&["--gpu-memory", "100MB"]),
        8,
        &["needs", "--gpu-memory allows only 0.1 GB", "raise --gpu-memory"],
    );
    assert_fails(&bench(&["--gpu-memory", "20"]), 2, &["expected a size such as 20GB"]);
}
