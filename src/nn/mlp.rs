//! The feed-forward half of a layer: one MLP, gated or not, or routed experts.

use anyhow::Result;
use candle_core::{DType, Tensor};

use super::linear::{Bias, Linear};
use super::routed::RoutedMlp;
use crate::kernels;
#[cfg(feature = "cuda")]
use crate::kernels::moe::expert_mlp::{ExpertLinear, expert_mlp};
use crate::kernels::moe::experts::{ExpertWeights, combine, expert_matmul};
use crate::kernels::moe::topk::{Softmax, topk_softmax};
use crate::kernels::swiglu::{Activation, clamped_swiglu, gated};
use crate::weights::{Weights, mxfp4};

pub enum Mlp {
    Gated(GatedMlp),
    Plain(PlainMlp),
    /// gpt-oss's.
    Experts(ExpertsMlp),
    /// Of gated MLPs.
    Routed(RoutedMlp),
}

impl Mlp {
    /// The dtype that inputs must have: a router's are f32.
    pub fn dtype(&self) -> DType {
        match self {
            Mlp::Gated(mlp) => mlp.dtype,
            Mlp::Plain(mlp) => mlp.dtype,
            Mlp::Experts(_) | Mlp::Routed(_) => DType::F32,
        }
    }

    /// x \[T, C\] → \[T, C\] f32.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Mlp::Gated(mlp) => mlp.forward(x),
            Mlp::Plain(mlp) => mlp.forward(x),
            Mlp::Experts(mlp) => mlp.forward(x),
            Mlp::Routed(mlp) => mlp.forward(x),
        }
    }

    /// Bytes of the weights that one token meets.
    pub fn step_bytes(&self) -> u64 {
        match self {
            Mlp::Gated(mlp) => mlp.gate_proj.bytes() + mlp.up_proj.bytes() + mlp.down_proj.bytes(),
            Mlp::Plain(mlp) => mlp.fc.bytes() + mlp.proj.bytes(),
            Mlp::Experts(mlp) => mlp.step_bytes(),
            Mlp::Routed(mlp) => mlp.step_bytes(),
        }
    }
}

/// down(activation(gate(x)) · up(x)), arXiv 2002.05202.
pub struct GatedMlp {
    pub(crate) gate_proj: Linear,
    pub(crate) up_proj: Linear,
    pub(crate) down_proj: Linear,
    pub(crate) activation: Activation,
    dtype: DType,
}

/// proj(activation(fc(x)))
pub struct PlainMlp {
    fc: Linear,
    proj: Linear,
    activation: Activation,
    dtype: DType,
}

impl PlainMlp {
    /// On projections with biases, for inputs of `dtype`.
    pub fn new(fc: Linear, proj: Linear, activation: Activation, dtype: DType) -> Self {
        Self { fc, proj, activation, dtype }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.proj.forward(&gated(&self.fc.forward(x)?, None, self.activation, self.dtype)?)
    }
}

impl GatedMlp {
    pub fn load(weights: &Weights, hidden_size: usize, intermediate_size: usize, bias: Bias) -> Result<Self> {
        Ok(Self {
            gate_proj: Linear::load(&weights.at("gate_proj"), hidden_size, intermediate_size, bias)?,
            up_proj: Linear::load(&weights.at("up_proj"), hidden_size, intermediate_size, bias)?,
            down_proj: Linear::load(&weights.at("down_proj"), intermediate_size, hidden_size, bias)?,
            activation: Activation::Silu,
            dtype: weights.dtype(),
        })
    }

    /// `gate_up_proj`, the gate's rows above the others, and `down_proj`; no biases.
    pub fn load_fused(weights: &Weights, hidden_size: usize, intermediate_size: usize) -> Result<Self> {
        let gate_up = Linear::load(&weights.at("gate_up_proj"), hidden_size, 2 * intermediate_size, Bias::Without)?;
        Ok(Self {
            gate_proj: gate_up.rows(0, intermediate_size)?,
            up_proj: gate_up.rows(intermediate_size, intermediate_size)?,
            down_proj: Linear::load(&weights.at("down_proj"), intermediate_size, hidden_size, Bias::Without)?,
            activation: Activation::Silu,
            dtype: weights.dtype(),
        })
    }

