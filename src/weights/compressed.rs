//! Checkpoints quantized to 8 bits by compressed-tensors (llm-compressor, vLLM): which of a model's linear layers are
//! quantized, and how, by `quantization_config` in config.json.
//!
//! Source: vllm-project/compressed-tensors 0.20, `quantization/quant_config.py`, `quantization/quant_args.py`,
//! `quantization/lifecycle/apply.py` and `utils/match.py`. A layer of such a checkpoint has `weight` \[out, in\] in I8 or
//! F8_E4M3, `weight_scale` \[out, 1\] or \[1\], and `input_scale` \[1\] if that is static. Older files may have scalars
//! for \[1\]. Packed ones have `weight_packed` I32 \[out, in / 4\] for it, each with four codes more 128, the first in the
//! lowest byte, and `weight_shape`.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use regex::Regex;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error::Error;
use crate::kernels::quantized;

/// Which linear layers are quantized, and how.
#[derive(Debug)]
pub struct CompressedConfig {
    /// In the order in which they are asked. What a rule has no scheme for stays as it is.
    rules: Vec<(Target, Option<Scheme>)>,
    ignore: Vec<Target>,
}

/// How a linear layer is quantized, always symmetrically: a number is its code times the scale. The product is that of
/// the numbers that the codes of weights and inputs stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheme {
    pub format: Format,
    pub weight_scales: WeightScales,
    pub activations: Activations,
    /// Whether four codes are in a word.
    pub packed: bool,
}

/// What codes are. To make one, a number is divided by the scale, clamped, and rounded, halves to even.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// -128 to 127. A dynamic scale is the largest magnitude / 127.5, so that -128 occurs and 127.5 becomes 127.
    Int8,
    /// E4M3, up to 448 and without infinities. A dynamic scale is the largest magnitude / 448.
    Fp8,
}

impl Format {
    /// How codes are kept in memory.
    pub fn kept(self) -> quantized::Format {
        match self {
            Self::Int8 => quantized::Format::Int8,
            Self::Fp8 => quantized::Format::Fp8,
        }
    }
}

/// What shares a scale, `weight_scale`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightScales {
    PerTensor,
    /// One for each row of [out, in].
    PerChannel,
}

/// What a layer's input becomes before it is multiplied: codes of the same [`Format`] as the weights', if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// Weights alone are quantized.
    Unquantized,
    /// Scales are found while running, one for each token. That of zeros only is the dtype's epsilon.
    PerToken,
    /// One is in the checkpoint, `input_scale`.
    Static,
}

/// A name of a layer, `re:` and a pattern that its beginning matches, or a class of layers.
#[derive(Debug)]
struct Target {
    text: String,
    pattern: Option<Regex>,
}

#[derive(Deserialize)]
struct Section {
    #[serde(default)]
    format: Option<String>,
    config_groups: Map<String, Value>,
    #[serde(default)]
    ignore: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Group {
    targets: Vec<String>,
    #[serde(default)]
    format: Option<String>,
    #[serde(default)]
    weights: Option<Arguments>,
    #[serde(default)]
    input_activations: Option<Arguments>,
    #[serde(default)]
    output_activations: Value,
}

/// How one tensor is quantized. Observers are of no concern once scales are known.
#[derive(Deserialize)]
struct Arguments {
    /// A number; some tools write a map by layer.
    #[serde(default = "eight")]
    num_bits: Value,
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    symmetric: Option<bool>,
    #[serde(default)]
    strategy: Option<String>,
    #[serde(default)]
    group_size: Option<i64>,
    /// Yes, no, or "local".
    #[serde(default)]
    dynamic: Value,
    #[serde(default)]
    block_structure: Value,
    #[serde(default)]
    actorder: Value,
    #[serde(default)]
    scale_dtype: Value,
}

fn eight() -> Value {
    8.into()
}

impl CompressedConfig {
    /// Reads config.json. `None` for a model that is not quantized, and for MXFP4, which is read elsewhere. Any other
    /// quantization that cannot be computed fails with [`Error::UnsupportedQuantization`].
    pub fn read(config: &Value) -> Result<Option<Self>> {
        // Until the autumn of 2024 the section was `compression_config`, before that a part of it.
        let sections = [&config["quantization_config"], &config["compression_config"]];
        let Some(outer) = sections.into_iter().find(|section| is_set(section)) else { return Ok(None) };
        let nested = &outer["quantization_config"];
        let section = if is_set(nested) { nested } else { outer };
        match section["quant_method"].as_str() {
            Some("compressed-tensors" | "compressed_tensors" | "sparseml") => {}
            Some("mxfp4") => return Ok(None),
            Some(other) => return refuse(format!("quantization '{other}'")),
            None => return refuse("a quantization_config without quant_method"),
        }
        for field in ["kv_cache_scheme", "transform_config", "moe_sparsity_config"] {
            if is_set(&section[field]) {
                return refuse(format!("{field} of compressed-tensors"));
            }
        }
        for sparsity in [&outer["sparsity_config"]["format"], &section["sparsity_config"]["format"]] {
            if is_set(sparsity) && sparsity != "dense" {
                return refuse(format!("sparsity_config {sparsity} of compressed-tensors"));
            }
        }
        Self::from_section(section).map(Some)
    }

