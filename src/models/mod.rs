//! The families: one file each, and one line in `FAMILIES`.

mod common;
pub mod gemma2;
pub mod gemma3;
pub mod gpt2;
pub mod gpt_oss;
pub mod llama;
pub mod mistral;
pub mod mixtral;
pub mod phi3;
pub mod qwen2;
pub mod qwen3;
pub mod qwen3_moe;

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::error::Error;
use crate::nn::decoder::Decoder;
use crate::nn::kv_cache::LayerSpec;
use crate::snapshot;
use crate::text;
use crate::weights::Weights;
use crate::weights::compressed::CompressedConfig;
use crate::weights::gguf::GgufCheckpoint;

/// Every family that can be loaded.
const FAMILIES: &[&Family] = &[
    &gpt_oss::FAMILY,
    &llama::FAMILY,
    &mistral::FAMILY,
    &mixtral::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &qwen3_moe::FAMILY,
    &phi3::FAMILY,
    &gemma2::FAMILY,
    &gemma3::TEXT,
    &gemma3::MULTIMODAL,
    &gpt2::FAMILY,
];

/// How a family is recognized and read.
pub struct Family {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// `architectures` in config.json, for files without a model_type.
    pub architecture: &'static str,
    /// Reads and checks config.json.
    pub read: fn(Value) -> Result<Box<dyn Architecture>>,
}

/// A model's config, checked, before any weight is touched.
pub trait Architecture {
    /// V
    fn vocab_size(&self) -> usize;
    /// The longest context the model was made for.
    fn max_position_embeddings(&self) -> usize;
    /// The longest context for which it computes as for short ones: more only for who asks for it.
    fn usual_context(&self) -> usize {
        self.max_position_embeddings()
    }
    /// What each layer keeps in the cache.
    fn cache_layers(&self) -> Vec<LayerSpec>;
    /// Assembles the model for contexts of up to `context` positions.
    fn build(&self, weights: &Weights, context: usize) -> Result<Decoder>;
}

/// A snapshot's config.json as its family reads it.
pub struct ModelConfig {
    pub family: &'static Family,
    pub architecture: Box<dyn Architecture>,
    /// `mxfp4` or the like; `None` for plain floats.
    pub quantization: Option<String>,
}

/// Reads config.json of a snapshot, or what a GGUF file says in its place. Fails with
/// [`Error::UnsupportedArchitecture`] for a family that is not listed.
pub fn read_config(dir: &Path) -> Result<ModelConfig> {
    if let Some(path) = snapshot::gguf::find(dir)? {
        return gguf_config(&GgufCheckpoint::open(&path)?);
    }
    let path = dir.join("config.json");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let json: Value = serde_json::from_str(&text).with_context(|| format!("broken {}", path.display()))?;
    parse_config(json).map_err(|error| match error.is::<Error>() {
        // An unsupported architecture says all there is to say.
        true => error,
        false => error.context(format!("cannot use {}", path.display())),
    })
}

/// The same of an open GGUF file.
pub fn gguf_config(file: &GgufCheckpoint) -> Result<ModelConfig> {
    let cannot = || format!("cannot use {}", file.path().display());
    let json = file.config().with_context(cannot)?;
    let family = find_family(&json)?;
    let architecture = (family.read)(json).with_context(cannot)?;
    Ok(ModelConfig { family, architecture, quantization: file.quantization() })
}

/// The same from what stands in config.json.
pub fn parse_config(json: Value) -> Result<ModelConfig> {
    let family = find_family(&json)?;
    let quantization = match CompressedConfig::read(&json)? {
        Some(compressed) => Some(compressed.name()),
        None => json["quantization_config"]["quant_method"].as_str().map(str::to_string),
    };
    let architecture = (family.read)(json)?;
    Ok(ModelConfig { family, architecture, quantization })
}

/// What config.json says the model is, supported or not; none if it cannot be read.
pub fn declared_type(dir: &Path) -> Option<String> {
    let text = std::fs::read_to_string(dir.join("config.json")).ok()?;
    let json: Value = serde_json::from_str(&text).ok()?;
    json["model_type"].as_str().or(json["architectures"][0].as_str()).map(str::to_string)
}

fn find_family(json: &Value) -> Result<&'static Family> {
    let model_type = json["model_type"].as_str();
    let architecture = json["architectures"][0].as_str();
    let known = |family: &&&Family| match (model_type, architecture) {
        (Some(model_type), _) => family.model_type == model_type,
        (None, Some(architecture)) => family.architecture == architecture,
        (None, None) => false,
    };
    FAMILIES.iter().find(known).copied().ok_or_else(|| {
        let named = model_type.or(architecture);
        let found = named.unwrap_or("(config.json names none)").to_string();
        let mut supported = FAMILIES.iter().map(|family| family.model_type).collect::<Vec<_>>().join(", ");
        if let Some(near) = named.and_then(nearest) {
            supported += &format!("; the nearest is {near}");
        }
        Error::UnsupportedArchitecture { found, supported }.into()
    })
}

/// The supported name that is most like this one, if any is at all.
fn nearest(found: &str) -> Option<&'static str> {
    let names = FAMILIES.iter().flat_map(|family| [family.model_type, family.architecture]);
    let by_distance = |name: &&str| text::edits(&found.to_lowercase(), &name.to_lowercase());
    names.min_by_key(by_distance).filter(|name| 5 * by_distance(name) <= 2 * name.len().max(found.len()))
}

/// The sizes that every family has, checked for what would otherwise fail late or not at all.
pub(crate) struct Sizes {
    pub hidden_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
    pub max_position_embeddings: usize,
}

impl Sizes {
    pub fn check(&self) -> Result<()> {
        let named = [
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("intermediate_size", self.intermediate_size),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        // 2^24 of anything is beyond every real model and keeps products of two of these within a u64.
        if let Some((name, value)) = named.into_iter().find(|&(_, value)| value == 0 || value > 1 << 24) {
            bail!("{name} is {value}");
        }
        if self.layers > 4096 || self.heads > 1 << 16 {
            bail!("num_hidden_layers is {}, num_attention_heads {}", self.layers, self.heads);
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            bail!("{} attention heads cannot share {} key/value heads", self.heads, self.kv_heads);
        }
        if self.head_dim > 256 || !self.head_dim.is_multiple_of(2) {
            bail!("head_dim is {}, supported are even ones up to 256", self.head_dim);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        assert_eq!(text::edits("kitten", "sitting"), 3);
        assert_eq!(text::edits("", "abc"), 3);
        assert_eq!(text::edits("gemma", "gemma2"), 1);
    }
}
