//! Tests of the compressed-tensors `quantization_config`: golden checkpoints, published configs, unsupported configs.
//! The test of published configs needs `INFERNO_FIXTURES`.

use std::path::Path;

use inferno::Error;
use inferno::weights::Checkpoint;
use inferno::weights::compressed::{Activations, CodeType, CompressedConfig, Scheme, WeightScales};
use serde_json::{Value, json};

use crate::support::{fixtures, golden};

const CASES: &[(&str, Scheme)] = &[
    ("int8", scheme(CodeType::Int8, WeightScales::PerChannel, Activations::PerToken)),
    ("int8_weights", scheme(CodeType::Int8, WeightScales::PerChannel, Activations::Unquantized)),
    (
        "int8_packed",
        Scheme { is_packed: true, ..scheme(CodeType::Int8, WeightScales::PerChannel, Activations::Unquantized) },
    ),
    ("fp8", scheme(CodeType::Fp8, WeightScales::PerChannel, Activations::PerToken)),
    ("fp8_static", scheme(CodeType::Fp8, WeightScales::PerTensor, Activations::Static)),
];

const fn scheme(code_type: CodeType, weight_scales: WeightScales, activations: Activations) -> Scheme {
    Scheme { code_type, weight_scales, activations, is_packed: false }
}