    fn from_section(section: &Value) -> Result<Self> {
        let broken = || "broken quantization_config".to_string();
        let section: Section = serde_json::from_value(section.clone()).with_context(broken)?;
        // Names come before patterns, each in the order of the alphabet; the last of two that are the same holds.
        let mut schemes: BTreeMap<(bool, String), Option<Scheme>> = BTreeMap::new();
        for (name, group) in section.config_groups {
            let place = format!("config_groups.{name}");
            if group.is_array() {
                return refuse(format!("the preset {place}"));
            }
            let group: Group = serde_json::from_value(group).with_context(|| format!("{}: {place}", broken()))?;
            let scheme = group.scheme(&place, section.format.as_deref())?;
            for target in group.targets {
                if target == "Embedding" && scheme.is_some() {
                    return refuse(format!("the target Embedding of {place}"));
                }
                schemes.insert((target.contains("re:"), target), scheme);
            }
        }
        let rules = schemes.into_iter().map(|((_, target), scheme)| Ok((Target::new(target)?, scheme)));
        let ignore = section.ignore.unwrap_or_default().into_iter().map(Target::new);
        Ok(Self { rules: rules.collect::<Result<_>>()?, ignore: ignore.collect::<Result<_>>()? })
    }

    /// In short: the bits of weights and activations and what they are, such as `w8a8 int8`.
    pub fn name(&self) -> String {
        let Some(scheme) = self.rules.iter().find_map(|(_, scheme)| *scheme) else { return "unquantized".into() };
        let activations = if scheme.activations == Activations::Unquantized { 16 } else { 8 };
        let format = if scheme.format == Format::Int8 { "int8" } else { "fp8" };
        format!("w8a{activations} {format}")
    }

    /// How the linear layer of this name, such as `model.layers.0.self_attn.q_proj`, is quantized, if it is. Names are
    /// those of the checkpoint's tensors, without `.weight`.
    pub fn scheme(&self, module: &str) -> Option<Scheme> {
        if self.ignore.iter().any(|target| target.names(module) || target.is_of_linear()) {
            return None;
        }
        let by_name = self.rules.iter().find(|(target, _)| target.names(module));
        let by_class = || self.rules.iter().find(|(target, _)| target.is_of_linear());
        by_name.or_else(by_class)?.1
    }
}

impl Target {
    fn new(text: String) -> Result<Self> {
        let pattern = match text.strip_prefix("re:").map(|pattern| Regex::new(&format!("^(?:{pattern})"))) {
            Some(Ok(pattern)) => Some(pattern),
            // Python's expressions can look around, which takes time without bound.
            Some(Err(_)) => return refuse(format!("the pattern '{text}' of quantization_config")),
            None => None,
        };
        Ok(Self { text, pattern })
    }

    fn names(&self, module: &str) -> bool {
        self.pattern.as_ref().map_or(self.text == module, |pattern| pattern.is_match(module))
    }

    /// By torch's classes.
    fn is_of_linear(&self) -> bool {
        self.text == "Linear" || self.text == "Module"
    }
}

impl Group {
    /// `None` if it leaves layers as they are.
    fn scheme(&self, place: &str, format: Option<&str>) -> Result<Option<Scheme>> {
        if is_set(&self.output_activations) {
            return refuse(format!("output_activations of {place}"));
        }
        let Some(weights) = &self.weights else {
            return match self.input_activations {
                Some(_) => refuse(format!("{place}, which quantizes inputs and not weights,")),
                None => Ok(None),
            };
        };
        let packed = match self.format.as_deref().or(format) {
            Some("int-quantized" | "float-quantized" | "naive-quantized") => false,
            Some("pack-quantized") => true,
            Some(other) => return refuse(format!("format '{other}' of compressed-tensors")),
            None => return refuse("a quantization_config of compressed-tensors without format"),
        };
        let place_of = |field| format!("{place}.{field}");
        let place = place_of("weights");
        let format = weights.format(&place)?;
        if packed && format != Format::Int8 {
            return refuse(format!("type 'float' of {place} in words"));
        }
        let weight_scales = match (weights.strategy(), weights.is_dynamic(&place)?) {
            ("tensor", false) => WeightScales::PerTensor,
            ("channel", false) => WeightScales::PerChannel,
            (_, true) => return refuse(format!("dynamic of {place}")),
            (other, false) => return refuse(format!("strategy '{other}' of {place}")),
        };
        let place = place_of("input_activations");
        let activations = match &self.input_activations {
            None => Activations::Unquantized,
            Some(inputs) if inputs.format(&place)? != format => {
                return refuse(format!("{place} of another type than its weights"));
            }
            Some(inputs) if is_set(&inputs.scale_dtype) => return refuse(format!("scale_dtype of {place}")),
            Some(inputs) => match (inputs.strategy(), inputs.is_dynamic(&place)?) {
                ("token", true) => Activations::PerToken,
                // One scale for all tokens of a pass: results would depend on what is computed together.
                ("tensor", true) => return refuse(format!("dynamic scales of whole tensors of {place}")),
                ("tensor", false) => Activations::Static,
                ("token", false) => return refuse(format!("strategy 'token' without dynamic of {place}")),
                (other, _) => return refuse(format!("strategy '{other}' of {place}")),
            },
        };
        Ok(Some(Scheme { format, weight_scales, activations, packed }))
    }
}

impl Arguments {
    fn format(&self, place: &str) -> Result<Format> {
        if self.num_bits.is_object() {
            return refuse(format!("num_bits by layer of {place}"));
        }
        if self.num_bits != 8 {
            return refuse(format!("num_bits {} of {place}", self.num_bits));
        }
        if self.symmetric == Some(false) {
            return refuse(format!("symmetric false of {place}"));
        }
        for (field, value) in [("actorder", &self.actorder), ("block_structure", &self.block_structure)] {
            if is_set(value) {
                return refuse(format!("{field} {value} of {place}"));
            }
        }
        if let Some(size) = self.group_size.filter(|&size| size != -1) {
            return refuse(format!("group_size {size} of {place}"));
        }
        match self.kind.as_deref().unwrap_or("int").to_lowercase().as_str() {
            "int" => Ok(Format::Int8),
            "float" => Ok(Format::Fp8),
            other => refuse(format!("type '{other}' of {place}")),
        }
    }

