//! The section `quantization_config` of config.json, and the quantization scheme that each of its groups describes.

use anyhow::{Result, anyhow};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::scheme::{Activations, CodeType, Scheme, WeightScales};
use crate::error::Error;
use crate::text::{excerpt, library_error, quote};

/// The `quantization_config` section of config.json.
#[derive(Deserialize)]
pub struct QuantizationConfig {
    #[serde(default)]
    pub format: Option<String>,
    pub config_groups: Map<String, Value>,
    #[serde(default)]
    pub ignore: Option<Vec<String>>,
}

/// One entry of `config_groups` in `quantization_config`.
#[derive(Deserialize)]
pub struct ConfigGroup {
    pub targets: Vec<String>,
    #[serde(default)]
    format: Option<String>,
    #[serde(default)]
    weights: Option<QuantizationArgs>,
    #[serde(default)]
    input_activations: Option<QuantizationArgs>,
    #[serde(default)]
    output_activations: Value,
}

/// The quantization arguments of weights or inputs. `observer` is ignored, because it matters only during calibration.
#[derive(Deserialize)]
struct QuantizationArgs {
    /// The number of bits per value. Some tools write an object with one number per layer, which is not supported.
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
    /// Whether scales are computed at run time. `null` counts as false, and `"local"` is not supported.
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

impl ConfigGroup {
    /// Returns the quantization scheme of the group, or `None` if the group leaves its layers unquantized.
    pub fn scheme(&self, path: &str, format: Option<&str>) -> Result<Option<Scheme>> {
        if is_set(&self.output_activations) {
            return unsupported(format!("output_activations in {path}"));
        }
        let Some(weights) = &self.weights else {
            return match self.input_activations {
                Some(_) => unsupported(format!("input-only quantization in {path}")),
                None => Ok(None),
            };
        };
        let is_packed = match self.format.as_deref().or(format) {
            Some("int-quantized" | "float-quantized" | "naive-quantized") => false,
            Some("pack-quantized") => true,
            Some(other) => return unsupported(format!("compressed-tensors format {}", quote(other))),
            None => return unsupported("a compressed-tensors quantization_config without a format"),
        };
        let group_path = path;
        let path = &format!("{group_path}.weights");
        let code_type = weights.code_type(path)?;
        if is_packed && code_type != CodeType::Int8 {
            return unsupported(format!("a packed 'float' type in {path}"));
        }
        let weight_scales = match (weights.strategy(), weights.is_dynamic(path)?) {
            ("tensor", false) => WeightScales::PerTensor,
            ("channel", false) => WeightScales::PerChannel,
            (_, true) => return unsupported(format!("dynamic=true in {path}")),
            (other, false) => return unsupported(format!("strategy={} in {path}", quote(other))),
        };
        let path = &format!("{group_path}.input_activations");
        let activations = match &self.input_activations {
            None => Activations::Unquantized,
            Some(inputs) if inputs.code_type(path)? != code_type => {
                return unsupported(format!("{path} with a different type than the weights"));
            }
            Some(inputs) if is_set(&inputs.scale_dtype) => return unsupported(format!("scale_dtype in {path}")),
            Some(inputs) => match (inputs.strategy(), inputs.is_dynamic(path)?) {
                ("token", true) => Activations::PerToken,
                // With one scale for all tokens of a step, a token's result would depend on the step's other tokens.
                ("tensor", true) => return unsupported(format!("dynamic per-tensor scaling in {path}")),
                ("tensor", false) => Activations::Static,
                ("token", false) => return unsupported(format!("strategy='token' without dynamic=true in {path}")),
                (other, _) => return unsupported(format!("strategy={} in {path}", quote(other))),
            },
        };
        Ok(Some(Scheme { code_type, weight_scales, activations, is_packed }))
    }
}

impl QuantizationArgs {
    fn code_type(&self, path: &str) -> Result<CodeType> {
        if self.num_bits.is_object() {
            return unsupported(format!("per-layer num_bits in {path}"));
        }
        if self.num_bits != 8 {
            return unsupported(format!("num_bits={} in {path}", excerpt(&self.num_bits.to_string())));
        }
        if self.symmetric == Some(false) {
            return unsupported(format!("symmetric=false in {path}"));
        }
        for (field, value) in [("actorder", &self.actorder), ("block_structure", &self.block_structure)] {
            if is_set(value) {
                return unsupported(format!("{field}={} in {path}", excerpt(&value.to_string())));
            }
        }
        if let Some(size) = self.group_size.filter(|&size| size != -1) {
            return unsupported(format!("group_size={size} in {path}"));
        }
        match self.kind.as_deref().unwrap_or("int").to_lowercase().as_str() {
            "int" => Ok(CodeType::Int8),
            "float" => Ok(CodeType::Fp8),
            other => unsupported(format!("type={} in {path}", quote(other))),
        }
    }

    /// Returns the granularity of the scales. The default is `channel` if the group size is -1, and `tensor` otherwise.
    fn strategy(&self) -> &str {
        self.strategy.as_deref().unwrap_or(if self.group_size == Some(-1) { "channel" } else { "tensor" })
    }

    fn is_dynamic(&self, path: &str) -> Result<bool> {
        match &self.dynamic {
            Value::Null => Ok(false),
            Value::Bool(dynamic) => Ok(*dynamic),
            other => unsupported(format!("dynamic={} in {path}", excerpt(&other.to_string()))),
        }
    }
}

/// Deserializes a value. The message of an error is a single short line.
pub fn from_json<'j, T: Deserialize<'j>>(json: &'j Value) -> Result<T> {
    T::deserialize(json).map_err(|error| anyhow!("{}", library_error(&error)))
}

/// Returns whether a JSON value counts as set. `null`, `false` and an empty object do not count.
pub fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Object(fields) => !fields.is_empty(),
        _ => true,
    }
}

/// Fails with [`Error::UnsupportedQuantization`].
pub fn unsupported<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::UnsupportedQuantization { what: what.into() }.into())
}
