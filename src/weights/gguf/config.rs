//! Converts GGUF metadata to the fields of config.json and generation_config.json.
//! Model families can therefore read the same config.json fields for GGUF files as for safetensors files.
//!
//! Keys that all architectures share have the same defaults as in llama.cpp
//! (ggml-org/llama.cpp, `src/llama-model.cpp`):
//! - one KV head per query head
//! - a head size equal to the hidden size divided by the number of heads
//! - a rope_theta of 10,000 and no RoPE scaling
//!
//! For Gemma 3, rope_theta defaults to 1,000,000, as in transformers.

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::architectures;
use super::architectures::{ArchitectureKeys, widen};
use super::file::GgufCheckpoint;
use super::file::{GgufMetadata, Value as MetadataValue};

impl GgufCheckpoint {
    /// Converts the GGUF metadata to the contents of a config.json.
    ///
    /// Fails if a required metadata key is missing, or if a value is invalid or cannot be expressed in config.json.
    /// Fails with [`UnsupportedArchitecture`](crate::error::Error::UnsupportedArchitecture) for unknown architectures.
    pub fn config(&self) -> Result<Value> {
        config(self)
    }

    /// Converts the sampling defaults in the GGUF metadata to the contents of a generation_config.json.
    /// Fields without a metadata key are null. `do_sample` is true if the temperature is above 0.
    pub fn generation_config(&self) -> Result<Value> {
        generation_config(&self.metadata())
    }
}

fn config(file: &GgufCheckpoint) -> Result<Value> {
    let keys = ArchitectureKeys { file, architecture: file.architecture()? };
    let layout = architectures::find(keys.architecture)?;
    let heads = file.head_counts()?;
    let head_dim = keys.head_dim()?;
    let mut fields = Map::new();
    let mut put = |name: &str, value: Value| drop(fields.insert(name.into(), value));
    put("model_type", layout.model_type.into());
    put("vocab_size", keys.vocab_size()?.into());
    put("hidden_size", keys.required_size("embedding_length")?.into());
    // If every layer has experts, the file may omit `feed_forward_length`, the intermediate size of a dense MLP.
    let intermediate = keys.size("feed_forward_length")?.filter(|length| *length > 0);
    put("intermediate_size", intermediate.or(keys.size("expert_feed_forward_length")?).into());
    put("num_hidden_layers", file.block_count()?.into());
    put("num_attention_heads", heads.query.into());
    put("num_key_value_heads", heads.kv.into());
    put("head_dim", head_dim.into());
    put("max_position_embeddings", keys.required_size("context_length")?.into());
    put("rms_norm_eps", keys.float("attention.layer_norm_rms_epsilon")?.into());
    put("tie_word_embeddings", (!keys.has("output.weight")).into());
    put("attention_bias", keys.has("blk.0.attn_output.bias").into());
    put("rope_theta", keys.float("rope.freq_base")?.unwrap_or(10_000.0).into());
    if let Some(scaling) = keys.rope_scaling()? {
        put("rope_scaling", scaling);
    }
    if let Some(rotated) = keys.size("rope.dimension_count")?.filter(|rotated| *rotated != head_dim) {
        put("partial_rotary_factor", fraction(rotated, head_dim).into());
    }
    (layout.add_fields)(&keys, &mut fields)?;
    // Remove fields that are `null`, because model families use their defaults only for absent fields.
    fields.retain(|_, value| !value.is_null());
    Ok(Value::Object(fields))
}

fn generation_config(metadata: &GgufMetadata) -> Result<Value> {
    let float = |name: &str| Ok::<_, anyhow::Error>(metadata.f32(&format!("general.sampling.{name}"))?.map(widen));
    let top_k = match metadata.get("general.sampling.top_k")? {
        Some(MetadataValue::Array(ks)) => ks.values().next().transpose()?.and_then(MetadataValue::u32),
        Some(k) => k.u32(),
        None => None,
    };
    let temperature = float("temp")?;
    Ok(json!({
        "do_sample": temperature.is_some_and(|temperature| temperature > 0.0),
        "temperature": temperature, "top_k": top_k, "top_p": float("top_p")?, "min_p": float("min_p")?,
        "repetition_penalty": float("penalty_repeat")?
    }))
}

/// Returns a factor such that `whole * factor`, rounded down, equals `part`.
fn fraction(part: u64, whole: u64) -> f64 {
    let factor = part as f64 / whole as f64;
    if (whole as f64 * factor) as u64 == part { factor } else { factor.next_up() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fraction_times_whole_is_part() {
        for whole in 2..=256u64 {
            for part in 1..=whole {
                assert_eq!((whole as f64 * fraction(part, whole)) as u64, part, "{part} of {whole}");
            }
        }
    }
}
