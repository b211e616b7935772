//! What metadata say of a model's sizes, in the words of its config.json, so that families read both alike and check both
//! alike. Keys by llama.cpp's `src/llama-arch.cpp`; where one is missing its defaults hold (`src/llama-model.cpp`): as
//! many key/value heads as heads, heads that share the hidden size evenly, rope_theta 10,000, no rope scaling.

use anyhow::{Result, bail};
use serde_json::{Map, Value, json};

use super::names::{InLayer, Layout};
use super::{GgufCheckpoint, Metadata};

/// What is said by tensors rather than by metadata: [`Said::rope_scaling`] reads them.
pub const SAID_BY_TENSORS: [&str; 3] = ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

/// Adds what one architecture has beyond the others.
pub type Fields = fn(&Said, &mut Map<String, Value>) -> Result<()>;

/// What the file says under its architecture's name.
pub struct Said<'c> {
    file: &'c GgufCheckpoint,
    architecture: &'c str,
}

impl<'c> Said<'c> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn size(&self, name: &str) -> Result<Option<u64>> {
        Ok(self.file.metadata().u32(&self.key(name))?.map(u64::from))
    }

    fn required_size(&self, name: &str) -> Result<u64> {
        Ok(self.file.metadata().required(&self.key(name), Metadata::u32)?.into())
    }

    /// As short as it prints: 1e-5 rather than 0.000009999999747378752.
    fn float(&self, name: &str) -> Result<Option<f64>> {
        Ok(self.file.metadata().f32(&self.key(name))?.map(widened))
    }

    fn string(&self, name: &str) -> Result<Option<&'c str>> {
        self.file.metadata().string(&self.key(name))
    }

    fn has(&self, tensor: &str) -> bool {
        self.file.info(tensor).is_some()
    }

    fn head_dim(&self) -> Result<u64> {
        let (heads, hidden) = (self.file.head_counts()?.0 as u64, self.required_size("embedding_length")?);
        let head_dim = match self.size("attention.key_length")? {
            Some(length) => length,
            None if heads == 0 || hidden.is_multiple_of(heads) => hidden / heads.max(1),
            None => {
                let (count, length) = (self.key("attention.head_count"), self.key("embedding_length"));
                bail!("metadata keys {count} and {length}: {heads} heads cannot share {hidden} dims evenly")
            }
        };
        match self.size("attention.value_length")?.filter(|length| *length != head_dim) {
            Some(other) => bail!("heads with keys of {head_dim} and values of {other} dims are not supported"),
            None => Ok(head_dim),
        }
    }

    /// Ids of the vocabulary: as said, else as there are tokens, else as the embedding has rows.
    fn vocab_size(&self) -> Result<Option<u64>> {
        let rows = self.file.info("token_embd.weight").and_then(|info| info.shape.first()).map(|rows| *rows as u64);
        let tokens = match self.file.metadata().get("tokenizer.ggml.tokens")? {
            Some(super::Value::Array(tokens)) => Some(tokens.len as u64),
            _ => None,
        };
        Ok(self.size("vocab_size")?.or(tokens).or(rows))
    }

    /// Which layers slide: every `n`-th does not, or one truth value a layer; `usual` if the file does not say.
    fn layer_types(&self, usual: u64) -> Result<Value> {
        let key = self.key("attention.sliding_window_pattern");
        let metadata = self.file.metadata();
        let layers = self.file.block_count()? as u64;
        let slides: Vec<bool> = match metadata.get(&key)? {
            Some(super::Value::Array(_)) => match metadata.bools(&key) {
                Ok(Some(slides)) => slides,
                _ => metadata.u32s(&key)?.unwrap_or_default().into_iter().map(|slides| slides != 0).collect(),
            },
            _ => {
                let period = metadata.u32(&key)?.map_or(usual, u64::from);
                (1..=layers).map(|layer| period != 0 && !layer.is_multiple_of(period)).collect()
            }
        };
        Ok(slides.into_iter().map(|slides| if slides { "sliding_attention" } else { "full_attention" }).collect())
    }

    fn rope_scaling(&self) -> Result<Option<Value>> {
        let factors = |name: &str| -> Result<Option<Vec<f64>>> {
            let there = self.has(name).then(|| self.file.values(name)).transpose()?;
            Ok(there.map(|factors| factors.into_iter().map(widened).collect()))
        };
        let original = self.size("rope.scaling.original_context_length")?;
        // Llama 3's rule is worked out in the file: what each frequency is divided by.
        let [freqs, short, long] = SAID_BY_TENSORS;
        if let Some(factors) = factors(freqs)? {
            return Ok(Some(json!({
                "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0
            })));
        }
        if let (Some(short), Some(long)) = (factors(short)?, factors(long)?) {
            return Ok(Some(json!({
                "rope_type": "longrope", "short_factor": short, "long_factor": long,
                "attention_factor": self.float("rope.scaling.attn_factor")?,
                "original_max_position_embeddings": original
            })));
        }
        let factor = self.float("rope.scaling.factor")?;
        Ok(match self.string("rope.scaling.type")? {
            // Files of 2023 say it in another word, turned round by some and not by others: the usual one is known.
            None | Some("none") => factor.map(|factor| json!({"rope_type": "linear", "factor": factor})),
            Some("linear") => Some(json!({"rope_type": "linear", "factor": factor.unwrap_or(1.0)})),
            Some("yarn") => Some(json!({
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                "beta_fast": self.float("rope.scaling.yarn_beta_fast")?,
                "beta_slow": self.float("rope.scaling.yarn_beta_slow")?
            })),
            Some(other) => bail!("metadata key {}: '{other}' is not supported", self.key("rope.scaling.type")),
        })
    }
}

