//! What config.json says, in all its spellings, and what is refused; checkpoints that name the same tensors otherwise.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor, safetensors};
use inferno::models;
use inferno::nn::decoder::{Batch, LogitsOf};
use inferno::nn::kv_cache::KvCache;
use inferno::weights::{Checkpoint, Loaded, Weights};
use serde_json::{Value, json};

use crate::support::{golden, relative_error, values};

fn config(case: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden(case).join("config.json")).unwrap()).unwrap()
}

fn read(config: &Value) -> anyhow::Result<models::ModelConfig> {
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("config.json"), config.to_string())?;
    models::read_config(dir.path())
}

/// Of each layer.
fn windows(config: &Value) -> Vec<Option<usize>> {
    read(config).unwrap().architecture.cache_layers().into_iter().map(|layer| layer.window).collect()
}

fn with(case: &str, fields: Value) -> Value {
    let mut config = config(case);
    for (name, value) in fields.as_object().unwrap() {
        config[name] = value.clone();
    }
    config
}

#[test]
fn windows_are_where_the_config_puts_them() {
    assert_eq!(windows(&config("mistral")), [Some(11); 4]);
    assert_eq!(windows(&with("mistral", json!({"sliding_window": null}))), [None; 4]);
    let mut absent = config("mistral");
    absent.as_object_mut().unwrap().remove("sliding_window");
    assert_eq!(windows(&absent), [Some(4096); 4], "transformers' default");

    assert_eq!(windows(&config("qwen2")), [None, None, Some(9), Some(9)]);
    assert_eq!(windows(&with("qwen2", json!({"use_sliding_window": false}))), [None; 4]);
    let types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"];
    assert_eq!(windows(&with("qwen2", json!({"layer_types": types}))), [Some(9), None, None, Some(9)]);

    assert_eq!(windows(&config("gemma2")), [Some(9), None, Some(9)]);
    assert_eq!(windows(&config("gemma3")), [Some(7), Some(7), None, Some(7)]);
    let mut six = with("gemma3", json!({"num_hidden_layers": 12}));
    six.as_object_mut().unwrap().remove("sliding_window_pattern");
    let full: Vec<usize> = (0..12).filter(|&layer| windows(&six)[layer].is_none()).collect();
    assert_eq!(full, [5, 11]);
    assert_eq!(windows(&config("phi3")), [Some(13); 3]);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let cases = [
        ("mistral", json!({"hidden_act": "gelu"}), "hidden_act 'gelu'"),
        ("mistral", json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}), "'dynamic'"),
        ("mistral", json!({"quantization_config": {"quant_method": "gptq"}}), "'gptq'"),
        ("mistral", json!({"sliding_window": 0}), "sliding_window is 0"),
        ("mistral", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        ("qwen2", json!({"use_mrope": true}), "use_mrope"),
        ("qwen2", json!({"layer_types": ["full_attention"]}), "1 layer_types for 4 layers"),
        ("qwen2", json!({"layer_types": ["chunked_attention", "", "", ""]}), "chunked_attention"),
        ("qwen3_moe", json!({"num_experts_per_tok": 8}), "cannot choose 8 of 7"),
        ("mixtral", json!({"num_local_experts": 2000}), "of 2000 experts"),
        ("phi3", json!({"rope_scaling": {"type": "linear", "factor": 2.0}}), "'linear'"),
        ("phi3", json!({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}), "long_factor"),
        ("gemma2", json!({"hidden_activation": "gelu"}), "hidden_activation 'gelu'"),
        ("gemma2", json!({"attn_logit_softcapping": -1.0}), "attn_logit_softcapping is -1"),
        ("gemma2", json!({"use_bidirectional_attention": true}), "use_bidirectional_attention"),
        ("gemma3", json!({"attn_logit_softcapping": 50.0}), "attn_logit_softcapping"),
        ("gemma3", json!({"sliding_window_pattern": 0}), "sliding_window_pattern is 0"),
        ("gpt2", json!({"activation_function": "relu"}), "activation_function 'relu'"),
        ("gpt2", json!({"n_head": 7}), "n_head 7"),
        ("gpt2", json!({"add_cross_attention": true}), "add_cross_attention"),
    ];
    for (case, fields, expected) in cases {
        let Err(error) = read(&with(case, fields.clone())) else { panic!("{case} with {fields} was taken") };
        assert!(format!("{error:#}").contains(expected), "{case} with {fields}: {error:#}");
    }
}

#[test]
fn an_unsupported_architecture_is_told_its_nearest() {
    let message = |name: &str| read(&json!({"model_type": name})).err().unwrap().to_string();
    assert!(message("mistral3").contains("nearest is mistral"), "{}", message("mistral3"));
    assert!(message("qwen3_next").contains("nearest is qwen3_moe"), "{}", message("qwen3_next"));
    assert!(message("gemma").contains("nearest is gemma2"), "{}", message("gemma"));
    assert!(!message("mamba2").contains("nearest"), "{}", message("mamba2"));
    assert!(message("mamba2").contains("gpt_oss, llama, mistral"));
}

