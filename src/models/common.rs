//! What the config.json of most families has in common, and what follows from it.

use anyhow::{Result, bail};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Architecture, Sizes};
use crate::nn::attention::{Attention, AttentionConfig};
use crate::nn::decoder::{Decoder, Frame, Place};
use crate::nn::kv_cache::LayerSpec;
use crate::nn::linear::Bias;
use crate::nn::mlp::{GatedMlp, Mlp};
use crate::nn::norm::NormConfig;
use crate::nn::rope::{Frequencies, Lengths, RopeConfig};
use crate::weights::Weights;

/// Fields that nearly all families spell alike.
#[derive(Debug, Deserialize)]
pub(super) struct Common {
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
    pub attention_bias: bool,
    #[serde(flatten)]
    pub rope: RopeConfig,
}

/// What is left to say of a family that has these fields, and layers of attention and an MLP, each behind a norm.
pub(super) trait Usual {
    fn common(&self) -> &Common;

    /// What each layer keeps in the cache.
    fn layers(&self) -> Vec<LayerSpec>;

    /// Attention and MLP of one layer.
    fn parts(&self, weights: &Weights, place: Place) -> Result<(Attention, Mlp)>;

    /// What stands around the layers.
    fn frame(&self, _: &Weights, context: usize) -> Result<Frame> {
        self.common().frame(self.layers(), context)
    }

    fn usual_context(&self) -> usize {
        self.common().max_position_embeddings
    }
}

impl<T: Usual> Architecture for T {
    fn vocab_size(&self) -> usize {
        self.common().vocab_size
    }

    fn max_position_embeddings(&self) -> usize {
        self.common().max_position_embeddings
    }

    fn usual_context(&self) -> usize {
        Usual::usual_context(self)
    }

    fn cache_layers(&self) -> Vec<LayerSpec> {
        self.layers()
    }

    fn build(&self, weights: &Weights, context: usize) -> Result<Decoder> {
        let frame = self.frame(weights, context)?;
        Decoder::load(weights, context, frame, |weights, place| self.parts(weights, place))
    }
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(super) enum LayerType {
    SlidingAttention,
    FullAttention,
}

/// Reads a family's config.json. `defaults` are what transformers takes for fields that are not there; a `null` is there.
pub(super) fn parse<T: DeserializeOwned>(family: &str, mut json: Value, defaults: Value) -> Result<T> {
    if json["quantization_config"]["quant_method"] == "mxfp4" {
        bail!("quantization 'mxfp4' is not supported for {family}");
    }
    let fallback = serde_json::json!({"tie_word_embeddings": false, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0});
    for source in [defaults, fallback] {
        let (Value::Object(from), Some(fields)) = (source, json.as_object_mut()) else { continue };
        from.into_iter().for_each(|(name, value)| {
            fields.entry(name).or_insert(value);
        });
    }
    Ok(serde_json::from_value(json)?)
}

/// Fails unless the activation named in `field` is one of `known`.
pub(super) fn check_activation(family: &str, json: &Value, field: &str, known: &[&str]) -> Result<()> {
    match json[field].as_str().filter(|activation| !known.contains(activation)) {
        Some(activation) => bail!("{field} '{activation}' is not supported for {family} ({})", known.join(", ")),
        None => Ok(()),
    }
}

/// Fails if one of `fields` is set to anything but null and false: options that the family's code does not know.
pub(super) fn refuse(family: &str, json: &Value, fields: &[&str]) -> Result<()> {
    let set = |field: &&&str| !matches!(json[**field], Value::Null | Value::Bool(false));
    match fields.iter().find(set) {
        Some(field) => bail!("{field} {} is not supported for {family}", json[*field]),
        None => Ok(()),
    }
}

impl Common {
    /// Checks everything that is not the family's own, and that heads are rotated whole.
    pub fn check(&self) -> Result<()> {
        let (rotated, head_dim) = (self.rope.rotated(self.head_dim()), self.head_dim());
        if rotated != head_dim {
            bail!(
                "partial_rotary_factor, which rotates {rotated} of {head_dim} dims, is not supported for this family"
            );
        }
        self.check_partial()
    }

    /// The same where heads may be rotated in part.
    pub fn check_partial(&self) -> Result<()> {
        Sizes {
            hidden_size: self.hidden_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads: self.kv_heads(),
            head_dim: self.head_dim(),
            intermediate_size: self.intermediate_size,
            vocab_size: self.vocab_size,
            max_position_embeddings: self.max_position_embeddings,
        }
        .check()?;
        let types = self.layer_types.as_ref().map_or(self.num_hidden_layers, Vec::len);
        if types != self.num_hidden_layers {
            bail!("{types} layer_types for {} layers", self.num_hidden_layers);
        }
        if let Some(window) = self.sliding_window.filter(|window| !(1..=1 << 24).contains(window)) {
            bail!("sliding_window is {window}");
        }
        let rotated = self.rope.rotated(self.head_dim());
        if rotated > self.head_dim() {
            bail!("partial_rotary_factor rotates {rotated} dims of heads of {}", self.head_dim());
        }
        // The shortest context and the longest: LongRoPE has other factors for each.
        self.frequencies(1)?;
        self.frequencies(self.max_position_embeddings)?;
        Ok(())
    }

    fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    pub fn frequencies(&self, context: usize) -> Result<Frequencies> {
        let lengths = Lengths { max_position_embeddings: self.max_position_embeddings, context };
        self.rope.frequencies(self.rope.rotated(self.head_dim()), lengths, 10_000.0)
    }

    /// All layers, each with the window that `window` says.
    pub fn layers(&self, window: impl Fn(usize) -> Option<usize>) -> Vec<LayerSpec> {
        let spec = |layer| LayerSpec { kv_heads: self.kv_heads(), head_dim: self.head_dim(), window: window(layer) };
        (0..self.num_hidden_layers).map(spec).collect()
    }

    /// All layers, sliding if there is a window. One that holds every position is none.
    pub fn all_sliding(&self) -> Vec<LayerSpec> {
        self.layers(|_| self.sliding_window.filter(|&window| window < self.max_position_embeddings))
    }

    /// The window of a layer that `layer_types`, or else `by_place`, says slides.
    pub fn window(&self, layer: usize, by_place: impl Fn(usize) -> bool) -> Option<usize> {
        let slides = match &self.layer_types {
            Some(types) => types[layer] == LayerType::SlidingAttention,
            None => by_place(layer),
        };
        self.sliding_window.filter(|_| slides)
    }

    pub fn attention(&self, spec: LayerSpec) -> AttentionConfig {
        AttentionConfig::new(self.hidden_size, self.num_attention_heads, spec)
    }

    /// The MLP of a layer without biases.
    pub fn mlp(&self, layer: &Weights) -> Result<GatedMlp> {
        GatedMlp::load(&layer.at("mlp"), self.hidden_size, self.intermediate_size, Bias::Without)
    }

    pub fn frame(&self, cache_layers: Vec<LayerSpec>, context: usize) -> Result<Frame> {
        let (norm, frequencies) = (NormConfig::rms(self.rms_norm_eps), self.frequencies(context)?);
        Ok(Frame {
            tie_word_embeddings: self.tie_word_embeddings,
            cache_layers,
            ..Frame::new(self.vocab_size, self.hidden_size, norm, frequencies)
        })
    }
}
