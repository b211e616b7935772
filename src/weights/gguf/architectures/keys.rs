//! Reads the metadata keys of an architecture.
//!
//! Source: ggml-org/llama.cpp, `src/llama-arch.cpp`.

use anyhow::{Result, bail};
use serde_json::{Value, json};

use crate::text::{counted, quote};
use crate::weights::gguf::file::GgufCheckpoint;
use crate::weights::gguf::file::{GgufMetadata, Value as MetadataValue};
use crate::weights::gguf::limits::MAX_HEAD_DIM;
use crate::weights::gguf::tensor_names::ROPE_FACTOR_TENSORS;

/// Access to the metadata keys that start with the name of the architecture, such as `llama.block_count`.
pub struct ArchitectureKeys<'c> {
    pub file: &'c GgufCheckpoint,
    pub architecture: &'c str,
}

impl<'c> ArchitectureKeys<'c> {
    /// Returns the metadata key `name` with the architecture as its prefix.
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    pub fn size(&self, name: &str) -> Result<Option<u64>> {
        Ok(self.file.metadata().u32(&self.key(name))?.map(u64::from))
    }

    pub fn required_size(&self, name: &str) -> Result<u64> {
        Ok(self.file.metadata().required(&self.key(name), GgufMetadata::u32)?.into())
    }

    /// Returns an f32 value as the f64 with the same decimal text: 1e-5, not 0.000009999999747378752.
    pub fn float(&self, name: &str) -> Result<Option<f64>> {
        Ok(self.file.metadata().f32(&self.key(name))?.map(widen))
    }

