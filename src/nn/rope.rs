//! Rotary embeddings: the frequencies of each scaling rule, as transformers computes them
//! (`modeling_rope_utils.py`), in both spellings of config.json.

use std::f32::consts::PI;

use anyhow::{Result, bail};
use candle_core::{Device, Tensor};
use rayon::prelude::*;
use serde::Deserialize;

use crate::kernels::attention::rope::Rotation;

/// The rope fields of a config.json: `rope_theta` + `rope_scaling`, or transformers 5's `rope_parameters`.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct RopeConfig {
    rope_theta: Option<f64>,
    rope_scaling: Option<Parameters>,
    rope_parameters: Option<Parameters>,
    partial_rotary_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Parameters {
    rope_type: Option<String>,
    /// The older name; files that were saved again have both.
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

/// The lengths that frequencies depend on.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    /// As in config.json; it stands in for a missing original length.
    pub max_position_embeddings: usize,
    /// Positions that the model is loaded for.
    pub context: usize,
}

/// How one model turns positions into angles.
#[derive(Clone, Debug, PartialEq)]
pub struct Frequencies {
    /// Radians per position for each rotated pair, f32 \[R/2\].
    pub inv_freq: Vec<f32>,
    /// Factor on cos and sin (YaRN's concentration); 1 for the other rules.
    pub attention_factor: f32,
}

impl Frequencies {
    /// None: a pair that is turned by nothing, for models that tell positions otherwise.
    pub fn still() -> Self {
        Self { inv_freq: vec![0.0], attention_factor: 1.0 }
    }
}

impl RopeConfig {
    fn parameters(&self) -> Option<&Parameters> {
        self.rope_parameters.as_ref().or(self.rope_scaling.as_ref())
    }

    /// How many dims of a head are rotated.
    pub fn rotated(&self, head_dim: usize) -> usize {
        let inner = self.parameters().and_then(|parameters| parameters.partial_rotary_factor);
        (head_dim as f64 * inner.or(self.partial_rotary_factor).unwrap_or(1.0)) as usize
    }

    /// The length that a model was trained for before it was made to read longer contexts.
    fn original_length(&self) -> Option<usize> {
        let inner = self.parameters().and_then(|parameters| parameters.original_max_position_embeddings);
        self.original_max_position_embeddings.or(inner)
    }

    /// With LongRoPE: the longest context for which the short factors are right.
    pub fn short_context(&self) -> Option<usize> {
        let long = self.parameters().is_some_and(|parameters| parameters.long_factor.is_some());
        self.original_length().filter(|_| long)
    }

    /// For `dim` rotated dims of a head.
    pub fn frequencies(&self, dim: usize, lengths: Lengths, default_theta: f64) -> Result<Frequencies> {
        let none = Parameters::default();
        let parameters = self.parameters().unwrap_or(&none);
        let theta = parameters.rope_theta.or(self.rope_theta).unwrap_or(default_theta) as f32;
        if !(theta.is_finite() && theta > 0.0) || dim == 0 || !dim.is_multiple_of(2) {
            bail!("config.json: rope over {dim} dims with rope_theta {theta} is not possible");
        }
        let plain: Vec<f32> = (0..dim / 2).map(|i| 1.0 / theta.powf((2 * i) as f32 / dim as f32)).collect();
        let original = self.original_length().unwrap_or(lengths.max_position_embeddings);
        let factor = || match parameters.factor {
            Some(factor) if factor.is_finite() && factor >= 1.0 => Ok(factor),
            other => bail!("config.json: rope scaling needs a factor of at least 1, found {other:?}"),
        };
        let rope_type = parameters.rope_type.as_deref().or(parameters.old_type.as_deref());
        match rope_type.unwrap_or("default") {
            "default" | "mrope" => Ok(Frequencies { inv_freq: plain, attention_factor: 1.0 }),
            "linear" => {
                let factor = factor()? as f32;
                Ok(Frequencies { inv_freq: plain.iter().map(|f| f / factor).collect(), attention_factor: 1.0 })
            }
            "llama3" => Ok(llama3(plain, parameters, factor()? as f32, original as f32)),
            "yarn" => yarn(plain, parameters, factor()?, theta as f64, original as f64),
            "longrope" | "su" => longrope(plain, parameters, original, lengths),
            other => {
                bail!("config.json: rope scaling '{other}' is not supported (default, linear, llama3, yarn, longrope)")
            }
        }
    }
}

/// Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between blended.
fn llama3(plain: Vec<f32>, parameters: &Parameters, factor: f32, original: f32) -> Frequencies {
    let low = parameters.low_freq_factor.unwrap_or(1.0) as f32;
    let high = parameters.high_freq_factor.unwrap_or(4.0) as f32;
    let scale = |frequency: f32| {
        let wavelength = 2.0 * PI / frequency;
        if wavelength > original / low {
            frequency / factor
        } else if wavelength < original / high {
            frequency
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            (1.0 - smooth) * frequency / factor + smooth * frequency
        }
    };
    Frequencies { inv_freq: plain.into_iter().map(scale).collect(), attention_factor: 1.0 }
}

/// LongRoPE (arXiv 2402.13753): a factor for each frequency, from one of two lists. transformers takes the long list once a
/// sequence exceeds the original length, and then reads all of it anew. Here the context that the model is loaded for
/// decides, so that cached keys stay as they were written: within the original length nothing differs.
fn longrope(plain: Vec<f32>, parameters: &Parameters, original: usize, lengths: Lengths) -> Result<Frequencies> {
    let (name, list) = match lengths.context > original {
        true => ("long_factor", &parameters.long_factor),
        false => ("short_factor", &parameters.short_factor),
    };
    let Some(factors) = list.as_ref().filter(|list| list.len() == plain.len()) else {
        let found = list.as_ref().map_or(0, Vec::len);
        bail!("config.json: rope scaling needs a {name} of {} numbers, found {found}", plain.len());
    };
    let factor = parameters.factor.unwrap_or(lengths.max_position_embeddings as f64 / original as f64);
    let attention_factor = match parameters.attention_factor {
        Some(given) => given,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
    };
    let inv_freq: Vec<f32> = plain.iter().zip(factors).map(|(f, factor)| 1.0 / (*factor as f32 * (1.0 / f))).collect();
    if let Some(bad) = inv_freq.iter().find(|frequency| !frequency.is_finite()) {
        bail!("config.json: {name} makes a frequency of {bad}");
    }
    Ok(Frequencies { inv_freq, attention_factor: attention_factor as f32 })
}

/// YaRN (arXiv 2309.00071): a ramp between interpolated and plain frequencies, and a concentration factor.
fn yarn(plain: Vec<f32>, parameters: &Parameters, factor: f64, theta: f64, original: f64) -> Result<Frequencies> {
    let dim = 2 * plain.len();
    let concentration = |scale: f64, mscale: f64| if scale <= 1.0 { 1.0 } else { 0.1 * mscale * scale.ln() + 1.0 };
    let attention_factor = match (parameters.attention_factor, parameters.mscale, parameters.mscale_all_dim) {
        (Some(given), _, _) => given,
        (None, Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => {
            concentration(factor, mscale) / concentration(factor, all)
        }
        _ => concentration(factor, 1.0),
    };
    // The dimension that turns `rotations` times within the original context.
    let dimension =
        |rotations: f64| dim as f64 * (original / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln());
    let given = |value: Option<f64>, default: f64| value.filter(|value| *value != 0.0).unwrap_or(default);
    let mut low = dimension(given(parameters.beta_fast, 32.0));
    let mut high = dimension(given(parameters.beta_slow, 1.0));
    if parameters.truncate.unwrap_or(true) {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    let blend = |(i, frequency): (usize, &f32)| {
        let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let interpolated = 1.0 / (factor as f32 * (1.0 / frequency));
        interpolated * ramp + frequency * (1.0 - ramp)
    };
    Ok(Frequencies {
        inv_freq: plain.iter().enumerate().map(blend).collect(),
        attention_factor: attention_factor as f32,
    })
}

/// cos and sin of every position of a context, on the device.
pub struct Rotary {
    /// f32 `[P, R/2]`
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
}

impl Rotary {
    /// Tables for positions below `positions`. They take positions × R × 4 bytes.
    pub fn new(frequencies: &Frequencies, positions: usize, device: &Device) -> Result<Self> {
        let half = frequencies.inv_freq.len();
        let angle = |i: usize| (i / half) as f32 * frequencies.inv_freq[i % half];
        let table = |f: fn(f32) -> f32| {
            let value = |i| f(angle(i)) * frequencies.attention_factor;
            let values: Vec<f32> = (0..positions * half).into_par_iter().map(value).collect();
            Tensor::from_vec(values, (positions, half), device)
        };
        Ok(Self { cos: table(f32::cos)?, sin: table(f32::sin)? })
    }

    /// The rotation of tokens at `positions`, u32 \[T\].
    pub fn at<'t>(&'t self, positions: &'t Tensor) -> Rotation<'t> {
        Rotation { cos: &self.cos, sin: &self.sin, positions }
    }
}
