//! Mixture-of-experts layers. A router chooses experts for each token, and the layer sums their weighted outputs.

use anyhow::{Result, bail};
use candle_core::{DType, Tensor};

use super::checks::check_size;
use super::linear::{Bias, Linear, SHARE_COLUMNS, gate_up_rows};
use super::residual::PartialRows;
use crate::kernels::activation::{Activation, clamped_swiglu, gated_halves};
use crate::kernels::matrix::Matrix;
use crate::kernels::moe::combine::combine;
use crate::kernels::moe::experts::{ExpertWeights, MAX_PAIRS, expert_matmul};
use crate::kernels::moe::mxfp4::MXFP4_BLOCK;
use crate::kernels::moe::routing::check_routing;
use crate::kernels::moe::routing::expert_usage::ExpertUsage;
use crate::kernels::moe::routing::topk::{Softmax, topk_softmax};
#[cfg(feature = "cuda")]
use crate::kernels::moe::{
    mxfp4_tiles::expert_mlp::{ExpertLinear, expert_mlp},
    routing::route::RoutedPairs,
};
use crate::kernels::{self, SumOrder};
use crate::weights::{Weights, mxfp4};

/// The sizes of a [`GatedMoe`], and how the chosen experts are weighted.
#[derive(Clone, Copy, Debug)]
pub struct GatedMoeConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub experts: usize,
    pub experts_per_token: usize,
    pub softmax: Softmax,
}

impl GatedMoeConfig {
    /// Fails if the intermediate size is out of range, or if [`check_routing`] fails.
    pub fn validate(&self) -> Result<()> {
        check_size("the intermediate size of experts", self.intermediate_size)?;
        Ok(check_routing(self.experts_per_token, self.experts)?)
    }
}

/// The names of an expert's three matrices, such as `gate_proj` in `experts.7.gate_proj.weight`.
pub struct ExpertNames {
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
}

/// A mixture of gated MLPs without biases, as in Qwen3-MoE and Mixtral.
pub struct GatedMoe {
    /// The router. It is f32, because a rounding error could send a token to another expert.
    pub(crate) router: Linear,
    /// The gate_proj and up_proj weights of all experts, `[experts, 2 * intermediate, hidden]`.
    /// Each expert has the gate_proj rows, then the up_proj rows.
    pub(crate) gate_up_proj: ExpertWeights,
    /// The down_proj weights of all experts, `[experts, hidden, intermediate]`.
    pub(crate) down_proj: ExpertWeights,
    pub(crate) dtype: DType,
    pub(crate) config: GatedMoeConfig,
}

impl GatedMoe {
    /// Loads the router `gate` and the experts.
    ///
    /// The experts are separate matrices, such as `experts.7.gate_proj`, or stacked matrices, as in transformers 5:
    /// - `experts.gate_up_proj` with shape `[experts, 2 * intermediate, hidden]`
    /// - `experts.down_proj` with shape `[experts, hidden, intermediate]`
    pub fn load(weights: &Weights, config: GatedMoeConfig, names: &ExpertNames) -> Result<Self> {
        let GatedMoeConfig { hidden_size, experts, .. } = config;
        let router = Linear::load_with_dtype(&weights.at("gate"), hidden_size, experts, Bias::Without, DType::F32)?;
        let expert_weights = weights.at("experts");
        let GatedExperts { gate_up_proj, down_proj } = if expert_weights.contains("gate_up_proj") {
            GatedExperts::load_stacked(&expert_weights, config)?
        } else {
            GatedExperts::load_separate(&expert_weights, config, names)?
        };
        Ok(Self { router, gate_up_proj, down_proj, dtype: weights.dtype(), config })
    }

    /// Returns the size in bytes of one expert on this rank.
    pub fn expert_bytes(&self) -> u64 {
        (self.gate_up_proj.bytes() + self.down_proj.bytes()) / self.config.experts as u64
    }

