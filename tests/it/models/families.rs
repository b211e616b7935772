//! Tests how inferno reads each family's config.json: older and newer fields, defaults, unsupported options and absurd
//! values. Also tests checkpoints with other tensor names, stacked experts or unused tensors, and the tensor tables.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor, safetensors};
use inferno::models;
use inferno::weights::tensor_table::{Form, TensorRow};
use inferno::weights::{Checkpoint, LoadProgress, WeightsBuilder};
use serde_json::{Value, json};

use crate::support::{GoldenKind, checkpoint_logits, expected_logits, golden, golden_models, relative_error};

fn config(case: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden(case).join("config.json")).unwrap()).unwrap()
}

fn read(config: &Value) -> anyhow::Result<models::ModelConfig> {
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("config.json"), config.to_string())?;
    models::read_config(dir.path())
}

/// Returns each layer's sliding window in tokens, or `None` for full attention.
fn windows(config: &Value) -> Vec<Option<usize>> {
    read(config).unwrap().architecture.cache_layers().into_iter().map(|layer| layer.window).collect()
}

fn config_with(case: &str, fields: Value) -> Value {
    let mut config = config(case);
    for (name, value) in fields.as_object().unwrap() {
        config[name] = value.clone();
    }
    config
}

#[test]
fn sliding_windows_follow_the_config() {
    assert_eq!(windows(&config("mistral")), [Some(11); 4]);
    assert_eq!(windows(&config_with("mistral", json!({"sliding_window": null}))), [None; 4]);
    let mut absent = config("mistral");
    absent.as_object_mut().unwrap().remove("sliding_window");
    absent["max_position_embeddings"] = json!(32_768);
    assert_eq!(windows(&absent), [Some(4096); 4], "a missing sliding_window must mean 4096, as in transformers");
    absent["max_position_embeddings"] = json!(4096);
    assert_eq!(windows(&absent), [None; 4], "a window as long as the context must be ignored");

    assert_eq!(windows(&config("qwen2")), [None, None, Some(9), Some(9)]);
    assert_eq!(windows(&config_with("qwen2", json!({"use_sliding_window": false}))), [None; 4]);
    let types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"];
    assert_eq!(windows(&config_with("qwen2", json!({"layer_types": types}))), [Some(9), None, None, Some(9)]);

    assert_eq!(windows(&config("gemma2")), [Some(9), None, Some(9)]);
    assert_eq!(windows(&config("gemma3")), [Some(7), Some(7), None, Some(7)]);
    let mut six = config_with("gemma3", json!({"num_hidden_layers": 12}));
    six.as_object_mut().unwrap().remove("sliding_window_pattern");
    let full: Vec<usize> = (0..12).filter(|&layer| windows(&six)[layer].is_none()).collect();
    assert_eq!(full, [5, 11]);
    assert_eq!(windows(&config("phi3")), [Some(13); 3]);
    // In Gemma 3, the decoder uses separate RoPE frequencies for the layers that have a window.
    // A layer therefore keeps its window even if the window is longer than the context.
    let wide = config_with("gemma3", json!({"sliding_window": 4096}));
    assert_eq!(windows(&wide), [Some(4096), Some(4096), None, Some(4096)]);
}

