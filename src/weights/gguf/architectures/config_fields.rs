//! The config.json fields that are specific to individual architectures.

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::keys::ArchitectureKeys;
use crate::weights::ggml::GgmlType;
use crate::weights::gguf::tensor_names::LayerTensorName;

/// Adds no fields. A placeholder in the layout `PLAIN`: every layout that is based on it sets its own function.
pub fn none(_: &ArchitectureKeys, _: &mut Map<String, Value>) -> Result<()> {
    Ok(())
}

/// Adds the fields of Llama, Mistral and Mixtral. Most GGUF files use the architecture name `llama` for all three.
/// Mistral files without a sliding window are loaded as Llama.
pub fn llama(keys: &ArchitectureKeys, fields: &mut Map<String, Value>) -> Result<()> {
    fields.insert("mlp_bias".into(), keys.has("blk.0.ffn_down.bias").into());
    if keys.size("expert_count")?.is_some_and(|experts| experts > 0) {
        fields.insert("model_type".into(), "mixtral".into());
        fields.remove("attention_bias");
        experts(keys, fields)?;
    } else if let Some(window) = keys.size("attention.sliding_window")?.filter(|window| *window > 0) {
        fields.insert("model_type".into(), "mistral".into());
        fields.insert("sliding_window".into(), window.into());
    }
    Ok(())
}

fn experts(keys: &ArchitectureKeys, fields: &mut Map<String, Value>) -> Result<()> {
    fields.insert("num_local_experts".into(), keys.required_size("expert_count")?.into());
    fields.insert("num_experts_per_tok".into(), keys.required_size("expert_used_count")?.into());
    Ok(())
}

/// Adds the sliding window of a Qwen model and the layers that use it, if the file specifies a window.
pub fn sliding_window(keys: &ArchitectureKeys, fields: &mut Map<String, Value>) -> Result<()> {
    if let Some(window) = keys.size("attention.sliding_window")?.filter(|window| *window > 0) {
        fields.insert("use_sliding_window".into(), true.into());
        fields.insert("sliding_window".into(), window.into());
        fields.insert("layer_types".into(), keys.layer_types(0)?);
    }
    Ok(())
}

pub fn qwen3_moe(keys: &ArchitectureKeys, fields: &mut Map<String, Value>) -> Result<()> {
    experts(keys, fields)?;
    let dense = |layer: &usize| keys.has(&format!("blk.{layer}.ffn_gate.weight"));
    let layers: Vec<usize> = (0..keys.file.block_count()?).filter(dense).collect();
    fields.insert("mlp_only_layers".into(), layers.into());
    fields.insert("moe_intermediate_size".into(), keys.required_size("expert_feed_forward_length")?.into());
    // If `expert_weights_norm` is missing, normalize the router weights of the chosen experts, as llama.cpp does.
    let normalized = keys.file.metadata().bool(&keys.key("expert_weights_norm"))?;
    fields.insert("norm_topk_prob".into(), normalized.unwrap_or(true).into());
    Ok(())
}

pub fn phi3(keys: &ArchitectureKeys, fields: &mut Map<String, Value>) -> Result<()> {
    fields.remove("attention_bias");
    fields.insert("sliding_window".into(), keys.size("attention.sliding_window")?.filter(|window| *window > 0).into());
    if let Some(original) = keys.size("rope.scaling.original_context_length")? {
        fields.insert("original_max_position_embeddings".into(), original.into());
    }
    Ok(())
}

/// Adds the fields that Gemma 2 and Gemma 3 share.
///
/// The attention scale is 1 / sqrt(`query_pre_attn_scalar`). If the file does not specify the scale,
/// `query_pre_attn_scalar` is the head size, except in the largest model (27B) of Gemma 2 and of Gemma 3.
/// There, it is hidden size / number of heads. The largest model has `layers_of_largest` layers.
fn gemma(keys: &ArchitectureKeys, fields: &mut Map<String, Value>, layers_of_largest: usize) -> Result<()> {
    let heads = keys.file.head_counts()?.query;
    let scalar = match keys.float("attention.scale")?.filter(|scale| *scale > 0.0) {
        Some(scale) => scale.powi(-2),
        None if keys.file.block_count()? == layers_of_largest => {
            keys.required_size("embedding_length")? as f64 / (heads as f64).max(1.0)
        }
        None => keys.head_dim()? as f64,
    };
    fields.insert("query_pre_attn_scalar".into(), scalar.into());
    fields.insert("sliding_window".into(), keys.size("attention.sliding_window")?.unwrap_or(4096).into());
    Ok(())
}

pub fn gemma2(keys: &ArchitectureKeys, fields: &mut Map<String, Value>) -> Result<()> {
    gemma(keys, fields, 46)?;
    fields.insert("layer_types".into(), keys.layer_types(2)?);
    let cap = |name: &str, default: f64| Ok::<_, anyhow::Error>(keys.float(name)?.unwrap_or(default).into());
    fields.insert("attn_logit_softcapping".into(), cap("attn_logit_softcapping", 50.0)?);
    fields.insert("final_logit_softcapping".into(), cap("final_logit_softcapping", 30.0)?);
    Ok(())
}

pub fn gemma3(keys: &ArchitectureKeys, fields: &mut Map<String, Value>) -> Result<()> {
    gemma(keys, fields, 62)?;
    fields.insert("layer_types".into(), keys.layer_types(6)?);
    fields.insert("final_logit_softcapping".into(), keys.float("final_logit_softcapping")?.into());
    let local = keys.float("rope.freq_base_swa")?.unwrap_or(10_000.0);
    fields.insert("rope_local_base_freq".into(), local.into());
    fields.insert("rope_theta".into(), keys.float("rope.freq_base")?.unwrap_or(1e6).into());
    Ok(())
}

pub fn gpt2(keys: &ArchitectureKeys, fields: &mut Map<String, Value>) -> Result<()> {
    let names = [
        ("n_embd", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("n_inner", "intermediate_size"),
        ("n_positions", "max_position_embeddings"),
    ];
    for (gpt2, standard) in names {
        let value = fields.get(standard).cloned().unwrap_or_default();
        fields.insert(gpt2.into(), value);
    }
    fields.insert("layer_norm_epsilon".into(), keys.float("attention.layer_norm_epsilon")?.into());
    Ok(())
}

pub fn gpt_oss(keys: &ArchitectureKeys, fields: &mut Map<String, Value>) -> Result<()> {
    experts(keys, fields)?;
    fields.insert("attention_bias".into(), true.into());
    fields.insert("sliding_window".into(), keys.required_size("attention.sliding_window")?.into());
    fields.insert("layer_types".into(), keys.layer_types(2)?);
    fields.insert("intermediate_size".into(), keys.required_size("expert_feed_forward_length")?.into());
    // The published gpt-oss models do not round the bounds of the YaRN ramp to integers.
    // GGUF has no metadata key for this rounding, so turn it off for every file.
    if let Some(Value::Object(scaling)) = fields.get_mut("rope_scaling") {
        scaling.insert("truncate".into(), false.into());
    }
    let packed = keys.file.tensors().any(|(name, info)| {
        let expert = LayerTensorName::parse(name).is_some_and(|name| name.module.ends_with("_exps"));
        expert && info.ggml_type == GgmlType::Mxfp4
    });
    if packed {
        fields.insert("quantization_config".into(), json!({"quant_method": "mxfp4"}));
    }
    Ok(())
}