    /// Maps x, f32 `[tokens, hidden]`, to this rank's partial result, f32 `[tokens, hidden]`.
    pub(super) fn forward(&self, x: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
        if self.down_proj.dims()?.2 == 0 {
            return Ok(x.zeros_like()?);
        }
        in_launches(x, self.config.experts_per_token, |x| self.forward_launch(x, sum_order))
    }

    /// Runs the layer. x must not have more tokens than one launch of the expert kernels can process.
    fn forward_launch(&self, x: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
        // 1. route: ids [tokens, experts_per_token], f32 weights [tokens, experts_per_token]
        let (ids, weights) =
            topk_softmax(&self.router.forward(x, sum_order)?, self.config.experts_per_token, self.config.softmax)?;
        // 2. run the chosen experts:
        //    [tokens, experts_per_token, 2 * intermediate] → [tokens, experts_per_token, hidden]
        let x = x.to_dtype(self.dtype)?;
        let gate_up = expert_matmul(&x, &self.gate_up_proj, None, &ids, sum_order)?;
        let down = expert_matmul(
            &gated_halves(&gate_up, Activation::Silu, self.dtype)?,
            &self.down_proj,
            None,
            &ids,
            sum_order,
        )?;
        // 3. combine in f32: [tokens, experts_per_token, hidden] → [tokens, hidden]
        Ok(combine(&down, &weights)?)
    }
}

/// This rank's share of the experts of a [`GatedMoe`].
struct GatedExperts {
    gate_up_proj: ExpertWeights,
    down_proj: ExpertWeights,
}

impl GatedExperts {
    /// Loads two matrices that stack the weights of all experts.
    fn load_stacked(weights: &Weights, config: GatedMoeConfig) -> Result<Self> {
        let GatedMoeConfig { hidden_size, intermediate_size, experts, .. } = config;
        let unit = weights.column_unit("down_proj", intermediate_size)?;
        let share = weights.world().share(intermediate_size, SHARE_COLUMNS.max(unit));
        let gate_up_shape = [experts, 2 * share.len(), hidden_size];
        let down_shape = [experts, hidden_size, share.len()];
        let gate_up_rows = gate_up_rows(&share, intermediate_size);
        let gate_up = weights.rows(gate_up_rows, 2 * intermediate_size).experts("gate_up_proj", gate_up_shape)?;
        let down = weights.columns(share, intermediate_size).experts("down_proj", down_shape)?;
        Ok(Self { gate_up_proj: split_experts(gate_up, gate_up_shape)?, down_proj: split_experts(down, down_shape)? })
    }

    /// Loads the three matrices of each expert, and stacks the matrices of all experts.
    fn load_separate(weights: &Weights, config: GatedMoeConfig, names: &ExpertNames) -> Result<Self> {
        let GatedMoeConfig { hidden_size, intermediate_size, experts, .. } = config;
        let unit = weights.at(0).at(names.down).column_unit("weight", intermediate_size)?;
        let share = weights.world().share(intermediate_size, SHARE_COLUMNS.max(unit));
        // Each matrix with its number of rows, in the order in which the matrices are stacked.
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for expert in (0..experts).map(|expert| weights.at(expert)) {
            for name in [names.gate, names.up] {
                gate_up.push((expert.at(name).rows([share.clone()], intermediate_size), share.len()));
            }
            down.push((expert.at(names.down).columns(share.clone(), intermediate_size), hidden_size));
        }
        let gate_up = Weights::matrix(&gate_up, "weight", hidden_size)?;
        let down = Weights::matrix(&down, "weight", share.len())?;
        Ok(Self {
            gate_up_proj: split_experts(gate_up, [experts, 2 * share.len(), hidden_size])?,
            down_proj: split_experts(down, [experts, hidden_size, share.len()])?,
        })
    }
}

/// Reshapes a matrix of stacked experts from `[experts * rows, columns]` to `[experts, rows, columns]`.
/// Fails if the experts are not all quantized in the same way.
fn split_experts(matrix: Matrix, shape: [usize; 3]) -> Result<ExpertWeights> {
    match matrix {
        Matrix::Dense(weights) => Ok(ExpertWeights::Dense(weights.reshape(&shape)?)),
        Matrix::Quantized(mut parts) if parts.len() == 1 => Ok(ExpertWeights::Quantized(parts.remove(0), shape[0])),
        _ => bail!("cannot load the MoE layer: its experts are not all quantized in the same way"),
    }
}