impl GgufCheckpoint {
    /// Returns the metadata in the form of a config.json.
    ///
    /// Fails with [`Error::UnsupportedArchitecture`](crate::error::Error::UnsupportedArchitecture) for an unknown
    /// architecture, and for metadata that a config.json cannot express.
    pub fn config(&self) -> Result<Value> {
        config(self)
    }

    /// Returns the sampling defaults in the form of a generation_config.json; fields that the file does not set are null.
    pub fn generation_config(&self) -> Result<Value> {
        generation_config(&self.metadata())
    }
}

/// Returns the metadata as the fields of a config.json.
fn config(file: &GgufCheckpoint) -> Result<Value> {
    let said = Said { file, architecture: file.architecture()? };
    let layout = Layout::find(said.architecture)?;
    let (heads, kv_heads) = file.head_counts()?;
    let head_dim = said.head_dim()?;
    let mut fields = Map::new();
    let mut put = |name: &str, value: Value| drop(fields.insert(name.into(), value));
    put("model_type", layout.model_type.into());
    put("vocab_size", said.vocab_size()?.into());
    put("hidden_size", said.required_size("embedding_length")?.into());
    // Some files of experts alone have none.
    let intermediate = said.size("feed_forward_length")?.filter(|length| *length > 0);
    put("intermediate_size", intermediate.or(said.size("expert_feed_forward_length")?).into());
    put("num_hidden_layers", file.block_count()?.into());
    put("num_attention_heads", heads.into());
    put("num_key_value_heads", kv_heads.into());
    put("head_dim", head_dim.into());
    put("max_position_embeddings", said.required_size("context_length")?.into());
    put("rms_norm_eps", said.float("attention.layer_norm_rms_epsilon")?.into());
    put("tie_word_embeddings", (!said.has("output.weight")).into());
    put("attention_bias", said.has("blk.0.attn_output.bias").into());
    put("rope_theta", said.float("rope.freq_base")?.unwrap_or(10_000.0).into());
    if let Some(scaling) = said.rope_scaling()? {
        put("rope_scaling", scaling);
    }
    if let Some(rotated) = said.size("rope.dimension_count")?.filter(|rotated| *rotated != head_dim) {
        put("partial_rotary_factor", share(rotated, head_dim).into());
    }
    (layout.config)(&said, &mut fields)?;
    // What is not said must not read as said: `null` is a value for families with defaults.
    fields.retain(|_, value| !value.is_null());
    Ok(Value::Object(fields))
}

