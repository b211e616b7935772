//! Rotary position embedding (RoPE): its frequencies, for each scaling method, and its cos and sin tables.
//!
//! The formulas are from `modeling_rope_utils.py` in transformers.
//! The fields of config.json can have the names of transformers 4 or of transformers 5.
//!
//! The rotation kernel is in `kernels::attention::rope`.
//! Unlike `candle_nn::rotary_emb`, the kernel takes one position per token, can leave a part of each head unrotated,
//! adds the biases of q, k and v, applies the q/k norms, and casts the result.

use std::f32::consts::PI;

use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use rayon::prelude::*;
use serde::Deserialize;

use super::checks::{check_optional, check_range, check_size};
use crate::kernels::attention::rope::Rotation;
use crate::text::quote;

/// The range of `rope_theta`. The minimum is above 1, because YaRN divides by the logarithm of `rope_theta`.
/// The maximum excludes only broken files.
const MIN_THETA: f64 = 2.0;
const MAX_THETA: f64 = 1e15;

/// The range of RoPE scaling parameters. `factor` must also be at least 1.
/// The range is far wider than the values of published models, so it excludes only broken files.
const MIN_FACTOR: f64 = 1e-3;
const MAX_FACTOR: f64 = 1e6;

/// The RoPE fields of config.json. transformers 5 writes `rope_parameters` instead of `rope_theta` and `rope_scaling`.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct RopeConfig {
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeParameters>,
    rope_parameters: Option<RopeParameters>,
    partial_rotary_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct RopeParameters {
    rope_type: Option<String>,
    /// The older name of `rope_type`. Not a serde alias, because some files have both names.
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    truncate: Option<bool>,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
    partial_rotary_factor: Option<f64>,
}

/// The context lengths that RoPE frequencies depend on.
#[derive(Clone, Copy, Debug)]
pub struct RopeLengths {
    /// `max_position_embeddings` in config.json.
    /// Also the original context length, if config.json has no `original_max_position_embeddings`.
    pub max_position_embeddings: usize,
    /// The number of positions that the model is loaded for. Only LongRoPE depends on this number.
    pub context: usize,
}

/// The rotation frequencies of a model, and the factor by which cos and sin are multiplied.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeFrequencies {
    /// The angle per position, in radians, of each rotated pair of elements: `[rotated / 2]`.
    pub inv_freq: Vec<f32>,
    /// The factor by which YaRN and LongRoPE multiply cos and sin. 1 for other methods.
    pub attention_factor: f32,
}

impl RopeFrequencies {
    /// Returns frequencies that rotate nothing, for models with learned positions: a single frequency of 0.
    pub fn none() -> Self {
        Self { inv_freq: vec![0.0], attention_factor: 1.0 }
    }
}

impl RopeConfig {
    fn parameters(&self) -> Option<&RopeParameters> {
        self.rope_parameters.as_ref().or(self.rope_scaling.as_ref())
    }

    /// Returns the number of elements per head that RoPE rotates.
    pub fn rotary_dim(&self, head_dim: usize) -> usize {
        let inner = self.parameters().and_then(|parameters| parameters.partial_rotary_factor);
        (head_dim as f64 * inner.or(self.partial_rotary_factor).unwrap_or(1.0)) as usize
    }

    /// Returns the context length before RoPE scaling, if config.json specifies it.
    fn original_length(&self) -> Option<usize> {
        let inner = self.parameters().and_then(|parameters| parameters.original_max_position_embeddings);
        self.original_max_position_embeddings.or(inner)
    }

    /// Returns the longest context that uses the short factors of LongRoPE.
    /// Returns `None` if config.json has no `long_factor` or does not specify the original length.
    pub fn short_context(&self) -> Option<usize> {
        let long = self.parameters().is_some_and(|parameters| parameters.long_factor.is_some());
        self.original_length().filter(|_| long)
    }