/// The sizes and the clamp limit of a [`ClampedMoe`].
#[derive(Clone, Copy, Debug)]
pub struct ClampedMoeConfig {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub experts: usize,
    pub experts_per_token: usize,
    pub swiglu_limit: f32,
}

/// The MoE layer of gpt-oss. The experts have MXFP4 or float weights, biases, and a clamped SwiGLU.
/// In `gate_up_proj`, gate rows and up rows alternate.
pub struct ClampedMoe {
    /// The router, in f32 like that of [`GatedMoe`].
    pub(crate) router: Linear,
    /// The gate_proj and up_proj weights of all experts, `[experts, 2 * intermediate, hidden]`.
    pub(crate) gate_up_proj: ExpertWeights,
    /// The biases of `gate_up_proj`, `[experts, 2 * intermediate]`.
    pub(crate) gate_up_bias: Tensor,
    /// The down_proj weights of all experts, `[experts, hidden, intermediate]`.
    pub(crate) down_proj: ExpertWeights,
    /// The biases of `down_proj`, `[experts, hidden]`. If ranks divide each layer, zeros on all ranks except the first.
    pub(crate) down_bias: Tensor,
    pub(crate) config: ClampedMoeConfig,
    /// Counts the distinct experts of small batches (see [`ExpertUsage`]).
    pub(crate) usage: ExpertUsage,
}

impl ClampedMoe {
    /// Loads `router` and `experts` with their biases.
    pub fn load(weights: &Weights, config: ClampedMoeConfig) -> Result<Self> {
        let ClampedMoeConfig { hidden_size, intermediate_size, experts, .. } = config;
        let (expert_weights, world) = (weights.at("experts"), weights.world());
        let share = world.share(intermediate_size, MXFP4_BLOCK);
        // Gate rows and up rows alternate, so this rank's rows form one range.
        let gate_up_rows = 2 * share.start..2 * share.end;
        let gate_up_weights = expert_weights.rows([gate_up_rows], 2 * intermediate_size);
        let down_weights = expert_weights.columns(share.clone(), intermediate_size);
        let gate_up = mxfp4::experts(&gate_up_weights, "gate_up_proj", [experts, 2 * share.len(), hidden_size])?;
        let down = mxfp4::experts(&down_weights, "down_proj", [experts, hidden_size, share.len()])?;
        let (gate_up_proj, down_proj) = mxfp4::for_tensor_cores(&expert_weights, gate_up, down)?;
        let down_bias = expert_weights.float("down_proj_bias", &[experts, hidden_size])?;
        Ok(Self {
            router: Linear::load_with_dtype(&weights.at("router"), hidden_size, experts, Bias::With, DType::F32)?,
            gate_up_proj,
            gate_up_bias: gate_up_weights.stacked_vectors("gate_up_proj_bias", experts, 2 * share.len())?,
            down_proj,
            // The outputs of all ranks are summed, so only the first rank adds the bias.
            down_bias: if world.is_first() { down_bias } else { down_bias.zeros_like()? },
            config,
            usage: ExpertUsage::new(weights.device())?,
        })
    }

    /// Returns the size in bytes of one expert on this rank, including its biases.
    pub fn expert_bytes(&self) -> u64 {
        let biases = kernels::bytes(&self.gate_up_bias) + kernels::bytes(&self.down_bias);
        (self.gate_up_proj.bytes() + self.down_proj.bytes() + biases) / self.config.experts as u64
    }

    pub fn usage(&self) -> &ExpertUsage {
        &self.usage
    }