/// The short factors hold up to the original length; whoever asks for more gets the long ones.
#[test]
fn longrope_models_are_loaded_for_their_original_length() {
    let phi = |case| read(&config(case)).unwrap().architecture;
    assert_eq!((phi("phi3").usual_context(), phi("phi3").max_position_embeddings()), (32, 240));
    assert_eq!((phi("phi4").usual_context(), phi("phi4").max_position_embeddings()), (160, 640));
    assert_eq!(phi("mistral").usual_context(), 240);
    assert!(
        read(&with(
            "phi3",
            json!({"rope_scaling": {
        "type": "su", "short_factor": [1, 1, 1, 1, 1], "long_factor": [1, 2, 3, 4, 5]}})
        ))
        .is_ok()
    );
}

/// Logits of a case's ids, from the checkpoint in `dir`.
fn logits(dir: &Path, ids: &[u32]) -> Vec<f32> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let report = |_| ();
    let loaded = Loaded::new(&report);
    let weights = Weights::new(&checkpoint, &Device::Cpu, DType::F32, &loaded).unwrap();
    let decoder = models::read_config(dir).unwrap().architecture.build(&weights, 160).unwrap();
    let mut cache = KvCache::new(decoder.cache_layers(), 160, ids.len(), DType::F32, &Device::Cpu).unwrap();
    let batch = Batch { ids, tokens: &[ids.len()], logits: LogitsOf::All };
    values(&decoder.forward(&batch, &mut [&mut cache]).unwrap())
}

/// The golden checkpoint under other names is the same model.
fn assert_same_under(case: &str, config: &Value, rename: impl Fn(HashMap<String, Tensor>) -> HashMap<String, Tensor>) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let tensors = safetensors::load(golden(case).join("model.safetensors"), &Device::Cpu).unwrap();
    safetensors::save(&rename(tensors), dir.path().join("model.safetensors")).unwrap();
    let golden = safetensors::load(golden(case).join("golden.safetensors"), &Device::Cpu).unwrap();
    let ids: Vec<u32> = golden["ids"].to_vec1::<i64>().unwrap().into_iter().map(|id| id as u32).collect();
    let error = relative_error(&logits(dir.path(), &ids), &values(&golden["logits"]));
    assert!(error < 1e-4, "{case}: off by {error:e}");
}

fn renamed(tensors: HashMap<String, Tensor>, rename: impl Fn(&str) -> String) -> HashMap<String, Tensor> {
    tensors.into_iter().map(|(name, tensor)| (rename(&name), tensor)).collect()
}

#[test]
fn gpt2_is_found_with_and_without_its_prefix() {
    assert_same_under("gpt2", &config("gpt2"), |tensors| renamed(tensors, |name| format!("transformer.{name}")));
}

#[test]
fn gemma3_is_found_in_multimodal_checkpoints_and_in_new_spelling() {
    let old = config("gemma3");
    let multimodal = json!({"model_type": "gemma3", "text_config": old, "vision_config": {"hidden_size": 7}});
    for place in ["language_model.model.", "model.language_model."] {
        let rename = |name: &str| name.replacen("model.", place, 1);
        assert_same_under("gemma3", &multimodal, |tensors| renamed(tensors, rename));
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
    assert_same_under("gemma3", &new, |tensors| tensors);
}

/// transformers 5 keeps all experts of a layer in one tensor; repositories have one for each matrix.
#[test]
fn experts_are_found_one_by_one_and_stacked() {
    let stack = |mut tensors: HashMap<String, Tensor>, block: &str, [gate, up, down]: [&str; 3]| {
        let gates: Vec<String> =
            tensors.keys().filter(|name| name.ends_with(&format!("experts.0.{gate}.weight"))).cloned().collect();
        for first in gates {
            let place = first.split(".experts.").next().unwrap().to_string();
            let mut take =
                |expert: usize, name: &str| tensors.remove(&format!("{place}.experts.{expert}.{name}.weight"));
            let (mut gate_up, mut downs) = (Vec::new(), Vec::new());
            while let Some(matrix) = take(downs.len(), gate) {
                gate_up.push(Tensor::cat(&[matrix, take(downs.len(), up).unwrap()], 0).unwrap());
                downs.push(take(downs.len(), down).unwrap());
            }
            tensors.insert(format!("{place}.experts.gate_up_proj"), Tensor::stack(&gate_up, 0).unwrap());
            tensors.insert(format!("{place}.experts.down_proj"), Tensor::stack(&downs, 0).unwrap());
        }
        renamed(tensors, |name| name.replace(block, "mlp"))
    };
    let (qwen, mixtral) = (["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]);
    assert_same_under("qwen3_moe", &config("qwen3_moe"), |tensors| stack(tensors, "mlp", qwen));
    assert_same_under("mixtral", &config("mixtral"), |tensors| stack(tensors, "block_sparse_moe", mixtral));
}
