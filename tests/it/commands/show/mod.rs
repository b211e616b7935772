//! Tests of `inferno show` for models on this machine and on the hub.

mod gguf;

use std::fs;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::demo_dir;
use crate::support::fake_hub::{COMMIT, FakeHub, INDEX, REPO, SHARDS};
use crate::support::program::{assert_fails, copy_of_demo, demo_with_config, inferno, run, text};

fn show(args: &[&str]) -> Value {
    let output = run(&[&["show", "--json"], args].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs `inferno show --remote` against the fake hub.
fn remote(fake: &FakeHub, args: &[&str]) -> Output {
    let home = TempDir::new().unwrap();
    let output = command(&home, fake).args(args).output().unwrap();
    assert!(!home.path().join("models").exists(), "show --remote wrote to the cache");
    output
}

fn command(home: &TempDir, fake: &FakeHub) -> Command {
    let mut command = inferno(home);
    command.env("HF_ENDPOINT", fake.endpoint()).args(["show", REPO, "--remote"]);
    command
}

/// Returns a safetensors file whose tensors are all zero. A tensor is (name, dtype, shape, size of its data in bytes).
fn file(tensors: &[(&str, &str, &[u64], usize)]) -> Vec<u8> {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, dtype, shape, bytes) in tensors {
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes] });
        header.insert(name.to_string(), entry);
        end += bytes;
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; end]].concat()
}

const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 100}"#;

const README: &[u8] = b"---\nlicense: llama3.2\n---\n# A model\n";

