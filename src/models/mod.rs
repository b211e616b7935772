//! The model families: one file per family, and one entry in `FAMILIES` per `model_type`.
//!
//! [Internal](crate#stable-api): can change in any release.

mod config;
mod family;
pub mod gemma2;
pub mod gemma3;
mod general;
pub mod gpt2;
pub mod gpt_oss;
pub mod llama;
pub mod mistral;
pub mod mixtral;
pub mod phi3;
pub mod qwen2;
pub mod qwen3;
pub mod qwen3_moe;
mod standard;

use std::path::Path;

use anyhow::Result;
use serde_json::Value;

pub use family::{Architecture, Family};

use crate::error::Error;
use crate::files;
use crate::nn::decoder::Decoder;
use crate::snapshot;
use crate::weights::compressed::CompressedConfig;
use crate::weights::gguf::GgufCheckpoint;
use crate::weights::{Checkpoint, TensorTable, Weights};

pub const FAMILIES: &[&Family] = &[
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

/// The longest name, in bytes, that [`nearest_name`] compares with the supported names.
const MAX_NAME_BYTES: usize = 100;

/// A model's config, parsed by its family.
pub struct ModelConfig {
    pub family: &'static Family,
    pub architecture: Box<dyn Architecture>,
    /// The quantization, such as `mxfp4` or `w8a8 int8`. `None` for safetensors files with float weights.
    /// For a GGUF file, the file type, such as `Q4_K_M` or `F16` (see [`GgufCheckpoint::quantization`]).
    pub quantization: Option<String>,
}

impl ModelConfig {
    /// Loads the model for contexts of up to `context` positions.
    pub fn build(&self, weights: &Weights, context: usize) -> Result<Decoder> {
        self.architecture.build(weights, context, self.family.tensors)
    }
}

/// Reads the config of the snapshot or GGUF file at `dir`.
/// If a snapshot has a GGUF file and no safetensors weights, the config comes from the GGUF file, not from config.json.
/// Fails with [`Error::UnsupportedArchitecture`] if no family supports the model.
pub fn read_config(dir: &Path) -> Result<ModelConfig> {
    if let Some(path) = snapshot::gguf::find(dir)? {
        return gguf_config(&GgufCheckpoint::open(&path)?);
    }
    let path = dir.join("config.json");
    parse_config(files::read_json(&path, files::MAX_CONFIG_BYTES)?).map_err(|error| cannot_use(&path, error))
}

/// Adds the path of a file to an error about its contents.
fn cannot_use(path: &Path, error: anyhow::Error) -> anyhow::Error {
    // An inferno `Error` is already a complete message for the user, so add no context.
    if error.is::<Error>() { error } else { error.context(format!("cannot use {}", path.display())) }
}

/// Reads the config of the snapshot or GGUF file at `dir`, and opens its checkpoint.
/// Parses the header of a GGUF file only once.
pub fn open(dir: &Path) -> Result<(ModelConfig, Checkpoint)> {
    let Some(path) = snapshot::gguf::find(dir)? else {
        return Ok((read_config(dir)?, Checkpoint::open(dir)?));
    };
    let file = GgufCheckpoint::open(&path)?;
    let config = gguf_config(&file)?;
    Ok((config, Checkpoint::from_gguf(file)?))
}

/// Reads the config from an open GGUF file.
pub fn gguf_config(file: &GgufCheckpoint) -> Result<ModelConfig> {
    let cannot_use = |error| cannot_use(file.path(), error);
    let json = file.config().map_err(cannot_use)?;
    let family = find_family(&json)?;
    let architecture = (family.read)(json).map_err(cannot_use)?;
    Ok(ModelConfig { family, architecture, quantization: file.quantization() })
}

/// Parses the contents of a config.json.
pub fn parse_config(json: Value) -> Result<ModelConfig> {
    let family = find_family(&json)?;
    let quantization = match CompressedConfig::read(&json)? {
        Some(compressed) => Some(compressed.name()),
        None => json["quantization_config"]["quant_method"].as_str().map(str::to_string),
    };
    let architecture = (family.read)(json)?;
    Ok(ModelConfig { family, architecture, quantization })
}

/// Returns the `model_type` in config.json, or else the first entry of `architectures`.
/// The returned name may be that of an unsupported architecture.
/// Returns `None` if config.json cannot be read or has neither field.
pub fn declared_model_type(dir: &Path) -> Option<String> {
    let json: Value = files::read_json(&dir.join("config.json"), files::MAX_CONFIG_BYTES).ok()?;
    json["model_type"].as_str().or(json["architectures"][0].as_str()).map(str::to_string)
}

/// Returns the tensor table of the family named in `json`, the contents of config.json.
/// If `json` names no supported family, returns the table of the usual tensor names.
pub fn tensor_table(json: &Value) -> TensorTable {
    find_family(json).map_or(general::TENSORS, |family| family.tensors)
}

fn find_family(json: &Value) -> Result<&'static Family> {
    let model_type = json["model_type"].as_str();
    let architecture = json["architectures"][0].as_str();
    let matches = |family: &&&Family| match (model_type, architecture) {
        (Some(model_type), _) => family.model_type == model_type,
        (None, Some(architecture)) => family.architecture == architecture,
        (None, None) => false,
    };
    FAMILIES.iter().find(matches).copied().ok_or_else(|| {
        let name = model_type.or(architecture);
        let found = name.unwrap_or("(config.json names none)").to_string();
        let mut supported = FAMILIES.iter().map(|family| family.model_type).collect::<Vec<_>>().join(", ");
        if let Some(near) = name.and_then(nearest_name) {
            supported += &format!("; the closest match is {near}");
        }
        Error::UnsupportedArchitecture { found, supported }.into()
    })
}

/// Returns the supported model type or architecture name with the smallest edit distance to `found`, ignoring case.
/// Returns `None` if the distance is more than 40% of the length of the longer name,
/// or if `found` is longer than [`MAX_NAME_BYTES`].
fn nearest_name(found: &str) -> Option<&'static str> {
    // Skip long names, because comparing two names takes time proportional to the product of their lengths.
    if found.len() > MAX_NAME_BYTES {
        return None;
    }
    let names = FAMILIES.iter().flat_map(|family| [family.model_type, family.architecture]);
    let by_distance = |name: &&str| strsim::levenshtein(&found.to_lowercase(), &name.to_lowercase());
    names.min_by_key(by_distance).filter(|name| 5 * by_distance(name) <= 2 * name.len().max(found.len()))
}