    /// Computes the frequencies for `dim` rotated elements of a head. Without `rope_theta`, `default_theta` applies.
    /// Fails if `dim` is 0 or odd, if the scaling method is not supported, if a parameter is missing or invalid,
    /// or if a frequency or the attention factor is not a positive number.
    pub fn frequencies(&self, dim: usize, lengths: RopeLengths, default_theta: f64) -> Result<RopeFrequencies> {
        let default = RopeParameters::default();
        let parameters = self.parameters().unwrap_or(&default);
        let theta = parameters.rope_theta.or(self.rope_theta).unwrap_or(default_theta);
        check_range("rope_theta", theta, MIN_THETA..=MAX_THETA)?;
        if dim == 0 || !dim.is_multiple_of(2) {
            bail!("RoPE cannot rotate {dim} elements of each head; the number must be even and positive");
        }
        let original_length = self.original_length().unwrap_or(lengths.max_position_embeddings);
        check_size("original_max_position_embeddings", original_length)?;
        parameters.check()?;
        let unscaled = (0..dim / 2).map(|i| 1.0 / (theta as f32).powf((2 * i) as f32 / dim as f32)).collect();
        let frequencies = RopeScaling { unscaled, parameters, theta, original_length, lengths }.frequencies()?;
        let is_positive = |value: &f32| value.is_finite() && *value > 0.0;
        if !frequencies.inv_freq.iter().all(is_positive) || !is_positive(&frequencies.attention_factor) {
            bail!("the model's RoPE scaling results in a frequency or factor that is not a positive number");
        }
        Ok(frequencies)
    }
}

impl RopeParameters {
    /// Fails if a RoPE scaling parameter is out of range.
    fn check(&self) -> Result<()> {
        check_optional("the RoPE scaling factor", self.factor, 1.0..=MAX_FACTOR)?;
        let positive = [
            ("low_freq_factor", self.low_freq_factor),
            ("high_freq_factor", self.high_freq_factor),
            ("attention_factor", self.attention_factor),
        ];
        for (key, value) in positive {
            check_optional(key, value, MIN_FACTOR..=MAX_FACTOR)?;
        }
        let zero_is_absent = [
            ("beta_fast", self.beta_fast),
            ("beta_slow", self.beta_slow),
            ("mscale", self.mscale),
            ("mscale_all_dim", self.mscale_all_dim),
        ];
        for (key, value) in zero_is_absent {
            check_optional(key, value.filter(|value| *value != 0.0), MIN_FACTOR..=MAX_FACTOR)?;
        }
        for (key, factors) in [("short_factor", &self.short_factor), ("long_factor", &self.long_factor)] {
            for (index, factor) in factors.iter().flatten().enumerate() {
                check_range(&format!("{key}[{index}]"), *factor, MIN_FACTOR..=MAX_FACTOR)?;
            }
        }
        Ok(())
    }
}

/// The inputs of the RoPE scaling methods. Each method computes the frequencies for one value of `rope_type`.
struct RopeScaling<'p> {
    /// The frequencies of RoPE without scaling, `[rotated / 2]`.
    unscaled: Vec<f32>,
    parameters: &'p RopeParameters,
    theta: f64,
    /// The context length before RoPE scaling.
    original_length: usize,
    lengths: RopeLengths,
}