fn json_of(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn read(config: &Value) -> CompressedConfig {
    CompressedConfig::read(config).unwrap().expect("quantized")
}

/// Asserts that the config is rejected with exit code 9.
/// Returns the first line of the error, without the prefix `cannot load the model: `.
fn unsupported(config: &Value) -> String {
    let error = CompressedConfig::read(config).expect_err("an error");
    let error = error.downcast_ref::<Error>().unwrap_or_else(|| panic!("{error:#}"));
    assert_eq!(error.exit_code(), 9);
    let message = error.to_string();
    message.lines().next().unwrap().strip_prefix("cannot load the model: ").unwrap().to_string()
}

#[test]
fn schemes_match_the_tensors_of_golden_checkpoints() {
    for (case, expected) in CASES {
        let dir = golden("compressed").join(case);
        let config = read(&json_of(&dir.join("config.json")));
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let is_layer = |name: &&str| name.ends_with("_proj") || *name == "lm_head";
        let names = checkpoint.tensors().filter_map(|(name, _)| name.strip_suffix(".weight"));
        let mut unquantized = Vec::new();
        for layer in names.filter(is_layer) {
            let tensor = |ending: &str| checkpoint.info(&format!("{layer}.{ending}"));
            let weight = tensor("weight").unwrap();
            let Some(scheme) = config.scheme(layer) else {
                assert_eq!(weight.dtype.to_string(), "BF16", "{case}: {layer}");
                assert!(tensor("weight_scale").is_none(), "{case}: {layer}");
                unquantized.push(layer);
                continue;
            };
            assert_eq!(scheme, *expected, "{case}: {layer}");
            let dtype = if scheme.code_type == CodeType::Int8 { "I8" } else { "F8_E4M3" };
            assert_eq!(weight.dtype.to_string(), dtype, "{case}: {layer}");
            let per_channel = scheme.weight_scales == WeightScales::PerChannel;
            let shape = if per_channel { vec![weight.shape[0], 1] } else { vec![1] };
            assert_eq!(tensor("weight_scale").unwrap().shape, shape, "{case}: {layer}");
            let is_static = scheme.activations == Activations::Static;
            assert_eq!(tensor("input_scale").is_some(), is_static, "{case}: {layer}");
        }
        let ignored: &[&str] =
            if *case == "fp8" { &["lm_head", "model.layers.1.self_attn.v_proj"] } else { &["lm_head"] };
        assert_eq!(unquantized, ignored, "{case}");
    }
}

#[test(fixtures)]
fn real_configs_are_supported() {
    let fixtures = fixtures().join("w8a8-compressed-tensors");
    for style in ["config.2024-style.json", "config.2025-style.json"] {
        let config = read(&json_of(&fixtures.join(style)));
        let expected = Some(CASES[0].1);
        assert_eq!(config.scheme("model.layers.0.self_attn.q_proj"), expected, "{style}");
        assert_eq!(config.scheme("model.layers.31.mlp.down_proj"), expected, "{style}");
        assert_eq!(config.scheme("lm_head"), None, "{style}");
    }
    let example = json!({"quantization_config": json_of(&fixtures.join("example_quant_config.json"))});
    let expected = scheme(CodeType::Int8, WeightScales::PerTensor, Activations::Static);
    assert_eq!(read(&example).scheme("lm_head"), Some(expected));
    let by_layer = json!({"quantization_config": json_of(&fixtures.join("quantization_config.num_bits-map.json"))});
    assert_eq!(unsupported(&by_layer), "per-layer num_bits in config_groups.group_0.weights is not supported");
}

/// Returns the `quantization_config` section of a W8A8 model.
fn section() -> Value {
    json_of(&golden("compressed/int8/config.json"))["quantization_config"].take()
}

#[test]
fn older_forms_are_supported() {
    let expected = Some(CASES[0].1);
    let mut underscored = section();
    underscored["quant_method"] = json!("compressed_tensors");
    let mut oldest = section();
    oldest["quant_method"] = json!("sparseml");
    let old = json!({"quantization_config": oldest, "sparsity_config": {"format": "dense"}});
    for config in [
        json!({"quantization_config": underscored}),
        json!({"compression_config": section()}),
        json!({"quantization_config": null, "compression_config": old}),
    ] {
        assert_eq!(read(&config).scheme("model.layers.0.mlp.up_proj"), expected, "{config}");
    }
    let mut sparse = json!({"compression_config": old});
    sparse["compression_config"]["sparsity_config"]["format"] = json!("sparse-bitmask");
    assert_eq!(unsupported(&sparse), "compressed-tensors sparsity_config \"sparse-bitmask\" is not supported");
}

#[test]
fn unquantized_and_mxfp4_models_have_no_scheme() {
    for config in [
        json!({}),
        json!({"quantization_config": null}),
        json!({"quantization_config": {}}),
        json!({"quantization_config": {"quant_method": "mxfp4"}}),
    ] {
        assert!(CompressedConfig::read(&config).unwrap().is_none(), "{config}");
    }
}

#[test]
fn other_quantization_methods_are_errors() {
    for method in ["gptq", "awq", "bitsandbytes", "fp8", "fbgemm_fp8", "modelopt", "quark", "hqq", "torchao"] {
        let config = json!({"quantization_config": {"quant_method": method}});
        assert_eq!(unsupported(&config), format!("quantization '{method}' is not supported"));
    }
    let config = json!({"quantization_config": {"load_in_8bit": true}});
    assert_eq!(unsupported(&config), "quantization_config without quant_method is not supported");
}

/// Returns a W8A8 config whose `quantization_config` has `value` at the JSON pointer `pointer`.
fn with(pointer: &str, value: Value) -> Value {
    let mut section = section();
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    section.pointer_mut(parent).unwrap()[field] = value;
    json!({"quantization_config": section})
}

const GROUP: &str = "/config_groups/group_0";
const WEIGHTS: &str = "/config_groups/group_0/weights";
const INPUTS: &str = "/config_groups/group_0/input_activations";

#[test]
fn unsupported_fields_are_errors() {
    let check = |pointer: &str, value: Value, what: &str| {
        assert_eq!(unsupported(&with(pointer, value)), format!("{what} is not supported"));
    };
    check("/kv_cache_scheme", json!({"num_bits": 8}), "compressed-tensors kv_cache_scheme");
    check("/transform_config", json!({"config_groups": {"u": {}}}), "compressed-tensors transform_config");
    check("/moe_sparsity_config", json!({"method": "prune"}), "compressed-tensors moe_sparsity_config");
    let sparse = json!({"format": "sparse-24-bitmask"});
    check("/sparsity_config", sparse, "compressed-tensors sparsity_config \"sparse-24-bitmask\"");
    check("/ignore", json!(["re:(?!lm_head)"]), "pattern 're:(?!lm_head)' in quantization_config");

    check(GROUP, json!(["Linear"]), "the preset config_groups.group_0");
    let formats = ["marlin-24", "nvfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense"];
    for format in formats {
        let what = format!("compressed-tensors format '{format}'");
        check(&format!("{GROUP}/format"), json!(format), &what);
        let mut config = with("/format", json!(format));
        config["quantization_config"]["config_groups"]["group_0"].as_object_mut().unwrap().remove("format");
        assert_eq!(unsupported(&config), format!("{what} is not supported"));
    }
    let output = "output_activations in config_groups.group_0";
    check(&format!("{GROUP}/output_activations"), json!({"num_bits": 8}), output);
    check(&format!("{GROUP}/targets"), json!(["re:*"]), "pattern 're:*' in quantization_config");
    check(&format!("{GROUP}/targets"), json!(["Embedding"]), "target 'Embedding' in config_groups.group_0");
    check(WEIGHTS, Value::Null, "input-only quantization in config_groups.group_0");

    for (tensor, place) in [(WEIGHTS, "weights"), (INPUTS, "input_activations")] {
        let check_field = |field: &str, value: Value, what: &str| {
            check(&format!("{tensor}/{field}"), value, &format!("{what} in config_groups.group_0.{place}"));
        };
        check_field("num_bits", json!(4), "num_bits=4");
        check_field("num_bits", json!({"mlp.experts": 4}), "per-layer num_bits");
        check_field("type", json!("uint"), "type='uint'");
        check_field("symmetric", json!(false), "symmetric=false");
        check_field("actorder", json!("weight"), "actorder=\"weight\"");
        check_field("group_size", json!(128), "group_size=128");
        check_field("block_structure", json!([128, 128]), "block_structure=[128,128]");
        check_field("strategy", json!("block"), "strategy='block'");
        check_field("strategy", json!("group"), "strategy='group'");
        check_field("strategy", json!("tensor_group"), "strategy='tensor_group'");
        check_field("dynamic", json!("local"), "dynamic=\"local\"");
    }
    check(&format!("{WEIGHTS}/dynamic"), json!(true), "dynamic=true in config_groups.group_0.weights");
    let inputs = |what| format!("{what} in config_groups.group_0.input_activations");
    check(&format!("{INPUTS}/dynamic"), json!(false), &inputs("strategy='token' without dynamic=true"));
    check(&format!("{INPUTS}/scale_dtype"), json!("torch.uint8"), &inputs("scale_dtype"));
    check(INPUTS, json!({"strategy": "tensor", "dynamic": true}), &inputs("dynamic per-tensor scaling"));
    let other = "config_groups.group_0.input_activations with a different type than the weights";
    check(&format!("{INPUTS}/type"), json!("float"), other);
}

#[test]
fn fields_without_effect_are_allowed() {
    let w8a8 = CASES[0].1;
    let per_tensor = Scheme { weight_scales: WeightScales::PerTensor, ..w8a8 };
    let inputs = |activations| Scheme { activations, ..w8a8 };
    for (pointer, value, expected) in [
        ("/sparsity_config", json!({"format": "dense", "global_sparsity": 0.1}), w8a8),
        ("/ignore", Value::Null, w8a8),
        ("/quantization_status", json!("frozen"), w8a8),
        (&format!("{GROUP}/format"), Value::Null, w8a8),
        (&format!("{WEIGHTS}/observer"), json!("mse"), w8a8),
        (&format!("{WEIGHTS}/actorder"), json!(false), w8a8),
        (&format!("{WEIGHTS}/group_size"), json!(-1), w8a8),
        (&format!("{WEIGHTS}/strategy"), json!("tensor"), per_tensor),
        (&format!("{WEIGHTS}/strategy"), Value::Null, per_tensor),
        (INPUTS, Value::Null, inputs(Activations::Unquantized)),
        (INPUTS, json!({"num_bits": 8}), inputs(Activations::Static)),
    ] {
        let config = read(&with(pointer, value.clone()));
        assert_eq!(config.scheme("model.layers.0.self_attn.q_proj"), Some(expected), "{pointer} {value}");
    }
    let mut by_size = with(&format!("{WEIGHTS}/strategy"), Value::Null);
    by_size["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = json!(-1);
    assert_eq!(read(&by_size).scheme("x"), Some(w8a8));
}

#[test]
fn malformed_configs_are_errors() {
    for (pointer, value) in [
        ("/config_groups", json!([])),
        ("/config_groups", Value::Null),
        ("/ignore", json!("lm_head")),
        (GROUP, json!("Linear")),
        (&format!("{GROUP}/targets"), json!("Linear")),
        (WEIGHTS, json!(8)),
        (&format!("{WEIGHTS}/group_size"), json!("all")),
    ] {
        let error = CompressedConfig::read(&with(pointer, value)).unwrap_err();
        assert!(format!("{error:#}").contains("invalid quantization_config"), "{error:#}");
    }
}
