//! Routed experts, each a gated MLP without biases: Qwen3-MoE and Mixtral.

use anyhow::{Result, bail};
use candle_core::{DType, Tensor};

use super::linear::{Bias, Linear};
use crate::kernels::experts::{ExpertWeights, expert_matmul};
use crate::kernels::swiglu::{Activation, gated_halves};
use crate::kernels::topk::{Softmax, topk_softmax};
use crate::weights::Weights;

/// Sizes of the experts and how they are chosen.
#[derive(Clone, Copy, Debug)]
pub struct RoutedConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub experts: usize,
    pub chosen: usize,
    pub softmax: Softmax,
}

impl RoutedConfig {
    /// Whether the kernels can choose so many of so many.
    pub fn check(&self) -> Result<()> {
        let (chosen, experts) = (self.chosen, self.experts);
        if chosen == 0 || chosen > experts || chosen > 32 || experts > 1024 {
            bail!("cannot choose {chosen} of {experts} experts (at most 32 of 1024)");
        }
        Ok(())
    }
}

/// Names of an expert's three matrices, as in `experts.7.gate_proj.weight`.
pub struct ExpertNames {
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
}

pub struct RoutedMlp {
    /// In f32: a rounding here may send a token to another expert.
    router: Linear,
    /// `[E, 2F, C]`, an expert's gate above its up.
    gate_up_proj: ExpertWeights,
    /// `[E, C, F]`
    down_proj: ExpertWeights,
    dtype: DType,
    config: RoutedConfig,
}

impl RoutedMlp {
    /// `gate`, and `experts.N` with the names given; or, as transformers 5 keeps them, `experts.gate_up_proj` \[E, 2F, C\] and
    /// `experts.down_proj` \[E, C, F\].
    pub fn load(weights: &Weights, config: RoutedConfig, names: &ExpertNames) -> Result<Self> {
        let RoutedConfig { hidden_size, intermediate_size, experts, .. } = config;
        let router = Linear::load_as(&weights.at("gate"), hidden_size, experts, Bias::Without, DType::F32)?;
        let stacks = weights.at("experts");
        let (gate_up, down) = if stacks.contains("gate_up_proj") {
            let gate_up = stacks.float("gate_up_proj", &[experts, 2 * intermediate_size, hidden_size])?;
            (gate_up, stacks.float("down_proj", &[experts, hidden_size, intermediate_size])?)
        } else {
            let (mut gate_up, mut down) = (Vec::with_capacity(2 * experts), Vec::with_capacity(experts));
            for expert in 0..experts {
                let matrix = |name, shape: [usize; 2]| stacks.at(expert).at(name).float("weight", &shape);
                gate_up.push(matrix(names.gate, [intermediate_size, hidden_size])?);
                gate_up.push(matrix(names.up, [intermediate_size, hidden_size])?);
                down.push(matrix(names.down, [hidden_size, intermediate_size])?);
            }
            let gate_up = Tensor::cat(&gate_up, 0)?.reshape((experts, 2 * intermediate_size, hidden_size))?;
            (gate_up, Tensor::stack(&down, 0)?)
        };
        let (gate_up_proj, down_proj) = (ExpertWeights::Dense(gate_up), ExpertWeights::Dense(down));
        Ok(Self { router, gate_up_proj, down_proj, dtype: weights.dtype(), config })
    }

    /// The router, and N of E experts.
    pub fn step_bytes(&self) -> u64 {
        let experts = self.gate_up_proj.bytes() + self.down_proj.bytes();
        self.router.bytes() + experts / self.config.experts as u64 * self.config.chosen as u64
    }

    /// x f32 \[T, C\] → \[T, C\] f32.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // 1. route: ids [T, N], weights [T, N] f32
        let (ids, weights) = topk_softmax(&self.router.forward(x)?, self.config.chosen, self.config.softmax)?;
        // 2. each chosen expert's MLP: [T, N, 2F] → [T, N, F] → [T, N, C]
        let x = x.to_dtype(self.dtype)?;
        let gate_up = expert_matmul(&x, &self.gate_up_proj, None, &ids)?;
        let down = expert_matmul(&gated_halves(&gate_up, Activation::Silu)?, &self.down_proj, None, &ids)?;
        // 3. mix in f32: [T, N, C] → [T, C]
        Ok(down.to_dtype(DType::F32)?.broadcast_mul(&weights.unsqueeze(2)?)?.sum(1)?)
    }
}
