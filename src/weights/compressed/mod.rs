//! Reads the quantization schemes of 8-bit checkpoints in the compressed-tensors format of llm-compressor and vLLM.
//!
//! `quantization_config` in config.json assigns the schemes to linear layers by name, by pattern, or by class.
//!
//! A quantized layer has a `weight` of shape `[out, in]` in I8 or F8_E4M3, and a `weight_scale` of shape `[out, 1]`
//! or `[1]`. With static input quantization, the layer also has an `input_scale` of shape `[1]`.
//! Older files may store scales as scalars instead of tensors of shape `[1]`.
//!
//! A packed layer has `weight_packed` and `weight_shape` in place of `weight`.
//! `weight_packed` is an I32 tensor of shape `[out, in / 4]`.
//! Each 32-bit word holds four int8 codes, each stored as code + 128. The first code is in the lowest byte.
//!
//! - `scheme`: the quantization scheme of a layer
//! - `section`: the section `quantization_config` as JSON, and the scheme that each of its groups describes
//!
//! Source: vllm-project/compressed-tensors 0.20:
//! - `quantization/quant_config.py`
//! - `quantization/quant_args.py`
//! - `quantization/lifecycle/apply.py`
//! - `utils/match.py`

mod scheme;
mod section;

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use regex::{Regex, RegexBuilder};
pub use scheme::{Activations, CodeType, Scheme, WeightScales};
use section::{ConfigGroup, QuantizationConfig, from_json, is_set, unsupported};
use serde_json::Value;

use crate::text::{excerpt, quote};

/// The prefix of a target that is a regular expression.
const PATTERN: &str = "re:";

/// The maximum number of targets in a `quantization_config`, including the targets in `ignore`.
/// Limits the time to look up the scheme of a layer.
const MAX_TARGETS: usize = 10_000;
/// The maximum number of regular expressions among the targets. Limits the memory of the compiled expressions.
const MAX_PATTERNS: usize = 100;

/// The maximum size of a compiled regular expression, in bytes.
const MAX_PATTERN_BYTES: usize = 1 << 20;

/// The `quantization_config` of a model, which assigns quantization schemes to linear layers.
#[derive(Debug)]
pub struct CompressedConfig {
    /// A layer uses the first rule whose target matches its name, or else the first rule for a linear class.
    /// The layer is unquantized if a target in `ignore` matches it, if no rule matches, or if the rule has no scheme.
    rules: Vec<(Target, Option<Scheme>)>,
    ignore: Vec<Target>,
}

/// Selects linear layers: a layer name, a layer class, or `re:` and a regex that must match at the start of the name.
#[derive(Debug)]
struct Target {
    text: String,
    pattern: Option<Regex>,
}

impl CompressedConfig {
    /// Reads `quantization_config` from config.json.
    /// Returns `None` for a model that is unquantized or uses MXFP4.
    /// Fails with [`UnsupportedQuantization`](crate::error::Error::UnsupportedQuantization) if it is not supported,
    /// and with another error if the section has an invalid structure.
    pub fn read(config: &Value) -> Result<Option<Self>> {
        // Older files name the section `compression_config`.
        // In some files, the section contains another `quantization_config`.
        let sections = [&config["quantization_config"], &config["compression_config"]];
        let Some(outer) = sections.into_iter().find(|section| is_set(section)) else { return Ok(None) };
        let nested = &outer["quantization_config"];
        let section = if is_set(nested) { nested } else { outer };
        match section["quant_method"].as_str() {
            Some("compressed-tensors" | "compressed_tensors" | "sparseml") => {}
            Some("mxfp4") => return Ok(None),
            Some(other) => return unsupported(format!("quantization {}", quote(other))),
            None => return unsupported("quantization_config without quant_method"),
        }
        for field in ["kv_cache_scheme", "transform_config", "moe_sparsity_config"] {
            if is_set(&section[field]) {
                return unsupported(format!("compressed-tensors {field}"));
            }
        }
        for sparsity in [&outer["sparsity_config"]["format"], &section["sparsity_config"]["format"]] {
            if is_set(sparsity) && sparsity != "dense" {
                return unsupported(format!("compressed-tensors sparsity_config {}", excerpt(&sparsity.to_string())));
            }
        }
        Self::from_section(section).map(Some)
    }

    fn from_section(section: &Value) -> Result<Self> {
        let broken = || "invalid quantization_config".to_string();
        let section: QuantizationConfig = from_json(section).with_context(broken)?;
        // As in compressed-tensors, targets that are names come before regular expressions, and both are in
        // alphabetical order. If a target occurs twice, only the last occurrence has an effect.
        let mut schemes: BTreeMap<(bool, String), Option<Scheme>> = BTreeMap::new();
        for (name, group) in section.config_groups {
            let path = format!("config_groups.{}", excerpt(&name));
            if group.is_array() {
                return unsupported(format!("the preset {path}"));
            }
            let group: ConfigGroup = from_json(&group).with_context(|| format!("{}: {path}", broken()))?;
            let scheme = group.scheme(&path, section.format.as_deref())?;
            for target in group.targets {
                if target == "Embedding" && scheme.is_some() {
                    return unsupported(format!("target 'Embedding' in {path}"));
                }
                schemes.insert((target.contains("re:"), target), scheme);
            }
        }
        let ignore = section.ignore.unwrap_or_default();
        let targets = schemes.keys().map(|(_, target)| target).chain(&ignore);
        let patterns = targets.clone().filter(|target| target.starts_with(PATTERN)).count();
        if targets.count() > MAX_TARGETS || patterns > MAX_PATTERNS {
            return unsupported(format!(
                "quantization_config with more than {MAX_TARGETS} targets or {MAX_PATTERNS} patterns"
            ));
        }
        let rules = schemes.into_iter().map(|((_, target), scheme)| Ok((Target::new(target)?, scheme)));
        let ignore = ignore.into_iter().map(Target::new);
        Ok(Self { rules: rules.collect::<Result<_>>()?, ignore: ignore.collect::<Result<_>>()? })
    }