impl RopeScaling<'_> {
    /// Computes the frequencies with the scaling method that config.json names.
    fn frequencies(self) -> Result<RopeFrequencies> {
        let rope_type = self.parameters.rope_type.as_deref().or(self.parameters.old_type.as_deref());
        match rope_type.unwrap_or("default") {
            "default" | "mrope" => Ok(RopeFrequencies { inv_freq: self.unscaled, attention_factor: 1.0 }),
            "linear" => self.linear(),
            "llama3" => self.llama3(),
            "yarn" => self.yarn(),
            "longrope" | "su" => self.longrope(),
            other => {
                let supported = "default, mrope, linear, llama3, yarn, longrope, su";
                bail!("RoPE scaling {} is not supported; supported: {supported}", quote(other))
            }
        }
    }

    fn factor(&self) -> Result<f64> {
        self.parameters.factor.context("RoPE scaling needs a factor, but the model's config has none")
    }

    /// Divides all frequencies by `factor` (position interpolation, arXiv 2306.15595).
    fn linear(&self) -> Result<RopeFrequencies> {
        let factor = self.factor()? as f32;
        Ok(RopeFrequencies { inv_freq: self.unscaled.iter().map(|f| f / factor).collect(), attention_factor: 1.0 })
    }

    /// Computes the frequencies of Llama 3.1. Low frequencies are divided by `factor`, and high frequencies are kept.
    /// Frequencies in between become a blend of the divided and the original frequency.
    fn llama3(&self) -> Result<RopeFrequencies> {
        let factor = self.factor()? as f32;
        let original_length = self.original_length as f32;
        let low = self.parameters.low_freq_factor.unwrap_or(1.0) as f32;
        let high = self.parameters.high_freq_factor.unwrap_or(4.0) as f32;
        if high <= low {
            bail!("high_freq_factor is {high:?}; it must be greater than low_freq_factor, which is {low:?}");
        }
        let scale = |&frequency: &f32| {
            let wavelength = 2.0 * PI / frequency;
            if wavelength > original_length / low {
                frequency / factor
            } else if wavelength < original_length / high {
                frequency
            } else {
                let smooth = (original_length / wavelength - low) / (high - low);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        };
        Ok(RopeFrequencies { inv_freq: self.unscaled.iter().map(scale).collect(), attention_factor: 1.0 })
    }

    /// Computes the frequencies of LongRoPE (arXiv 2402.13753) with one of two lists of divisors.
    ///
    /// When a sequence exceeds the original length, transformers switches to the long list and recomputes all keys.
    /// inferno chooses the list once, from the context length for which it loads the model, so cached keys stay valid.
    /// Results match those of transformers if the loaded context length does not exceed the original length.
    fn longrope(&self) -> Result<RopeFrequencies> {
        let (name, list) = if self.lengths.context > self.original_length {
            ("long_factor", &self.parameters.long_factor)
        } else {
            ("short_factor", &self.parameters.short_factor)
        };
        let Some(divisors) = list.as_ref().filter(|list| list.len() == self.unscaled.len()) else {
            let found = list.as_ref().map_or(0, Vec::len);
            bail!("RoPE scaling needs {} numbers in {name}, found {found}", self.unscaled.len());
        };
        let original_length = self.original_length as f64;
        let default_factor = self.lengths.max_position_embeddings as f64 / original_length;
        let factor = self.parameters.factor.unwrap_or(default_factor);
        let attention_factor = match self.parameters.attention_factor {
            Some(attention_factor) => attention_factor,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / original_length.ln()).sqrt(),
        };
        let scale = |(frequency, divisor): (&f32, &f64)| 1.0 / (*divisor as f32 * (1.0 / frequency));
        Ok(RopeFrequencies {
            inv_freq: self.unscaled.iter().zip(divisors).map(scale).collect(),
            attention_factor: attention_factor as f32,
        })
    }

    /// Computes the frequencies of YaRN (arXiv 2309.00071). Low frequencies are divided by `factor`, and high
    /// frequencies are kept. In between, a linear ramp blends the divided and the original frequency.
    /// YaRN also scales cos and sin.
    fn yarn(&self) -> Result<RopeFrequencies> {
        let parameters = self.parameters;
        let factor = self.factor()?;
        let (theta, original_length) = (self.theta as f32 as f64, self.original_length as f64);
        let dim = 2 * self.unscaled.len();
        let concentration = |scale: f64, mscale: f64| if scale <= 1.0 { 1.0 } else { 0.1 * mscale * scale.ln() + 1.0 };
        let attention_factor = match (parameters.attention_factor, parameters.mscale, parameters.mscale_all_dim) {
            (Some(attention_factor), _, _) => attention_factor,
            (None, Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => {
                concentration(factor, mscale) / concentration(factor, all)
            }
            _ => concentration(factor, 1.0),
        };
        // Returns the fractional index of the pair that completes `rotations` full turns within the original context.
        let pair_index = |rotations: f64| {
            dim as f64 * (original_length / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln())
        };
        let nonzero = |value: Option<f64>, default: f64| value.filter(|value| *value != 0.0).unwrap_or(default);
        // The ramp rises from 0 at pair `low` to 1 at pair `high`.
        let mut low = pair_index(nonzero(parameters.beta_fast, 32.0));
        let mut high = pair_index(nonzero(parameters.beta_slow, 1.0));
        if parameters.truncate.unwrap_or(true) {
            (low, high) = (low.floor(), high.ceil());
        }
        let low = low.max(0.0);
        let mut high = high.min(dim as f64 - 1.0);
        if low == high {
            // Prevent a division by zero.
            high += 0.001;
        }
        let blend = |(i, frequency): (usize, &f32)| {
            let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let interpolated = 1.0 / (factor as f32 * (1.0 / frequency));
            interpolated * ramp + frequency * (1.0 - ramp)
        };
        Ok(RopeFrequencies {
            inv_freq: self.unscaled.iter().enumerate().map(blend).collect(),
            attention_factor: attention_factor as f32,
        })
    }
}