    /// The dtype that inputs must have.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The same with another activation than silu.
    pub fn with(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (gate, up) = (self.gate_proj.forward(x)?, self.up_proj.forward(x)?);
        let gated = gated(&gate, Some(&up), self.activation, self.dtype)?;
        self.down_proj.forward(&gated)
    }
}

/// Sizes of gpt-oss's routed experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub experts: usize,
    pub chosen: usize,
    pub swiglu_limit: f32,
}

/// A router and its experts, with gpt-oss's clamped SwiGLU on interleaved gate and linear rows.
pub struct ExpertsMlp {
    /// In f32: a rounding here may send a token to another expert.
    pub(crate) router: Linear,
    /// `[E, 2F, C]`
    pub(crate) gate_up_proj: ExpertWeights,
    /// `[E, 2F]`
    pub(crate) gate_up_bias: Tensor,
    /// `[E, C, F]`
    pub(crate) down_proj: ExpertWeights,
    /// `[E, C]`
    pub(crate) down_bias: Tensor,
    pub(crate) config: ExpertsConfig,
}

impl ExpertsMlp {
    pub fn load(weights: &Weights, config: ExpertsConfig) -> Result<Self> {
        let ExpertsConfig { hidden_size, intermediate_size, experts, .. } = config;
        let stacks = weights.at("experts");
        let gate_up = mxfp4::experts(&stacks, "gate_up_proj", (experts, 2 * intermediate_size, hidden_size))?;
        let down = mxfp4::experts(&stacks, "down_proj", (experts, hidden_size, intermediate_size))?;
        let (gate_up_proj, down_proj) = mxfp4::for_tensor_cores(&stacks, gate_up, down)?;
        Ok(Self {
            router: Linear::load_as(&weights.at("router"), hidden_size, experts, Bias::With, DType::F32)?,
            gate_up_proj,
            gate_up_bias: stacks.float("gate_up_proj_bias", &[experts, 2 * intermediate_size])?,
            down_proj,
            down_bias: stacks.float("down_proj_bias", &[experts, hidden_size])?,
            config,
        })
    }

    /// The router, and N of E experts.
    fn step_bytes(&self) -> u64 {
        let biases = kernels::bytes(&self.gate_up_bias) + kernels::bytes(&self.down_bias);
        let experts = self.gate_up_proj.bytes() + self.down_proj.bytes() + biases;
        self.router.bytes() + experts / self.config.experts as u64 * self.config.chosen as u64
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // 1. route: ids [T, N], weights [T, N] f32
        let (ids, weights) = topk_softmax(&self.router.forward(x)?, self.config.chosen, Softmax::OverChosen)?;
        #[cfg(feature = "cuda")]
        if let (ExpertWeights::Mxfp4Tiles(gate_up), ExpertWeights::Mxfp4Tiles(down)) =
            (&self.gate_up_proj, &self.down_proj)
        {
            let gate_up = ExpertLinear { tiles: gate_up, bias: &self.gate_up_bias };
            let down = ExpertLinear { tiles: down, bias: &self.down_bias };
            return Ok(expert_mlp(x, &ids, &weights, gate_up, down, self.config.swiglu_limit)?);
        }
        let x = x.to_dtype(self.gate_up_bias.dtype())?;
        // 2. each chosen expert's MLP: [T, N, 2F] → [T, N, F] → [T, N, C]
        let gate_up = expert_matmul(&x, &self.gate_up_proj, Some(&self.gate_up_bias), &ids)?;
        let gated = clamped_swiglu(&gate_up, self.config.swiglu_limit)?;
        let down = expert_matmul(&gated, &self.down_proj, Some(&self.down_bias), &ids)?;
        // 3. mix in f32: [T, N, C] → [T, C]
        Ok(combine(&down, &weights)?)
    }
}