    /// Returns the bit widths of weights and activations and the type of the codes, such as `w8a8 int8`.
    /// If layers have different schemes, describes only one of them. Returns `unquantized` if there is no scheme.
    pub fn name(&self) -> String {
        let Some(scheme) = self.rules.iter().find_map(|(_, scheme)| *scheme) else { return "unquantized".into() };
        let activations = if scheme.activations == Activations::Unquantized { 16 } else { 8 };
        let code_type = if scheme.code_type == CodeType::Int8 { "int8" } else { "fp8" };
        format!("w8a{activations} {code_type}")
    }

    /// Returns the quantization scheme of a linear layer, or `None` if the layer is unquantized.
    /// `module` is the name of the layer's weight without `.weight`, such as `model.layers.0.self_attn.q_proj`.
    pub fn scheme(&self, module: &str) -> Option<Scheme> {
        if self.ignore.iter().any(|target| target.matches_name(module) || target.is_linear_class()) {
            return None;
        }
        let by_name = self.rules.iter().find(|(target, _)| target.matches_name(module));
        let by_class = || self.rules.iter().find(|(target, _)| target.is_linear_class());
        by_name.or_else(by_class)?.1
    }
}

impl Target {
    fn new(text: String) -> Result<Self> {
        let compile = |pattern| RegexBuilder::new(&format!("^(?:{pattern})")).size_limit(MAX_PATTERN_BYTES).build();
        let pattern = match text.strip_prefix(PATTERN).map(compile) {
            Some(Ok(pattern)) => Some(pattern),
            // The expression is invalid, too large, or uses Python syntax that the regex crate lacks (lookaround).
            Some(Err(_)) => return unsupported(format!("pattern {} in quantization_config", quote(&text))),
            None => None,
        };
        Ok(Self { text, pattern })
    }

    /// Returns true if the target is the module's name, or a regular expression that matches the start of the name.
    fn matches_name(&self, module: &str) -> bool {
        self.pattern.as_ref().map_or(self.text == module, |pattern| pattern.is_match(module))
    }

    /// Returns true if the target is one of the PyTorch classes of which every linear layer is an instance.
    fn is_linear_class(&self) -> bool {
        self.text == "Linear" || self.text == "Module"
    }
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

    fn scheme(code_type: CodeType, weight_scales: WeightScales) -> Option<Scheme> {
        Some(Scheme { code_type, weight_scales, activations: Activations::Unquantized, is_packed: false })
    }

    #[test]
    fn names_precede_patterns_and_patterns_precede_classes() {
        let groups = json!({
            "a": weights("int", "channel", &["Linear"]),
            "b": weights("float", "channel", &["re:.*o_proj"]),
            "c": weights("float", "tensor", &["l.1.o_proj"]),
            "d": {"targets": ["l.2.o_proj"]},
        });
        let config = config(groups, Value::Null);
        assert_eq!(config.scheme("l.0.q_proj"), scheme(CodeType::Int8, WeightScales::PerChannel));
        assert_eq!(config.scheme("l.0.o_proj"), scheme(CodeType::Fp8, WeightScales::PerChannel));
        assert_eq!(config.scheme("l.1.o_proj"), scheme(CodeType::Fp8, WeightScales::PerTensor));
        assert_eq!(config.scheme("l.2.o_proj"), None, "a group without `weights` quantized its layer");
    }

    #[test]
    fn patterns_match_the_beginning_of_the_name() {
        let groups = json!({"a": weights("int", "tensor", &["re:q_proj|l\\.\\d+\\.k"])});
        let config = config(groups, json!([]));
        assert!(config.scheme("l.12.k_proj").is_some());
        assert!(config.scheme("q_proj.anything").is_some());
        assert_eq!(config.scheme("l.0.q_proj"), None);
        assert_eq!(config.scheme("l.x.k_proj"), None);
    }

    #[test]
    fn ignored_layers_stay_unquantized() {
        let linear = |ignore| config(json!({"a": weights("int", "tensor", &["Linear"])}), ignore);
        let some = linear(json!(["lm_head", "re:.*\\.mlp\\.gate$"]));
        assert_eq!(some.scheme("lm_head"), None);
        assert_eq!(some.scheme("l.0.mlp.gate"), None);
        assert!(some.scheme("l.0.mlp.gate_proj").is_some());
        assert!(some.scheme("model.lm_head").is_some());
        assert_eq!(linear(json!(["Linear"])).scheme("l.0.q_proj"), None);
    }

    #[test]
    fn last_group_with_the_same_target_wins() {
        let groups = json!({"b": weights("int", "tensor", &["Linear"]), "a": weights("float", "tensor", &["Linear"])});
        assert_eq!(config(groups, json!([])).scheme("x"), scheme(CodeType::Fp8, WeightScales::PerTensor));
    }
}