/// Tables of cos and sin for every position of a context, on the device.
pub struct RotaryEmbedding {
    /// The table of cos values, f32 `[positions, rotated / 2]`.
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
}

impl RotaryEmbedding {
    /// Computes the tables for positions 0 to `positions` - 1. Both tables together take positions · rotated · 4 bytes.
    pub fn new(frequencies: &RopeFrequencies, positions: usize, device: &Device) -> Result<Self> {
        let half = frequencies.inv_freq.len();
        let angle = |i: usize| (i / half) as f32 * frequencies.inv_freq[i % half];
        let table = |f: fn(f32) -> f32| {
            let value = |i| f(angle(i)) * frequencies.attention_factor;
            let values: Vec<f32> = (0..positions * half).into_par_iter().map(value).collect();
            Tensor::from_vec(values, (positions, half), device)
        };
        Ok(Self { cos: table(f32::cos)?, sin: table(f32::sin)? })
    }

    /// Returns the rotation for tokens at `positions`, u32 `[tokens]`.
    pub fn rotation<'t>(&'t self, positions: &'t Tensor) -> Rotation<'t> {
        Rotation { cos: &self.cos, sin: &self.sin, positions }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::kernels::attention::rope::{HeadSizes, SplitQkvInputs, split_qkv};
    use crate::kernels::attention::{BLOCK_TOKENS, CachedLayer};

    #[test]
    fn rotation_agrees_with_candle_nn() {
        let tokens = 7;
        let heads = 3;
        let kv_heads = 1;
        let head_dim = 8;
        let first = 2;
        let frequencies = RopeFrequencies { inv_freq: vec![1.0, 0.3, 0.1, 0.02], attention_factor: 1.0 };
        let rotary = RotaryEmbedding::new(&frequencies, 16, &Device::Cpu).unwrap();
        let count = tokens * (heads + 2 * kv_heads) * head_dim;
        let values = (0..count).map(|i| ((i * 37 % 101) as f32 - 50.0) / 17.0);
        let qkv = Tensor::from_iter(values, &Device::Cpu).unwrap().reshape((tokens, ())).unwrap();
        let positions = Tensor::arange(first as u32, (first + tokens) as u32, &Device::Cpu).unwrap();

        let sizes = HeadSizes { heads, kv_heads, head_dim };
        let cache = Tensor::zeros((BLOCK_TOKENS, kv_heads, head_dim), DType::F32, &Device::Cpu).unwrap();
        let layer = CachedLayer { k: &cache, v: &cache };
        let terms = qkv.unsqueeze(0).unwrap();
        let rotation = rotary.rotation(&positions);
        let slots = &positions;
        let inputs = SplitQkvInputs { qkv: &terms, bias: None, norms: None, rotation, sizes, layer, slots };
        let q = split_qkv(inputs).unwrap();

        // candle's rope takes [batch, heads, tokens, head_dim].
        let plain = qkv.narrow(1, 0, heads * head_dim).unwrap().reshape((1, tokens, heads, head_dim)).unwrap();
        let plain = plain.transpose(1, 2).unwrap().contiguous().unwrap();
        let table = |table: &Tensor| table.narrow(0, first, tokens).unwrap();
        let expected = candle_nn::rotary_emb::rope(&plain, &table(&rotary.cos), &table(&rotary.sin)).unwrap();
        let expected = expected.transpose(1, 2).unwrap().squeeze(0).unwrap();
        let difference = (q - expected).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(difference < 1e-5, "{difference}");
    }
}