fn two_shards() -> FakeHub {
    let index = json!({"weight_map": {"model.embed_tokens.weight": SHARDS[0], "model.norm.weight": SHARDS[1]}});
    FakeHub::start(&[
        ("README.md", README),
        ("config.json", CONFIG.as_bytes()),
        (INDEX, index.to_string().as_bytes()),
        (SHARDS[0], &file(&[("model.embed_tokens.weight", "BF16", &[10, 8], 160)])),
        (SHARDS[1], &file(&[("model.norm.weight", "F32", &[8], 32)])),
        ("tokenizer.json", b"{}"),
        ("tokenizer_config.json", br#"{"chat_template": "{{ messages }}"}"#),
    ])
}

#[test]
fn demo_report_has_all_sizes_and_needs() {
    let model = show(&["demo"]);
    assert_eq!(model["name"], "demo");
    assert_eq!(model["supported"], true);
    assert_eq!(model["chat"], "harmony");
    assert_eq!(model["license"], "MIT OR Apache-2.0");
    for (field, value) in [("layers", 6), ("heads", 8), ("kv_heads", 2), ("head_dim", 40), ("experts", 10)] {
        assert_eq!(model[field], value, "{field}");
    }
    let (all, active) = (model["parameters"].as_u64().unwrap(), model["active_parameters"].as_u64().unwrap());
    let groups = model["tensors"].as_array().unwrap();
    let sum = |field: &str| groups.iter().map(|group| group[field].as_u64().unwrap()).sum::<u64>();
    assert_eq!((sum("parameters"), sum("bytes")), (all, model["weight_bytes"].as_u64().unwrap()));
    let experts = groups.iter().find(|group| group["name"] == "experts").unwrap();
    assert_eq!(active, all - experts["parameters"].as_u64().unwrap() * 7 / 10);
    assert_eq!(experts["dtypes"], json!(["bf16", "mxfp4"]));
    assert!(groups.iter().all(|group| group["name"] != "other"), "{groups:?}");
    let size = |name: &str| fs::metadata(demo_dir().join(name)).unwrap().len();
    let files = model["files"].as_array().unwrap();
    assert!(files.contains(&json!({"name": "model.safetensors", "bytes": size("model.safetensors")})));

    let needs = &model["needs"];
    let bytes = |field: &str| needs[field].as_u64().unwrap();
    assert_eq!(bytes("total_bytes"), bytes("weight_bytes") + bytes("cache_bytes") + bytes("workspace_bytes"));
    assert_eq!(bytes("cache_bytes_per_1000_tokens"), 3 * 1000 * 2 * 2 * 40 * 2);
    assert_eq!(bytes("context"), 4096);
    assert_eq!(model["gpu"].is_null(), needs["fits"].is_null());
    if !cfg!(feature = "cuda") {
        assert!(model["no_gpu"].as_str().unwrap().contains("no GPU support"));
    }
}

#[test]
fn table_counts_one_kv_head_in_the_singular() {
    let (_folder, path) = demo_with_config(|config| config["num_key_value_heads"] = 1.into());
    let table = text(&run(&["show", path.to_str().unwrap()]).stdout);
    assert!(table.contains(", 1 KV head, 40 dims each"), "{table}");
}

#[test]
fn table_fits_120_columns() {
    let output = run(&["show", "demo"]);
    let table = text(&output.stdout);
    assert!(output.status.success() && text(&output.stderr).is_empty());
    for words in ["gpt_oss", "7.2M, 3.5M of them active", "10, 3 chosen", "TENSORS", "model.safetensors", "total"] {
        assert!(table.contains(words), "the table does not contain {words:?}:\n{table}");
    }
    assert!(table.lines().all(|line| line.chars().count() <= 120), "{table}");
}

#[test]
fn several_gpus_need_less_memory_each() {
    let needs = |args: &[&str]| show(&[&["demo"], args].concat())["needs"].clone();
    let one = needs(&[]);
    assert_eq!(one["gpus"], 1);
    for split in ["tensor", "layers"] {
        let two = needs(&["--gpus", "2", "--split", split]);
        assert_eq!(two["gpus"], 2);
        for field in ["weight_bytes", "cache_bytes", "cache_bytes_per_1000_tokens"] {
            let (one, two) = (one[field].as_u64().unwrap(), two[field].as_u64().unwrap());
            assert!(
                two < one && two >= one / 2,
                "{split}, {field}: {one} bytes on one GPU, {two} bytes on each of two GPUs"
            );
        }
    }
    let table = run(&["show", "demo", "--gpus", "2"]);
    assert!(text(&table.stdout).contains("ON EACH OF 2 GPUS"), "{}", text(&table.stdout));
    assert_fails(&run(&["show", "demo", "--gpus", "9"]), 2, &["choose 1 to 8"]);
    assert_fails(&run(&["show", "demo", "--gpus", "7", "--split", "layers"]), 2, &["6 layers among 7 devices"]);
}

#[test]
fn context_changes_the_cache_size_or_is_rejected() {
    let cache = |context: &str| show(&["demo", "--context", context])["needs"]["cache_bytes"].as_u64().unwrap();
    assert!(cache("1000") < cache("2000"));
    assert_fails(&run(&["show", "demo", "--context", "5000"]), 2, &["--context 5000", "4096"]);
    assert_fails(&run(&["show", "demo", "--context", "0"]), 2, &["--context 0"]);
}

#[test]
fn unsupported_model_is_shown_with_the_reason() {
    let (_folder, path) = demo_with_config(|config| config["model_type"] = "mamba9".into());
    let model = show(&[path.to_str().unwrap()]);
    assert_eq!((&model["family"], &model["supported"]), (&json!("mamba9"), &json!(false)));
    assert!(model["reason"].as_str().unwrap().contains("'mamba9' is not supported"));
    assert_eq!((&model["layers"], &model["vocab_size"]), (&json!(6), &json!(2000)));
    assert_eq!(model["needs"]["estimated"], true);
}

#[test]
fn invalid_config_is_shown_with_the_field() {
    let (_folder, path) = demo_with_config(|config| config["num_attention_heads"] = 0.into());
    assert!(show(&[path.to_str().unwrap()])["reason"].as_str().unwrap().contains("num_attention_heads"));
}

#[test]
fn broken_files_are_named_and_the_license_is_still_shown() {
    let (_folder, path) = copy_of_demo();
    fs::write(path.join("config.json"), "{").unwrap();
    fs::write(path.join("model.safetensors"), "short").unwrap();
    fs::write(path.join("LICENSE"), "\n  Apache License\n").unwrap();
    let model = show(&[path.to_str().unwrap()]);
    assert!(model["reason"].as_str().unwrap().contains("config.json"));
    assert!(model["weights_problem"].as_str().unwrap().contains("model.safetensors"));
    assert_eq!(model["license"], "Apache License (LICENSE)");
    assert!(run(&["show", path.to_str().unwrap()]).status.success());
}

#[test]
fn missing_model_error_suggests_remote() {
    assert_fails(&run(&["show", "org/name"]), 3, &["inferno download org/name", "inferno show org/name --remote"]);
    let output = run(&["show", "./nowhere"]);
    assert_fails(&output, 3, &["./nowhere"]);
    assert!(!text(&output.stderr).contains("--remote"));
}

#[test]
fn remote_needs_the_name_of_a_repository() {
    assert_fails(&run(&["show", "demo", "--remote"]), 2, &["inferno show demo"]);
    assert_fails(&run(&["show", "a/b/c", "--remote"]), 2, &["org/name"]);
}

#[test]
fn remote_fails_without_a_hub() {
    // `run` sets `HF_ENDPOINT` to http://127.0.0.1:1, where no server listens.
    assert_fails(&run(&["show", "org/name", "--remote"]), 5, &["127.0.0.1:1"]);
    let home = TempDir::new().unwrap();
    let output = inferno(&home).args(["show", REPO, "--remote"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert_fails(&output, 5, &["HF_HUB_OFFLINE"]);
}

#[test]
fn remote_model_is_read_from_its_headers() {
    let fake = two_shards();
    let output = remote(&fake, &["--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let model: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(model["revision"], COMMIT);
    assert!(model["path"].is_null());
    assert_eq!((&model["supported"], &model["license"]), (&json!(true), &json!("llama3.2")));
    assert_eq!(model["chat"], "tokenizer_config.json");
    assert_eq!((&model["parameters"], &model["weight_bytes"]), (&json!(88), &json!(192)));
    assert_eq!(model["tied_embeddings"], true);
    // In memory, the 80 elements of the embedding are bf16, and the 8 elements of the norm are f32.
    assert_eq!(model["needs"]["weight_bytes"], 192);
    assert_eq!(model["files"].as_array().unwrap().len(), 7);

    let mut lines = fake.take_lines();
    lines.sort();
    let file = |name: &str| format!("GET /{REPO}/resolve/{COMMIT}/{name}");
    let mut expected = vec![format!("GET /api/models/{REPO}/revision/main?blobs=true")];
    expected.extend(["README.md", "config.json", SHARDS[0], SHARDS[1], INDEX, "tokenizer_config.json"].map(file));
    expected.sort();
    assert_eq!(lines, expected, "expected one request for the listing and one per needed file");
}

#[test]
fn weights_are_not_fetched_even_from_a_server_without_ranges() {
    const SIZE: usize = 64 << 20;
    let weights = file(&[("model.embed_tokens.weight", "U8", &[SIZE as u64], SIZE)]);
    for supports_ranges in [true, false] {
        let fake = FakeHub::start(&[("config.json", CONFIG.as_bytes()), ("model.safetensors", &weights)]);
        fake.change(|world| world.supports_ranges = supports_ranges);
        let output = remote(&fake, &["--json"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let model: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(model["weight_bytes"], SIZE);
        let sent = fake.state.lock().unwrap().sent_bytes;
        // A server without range support keeps sending until inferno closes the connection.
        let limit = if supports_ranges { 200_000 } else { SIZE / 2 };
        assert!(sent < limit, "the server sent {sent} bytes, not fewer than {limit}; range support: {supports_ranges}");
    }
}

#[test]
fn long_header_takes_a_second_request() {
    let names: Vec<String> = (0..3000).map(|index| format!("model.layers.{index}.self_attn.q_proj.weight")).collect();
    let tensors: Vec<(&str, &str, &[u64], usize)> =
        names.iter().map(|name| (name.as_str(), "F16", &[2, 3][..], 12)).collect();
    let weights = file(&tensors);
    let fake = FakeHub::start(&[("config.json", CONFIG.as_bytes()), ("model.safetensors", &weights)]);
    for (supports_ranges, requests) in [(true, 2), (false, 1)] {
        fake.change(|world| world.supports_ranges = supports_ranges);
        let output = remote(&fake, &["--json"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let model: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(model["parameters"], 18_000);
        let weight_requests = fake.take_lines().iter().filter(|line| line.ends_with("model.safetensors")).count();
        assert_eq!(weight_requests, requests);
    }
}

#[test]
fn broken_headers_are_rejected() {
    let whole = file(&[("model.norm.weight", "F32", &[8], 32)]);
    let with_length = |length: u64| [&length.to_le_bytes(), &whole[8..]].concat();
    let cases = [
        (whole[..5].to_vec(), "the safetensors file is incomplete"),
        (whole[..whole.len() - 50].to_vec(), "model.safetensors"),
        (whole[..whole.len() - 1].to_vec(), "32 bytes of tensors"),
        (with_length(u64::MAX), "claims a header"),
        (with_length(100_000_001), "claims a header"),
        (with_length(1 << 20), "claims a header"),
        (with_length(20), "model.safetensors"),
    ];
    for (weights, message) in cases {
        // A mirror may omit file sizes. inferno then cannot check whether the file contains all tensor data.
        for lists_sizes in [true, false] {
            let fake = FakeHub::start(&[("config.json", CONFIG.as_bytes()), ("model.safetensors", &weights)]);
            fake.change(|world| world.lists_sizes = lists_sizes);
            let output = remote(&fake, &[]);
            if output.status.success() {
                let table = text(&output.stdout);
                assert!(!lists_sizes || table.contains(message), "the table does not contain {message:?}:\n{table}");
            } else {
                assert_eq!(output.status.code(), Some(1));
                assert!(text(&output.stderr).contains("model.safetensors"), "{}", text(&output.stderr));
            }
        }
    }
    // The size in the hub's listing is larger than the size of the stored file.
    let fake = FakeHub::start(&[("config.json", CONFIG.as_bytes()), ("model.safetensors", &whole[..30])]);
    fake.change(|world| world.claimed_bytes = Some(whole.len() as u64));
    assert_fails(
        &remote(&fake, &[]),
        1,
        &["cannot read 'model.safetensors': the safetensors file is incomplete", "30 bytes"],
    );
}

#[test]
fn remote_errors_are_those_of_a_download() {
    let fake = two_shards();
    fake.change(|world| world.files_refused = Some((403, "GatedRepo")));
    assert_fails(&remote(&fake, &[]), 4, &["accept its license", REPO]);
    fake.change(|world| {
        world.files_refused = None;
        world.listing_refused = Some((404, "RevisionNotFound", ""));
    });
    assert_fails(&remote(&fake, &["--revision", "v9"]), 3, &["cannot find revision 'v9'"]);
    fake.change(|world| {
        world.listing_refused = None;
        let index = json!({"weight_map": {"a": "../../x.safetensors"}}).to_string();
        world.files.insert(INDEX.into(), index.into_bytes());
    });
    assert_fails(&remote(&fake, &[]), 1, &["not a plain file name"]);
    fake.change(|world| drop(world.files.insert("../config.json".into(), vec![])));
    assert_fails(&remote(&fake, &[]), 1, &["not a valid path in a repository"]);
}

#[test]
fn token_is_sent_only_to_the_endpoint() {
    let (fake, storage) = (two_shards(), two_shards());
    // The storage server is not the endpoint: both the host name and the port differ.
    fake.change(|world| world.storage = Some(format!("http://localhost:{}", storage.port)));
    let home = TempDir::new().unwrap();
    let output = command(&home, &fake).env("HF_TOKEN", "hf_secret").output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!text(&output.stdout).contains("hf_secret"));
    let has_token = |head: &String| head.to_lowercase().contains("authorization: bearer hf_secret");
    assert!(fake.take_heads().iter().all(has_token));
    let storage_heads = storage.take_heads();
    assert!(!storage_heads.is_empty() && !storage_heads.iter().any(has_token), "{storage_heads:?}");
}

#[test]
fn repository_without_supported_weights_is_shown_with_reasons() {
    let fake = FakeHub::start(&[("pytorch_model.bin", b"pickle")]);
    let table = text(&remote(&fake, &[]).stdout);
    assert!(table.contains("no config.json") && table.contains("neither safetensors weights"), "{table}");
}

#[test]
fn absurd_sizes_do_not_crash_the_report() {
    let names = ["num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size", "hidden_size", "sliding_window"];
    for value in [json!(u64::MAX), json!(-1), json!(1e300), json!("many"), json!(0), json!([4])] {
        let mut config = json!({"model_type": "mamba9", "max_position_embeddings": value, "num_experts": value,
            "num_experts_per_tok": value, "rope_scaling": {"type": value, "factor": value}});
        names.iter().for_each(|name| config[*name] = value.clone());
        let header = json!({"a.experts.b": {"dtype": "F8_NEW", "shape": [u64::MAX], "data_offsets": [0, u64::MAX]},
            "c_blocks": {"dtype": "NEW", "shape": [u64::MAX], "data_offsets": [0, u64::MAX]}});
        let header = header.to_string();
        let weights = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        let config = config.to_string();
        let fake = FakeHub::start(&[("config.json", config.as_bytes()), ("model.safetensors", &weights)]);
        fake.change(|world| world.lists_sizes = false);
        for format in [&["--json"][..], &[]] {
            let output = remote(&fake, format);
            assert!(output.status.success(), "{value}: {}", text(&output.stderr));
        }
    }
}
