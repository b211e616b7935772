//! The config.json fields that most families share, and their validation.

use anyhow::{Result, bail};
use candle_nn::Activation;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::nn::attention::AttentionConfig;
use crate::nn::checks::{MAX_SIZE, check_optional, check_range, check_size};
use crate::nn::decoder_config::DecoderConfig;
use crate::nn::kv_cache::LayerSpec;
use crate::nn::linear::Bias;
use crate::nn::mlp::{GatedMlp, MlpConfig};
use crate::nn::norm::NormConfig;
use crate::nn::rope::{RopeConfig, RopeFrequencies, RopeLengths};
use crate::text::{counted, excerpt, library_error, quote};
use crate::weights::Weights;

/// [`from_json`] searches for the invalid field only in configs with at most this many fields.
/// The search parses the config up to once per field, so it would be slow for a hostile config with many fields.
const MAX_FIELDS: usize = 200;

/// The config.json fields that have the same names in nearly all families.
#[derive(Debug, Deserialize)]
pub(super) struct CommonConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f64,
    pub tie_word_embeddings: bool,
    #[serde(default)]
    pub sliding_window: Option<usize>,
    pub layer_types: Option<Vec<LayerType>>,
    #[serde(default)]
    attention_bias: bool,
    pub hidden_act: Activation,
    #[serde(flatten)]
    pub rope: RopeConfig,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(super) enum LayerType {
    SlidingAttention,
    FullAttention,
}

/// Parses config.json. `defaults` has the family's values for absent fields, as in transformers.
/// `tie_word_embeddings`, `rms_norm_eps` and `rope_theta` always have a default. A `null` does not count as absent.
///
/// Fails if a field is invalid or a required field is absent, or if the weights are MXFP4, which only gpt-oss supports.
pub(super) fn parse<T: DeserializeOwned>(family: &str, mut json: Value, defaults: Value) -> Result<T> {
    if json["quantization_config"]["quant_method"] == "mxfp4" {
        bail!("quantization 'mxfp4' is not supported for {family}");
    }
    let fallback = serde_json::json!({"tie_word_embeddings": false, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0});
    for source in [defaults, fallback] {
        let (Value::Object(source), Some(fields)) = (source, json.as_object_mut()) else { continue };
        for (name, value) in source {
            fields.entry(name).or_insert(value);
        }
    }
    from_json(json)
}

/// Parses the fields of config.json. If possible, the error names the invalid field.
pub(super) fn from_json<T: DeserializeOwned>(json: Value) -> Result<T> {
    let parse = |json: &Value| serde_json::from_value::<T>(json.clone()).map_err(|error| library_error(&error));
    let error = match parse(&json) {
        Ok(config) => return Ok(config),
        Err(error) => error,
    };
    if error.starts_with("missing field") {
        // This error already names the field.
        bail!("{error}");
    }
    // serde does not name an invalid field. Find the first field whose removal changes the error.
    let is_cause = |key: &&String| {
        let mut others = json.clone();
        others.as_object_mut().and_then(|fields| fields.shift_remove(*key));
        parse(&others).err().as_ref() != Some(&error)
    };
    match json.as_object().filter(|fields| fields.len() <= MAX_FIELDS).and_then(|fields| fields.keys().find(is_cause)) {
        Some(key) => bail!("{}: {error}", excerpt(key)),
        None => bail!("{error}"),
    }
}

/// Copies the activation in `field` to `hidden_act`, the field that the config structs read.
/// Fails if the activation is not in `supported`.
/// If `field` is absent or not a string, the activation is the first of `supported`.
pub(super) fn normalize_activation(family: &str, json: &mut Value, field: &str, supported: &[&str]) -> Result<()> {
    let name = json[field].as_str().unwrap_or(supported[0]);
    if !supported.contains(&name) {
        bail!("{field} {} is not supported for {family}; supported: {}", quote(name), supported.join(", "));
    }
    json["hidden_act"] = name.into();
    Ok(())
}

/// Fails if one of the unsupported `fields` has a value other than `null` or `false`.
pub(super) fn reject_fields(family: &str, json: &Value, fields: &[&str]) -> Result<()> {
    let is_set = |field: &&&str| !matches!(json[**field], Value::Null | Value::Bool(false));
    match fields.iter().find(is_set) {
        Some(field) => bail!("{field} {} is not supported for {family}", excerpt(&json[*field].to_string())),
        None => Ok(()),
    }
}

/// Fails if a scale, soft cap or clamp limit is present but is not between 1e-6 and 1e9.
pub(super) fn check_scale(key: &str, value: Option<f32>) -> Result<()> {
    check_optional(key, value, 1e-6..=1e9)
}

/// Fails if the epsilon of a norm is not between 1e-20 and 1.
pub(super) fn check_eps(key: &str, eps: f64) -> Result<()> {
    check_range(key, eps, 1e-20..=1.0)
}

/// Fails if `layer_types` is present but does not have exactly one entry per layer.
pub(super) fn check_layer_types(layer_types: Option<&Vec<LayerType>>, layers: usize) -> Result<()> {
    match layer_types.filter(|types| types.len() != layers) {
        Some(types) => {
            bail!("the length of layer_types is {}, but the model has {}", types.len(), counted(layers, "layer"))
        }
        None => Ok(()),
    }
}

/// Fails if `sliding_window` is present but is not between 1 and [`MAX_SIZE`].
pub(super) fn check_window(sliding_window: Option<usize>) -> Result<()> {
    check_optional("sliding_window", sliding_window, 1..=MAX_SIZE)
}

