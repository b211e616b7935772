//! The feed-forward part of a layer: a gated MLP, a plain MLP, or a mixture of experts.

use std::ops::Range;

use anyhow::{Result, bail};
use candle_core::{DType, Tensor};
use candle_nn::Activation as ConfigActivation;

use super::linear::{Bias, Linear, SHARE_COLUMNS, gate_up_rows};
use super::moe::{ClampedMoe, GatedMoe};
use super::residual::{PartialForm, PartialOutput, PartialRows};
use crate::kernels::SumOrder;
use crate::kernels::activation::{Activation, gated};
use crate::kernels::moe::routing::expert_usage::ExpertUsage;
use crate::weights::Weights;

/// The MLP of a layer, from `[tokens, hidden]` to `[tokens, hidden]`.
pub enum Mlp {
    Gated(GatedMlp),
    Plain(PlainMlp),
    GatedMoe(GatedMoe),
    ClampedMoe(ClampedMoe),
}

/// The experts per token and the size of one expert on this rank, in one layer or in all layers of this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertCost {
    /// The number of experts that each token uses per layer. For several layers, the maximum over the layers.
    pub per_token: usize,
    /// The size of one expert in bytes. For several layers, the sum over the layers.
    pub bytes: u64,
}

impl Mlp {
    /// Returns the dtype of the input. MoE layers take f32, because their router runs in f32.
    pub fn dtype(&self) -> DType {
        match self {
            Mlp::Gated(mlp) => mlp.dtype,
            Mlp::Plain(mlp) => mlp.dtype,
            Mlp::GatedMoe(_) | Mlp::ClampedMoe(_) => DType::F32,
        }
    }

    /// Maps x `[tokens, hidden]` to this rank's partial result, `[tokens, hidden]`.
    pub(super) fn forward(&self, x: &Tensor, sum_order: SumOrder, form: PartialForm) -> Result<PartialOutput<'_>> {
        match self {
            Mlp::Gated(mlp) => mlp.forward(x, sum_order, form),
            Mlp::Plain(mlp) => mlp.forward(x, sum_order, form),
            Mlp::GatedMoe(moe) => {
                Ok(PartialOutput { rows: PartialRows::Summed(moe.forward(x, sum_order)?), bias: None })
            }
            Mlp::ClampedMoe(moe) => Ok(PartialOutput { rows: moe.forward(x, sum_order)?, bias: None }),
        }
    }

    /// Returns the experts per token and the size of one expert, or `None` for a dense MLP.
    pub fn expert_cost(&self) -> Option<ExpertCost> {
        let (per_token, bytes) = match self {
            Mlp::Gated(_) | Mlp::Plain(_) => return None,
            Mlp::GatedMoe(moe) => (moe.config.experts_per_token, moe.expert_bytes()),
            Mlp::ClampedMoe(moe) => (moe.config.experts_per_token, moe.expert_bytes()),
        };
        Some(ExpertCost { per_token, bytes })
    }

    /// Returns the counters of used experts. Only [`ClampedMoe`] layers have them.
    pub fn usage(&self) -> Option<&ExpertUsage> {
        match self {
            Mlp::ClampedMoe(moe) => Some(moe.usage()),
            _ => None,
        }
    }

    /// Returns how many bytes of this rank's weights a decode step reads for one token.
    /// Of a mixture of experts, counts the router and the experts of the token.
    pub fn step_bytes(&self) -> u64 {
        let always_read = match self {
            Mlp::Gated(mlp) => mlp.gate_up_proj.bytes() + mlp.down_proj.bytes(),
            Mlp::Plain(mlp) => mlp.fc.bytes() + mlp.proj.bytes(),
            Mlp::GatedMoe(moe) => moe.router.bytes(),
            Mlp::ClampedMoe(moe) => moe.router.bytes(),
        };
        always_read + self.expert_cost().map_or(0, |cost| cost.per_token as u64 * cost.bytes)
    }
}

#[cfg(feature = "cuda")]
impl Mlp {
    /// Returns the first and the last linear layer of a dense MLP. Returns `None` for a mixture of experts.
    pub fn linears(&self) -> Option<(&Linear, &Linear)> {
        match self {
            Mlp::Gated(mlp) => Some((&mlp.gate_up_proj, &mlp.down_proj)),
            Mlp::Plain(mlp) => Some((&mlp.fc, &mlp.proj)),
            Mlp::GatedMoe(_) | Mlp::ClampedMoe(_) => None,
        }
    }

    /// Returns the input of the last linear layer of a dense MLP. Returns `None` for a mixture of experts.
    pub(super) fn activated(&self, x: &Tensor, sum_order: SumOrder) -> Result<Option<Tensor>> {
        match self {
            Mlp::Gated(mlp) => mlp.activated(x, sum_order).map(Some),
            Mlp::Plain(mlp) => mlp.activated(x, sum_order).map(Some),
            Mlp::GatedMoe(_) | Mlp::ClampedMoe(_) => Ok(None),
        }
    }
}

/// The sizes and the activation of a dense MLP.
#[derive(Clone, Copy)]
pub struct MlpConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub activation: ConfigActivation,
}

/// A gated MLP: down(activation(gate(x)) · up(x)), from arXiv 2002.05202.
pub struct GatedMlp {
    /// The stacked weights: the gate_proj rows, then the up_proj rows.
    gate_up_proj: Linear,
    pub(crate) down_proj: Linear,
    pub(crate) activation: Activation,
    dtype: DType,
}

