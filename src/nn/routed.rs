//! Routed experts, each a gated MLP without biases: Qwen3-MoE and Mixtral.

use anyhow::{Result, bail};
use candle_core::{DType, Tensor};

use super::linear::{Bias, Linear};
use crate::kernels::moe::experts::{ExpertWeights, MAX_PAIRS, combine, expert_matmul};
use crate::kernels::moe::topk::{Softmax, topk_softmax};
use crate::kernels::quantized::Matrix;
use crate::kernels::swiglu::{Activation, gated_halves};
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
    /// Whether the kernels can choose so many of so many, and sizes are such that their products are numbers.
    pub fn check(&self) -> Result<()> {
        let (chosen, experts) = (self.chosen, self.experts);
        if self.intermediate_size == 0 || self.intermediate_size > 1 << 24 {
            bail!("the intermediate size of experts is {}", self.intermediate_size);
        }
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
    pub(crate) router: Linear,
    /// `[E, 2F, C]`, an expert's gate above its up.
    pub(crate) gate_up_proj: ExpertWeights,
    /// `[E, C, F]`
    pub(crate) down_proj: ExpertWeights,
    pub(crate) dtype: DType,
    pub(crate) config: RoutedConfig,
}

impl RoutedMlp {
    /// `gate`, and `experts.N` with the names given; or, as transformers 5 keeps them, `experts.gate_up_proj` \[E, 2F, C\] and
    /// `experts.down_proj` \[E, C, F\].
    pub fn load(weights: &Weights, config: RoutedConfig, names: &ExpertNames) -> Result<Self> {
        let RoutedConfig { hidden_size, intermediate_size, experts, .. } = config;
        let router = Linear::load_as(&weights.at("gate"), hidden_size, experts, Bias::Without, DType::F32)?;
        let stacks = weights.at("experts");
        let (gate_up_shape, down_shape) =
            ([experts, 2 * intermediate_size, hidden_size], [experts, hidden_size, intermediate_size]);
        let (gate_up, down) = if stacks.contains("gate_up_proj") {
            (stacks.experts("gate_up_proj", gate_up_shape)?, stacks.experts("down_proj", down_shape)?)
        } else {
            let place = |expert: usize, name| stacks.at(expert).at(name);
            let gate_up = |expert| [names.gate, names.up].map(|name| (place(expert, name), intermediate_size));
            let gate_up: Vec<_> = (0..experts).flat_map(gate_up).collect();
            let down: Vec<_> = (0..experts).map(|expert| (place(expert, names.down), hidden_size)).collect();
            let gate_up = Weights::matrix(&gate_up, "weight", hidden_size)?;
            (gate_up, Weights::matrix(&down, "weight", intermediate_size)?)
        };
        let (gate_up_proj, down_proj) = (stack(gate_up, gate_up_shape)?, stack(down, down_shape)?);
        Ok(Self { router, gate_up_proj, down_proj, dtype: weights.dtype(), config })
    }

    /// The router, and N of E experts.
    pub fn step_bytes(&self) -> u64 {
        let experts = self.gate_up_proj.bytes() + self.down_proj.bytes();
        self.router.bytes() + experts / self.config.experts as u64 * self.config.chosen as u64
    }

    /// x f32 \[T, C\] → \[T, C\] f32.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // As many at a time as have their pairs of token and expert in one grid.
        let (tokens, at_a_time) = (x.dim(0)?, MAX_PAIRS / self.config.chosen);
        if tokens <= at_a_time {
            return self.forward_some(x);
        }
        let starts = (0..tokens).step_by(at_a_time);
        let parts =
            starts.map(|start| self.forward_some(&x.narrow(0, start, at_a_time.min(tokens - start))?.contiguous()?));
        Ok(Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
    }

    fn forward_some(&self, x: &Tensor) -> Result<Tensor> {
        // 1. route: ids [T, N], weights [T, N] f32
        let (ids, weights) = topk_softmax(&self.router.forward(x)?, self.config.chosen, self.config.softmax)?;
        // 2. each chosen expert's MLP: [T, N, 2F] → [T, N, F] → [T, N, C]
        let x = x.to_dtype(self.dtype)?;
        let gate_up = expert_matmul(&x, &self.gate_up_proj, None, &ids)?;
        let down = expert_matmul(&gated_halves(&gate_up, Activation::Silu)?, &self.down_proj, None, &ids)?;
        // 3. mix in f32: [T, N, C] → [T, C]
        Ok(combine(&down, &weights)?)
    }
}

/// Experts' matrices, which stand one below the other.
fn stack(matrix: Matrix, shape: [usize; 3]) -> Result<ExpertWeights> {
    match matrix {
        Matrix::Dense(weights) => Ok(ExpertWeights::Dense(weights.reshape(&shape)?)),
        Matrix::Quantized(mut parts) if parts.len() == 1 => Ok(ExpertWeights::Quantized(parts.remove(0), shape[0])),
        _ => bail!("experts that are quantized in different ways"),
    }
}