    /// A missing one follows from the size of groups, where -1 is a whole row.
    fn strategy(&self) -> &str {
        self.strategy.as_deref().unwrap_or(if self.group_size == Some(-1) { "channel" } else { "tensor" })
    }

    fn is_dynamic(&self, place: &str) -> Result<bool> {
        match &self.dynamic {
            Value::Null => Ok(false),
            Value::Bool(dynamic) => Ok(*dynamic),
            other => refuse(format!("dynamic {other} of {place}")),
        }
    }
}

/// Anything but null, false and an empty object.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Object(fields) => !fields.is_empty(),
        _ => true,
    }
}

fn refuse<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::UnsupportedQuantization { what: what.into() }.into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(groups: Value, ignore: Value) -> CompressedConfig {
        let section = json!({"quant_method": "compressed-tensors", "format": "naive-quantized",
            "config_groups": groups, "ignore": ignore});
        CompressedConfig::read(&json!({"quantization_config": section})).unwrap().unwrap()
    }

    fn weights(kind: &str, strategy: &str, targets: &[&str]) -> Value {
        json!({"targets": targets, "weights": {"num_bits": 8, "type": kind, "strategy": strategy}})
    }

    fn scheme(format: Format, weight_scales: WeightScales) -> Option<Scheme> {
        Some(Scheme { format, weight_scales, activations: Activations::Unquantized, packed: false })
    }

    #[test]
    fn a_name_goes_before_a_pattern_and_a_pattern_before_a_class() {
        let groups = json!({
            "a": weights("int", "channel", &["Linear"]),
            "b": weights("float", "channel", &["re:.*o_proj"]),
            "c": weights("float", "tensor", &["l.1.o_proj"]),
            "d": {"targets": ["l.2.o_proj"]},
        });
        let config = config(groups, Value::Null);
        assert_eq!(config.scheme("l.0.q_proj"), scheme(Format::Int8, WeightScales::PerChannel));
        assert_eq!(config.scheme("l.0.o_proj"), scheme(Format::Fp8, WeightScales::PerChannel));
        assert_eq!(config.scheme("l.1.o_proj"), scheme(Format::Fp8, WeightScales::PerTensor));
        assert_eq!(config.scheme("l.2.o_proj"), None, "a group may quantize nothing");
    }

    #[test]
    fn patterns_match_from_the_beginning_as_in_python() {
        let groups = json!({"a": weights("int", "tensor", &["re:q_proj|l\\.\\d+\\.k"])});
        let config = config(groups, json!([]));
        assert!(config.scheme("l.12.k_proj").is_some());
        assert!(config.scheme("q_proj.anything").is_some());
        assert_eq!(config.scheme("l.0.q_proj"), None);
        assert_eq!(config.scheme("l.x.k_proj"), None);
    }

    #[test]
    fn what_is_ignored_stays_as_it_is() {
        let linear = |ignore| config(json!({"a": weights("int", "tensor", &["Linear"])}), ignore);
        let some = linear(json!(["lm_head", "re:.*\\.mlp\\.gate$"]));
        assert_eq!(some.scheme("lm_head"), None);
        assert_eq!(some.scheme("l.0.mlp.gate"), None);
        assert!(some.scheme("l.0.mlp.gate_proj").is_some());
        assert!(some.scheme("model.lm_head").is_some());
        assert_eq!(linear(json!(["Linear"])).scheme("l.0.q_proj"), None);
    }

    #[test]
    fn the_last_of_two_groups_with_the_same_target_holds() {
        let groups = json!({"b": weights("int", "tensor", &["Linear"]), "a": weights("float", "tensor", &["Linear"])});
        assert_eq!(config(groups, json!([])).scheme("x"), scheme(Format::Fp8, WeightScales::PerTensor));
    }
}