    pub fn string(&self, name: &str) -> Result<Option<&'c str>> {
        self.file.metadata().string(&self.key(name))
    }

    pub fn has(&self, tensor: &str) -> bool {
        self.file.info(tensor).is_some()
    }

    /// Returns the head size. The default is the hidden size divided by the number of heads.
    /// Fails if this default is not an integer, if keys and values have different head sizes, or if the metadata lacks
    /// the hidden size or the number of heads.
    pub fn head_dim(&self) -> Result<u64> {
        let heads = self.file.head_counts()?.query as u64;
        let hidden = self.required_size("embedding_length")?;
        let head_dim = match self.size("attention.key_length")? {
            Some(length) => length,
            None if heads == 0 || hidden.is_multiple_of(heads) => hidden / heads.max(1),
            None => {
                let (count, length) = (self.key("attention.head_count"), self.key("embedding_length"));
                bail!("metadata keys {length} and {count}: {hidden} is not a multiple of {heads}")
            }
        };
        match self.size("attention.value_length")?.filter(|length| *length != head_dim) {
            Some(other) => bail!("heads with keys of size {head_dim} and values of size {other} are not supported"),
            None => Ok(head_dim),
        }
    }

    /// Returns the vocabulary size, or `None` if the file does not specify it.
    /// The sources, in order of precedence, are the key `vocab_size`, the tokens, and the rows of the embedding.
    pub fn vocab_size(&self) -> Result<Option<u64>> {
        let rows = self.file.info("token_embd.weight").and_then(|info| info.shape.first()).map(|rows| *rows as u64);
        let tokens = match self.file.metadata().get("tokenizer.ggml.tokens")? {
            Some(MetadataValue::Array(tokens)) => Some(tokens.len as u64),
            _ => None,
        };
        Ok(self.size("vocab_size")?.or(tokens).or(rows))
    }

    /// Returns the attention type of each layer, as in `layer_types` of config.json.
    ///
    /// The key `attention.sliding_window_pattern` holds either one boolean or integer per layer, or a single period n.
    /// In a list, true or a nonzero integer means that the layer has a sliding window.
    /// With a period, every n-th layer has full attention, and the other layers have a sliding window.
    /// A period of 0 means full attention in every layer.
    /// If the key is missing, `default_period` is used as the period.
    /// Fails if a list does not have exactly one value per layer.
    pub fn layer_types(&self, default_period: u64) -> Result<Value> {
        let key = self.key("attention.sliding_window_pattern");
        let metadata = self.file.metadata();
        let layers = self.file.block_count()? as u64;
        let slides: Vec<bool> = match metadata.get(&key)? {
            Some(MetadataValue::Array(array)) if array.len as u64 != layers => {
                bail!("metadata key {key}: its length is {}, but the model has {}", array.len, counted(layers, "layer"))
            }
            Some(MetadataValue::Array(_)) => match metadata.bools(&key) {
                Ok(Some(slides)) => slides,
                _ => metadata.u32s(&key)?.unwrap_or_default().into_iter().map(|slides| slides != 0).collect(),
            },
            _ => {
                let period = metadata.u32(&key)?.map_or(default_period, u64::from);
                (1..=layers).map(|layer| period != 0 && !layer.is_multiple_of(period)).collect()
            }
        };
        Ok(slides.into_iter().map(|slides| if slides { "sliding_attention" } else { "full_attention" }).collect())
    }

    /// Returns the `rope_scaling` object of config.json, or `None` if the file has no RoPE factors and no RoPE scaling.
    /// Fails if RoPE factors are not finite or have the wrong length, or if the scaling type is not supported.
    pub fn rope_scaling(&self) -> Result<Option<Value>> {
        let rotated = self.size("rope.dimension_count")?.unwrap_or(self.head_dim()?);
        let factors = |name: &str| self.rope_factors(name, rotated);
        let original = self.size("rope.scaling.original_context_length")?;
        // For Llama 3.1, llama.cpp's converter stores one divisor per RoPE frequency.
        // LongRoPE also divides each frequency, so use these divisors as its short factors and as its long factors.
        let [freqs, short, long] = ROPE_FACTOR_TENSORS;
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
            // The key `rope.scale_linear` in files from 2023 is ignored, because some converters inverted its value.
            None => factor.map(|factor| json!({"rope_type": "linear", "factor": factor})),
            // As in llama.cpp, the type `none` has precedence over a scaling factor.
            Some("none") => None,
            Some("linear") => Some(json!({"rope_type": "linear", "factor": factor.unwrap_or(1.0)})),
            Some("yarn") => Some(json!({
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                "beta_fast": self.float("rope.scaling.yarn_beta_fast")?,
                "beta_slow": self.float("rope.scaling.yarn_beta_slow")?
            })),
            Some(other) => {
                bail!("metadata key {}: {} is not supported", self.key("rope.scaling.type"), quote(other))
            }
        })
    }

    /// Returns the RoPE factors in the tensor `name`, or `None` if the file has no such tensor.
    /// `rotated` is the number of rotated elements per head. Fails unless there is one finite factor for each pair.
    fn rope_factors(&self, name: &str, rotated: u64) -> Result<Option<Vec<f64>>> {
        let Some(info) = self.file.info(name) else { return Ok(None) };
        // Check the length of the RoPE factors before reading them, because the tensor may have any size.
        if info.elements() as u64 != rotated / 2 || rotated > MAX_HEAD_DIM {
            bail!(
                "tensor {name}: expected {} factors, one per pair of elements, found {} \
                 (limit: {MAX_HEAD_DIM} elements)",
                rotated / 2,
                info.elements()
            );
        }
        let values = self.file.values(name)?;
        // Reject NaN and infinity, because JSON cannot express them.
        if let Some(value) = values.iter().find(|value| !value.is_finite()) {
            bail!("tensor {name}: expected finite factors, found {value}");
        }
        Ok(Some(values.into_iter().map(widen).collect()))
    }
}

/// Returns the f64 that has the same decimal text as the f32.
pub fn widen(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widened_floats_print_the_same() {
        assert_eq!(widen(1e-5), 1e-5);
        assert_eq!(widen(500_000.0), 500_000.0);
    }
}
