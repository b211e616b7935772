//! Runs the program as a user or a script would. Checks its output, exit codes and error messages.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Output, Stdio};

use inferno::weights::Checkpoint;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::program::{assert_fails, inferno, run, text};
use crate::support::program::{copy_of_demo, demo_with_config, libraries_are_loaded_on_demand, without_driver};
use crate::support::screen::Screen;
use crate::support::{demo_dir, golden};

const CPU: &[&str] = &["--device", "cpu"];

fn ask(model: &Path, more: &[&str]) -> Output {
    let model = model.to_str().unwrap();
    run(&[&["play", model, "--prompt", "How do I download a model?"], CPU, more].concat())
}

#[test]
fn one_shot_prints_only_the_answer() {
    let output = run(&["play", "demo", "--device", "cpu", "--prompt", "How do I download a model?"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let answer = text(&output.stdout);
    assert!(answer.contains("inferno download") && answer.ends_with('\n') && !answer.contains("<|"), "{answer}");
    assert_eq!(text(&output.stderr), "", "inferno wrote to stderr although stderr is not a terminal");
}

#[test]
fn standard_input_is_the_prompt() {
    let home = TempDir::new().unwrap();
    let mut child = inferno(&home)
        .args(["play", "demo", "--device", "cpu"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"How do I list my models?\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("inferno list"), "{}", text(&output.stdout));
}

/// If standard input is not UTF-8, the error gives the offset of the first invalid byte.
#[test]
fn standard_input_must_be_utf8() {
    let home = TempDir::new().unwrap();
    for arguments in [&["play", "demo", "--device", "cpu"][..], &["tokenize", "demo"]] {
        let mut command = inferno(&home);
        let streams = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = streams.spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"caf\xe9").unwrap();
        let output = child.wait_with_output().unwrap();
        let message = text(&output.stderr);
        assert!(!output.status.success());
        assert!(message.contains("cannot read standard input: not valid UTF-8 at offset 3"), "{message}");
    }
}

#[test]
fn play_json_has_text_tokens_usage_and_stats() {
    let output = ask(&demo_dir(), &["--json", "--seed", "7", "--temperature", "0"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(json["text"].as_str().unwrap().contains("inferno download"));
    assert!(!json["reasoning"].as_str().unwrap().is_empty());
    assert_eq!(json["finish_reason"], "stop");
    assert_eq!(json["seed"], 7);
    let tokens = json["tokens"].as_array().unwrap();
    assert_eq!(json["usage"]["completion_tokens"], tokens.len());
    assert!(json["usage"]["prompt_tokens"].as_u64().unwrap() > 20);
    for figure in ["ttft_s", "tok_per_s", "load_s"] {
        assert!(json["stats"][figure].as_f64().unwrap() > 0.0, "{figure}");
    }
    assert_eq!(json["model"], demo_dir().to_str().unwrap());
    assert!(json.as_object().unwrap().contains_key("revision"), "{json}");
}

#[test]
fn raw_mode_continues_the_text_and_can_ignore_eos() {
    let output = run(&[
        "play",
        "demo",
        "--device",
        "cpu",
        "--raw",
        "--prompt",
        "To download",
        "--max-tokens",
        "60",
        "--ignore-eos",
        "--json",
    ]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["tokens"].as_array().unwrap().len(), 60);
    assert_eq!(json["finish_reason"], "length");
    let ids = run(&["tokenize", "demo", "To download", "--json"]);
    let ids: Value = serde_json::from_slice(&ids.stdout).unwrap();
    assert_eq!(json["usage"]["prompt_tokens"], ids["ids"].as_array().unwrap().len());
}

#[test]
fn answer_cut_off_within_its_header_is_empty() {
    for tokens in ["1", "2", "3"] {
        let output = ask(&demo_dir(), &["--json", "--max-tokens", tokens]);
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((json["text"].as_str(), json["finish_reason"].as_str()), (Some(""), Some("length")), "{tokens}");
    }
}

#[test]
fn list_shows_the_demo() {
    let table = text(&run(&["list"]).stdout);
    assert!(table.contains("demo") && table.contains("gpt_oss") && table.contains("mxfp4"), "{table}");
    let json: Value = serde_json::from_slice(&run(&["list", "--json"]).stdout).unwrap();
    let demo = &json[0];
    for field in ["name", "revision", "family", "quantization", "parameters", "size_bytes", "path"] {
        assert!(!demo[field].is_null(), "{field}");
    }
    assert!(demo["size_bytes"].as_u64().unwrap() < 8_000_000);
}

/// `list` must report the same parameter counts as `Checkpoint`.
#[test]
fn listed_parameter_counts_equal_those_of_the_checkpoint() {
    let home = TempDir::new().unwrap();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let models = ["llama3", "gpt_oss", "mixtral", "compressed/int8", "compressed/fp8", "compressed/int8_packed"];
    let install = |name: &str, model: &str| {
        let folder = home.path().join("models").join(format!("models--org--{name}"));
        let snapshot = folder.join("snapshots").join(commit);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(folder.join("refs")).unwrap();
        fs::write(folder.join("refs/main"), commit).unwrap();
        for file in
            fs::read_dir(golden(model)).unwrap().flatten().filter(|file| file.file_name() != "golden.safetensors")
        {
            fs::copy(file.path(), snapshot.join(file.file_name())).unwrap();
        }
        fs::write(snapshot.join("tokenizer.json"), "{}").unwrap();
        snapshot
    };
    models.iter().for_each(|model| drop(install(&model.replace('/', "-"), model)));
    // 4-bit weights of compressed-tensors (eight in one I32) are not supported, so `list` reports no parameter count.
    let four_bits = install("four-bits", "compressed/int8_packed").join("config.json");
    let config = fs::read_to_string(&four_bits).unwrap();
    fs::write(&four_bits, config.replace("\"num_bits\": 8", "\"num_bits\": 4")).unwrap();

    let output = inferno(&home).args(["list", "--json"]).output().unwrap();
    let listed: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let listed = |name: &str| listed.iter().find(|model| model["name"] == format!("org/{name}")).unwrap();
    for model in models {
        let checkpoint = Checkpoint::open(&golden(model)).unwrap();
        let listed = listed(&model.replace('/', "-"));
        assert_eq!(listed["parameters"], checkpoint.parameters(), "{model}");
        assert_eq!((&listed["supported"], listed["quantization"].is_string()), (&Value::Bool(true), true), "{model}");
    }
    assert_eq!(listed("llama3")["quantization"], "bf16");
    let four_bits = listed("four-bits");
    assert_eq!((&four_bits["supported"], &four_bits["parameters"]), (&Value::Bool(false), &Value::Null));
}

#[test]
fn tokenize_shows_texts_and_conversations() {
    let home = TempDir::new().unwrap();
    let output = run(&["tokenize", "demo", "Hello <|start|>", "--json"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["ids"].as_array().unwrap().len(), json["pieces"].as_array().unwrap().len());
    assert_eq!(json["pieces"].as_array().unwrap().last().unwrap(), "<|start|>");

    let chat = home.path().join("chat.json");
    fs::write(&chat, r#"[{"role":"user","content":"Say <|end|> twice"}]"#).unwrap();
    let chat = chat.to_str().unwrap();
    let pieces = |more: &[&str]| {
        let output = run(&[&["tokenize", "demo", "--chat", chat, "--date", "2026-01-31", "--json"], more].concat());
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        (json["rendered"].as_str().unwrap().to_string(), json["pieces"].to_string())
    };
    let (rendered, tokens) = pieces(&[]);
    assert!(rendered.contains("Current date: 2026-01-31") && rendered.ends_with("<|start|>assistant"), "{rendered}");
    // The system and user messages end with <|end|>. The <|end|> in the user's text is not a control token.
    assert_eq!(tokens.matches("<|end|>").count(), 2, "{tokens}");
    assert!(!pieces(&["--no-generation-prompt"]).0.ends_with("assistant"));
}

#[test]
fn perplexity_reports_every_token() {
    let home = TempDir::new().unwrap();
    let file = home.path().join("text.txt");
    fs::write(&file, "A token is a piece of a word. ".repeat(30)).unwrap();
    let file = file.to_str().unwrap();
    let output = run(&["perplexity", "demo", "--device", "cpu", "--file", file, "--json"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let nll = json["nll"].as_array().unwrap();
    assert_eq!(nll.len() as u64 + 1, json["tokens"].as_u64().unwrap());
    let mean = nll.iter().map(|nll| nll.as_f64().unwrap()).sum::<f64>() / nll.len() as f64;
    assert!((mean - json["mean_nll"].as_f64().unwrap()).abs() < 1e-6);
    assert!((mean.exp() / json["perplexity"].as_f64().unwrap() - 1.0).abs() < 1e-6);

    // The format with fewer bits must have the larger KL divergence.
    let quantized = |quantize: &str| -> Value {
        let args = ["perplexity", "demo", "--device", "cpu", "--file", file, "--json", "--kl", "--quantize", quantize];
        serde_json::from_slice(&run(&args).stdout).unwrap()
    };
    let (small, large) = (quantized("q8_0"), quantized("q4_0"));
    let kl = |json: &Value| json["kl"].as_f64().unwrap();
    assert!(0.0 < kl(&small) && kl(&small) < 0.01 && kl(&small) < kl(&large), "{} {}", kl(&small), kl(&large));
    assert_eq!(small["unquantized_weight_bytes"], json["weight_bytes"]);
    assert!(large["weight_bytes"].as_u64() < small["weight_bytes"].as_u64());
    assert!(small["weight_bytes"].as_u64() < json["weight_bytes"].as_u64());
    assert_fails(&run(&["perplexity", "demo", "--device", "cpu", "--file", file, "--kl"]), 2, &["--quantize"]);
}

#[test(no_driver)]
fn missing_gpu_is_an_error_that_names_the_next_command() {
    let home = TempDir::new().unwrap();
    let run = |device: &str| without_driver(&home).args(["play", "demo", "-p", "hello", "--device", device]).output();
    let reason = if cfg!(feature = "cuda") { "libcuda.so.1" } else { "--features cuda" };
    for device in ["cuda", "cuda:1"] {
        assert_fails(&run(device).unwrap(), 7, &["cannot use an NVIDIA GPU", reason, "--device cpu"]);
    }
    assert_eq!(run("tpu").unwrap().status.code(), Some(2));
    assert!(without_driver(&home).arg("--help").output().unwrap().status.success());
}

#[test]
fn an_unknown_exchange_path_is_a_usage_error() {
    let home = TempDir::new().unwrap();
    let run = |path: &OsStr| {
        let arguments = ["play", "demo", "--device", "cpu,cpu", "--prompt", "hello", "--max-tokens", "2"];
        inferno(&home).args(arguments).env("INFERNO_EXCHANGE", path).output().unwrap()
    };
    assert_fails(&run("direct".as_ref()), 2, &["INFERNO_EXCHANGE is 'direct'", "host or copy"]);
    #[cfg(unix)]
    assert_fails(
        &run(std::os::unix::ffi::OsStrExt::from_bytes(b"host\xff")),
        2,
        &["INFERNO_EXCHANGE is 'host\u{fffd}'"],
    );
    assert!(["host", "copy", ""].iter().all(|path| run(path.as_ref()).status.success()));
}

/// If the dynamic loader loaded NVIDIA libraries at startup, no command would start on a machine without a driver.
#[test]
fn startup_loads_no_nvidia_library() {
    // Debug builds linked with GNU ld load NVIDIA libraries at startup. `src/device/libraries.rs` explains why.
    let with_gnu_ld = !fs::read(env!("CARGO_BIN_EXE_inferno")).unwrap().windows(12).any(|part| part == b"Linker: LLD ");
    assert!(libraries_are_loaded_on_demand() || (with_gnu_ld && cfg!(debug_assertions)));
}

#[test]
fn missing_model_error_names_the_download_command() {
    let output = run(&["play", "openai/gpt-oss-20b", "--device", "cpu", "--prompt", "hello"]);
    assert_fails(&output, 3, &["openai/gpt-oss-20b", "inferno download openai/gpt-oss-20b"]);
    let home = TempDir::new().unwrap();
    let output = inferno(&home).args(["download", "org/model"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert_fails(&output, 5, &["cannot download 'org/model'", "HF_HUB_OFFLINE"]);
    let output = inferno(&home).args(["show", "org/model", "--revision", "v1"]).output().unwrap();
    assert_fails(&output, 3, &["inferno show org/model --revision v1 --remote"]);
    let output = run(&["download", "not a name"]);
    assert_fails(&output, 2, &["org/name"]);
}

#[test]
fn broken_weights_error_names_the_file() {
    let weights = "model.safetensors";
    // Truncate the file at several places: at 0, within and after the 8-byte header length, in the header, in the data.
    for length in [0, 5, 8, 1000, 100_000] {
        let (_folder, path) = copy_of_demo();
        let file = fs::OpenOptions::new().write(true).open(path.join(weights)).unwrap();
        file.set_len(length).unwrap();
        assert_fails(&ask(&path, &[]), 1, &[weights]);
    }
    // Corrupt the header: a length beyond the file, a huge length, invalid JSON, wrong offsets, an unknown dtype.
    let rewrite = |change: &dyn Fn(Vec<u8>) -> Vec<u8>| {
        let (folder, path) = copy_of_demo();
        let bytes = fs::read(path.join(weights)).unwrap();
        fs::write(path.join(weights), change(bytes)).unwrap();
        let output = ask(&path, &[]);
        drop(folder);
        output
    };
    let with_length = |length: u64| move |bytes: Vec<u8>| [&length.to_le_bytes(), &bytes[8..]].concat();
    assert_fails(&rewrite(&with_length(1 << 30)), 1, &[weights]);
    assert_fails(&rewrite(&with_length(u64::MAX)), 1, &[weights]);
    assert_fails(&rewrite(&with_length(64)), 1, &[weights]);
    let replace = |from: &'static str, to: &'static str| {
        assert_eq!(from.len(), to.len());
        move |mut bytes: Vec<u8>| {
            let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
            bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
            bytes
        }
    };
    assert_fails(&rewrite(&replace("\"data_offsets\":[0,", "\"data_offsets\":[1,")), 1, &[weights]);
    assert_fails(&rewrite(&replace("\"dtype\":\"BF16\"", "\"dtype\":\"F8XX\"")), 1, &[weights]);
    // A renamed tensor is reported as missing under its original name.
    let renamed = rewrite(&replace("model.norm.weight", "model.nrom.weight"));
    assert_fails(&renamed, 1, &["model.norm.weight", "missing", weights]);
    let (_folder, path) = copy_of_demo();
    fs::remove_file(path.join(weights)).unwrap();
    assert_fails(&ask(&path, &[]), 1, &["no weights", weights]);
}

#[test]
fn wrong_shape_error_names_the_expected_shape() {
    let (_folder, path) = demo_with_config(|config| {
        let size = config["vocab_size"].as_u64().unwrap();
        config["vocab_size"] = (size + 1).into();
    });
    assert_fails(&ask(&path, &[]), 1, &["model.embed_tokens.weight", "expected shape", "found", "model.safetensors"]);
}

#[test]
fn invalid_configs_are_rejected() {
    let cases: [(&str, Value, &str); 10] = [
        ("swiglu_limit", (-1.0).into(), "swiglu_limit"),
        ("sliding_window", (u64::MAX - 254).into(), "sliding_window"),
        ("num_attention_heads", 0.into(), "num_attention_heads"),
        ("hidden_size", (-4).into(), "config.json"),
        ("num_hidden_layers", 1_000_000_000u64.into(), "num_hidden_layers"),
        ("num_key_value_heads", 5.into(), "heads"),
        ("num_experts_per_tok", 99.into(), "experts"),
        ("layer_types", serde_json::json!(["full_attention"]), "layer_types"),
        ("layer_types", serde_json::json!(["mamba"]), "mamba"),
        ("rope_scaling", serde_json::json!({"rope_type": "spiral", "factor": 2.0}), "spiral"),
    ];
    for (field, value, word) in cases {
        let (_folder, path) = demo_with_config(|config| config[field] = value.clone());
        assert_fails(&ask(&path, &[]), 1, &[word]);
    }
    let (_folder, path) = demo_with_config(|config| config["model_type"] = "mamba2".into());
    assert_fails(&ask(&path, &[]), 9, &["mamba2", "gpt_oss", "llama"]);
    let abc = serde_json::json!({"quant_method": "abc"});
    let (_folder, path) = demo_with_config(|config| config["quantization_config"] = abc);
    assert_fails(&ask(&path, &[]), 9, &["'abc'", "compressed-tensors"]);
    let (_folder, path) = copy_of_demo();
    fs::write(path.join("config.json"), "{").unwrap();
    assert_fails(&ask(&path, &[]), 1, &["config.json"]);
}

#[test]
fn shards_that_are_missing_or_outside_the_folder_are_rejected() {
    let index = |shard: &str| {
        let (folder, path) = copy_of_demo();
        let index = serde_json::json!({ "metadata": {}, "weight_map": { "model.norm.weight": shard } });
        fs::write(path.join("model.safetensors.index.json"), index.to_string()).unwrap();
        let output = ask(&path, &[]);
        drop(folder);
        output
    };
    assert_fails(&index("model-00001-of-00002.safetensors"), 1, &["model-00001-of-00002.safetensors", "missing"]);
    for outside in ["../model.safetensors", "/etc/passwd", "a/../../b.safetensors", "..", ""] {
        assert_fails(&index(outside), 1, &["not a plain file name"]);
    }
    let (_folder, path) = copy_of_demo();
    let index = serde_json::json!({ "weight_map": { "model.missing.weight": "model.safetensors" } });
    fs::write(path.join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert_fails(&ask(&path, &[]), 1, &["model.missing.weight", "is missing from shard"]);
}

#[test]
fn broken_tokenizer_error_names_the_file() {
    for broken in
        ["", "{}", "[1, 2", r#"{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":[["b","c"]]}}"#]
    {
        let (_folder, path) = copy_of_demo();
        fs::write(path.join("tokenizer.json"), broken).unwrap();
        assert_fails(&ask(&path, &[]), 1, &["tokenizer.json"]);
    }
    // This tokenizer.json makes the `tokenizers` crate panic (huggingface/tokenizers #2094).
    // inferno hides the panic message.
    let merge = r#"{"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":[["a","b"]]}}"#;
    // This tokenizer.json makes the `tokenizers` crate panic on a rayon thread.
    let charsmap = r#"{"version":"1.0","normalizer":{"type":"Precompiled","precompiled_charsmap":"%"},"model":{}}"#;
    for panics in [merge, charsmap] {
        let (_folder, path) = copy_of_demo();
        fs::write(path.join("tokenizer.json"), panics).unwrap();
        let output = ask(&path, &[]);
        assert_fails(&output, 1, &["cannot use", "tokenizer.json"]);
        assert!(!text(&output.stderr).contains("panicked at"), "{}", text(&output.stderr));
    }
    let (_folder, path) = copy_of_demo();
    fs::remove_file(path.join("tokenizer.json")).unwrap();
    assert_fails(&ask(&path, &[]), 1, &["tokenizer.json"]);
}

#[test]
fn prompt_longer_than_the_context_is_an_error() {
    let long = "download ".repeat(500);
    let output = run(&["play", "demo", "--device", "cpu", "--context", "128", "--prompt", &long]);
    assert_fails(&output, 10, &["context holds only 128", "--context"]);
}

#[test]
fn invalid_flags_and_a_missing_prompt_are_usage_errors() {
    assert_fails(&ask(&demo_dir(), &["--context", "99999999"]), 2, &["--context", "99999999"]);
    assert_fails(&ask(&demo_dir(), &["--temperature=-1"]), 2, &["temperature"]);
    assert_fails(&ask(&demo_dir(), &["--temperature", "-3"]), 2, &["temperature"]);
    assert_fails(&ask(&demo_dir(), &["--top-p", "nan"]), 2, &["top-p"]);
    assert_fails(&ask(&demo_dir(), &["--max-tokens", "0"]), 2, &["--max-tokens"]);
    assert_fails(&run(&["play", "demo", "--device", "cpu"]), 2, &["no prompt"]);
}

#[test]
fn closed_stdout_is_not_a_failure() {
    let home = TempDir::new().unwrap();
    let mut child = inferno(&home)
        .args(["play", "demo", "--device", "cpu", "--prompt", "How do I download a model?", "--ignore-eos"])
        .args(["--max-tokens", "400", "--temperature", "2"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0u8; 1];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut first).unwrap();
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn base_model_is_rejected_before_its_weights_are_read() {
    let (_folder, model) = copy_of_demo();
    // Without `<|channel|>`, the demo model has no chat format, because harmony is its only one.
    let tokenizer = fs::read_to_string(model.join("tokenizer.json")).unwrap();
    fs::write(model.join("tokenizer.json"), tokenizer.replace("<|channel|>", "<|canal|>")).unwrap();
    let name = model.to_str().unwrap();
    assert_fails(&ask(&model, &[]), 1, &["no chat format", &format!("inferno play {name} --raw")]);
    let raw = run(&["play", name, "--device", "cpu", "--raw", "--prompt", "To", "--max-tokens", "1"]);
    assert!(raw.status.success(), "{}", text(&raw.stderr));
    // In a chat, `/model` rejects a base model and keeps the current model.
    let home = TempDir::new().unwrap();
    let mut chat = Screen::chat(&home, &[]);
    assert!(chat.say(&format!("/model {name}")).contains("no chat format"));
    assert!(chat.say("My name is Ada").contains("tok/s"));
    // Broken weights do not change the error: the weights and the chat format load in parallel, but the error of the
    // chat format takes precedence.
    for entry in fs::read_dir(&model).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let header = fs::read(&path).unwrap();
            let length = u64::from_le_bytes(header[..8].try_into().unwrap()) as usize + 8;
            let cleared = [&header[..length], &vec![0xff; header.len() - length]].concat();
            fs::write(&path, cleared).unwrap();
        }
    }
    assert_fails(&ask(&model, &[]), 1, &["no chat format"]);
}

#[test]
fn reasoning_that_leaves_no_answer_names_the_flag_to_raise() {
    let output = ask(&demo_dir(), &["--max-tokens", "8"]);
    assert!(text(&output.stderr).contains("raise --max-tokens"), "{}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&ask(&demo_dir(), &["--json"]).stdout).unwrap();
    // The context has room for the prompt and only 8 tokens of reasoning.
    let context = json["usage"]["prompt_tokens"].as_u64().unwrap() + 8;
    let output = ask(&demo_dir(), &["--context", &context.to_string()]);
    assert!(text(&output.stderr).contains("raise --context"), "{}", text(&output.stderr));
}

#[test]
fn help_lists_the_flags_of_the_command_before_the_global_flags() {
    let help = text(&run(&["play", "--help"]).stdout);
    let position = |flag: &str| help.find(flag).unwrap_or_else(|| panic!("no {flag} in {help}"));
    assert!(position("--seed") < position("--verbose"), "{help}");
}

#[test]
fn chunk_sizes_that_a_kernel_cannot_process_are_usage_errors() {
    for chunk in ["0", "16385", "18446744073709551615"] {
        let output = run(&["play", "demo", "--device", "cpu", "--prompt", "Hi", "--chunk", chunk]);
        assert_fails(&output, 2, &[&format!("--chunk {chunk}: use --chunk ")]);
    }
}