/// Reads shortened configs of models on the hub. Expected values: vocabulary size, longest context, number of layers,
/// number of sliding-window layers, and the KV heads and head dim of the first layer.
#[test]
fn configs_from_the_hub_are_read() {
    let phi = |long: bool| {
        let scaling = json!({"type": "longrope", "short_factor": vec![1.0; 48], "long_factor": vec![2.0; 48]});
        let (max, scaling) = if long { (131_072, scaling) } else { (4096, Value::Null) };
        json!({
            "model_type": "phi3", "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32_064,
            "max_position_embeddings": max, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_scaling": scaling,
            "rope_theta": 10_000.0, "sliding_window": if long { 262_144 } else { 2047 }, "tie_word_embeddings": false
        })
    };
    let cases = [
        (
            "Mistral-7B-v0.1",
            json!({
            "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14_336,
            "max_position_embeddings": 32_768, "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "sliding_window": 4096,
            "vocab_size": 32_000}),
            (32_000, 32_768, 32, 32, 8, 128),
        ),
        (
            "Mistral-Nemo-Instruct-2407",
            json!({
            "model_type": "mistral", "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "intermediate_size": 14_336, "max_position_embeddings": 131_072, "num_attention_heads": 32,
            "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "sliding_window": null, "vocab_size": 131_072}),
            (131_072, 131_072, 40, 0, 8, 128),
        ),
        (
            "Mixtral-8x7B-Instruct-v0.1",
            json!({
            "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14_336,
            "max_position_embeddings": 32_768, "num_attention_heads": 32, "num_experts_per_tok": 2,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "sliding_window": null, "vocab_size": 32_000}),
            (32_000, 32_768, 32, 0, 8, 128),
        ),
        (
            "Qwen2.5-0.5B-Instruct",
            json!({
            "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
            "max_position_embeddings": 32_768, "max_window_layers": 21, "num_attention_heads": 14,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "sliding_window": 32_768, "tie_word_embeddings": true, "use_sliding_window": false,
            "vocab_size": 151_936}),
            (151_936, 32_768, 24, 0, 2, 64),
        ),
        (
            "Qwen3-30B-A3B",
            json!({
            "model_type": "qwen3_moe", "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40_960,
            "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": true,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 1e6,
            "sliding_window": null, "use_sliding_window": false, "vocab_size": 151_936}),
            (151_936, 40_960, 48, 0, 4, 128),
        ),
        ("Phi-3-mini-4k-instruct", phi(false), (32_064, 4096, 32, 32, 32, 96)),
        ("Phi-3-mini-128k-instruct", phi(true), (32_064, 131_072, 32, 0, 32, 96)),
        (
            "gemma-2-2b-it",
            json!({
            "model_type": "gemma2", "attention_bias": false, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
            "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
            "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
            "sliding_window": 4096, "vocab_size": 256_000}),
            (256_000, 8192, 26, 13, 4, 256),
        ),
        (
            "gemma-3-4b-it",
            json!({
            "model_type": "gemma3", "text_config": {
                "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text",
                "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024}}),
            (262_208, 131_072, 34, 29, 4, 256),
        ),
        (
            "gpt2",
            json!({
            "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_ctx": 1024,
            "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50_257}),
            (50_257, 1024, 12, 0, 12, 64),
        ),
    ];
    for (name, config, expected) in cases {
        let model = read(&config).unwrap_or_else(|error| panic!("{name}: {error:#}")).architecture;
        let layers = model.cache_layers();
        let sliding = layers.iter().filter(|layer| layer.window.is_some()).count();
        let (first, lengths) = (layers[0], (model.vocab_size(), model.max_position_embeddings()));
        let actual = (lengths.0, lengths.1, layers.len(), sliding, first.kv_heads, first.head_dim);
        assert_eq!(actual, expected, "{name}");
    }
}

#[test]
fn unsupported_options_are_errors_that_name_the_field() {
    let cases = [
        ("mistral", json!({"hidden_act": "gelu"}), "hidden_act 'gelu'"),
        ("mistral", json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}), "'dynamic'"),
        ("mistral", json!({"quantization_config": {"quant_method": "gptq"}}), "'gptq'"),
        ("mistral", json!({"sliding_window": 0}), "sliding_window is 0"),
        ("mistral", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        ("qwen2", json!({"use_mrope": true}), "use_mrope"),
        (
            "qwen2",
            json!({"layer_types": ["full_attention"]}),
            "the length of layer_types is 1, but the model has 4 layers",
        ),
        ("qwen2", json!({"layer_types": ["chunked_attention", "", "", ""]}), "chunked_attention"),
        ("qwen3_moe", json!({"num_experts_per_tok": 8}), "cannot route each token to 8 of 7 experts"),
        ("mixtral", json!({"num_local_experts": 2000}), "of 2000 experts"),
        ("phi3", json!({"rope_scaling": {"type": "linear", "factor": 2.0}}), "'linear'"),
        ("phi3", json!({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}), "short_factor"),
        ("phi3", json!({"rope_scaling": {"type": "su", "short_factor": [1, 1, 1, 1, 1]}}), "long_factor"),
        ("gemma2", json!({"hidden_activation": "gelu"}), "hidden_activation 'gelu'"),
        ("gemma2", json!({"attn_logit_softcapping": -1.0}), "attn_logit_softcapping is -1"),
        ("gemma2", json!({"use_bidirectional_attention": true}), "use_bidirectional_attention"),
        ("gemma3", json!({"attn_logit_softcapping": 50.0}), "attn_logit_softcapping"),
        ("gemma3", json!({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}), "'dynamic'"),
        ("gemma3", json!({"rope_parameters": "broken"}), "no entry for full_attention"),
        ("gemma3", json!({"sliding_window_pattern": 0}), "sliding_window_pattern is 0"),
        ("gpt2", json!({"activation_function": "relu"}), "activation_function 'relu'"),
        ("gpt2", json!({"n_head": 7}), "n_head 7"),
        ("gpt2", json!({"add_cross_attention": true}), "add_cross_attention"),
    ];
    for (case, fields, expected) in cases {
        let Err(error) = read(&config_with(case, fields.clone())) else { panic!("{case} with {fields} was accepted") };
        assert!(format!("{error:#}").contains(expected), "{case} with {fields}: wrong error: {error:#}");
    }
}

#[test]
fn errors_about_missing_fields_name_no_other_field() {
    for field in ["vocab_size", "hidden_size", "num_hidden_layers"] {
        let mut config = config("llama3");
        config.as_object_mut().unwrap().remove(field);
        let error = format!("{:#}", read(&config).err().unwrap());
        assert!(error.ends_with(&format!("config.json: missing field `{field}`")), "{error}");
    }
}

/// Replaces each number in the config.json of each family with absurd values, one at a time.
/// inferno must load or reject each config within ten seconds, and must reject impossible sizes.
#[test]
fn absurd_numbers_fail_quickly_or_load() {
    let sizes = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_embd",
        "n_head",
        "n_layer",
        "n_positions",
    ];
    let impossible =
        [json!(0), json!(-1), json!(u64::MAX), json!(1e300), json!(0.5), json!("many"), json!([4]), json!({})];
    let unusual = [json!(1), json!(3), json!(u32::MAX), json!(1u64 << 53), json!(-1e300), json!(null), json!(true)];
    let progress = LoadProgress::silent();
    for case in golden_models(|model| model.kind == GoldenKind::Family) {
        let checkpoint = Checkpoint::open(&golden(case)).unwrap();
        let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress).build().unwrap();
        let original = config(case);
        let build = |json: Value| -> anyhow::Result<()> {
            let model = models::parse_config(json)?;
            let context = model.architecture.max_position_embeddings().min(160);
            model.build(&weights, context).map(drop)
        };
        build(original.clone()).unwrap();
        let numbers = |json: &Value| -> Vec<String> {
            let fields = json.as_object().into_iter().flatten();
            fields.filter(|(_, value)| value.is_number()).map(|(name, _)| name.clone()).collect()
        };
        let nested = ["rope_scaling", "rope_parameters"]
            .map(|section| numbers(&original[section]).into_iter().map(move |name| (Some(section), name)));
        let top_level = numbers(&original).into_iter().map(|name| (None, name));
        for (section, name) in top_level.chain(nested.into_iter().flatten()) {
            for value in impossible.iter().chain(&unusual) {
                let mut json = original.clone();
                match section {
                    Some(section) => json[section][&name] = value.clone(),
                    None => json[&name] = value.clone(),
                }
                let start = Instant::now();
                let outcome = build(json);
                let duration = start.elapsed();
                assert!(duration < Duration::from_secs(10), "{case}: loading with {name} = {value} took {duration:?}");
                let must_fail = section.is_none() && sizes.contains(&name.as_str()) && impossible.contains(value);
                assert!(!must_fail || outcome.is_err(), "{case}: {name} = {value} was accepted");
            }
        }
    }
}

#[test]
fn unsupported_architecture_error_names_the_nearest_supported_one() {
    let message = |name: &str| read(&json!({"model_type": name})).err().unwrap().to_string();
    assert!(message("mistral3").contains("closest match is mistral"), "{}", message("mistral3"));
    assert!(message("qwen3_next").contains("closest match is qwen3_moe"), "{}", message("qwen3_next"));
    assert!(message("gemma").contains("closest match is gemma2"), "{}", message("gemma"));
    assert!(!message("mamba2").contains("closest"), "{}", message("mamba2"));
    assert!(message("mamba2").contains("gpt_oss, llama, mistral"));
}

/// LongRoPE uses its short factors for contexts up to `original_max_position_embeddings`.
/// Longer contexts need the long factors and are opt-in.
#[test]
fn longrope_models_default_to_their_original_length() {
    let phi = |case| read(&config(case)).unwrap().architecture;
    assert_eq!((phi("phi3").default_context(), phi("phi3").max_position_embeddings()), (32, 240));
    assert_eq!((phi("phi4").default_context(), phi("phi4").max_position_embeddings()), (160, 640));
    assert_eq!(phi("mistral").default_context(), 240);
    let plain = read(&config_with("phi3", json!({"rope_scaling": null}))).unwrap().architecture;
    assert_eq!(plain.default_context(), 240, "without LongRoPE, the default context must be the longest context");
    assert!(
        read(&config_with(
            "phi3",
            json!({"rope_scaling": {
        "type": "su", "short_factor": [1, 1, 1, 1, 1], "long_factor": [1, 2, 3, 4, 5]}})
        ))
        .is_ok()
    );
}

/// Asserts that the golden model `case` still produces the golden logits with the config `config`, and with the tensors
/// that `change` returns. Also checks the tensor table of the model's family.
fn assert_same_model(case: &str, config: &Value, change: impl Fn(HashMap<String, Tensor>) -> HashMap<String, Tensor>) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let tensors = safetensors::load(golden(case).join("model.safetensors"), &Device::Cpu).unwrap();
    safetensors::save(&change(tensors), dir.path().join("model.safetensors")).unwrap();
    let (ids, expected) = expected_logits(&golden(case).join("golden.safetensors"));
    let error = relative_error(&checkpoint_logits(dir.path(), &ids).unwrap(), &expected);
    assert!(error < 1e-4, "{case}: relative error of the logits: {error:e}");
}

fn rename_all(tensors: HashMap<String, Tensor>, rename: impl Fn(&str) -> String) -> HashMap<String, Tensor> {
    tensors.into_iter().map(|(name, tensor)| (rename(&name), tensor)).collect()
}

/// Adds tensors with the given names, which inferno must not load.
fn with_unloaded<'n>(
    mut tensors: HashMap<String, Tensor>,
    names: impl IntoIterator<Item = &'n str>,
) -> HashMap<String, Tensor> {
    for name in names {
        tensors.insert(name.into(), Tensor::ones((3, 5), DType::F32, &Device::Cpu).unwrap());
    }
    tensors
}

#[test]
fn attention_masks_and_vision_modules_are_not_loaded() {
    let masks = ["h.0.attn.bias", "h.0.attn.masked_bias"];
    assert_same_model("gpt2", &config("gpt2"), |tensors| with_unloaded(tensors, masks));
    let vision = ["vision_tower.layers.0.self_attn.q_proj.weight", "model.multi_modal_projector.soft_norm.weight"];
    assert_same_model("gemma3", &config("gemma3"), |tensors| with_unloaded(tensors, vision));
    let tables = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"];
    assert_same_model("llama3", &config("llama3"), |tensors| with_unloaded(tensors, tables));
}

#[test]
fn gpt2_loads_with_the_transformer_prefix() {
    assert_same_model("gpt2", &config("gpt2"), |tensors| rename_all(tensors, |name| format!("transformer.{name}")));
}

#[test]
fn gemma3_loads_from_multimodal_checkpoints_and_with_rope_parameters() {
    let old = config("gemma3");
    let multimodal = json!({"model_type": "gemma3", "text_config": old, "vision_config": {"hidden_size": 7}});
    for prefix in ["language_model.model.", "model.language_model."] {
        let rename = |name: &str| name.replacen("model.", prefix, 1);
        assert_same_model("gemma3", &multimodal, |tensors| rename_all(tensors, rename));
    }
    let mut new = old.clone();
    for field in ["rope_scaling", "rope_theta", "rope_local_base_freq", "sliding_window_pattern"] {
        new.as_object_mut().unwrap().remove(field);
    }
    new["layer_types"] = json!(["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]);
    new["rope_parameters"] = json!({
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}
    });
    assert_same_model("gemma3", &new, |tensors| tensors);
}

/// The names of rows for tensors that inferno does not load. No golden checkpoint contains such tensors, but
/// `attention_masks_and_vision_modules_are_not_loaded` adds them to copies of golden checkpoints.
const UNTESTED: [&str; 5] = ["attn.bias", "attn.masked_bias", "rotary_emb", "vision_tower", "multi_modal_projector"];

/// Each tensor of a golden checkpoint must match a row of its family's table that marks the tensor as loaded.
/// Each row except those in [`UNTESTED`] must match a tensor of a golden checkpoint. Families can share rows.
#[test]
fn tensor_tables_describe_the_test_checkpoints() {
    let names = golden_models(|_| true).into_iter().chain(["trained"]).map(golden);
    let gguf = std::fs::read_dir(golden("gguf_quantized")).unwrap().map(|file| file.unwrap().path());
    let mut used = Vec::new();
    for path in names.chain(gguf.filter(|path| path.extension().is_some_and(|extension| extension == "gguf"))) {
        let (config, checkpoint) = models::open(&path).unwrap();
        for (name, _) in checkpoint.tensors() {
            let row = config.family.tensors.row(name);
            let row = row.unwrap_or_else(|| panic!("{}: no row matches tensor {name}", path.display()));
            assert!(
                matches!(row, TensorRow::Tensor(_, role) if role.form != Form::Unloaded),
                "the tensor table says that {name} is not loaded"
            );
            used.push(row);
        }
    }
    for family in models::FAMILIES {
        for row in family.tensors.rows().filter(|row| !used.contains(row)) {
            let (TensorRow::Tensor(name, _) | TensorRow::UnloadedModule(name)) = row;
            assert!(UNTESTED.contains(name), "{}: the row {name} matches no tensor", family.model_type);
        }
    }
}

/// transformers 5 stacks the experts of a layer into two tensors. The golden checkpoints of Qwen3-MoE and Mixtral have
/// one tensor per expert matrix instead. With stacked experts, they must still produce the golden logits.
#[test]
fn stacked_experts_load_as_separate_ones_do() {
    let stack = |mut tensors: HashMap<String, Tensor>, block: &str, [gate, up, down]: [&str; 3]| {
        let gates: Vec<String> =
            tensors.keys().filter(|name| name.ends_with(&format!("experts.0.{gate}.weight"))).cloned().collect();
        for first in gates {
            let prefix = first.split(".experts.").next().unwrap().to_string();
            let mut take =
                |expert: usize, name: &str| tensors.remove(&format!("{prefix}.experts.{expert}.{name}.weight"));
            let (mut gate_up, mut downs) = (Vec::new(), Vec::new());
            while let Some(matrix) = take(downs.len(), gate) {
                gate_up.push(Tensor::cat(&[matrix, take(downs.len(), up).unwrap()], 0).unwrap());
                downs.push(take(downs.len(), down).unwrap());
            }
            tensors.insert(format!("{prefix}.experts.gate_up_proj"), Tensor::stack(&gate_up, 0).unwrap());
            tensors.insert(format!("{prefix}.experts.down_proj"), Tensor::stack(&downs, 0).unwrap());
        }
        rename_all(tensors, |name| name.replace(block, "mlp"))
    };
    let (qwen, mixtral) = (["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]);
    assert_same_model("qwen3_moe", &config("qwen3_moe"), |tensors| stack(tensors, "mlp", qwen));
    assert_same_model("mixtral", &config("mixtral"), |tensors| stack(tensors, "block_sparse_moe", mixtral));
}