    /// Maps x, f32 `[tokens, hidden]`, to this rank's partial result, `[tokens, hidden]`.
    pub(super) fn forward(&self, x: &Tensor, sum_order: SumOrder) -> Result<PartialRows> {
        if self.down_proj.dims()?.2 == 0 {
            return Ok(PartialRows::Summed(x.zeros_like()?));
        }
        let experts_per_token = self.config.experts_per_token;
        #[cfg(feature = "cuda")]
        if let (ExpertWeights::Mxfp4Tiles(gate_up), ExpertWeights::Mxfp4Tiles(down), Matrix::Dense(router)) =
            (&self.gate_up_proj, &self.down_proj, &self.router.weight)
        {
            let bias = self.router.bias.as_ref();
            let routed = RoutedPairs::route(x, router, bias, experts_per_token, sum_order, Some(&self.usage))?;
            let gate_up = ExpertLinear { tiles: gate_up, bias: &self.gate_up_bias };
            let down = ExpertLinear { tiles: down, bias: &self.down_bias };
            let outputs = expert_mlp(x, &routed, gate_up, down, self.config.swiglu_limit, sum_order)?;
            return Ok(PartialRows::PerExpert(outputs));
        }
        let rows = in_launches(x, experts_per_token, |x| self.forward_launch(x, sum_order))?;
        Ok(PartialRows::Summed(rows))
    }

    /// Runs the layer without `expert_mlp`, which supports only MXFP4 tiles.
    /// x must not have more tokens than one launch of the expert kernels can process.
    fn forward_launch(&self, x: &Tensor, sum_order: SumOrder) -> Result<Tensor> {
        let experts_per_token = self.config.experts_per_token;
        // 1. route: ids [tokens, experts_per_token], f32 weights [tokens, experts_per_token]
        let (ids, weights) = topk_softmax(&self.router.forward(x, sum_order)?, experts_per_token, Softmax::OverChosen)?;
        let x = x.to_dtype(self.gate_up_bias.dtype())?;
        // 2. run the chosen experts:
        //    [tokens, experts_per_token, 2 * intermediate] → [tokens, experts_per_token, hidden]
        let gate_up = expert_matmul(&x, &self.gate_up_proj, Some(&self.gate_up_bias), &ids, sum_order)?;
        let gated = clamped_swiglu(&gate_up, self.config.swiglu_limit)?;
        let down = expert_matmul(&gated, &self.down_proj, Some(&self.down_bias), &ids, sum_order)?;
        // 3. combine in f32: [tokens, experts_per_token, hidden] → [tokens, hidden]
        Ok(combine(&down, &weights)?)
    }
}

/// Returns the results of `forward` for all rows of x, `[tokens, hidden]`. Every token has `experts_per_token` experts.
/// Divides x if there are more than [`MAX_PAIRS`] (token, expert) pairs, the limit of one launch of the expert kernels.
fn in_launches(x: &Tensor, experts_per_token: usize, forward: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let tokens = x.dim(0)?;
    let limit = MAX_PAIRS / experts_per_token;
    if tokens <= limit {
        return forward(x);
    }
    let parts = (0..tokens).step_by(limit).map(|start| {
        let rows = x.narrow(0, start, limit.min(tokens - start))?;
        forward(&rows.contiguous()?)
    });
    Ok(Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use candle_core::Device;

    use super::*;

    #[test]
    fn large_batches_are_divided_into_launches() {
        for (tokens, expected) in
            [(16_383, vec![16_383]), (16_384, vec![16_383, 1]), (40_000, vec![16_383, 16_383, 7234])]
        {
            let x = Tensor::arange(0u32, tokens, &Device::Cpu).unwrap().reshape(((), 1)).unwrap();
            let sizes = RefCell::new(Vec::new());
            let out = in_launches(&x, 4, |x| {
                sizes.borrow_mut().push(x.dim(0)?);
                Ok((x + 1.0)?)
            });
            assert_eq!(sizes.into_inner(), expected, "{tokens} tokens with 4 experts each");
            let out: Vec<u32> = out.unwrap().flatten_all().unwrap().to_vec1().unwrap();
            assert!(out.into_iter().eq(1..=tokens), "the rows of {tokens} tokens are not in order");
        }
    }
}