/// Returns the fields of a generation_config.json. Most files set few of them, the others are null.
fn generation_config(metadata: &Metadata) -> Result<Value> {
    let float = |name: &str| Ok::<_, anyhow::Error>(metadata.f32(&format!("general.sampling.{name}"))?.map(widened));
    let top_k = metadata.i32s("general.sampling.top_k").ok().flatten().and_then(|ks| ks.first().copied());
    let top_k = match top_k {
        Some(k) => u32::try_from(k).ok(),
        None => metadata.u32("general.sampling.top_k").unwrap_or(None),
    };
    let temperature = float("temp")?;
    Ok(json!({
        "do_sample": temperature.is_some_and(|temperature| temperature > 0.0),
        "temperature": temperature, "top_k": top_k, "top_p": float("top_p")?, "min_p": float("min_p")?,
        "repetition_penalty": float("penalty_repeat")?
    }))
}

/// The f64 that prints as the f32 does.
fn widened(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// `part` of `whole` as a factor that makes `part` again, rounded down.
fn share(part: u64, whole: u64) -> f64 {
    let factor = part as f64 / whole as f64;
    if (whole as f64 * factor) as u64 == part { factor } else { factor.next_up() }
}

pub fn nothing(_: &Said, _: &mut Map<String, Value>) -> Result<()> {
    Ok(())
}

/// Llama, and what llama.cpp calls so too: Mistral, whose window old files do not tell, and Mixtral.
pub fn llama(said: &Said, fields: &mut Map<String, Value>) -> Result<()> {
    fields.insert("mlp_bias".into(), said.has("blk.0.ffn_down.bias").into());
    if said.size("expert_count")?.is_some_and(|experts| experts > 0) {
        fields.insert("model_type".into(), "mixtral".into());
        fields.remove("attention_bias");
        experts(said, fields)?;
    } else if let Some(window) = said.size("attention.sliding_window")?.filter(|window| *window > 0) {
        fields.insert("model_type".into(), "mistral".into());
        fields.insert("sliding_window".into(), window.into());
    }
    Ok(())
}

fn experts(said: &Said, fields: &mut Map<String, Value>) -> Result<()> {
    fields.insert("num_local_experts".into(), said.required_size("expert_count")?.into());
    fields.insert("num_experts_per_tok".into(), said.required_size("expert_used_count")?.into());
    Ok(())
}

/// Qwen: a window only if the file has one, and then on the layers it says.
pub fn sliding(said: &Said, fields: &mut Map<String, Value>) -> Result<()> {
    if let Some(window) = said.size("attention.sliding_window")?.filter(|window| *window > 0) {
        fields.insert("use_sliding_window".into(), true.into());
        fields.insert("sliding_window".into(), window.into());
        fields.insert("layer_types".into(), said.layer_types(0)?);
    }
    Ok(())
}

pub fn qwen3_moe(said: &Said, fields: &mut Map<String, Value>) -> Result<()> {
    experts(said, fields)?;
    let dense = |layer: &usize| said.has(&format!("blk.{layer}.ffn_gate.weight"));
    let layers: Vec<usize> = (0..said.file.block_count()?).filter(dense).collect();
    fields.insert("mlp_only_layers".into(), layers.into());
    fields.insert("moe_intermediate_size".into(), said.required_size("expert_feed_forward_length")?.into());
    // llama.cpp takes it for granted.
    let normed = said.file.metadata().bool(&said.key("expert_weights_norm"))?;
    fields.insert("norm_topk_prob".into(), normed.unwrap_or(true).into());
    Ok(())
}

pub fn phi3(said: &Said, fields: &mut Map<String, Value>) -> Result<()> {
    fields.remove("attention_bias");
    fields.insert("sliding_window".into(), said.size("attention.sliding_window")?.filter(|window| *window > 0).into());
    if let Some(original) = said.size("rope.scaling.original_context_length")? {
        fields.insert("original_max_position_embeddings".into(), original.into());
    }
    Ok(())
}

/// The largest Gemmas, told by their layers, scale scores by the hidden size's share of a head.
fn gemma(said: &Said, fields: &mut Map<String, Value>, largest: usize) -> Result<()> {
    let (heads, _) = said.file.head_counts()?;
    let scalar = match said.float("attention.scale")?.filter(|scale| *scale > 0.0) {
        Some(scale) => scale.powi(-2),
        None if said.file.block_count()? == largest => {
            said.required_size("embedding_length")? as f64 / (heads as f64).max(1.0)
        }
        None => said.head_dim()? as f64,
    };
    fields.insert("query_pre_attn_scalar".into(), scalar.into());
    fields.insert("sliding_window".into(), said.size("attention.sliding_window")?.unwrap_or(4096).into());
    Ok(())
}

pub fn gemma2(said: &Said, fields: &mut Map<String, Value>) -> Result<()> {
    gemma(said, fields, 46)?;
    fields.insert("layer_types".into(), said.layer_types(2)?);
    let cap = |name: &str, usual: f64| Ok::<_, anyhow::Error>(said.float(name)?.unwrap_or(usual).into());
    fields.insert("attn_logit_softcapping".into(), cap("attn_logit_softcapping", 50.0)?);
    fields.insert("final_logit_softcapping".into(), cap("final_logit_softcapping", 30.0)?);
    Ok(())
}

pub fn gemma3(said: &Said, fields: &mut Map<String, Value>) -> Result<()> {
    gemma(said, fields, 62)?;
    fields.insert("layer_types".into(), said.layer_types(6)?);
    fields.insert("final_logit_softcapping".into(), said.float("final_logit_softcapping")?.into());
    let local = said.float("rope.freq_base_swa")?.unwrap_or(10_000.0);
    fields.insert("rope_local_base_freq".into(), local.into());
    fields.insert("rope_theta".into(), said.float("rope.freq_base")?.unwrap_or(1e6).into());
    Ok(())
}

pub fn gpt2(said: &Said, fields: &mut Map<String, Value>) -> Result<()> {
    let names = [
        ("n_embd", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("n_inner", "intermediate_size"),
        ("n_positions", "max_position_embeddings"),
    ];
    for (ours, usual) in names {
        let value = fields.get(usual).cloned().unwrap_or_default();
        fields.insert(ours.into(), value);
    }
    fields.insert("layer_norm_epsilon".into(), said.float("attention.layer_norm_epsilon")?.into());
    Ok(())
}

pub fn gpt_oss(said: &Said, fields: &mut Map<String, Value>) -> Result<()> {
    experts(said, fields)?;
    fields.insert("attention_bias".into(), true.into());
    fields.insert("sliding_window".into(), said.required_size("attention.sliding_window")?.into());
    fields.insert("layer_types".into(), said.layer_types(2)?);
    fields.insert("intermediate_size".into(), said.required_size("expert_feed_forward_length")?.into());
    // The published model's ramp is not rounded to whole dims, which no key says.
    if let Some(Value::Object(scaling)) = fields.get_mut("rope_scaling") {
        scaling.insert("truncate".into(), false.into());
    }
    let packed = said.file.tensors().any(|(name, info)| {
        let expert = InLayer::parse(name).is_some_and(|in_layer| in_layer.part.ends_with("_exps"));
        expert && info.ggml_type == crate::weights::ggml::GgmlType::Mxfp4
    });
    if packed {
        fields.insert("quantization_config".into(), json!({"quant_method": "mxfp4"}));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_floats_come_back() {
        for whole in 2..=256u64 {
            for part in 1..=whole {
                assert_eq!((whole as f64 * share(part, whole)) as u64, part, "{part} of {whole}");
            }
        }
        assert_eq!(widened(1e-5), 1e-5);
        assert_eq!(widened(500_000.0), 500_000.0);
    }
}