impl GatedMlp {
    /// Loads this rank's part of `gate_proj`, `up_proj` and `down_proj`.
    pub fn load(weights: &Weights, config: MlpConfig, bias: Bias) -> Result<Self> {
        let MlpConfig { hidden_size, intermediate_size, .. } = config;
        let down = weights.at("down_proj");
        let share = intermediate_share(&down, intermediate_size)?;
        let part = |name| (weights.at(name).rows([share.clone()], intermediate_size), share.len());
        let gate_up_proj = Linear::load_stacked(&[part("gate_proj"), part("up_proj")], hidden_size, bias)?;
        let down = down.columns(share.clone(), intermediate_size);
        Self::new(gate_up_proj, Linear::load(&down, share.len(), hidden_size, bias)?, config, down.dtype())
    }

    /// Loads this rank's part of `gate_up_proj` and `down_proj`, without biases.
    /// `gate_up_proj` has the gate rows, then the up rows.
    pub fn load_fused(weights: &Weights, config: MlpConfig) -> Result<Self> {
        let MlpConfig { hidden_size, intermediate_size, .. } = config;
        let down = weights.at("down_proj");
        let share = intermediate_share(&down, intermediate_size)?;
        let rows = gate_up_rows(&share, intermediate_size);
        let gate_up = weights.at("gate_up_proj").rows(rows, 2 * intermediate_size);
        let gate_up_proj = Linear::load(&gate_up, hidden_size, 2 * share.len(), Bias::Without)?;
        let down = down.columns(share.clone(), intermediate_size);
        Self::new(gate_up_proj, Linear::load(&down, share.len(), hidden_size, Bias::Without)?, config, down.dtype())
    }

    fn new(gate_up_proj: Linear, down_proj: Linear, config: MlpConfig, dtype: DType) -> Result<Self> {
        Ok(Self { gate_up_proj, down_proj, activation: kernel_activation(config.activation)?, dtype })
    }

    /// Returns `gate_proj` and `up_proj` as two layers, which share memory with `gate_up_proj`.
    #[cfg(feature = "cuda")]
    pub(crate) fn gate_and_up(&self) -> Result<[Linear; 2]> {
        let intermediate_size = self.gate_up_proj.weight.dims().0 / 2;
        Ok([
            self.gate_up_proj.rows(0, intermediate_size)?,
            self.gate_up_proj.rows(intermediate_size, intermediate_size)?,
        ])
    }

    /// Returns the compute dtype, which is the dtype of x and of the intermediate activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns activation(gate(x)) · up(x).
    fn activated(&self, x: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
        self.gate_up_proj.forward_gated(x, self.activation, self.dtype, sum_order)
    }

    fn forward(&self, x: &Tensor, sum_order: SumOrder, form: PartialForm) -> Result<PartialOutput<'_>> {
        self.down_proj.forward_partial(&self.activated(x, sum_order)?, sum_order, form)
    }
}

/// A plain MLP: proj(activation(fc(x))), with biases in both projections (GPT-2).
pub struct PlainMlp {
    fc: Linear,
    proj: Linear,
    activation: Activation,
    dtype: DType,
}

impl PlainMlp {
    /// Loads this rank's part of `c_fc` and `c_proj`, which are stored transposed.
    pub fn load_transposed(weights: &Weights, config: MlpConfig) -> Result<Self> {
        let MlpConfig { hidden_size, intermediate_size, activation } = config;
        let (fc, proj) = (weights.at("c_fc"), weights.at("c_proj"));
        let share = intermediate_share(&proj, intermediate_size)?;
        let fc = fc.rows([share.clone()], intermediate_size);
        Ok(Self {
            fc: Linear::load_transposed(&fc, hidden_size, share.len())?,
            proj: Linear::load_transposed(&proj.columns(share.clone(), intermediate_size), share.len(), hidden_size)?,
            activation: kernel_activation(activation)?,
            dtype: weights.dtype(),
        })
    }

    /// Returns activation(fc(x)).
    fn activated(&self, x: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
        Ok(gated(&self.fc.forward(x, sum_order)?, None, self.activation, self.dtype)?)
    }

    fn forward(&self, x: &Tensor, sum_order: SumOrder, form: PartialForm) -> Result<PartialOutput<'_>> {
        self.proj.forward_partial(&self.activated(x, sum_order)?, sum_order, form)
    }
}

/// Returns the range of the intermediate dimension that this rank holds.
/// `down` is the down projection, whose quantization can limit where the dimension may be divided.
fn intermediate_share(down: &Weights, intermediate_size: usize) -> Result<Range<usize>> {
    let unit = SHARE_COLUMNS.max(down.column_unit("weight", intermediate_size)?);
    Ok(down.world().share(intermediate_size, unit))
}

/// Converts an activation from config.json to the type that the kernels use. Fails if no kernel implements it.
fn kernel_activation(activation: ConfigActivation) -> Result<Activation> {
    match activation {
        ConfigActivation::Silu | ConfigActivation::Swish => Ok(Activation::Silu),
        ConfigActivation::NewGelu | ConfigActivation::GeluPytorchTanh => Ok(Activation::GeluTanh),
        other => bail!("activation {other:?} is not supported"),
    }
}
