//! The feed-forward half of a layer: one gated MLP, or routed experts.

use anyhow::Result;
use candle_core::{DType, Tensor};

use super::linear::{Bias, Linear};
use crate::kernels;
use crate::kernels::experts::{ExpertWeights, expert_matmul};
use crate::kernels::swiglu::clamped_swiglu;
use crate::kernels::topk::topk_softmax;
use crate::weights::{Weights, mxfp4};

pub enum Mlp {
    Gated(GatedMlp),
    Experts(ExpertsMlp),
}

impl Mlp {
    /// x \[T, C\] f32 → \[T, C\] f32.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Mlp::Gated(mlp) => mlp.forward(x),
            Mlp::Experts(mlp) => mlp.forward(x),
        }
    }

    /// Bytes of the weights that one token meets.
    pub fn step_bytes(&self) -> u64 {
        match self {
            Mlp::Gated(mlp) => mlp.gate_proj.bytes() + mlp.up_proj.bytes() + mlp.down_proj.bytes(),
            Mlp::Experts(mlp) => mlp.step_bytes(),
        }
    }
}

/// down(silu(gate(x)) · up(x)), arXiv 2002.05202.
pub struct GatedMlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    dtype: DType,
}

impl GatedMlp {
    pub fn load(weights: &Weights, hidden_size: usize, intermediate_size: usize, bias: Bias) -> Result<Self> {
        Ok(Self {
            gate_proj: Linear::load(&weights.at("gate_proj"), hidden_size, intermediate_size, bias)?,
            up_proj: Linear::load(&weights.at("up_proj"), hidden_size, intermediate_size, bias)?,
            down_proj: Linear::load(&weights.at("down_proj"), intermediate_size, hidden_size, bias)?,
            dtype: weights.dtype(),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.to_dtype(self.dtype)?;
        let gated = (candle_nn::ops::silu(&self.gate_proj.forward(&x)?)? * self.up_proj.forward(&x)?)?;
        self.down_proj.forward(&gated.to_dtype(self.dtype)?)
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
    router: Linear,
    /// `[E, 2F, C]`
    gate_up_proj: ExpertWeights,
    /// `[E, 2F]`
    gate_up_bias: Tensor,
    /// `[E, C, F]`
    down_proj: ExpertWeights,
    /// `[E, C]`
    down_bias: Tensor,
    config: ExpertsConfig,
}

impl ExpertsMlp {
    pub fn load(weights: &Weights, config: ExpertsConfig) -> Result<Self> {
        let ExpertsConfig { hidden_size, intermediate_size, experts, .. } = config;
        let stacks = weights.at("experts");
        Ok(Self {
            router: Linear::load_as(&weights.at("router"), hidden_size, experts, Bias::With, DType::F32)?,
            gate_up_proj: mxfp4::experts(&stacks, "gate_up_proj", (experts, 2 * intermediate_size, hidden_size))?,
            gate_up_bias: stacks.float("gate_up_proj_bias", &[experts, 2 * intermediate_size])?,
            down_proj: mxfp4::experts(&stacks, "down_proj", (experts, hidden_size, intermediate_size))?,
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
        let (ids, weights) = topk_softmax(&self.router.forward(x)?, self.config.chosen)?;
        let x = x.to_dtype(self.gate_up_bias.dtype())?;
        // 2. each chosen expert's MLP: [T, N, 2F] → [T, N, F] → [T, N, C]
        let gate_up = expert_matmul(&x, &self.gate_up_proj, Some(&self.gate_up_bias), &ids)?;
        let gated = clamped_swiglu(&gate_up, self.config.swiglu_limit)?;
        let down = expert_matmul(&gated, &self.down_proj, Some(&self.down_bias), &ids)?;
        // 3. mix in f32: [T, N, C] → [T, C]
        Ok(down.to_dtype(DType::F32)?.broadcast_mul(&weights.unsqueeze(2)?)?.sum(1)?)
    }
}