impl CommonConfig {
    /// Fails if a shared field has an invalid value, or if RoPE rotates only part of a head.
    pub fn validate(&self) -> Result<()> {
        let (rotary_dim, head_dim) = (self.rope.rotary_dim(self.head_dim()), self.head_dim());
        if rotary_dim != head_dim {
            bail!(
                "partial_rotary_factor rotates {rotary_dim} of {head_dim} dimensions, which this family does not support"
            );
        }
        self.validate_with_partial_rope()
    }

    /// Validates like [`Self::validate`], but allows RoPE that rotates only part of a head.
    pub fn validate_with_partial_rope(&self) -> Result<()> {
        ModelSizes {
            hidden_size: self.hidden_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads: self.kv_heads(),
            head_dim: self.head_dim(),
            intermediate_size: self.intermediate_size,
            vocab_size: self.vocab_size,
            max_position_embeddings: self.max_position_embeddings,
        }
        .validate()?;
        check_layer_types(self.layer_types.as_ref(), self.num_hidden_layers)?;
        check_window(self.sliding_window)?;
        check_eps("rms_norm_eps", self.rms_norm_eps)?;
        let rotary_dim = self.rope.rotary_dim(self.head_dim());
        if rotary_dim > self.head_dim() {
            bail!("partial_rotary_factor rotates {rotary_dim} dimensions, but head_dim is {}", self.head_dim());
        }
        // LongRoPE has separate factors for short and long contexts. A context of 1 checks the short factors.
        self.frequencies(1)?;
        self.frequencies(self.max_position_embeddings)?;
        Ok(())
    }

    fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    pub fn head_dim(&self) -> usize {
        // The config may not be validated yet, so the number of heads may be 0.
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Returns the RoPE frequencies of a model that is loaded for `context` positions.
    pub fn frequencies(&self, context: usize) -> Result<RopeFrequencies> {
        let lengths = RopeLengths { max_position_embeddings: self.max_position_embeddings, context };
        self.rope.frequencies(self.rope.rotary_dim(self.head_dim()), lengths, 10_000.0)
    }

    /// Returns the KV cache spec of each layer. `window` maps a layer index to the layer's sliding window, if any.
    pub fn layers(&self, window: impl Fn(usize) -> Option<usize>) -> Vec<LayerSpec> {
        let spec = |layer| LayerSpec { kv_heads: self.kv_heads(), head_dim: self.head_dim(), window: window(layer) };
        (0..self.num_hidden_layers).map(spec).collect()
    }

    /// Returns the KV cache specs of a model whose layers all use `sliding_window`.
    /// A window of at least `max_position_embeddings` counts as no window.
    pub fn sliding_layers(&self) -> Vec<LayerSpec> {
        self.layers(|_| self.sliding_window.filter(|&window| window < self.max_position_embeddings))
    }

    /// Returns the sliding window of a layer, or `None` for full attention.
    /// If config.json has no `layer_types`, `is_sliding` determines which layers have a sliding window.
    pub fn window(&self, layer: usize, is_sliding: impl Fn(usize) -> bool) -> Option<usize> {
        let sliding = match &self.layer_types {
            Some(types) => types[layer] == LayerType::SlidingAttention,
            None => is_sliding(layer),
        };
        self.sliding_window.filter(|_| sliding)
    }

    /// Returns the attention config of a layer. `attention_bias` determines whether the projections have biases.
    pub fn attention(&self, spec: LayerSpec) -> AttentionConfig {
        let bias = Bias::from(self.attention_bias);
        let config = AttentionConfig::new(self.hidden_size, self.num_attention_heads, spec);
        AttentionConfig { qkv_bias: bias, o_bias: bias, ..config }
    }

    /// Returns the config of a layer's dense MLP.
    pub fn mlp(&self) -> MlpConfig {
        let Self { hidden_size, intermediate_size, hidden_act: activation, .. } = *self;
        MlpConfig { hidden_size, intermediate_size, activation }
    }

    /// Loads the gated MLP of a layer, without biases.
    pub fn load_mlp(&self, layer: &Weights) -> Result<GatedMlp> {
        GatedMlp::load(&layer.at("mlp"), self.mlp(), Bias::Without)
    }

    /// Returns a decoder config with Llama's options.
    pub fn decoder_config(&self, cache_layers: Vec<LayerSpec>, context: usize) -> Result<DecoderConfig> {
        let norm = NormConfig::rms(self.rms_norm_eps);
        let frequencies = self.frequencies(context)?;
        Ok(DecoderConfig {
            tie_word_embeddings: self.tie_word_embeddings,
            cache_layers,
            ..DecoderConfig::new(self.vocab_size, self.hidden_size, norm, frequencies)
        })
    }
}

/// The sizes that every model has. Checking their ranges prevents overflows in products of sizes.
pub(super) struct ModelSizes {
    pub hidden_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
    pub max_position_embeddings: usize,
}

impl ModelSizes {
    /// Fails if a size is out of range, if the number of KV heads does not divide the number of query heads,
    /// or if `head_dim` is odd or too large for the attention kernels.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("intermediate_size", self.intermediate_size),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        for (name, value) in sizes {
            check_size(name, value)?;
        }
        check_range("num_hidden_layers", self.layers, 1..=4096)?;
        check_range("num_attention_heads", self.heads, 1..=1 << 16)?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            bail!("num_attention_heads {} is not a multiple of num_key_value_heads {}", self.heads, self.kv_heads);
        }
        if self.head_dim > 256 || !self.head_dim.is_multiple_of(2) {
            bail!("head_dim is {}; it must be even and at most 256", self.head_dim);
        }
        Ok(())
    }
}
