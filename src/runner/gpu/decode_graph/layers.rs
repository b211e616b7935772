//! The launches of the decoder layers in the decode graph, and the buffers between these launches.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};

use crate::kernels::attention::{AttentionMask, CachedLayer, FlashAttention, FlashTensors};
use crate::kernels::decode::{
    self, ExpertBuffers, PostNorm, Projection, QkNormBuffers, QkvProjection, RmsNormParams, StepBuffers,
};
use crate::kernels::launch::LaunchList;
use crate::kernels::matrix::Matrix;
use crate::kernels::moe::experts::ExpertWeights;
use crate::nn::attention::{Attention, QkNorms};
use crate::nn::layer::DecoderLayer;
use crate::nn::linear::Linear;
use crate::nn::mlp::GatedMlp;
use crate::nn::moe::{ClampedMoe, GatedMoe};
use crate::nn::norm::Norm;

/// What a layer buffer holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Contents {
    /// The rotated queries.
    Queries,
    /// The output of attention.
    Attended,
    /// The partial results of attention partitions. Each partition covers a range of the sequence's cached positions.
    Partials,
    /// The counters of finished attention partitions.
    Arrivals,
    /// The input of the MLP's down projection.
    Intermediate,
    /// The queries and keys before the q/k norms.
    UnnormalizedQk,
    /// The output of attention or of the MLP before a post-norm.
    UnnormalizedOutput,
    /// The logits of a router.
    RouterLogits,
    /// Zeros: this rank's contribution to the sum after layers that another rank runs (`Split::Layers`).
    Zeros,
}

/// The buffers between the kernels of the layers. Layers with the same shapes share buffers.
#[derive(Default)]
pub(super) struct LayerBuffers {
    tensors: HashMap<(Contents, Vec<usize>, DType), Tensor>,
    experts: Option<ExpertBuffers>,
}

impl LayerBuffers {
    /// Returns the buffer for the given contents, shape and dtype. On first use, allocates it, filled with zeros.
    fn tensor(&mut self, contents: Contents, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
        Ok(match self.tensors.entry((contents, shape.to_vec(), dtype)) {
            Entry::Occupied(entry) => entry.get().clone(),
            Entry::Vacant(entry) => entry.insert(Tensor::zeros(shape, dtype, device)?).clone(),
        })
    }

    /// Returns a buffer of zeros with the shape and dtype of `x`.
    pub fn zeros(&mut self, x: &Tensor) -> Result<Tensor> {
        self.tensor(Contents::Zeros, x.dims(), x.dtype(), x.device())
    }
}

pub(super) fn rms_norm(norm: &Norm) -> RmsNormParams<'_> {
    RmsNormParams { weight: &norm.weight, eps: norm.eps }
}

/// Returns the parameters of a post-norm, or `None` without a post-norm.
/// `unnormalized`, f32 `[hidden]`, is the buffer for the output of the projection before the norm.
fn post_norm<'t>(norm: &'t Option<Norm>, unnormalized: &'t Tensor) -> Option<PostNorm<'t>> {
    norm.as_ref().map(|norm| PostNorm { norm: rms_norm(norm), unnormalized })
}

fn projection(linear: &Linear) -> Projection<'_> {
    Projection { weight: &linear.weight, bias: linear.bias.as_ref() }
}

/// Adds the launches for a layer's attention, from the norm before the QKV projection to the residual connection.
///
/// `table`, u32 `[1, blocks]`, is the block table of the sequence.
/// The table must cover the position of every step that runs.
pub(super) fn add_attention(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    layer_buffers: &mut LayerBuffers,
    layer: &DecoderLayer,
    cache: CachedLayer,
    table: &Tensor,
) -> Result<()> {
    let Attention { qkv_proj, o_proj, qk_norms, rotary, config, .. } = &layer.self_attn;
    let (device, dtype) = (buffers.x.device(), layer.self_attn.dtype());
    let (heads, head_dim) = (config.heads, config.spec.head_dim);
    let q = layer_buffers.tensor(Contents::Queries, &[heads, head_dim], dtype, device)?;
    let qk_shape = [heads + config.spec.kv_heads, head_dim];
    let unnormalized_qk = layer_buffers.tensor(Contents::UnnormalizedQk, &qk_shape, DType::F32, device)?;
    let qk_norm = qk_norms.as_ref().map(|QkNorms { q_norm, k_norm }| QkNormBuffers {
        q: &q_norm.weight,
        k: &k_norm.weight,
        eps: q_norm.eps,
        unnormalized: &unnormalized_qk,
    });
    let qkv = QkvProjection {
        weight: &qkv_proj.weight,
        bias: qkv_proj.bias.as_ref(),
        cos: &rotary.cos,
        sin: &rotary.sin,
        q: &q,
        layer: cache,
        table,
        qk_norm,
    };
    decode::add_qkv(launches, buffers, rms_norm(&layer.attention_norm), &qkv)?;
    let attended = add_flash_attention(launches, buffers, layer_buffers, &layer.self_attn, cache, &q, table)?;
    let unnormalized = layer_buffers.tensor(Contents::UnnormalizedOutput, buffers.x.dims(), DType::F32, device)?;
    let post_norm = post_norm(&layer.attention_post_norm, &unnormalized);
    Ok(decode::add_residual(
        launches,
        buffers,
        &attended.flatten_all()?,
        &o_proj.weight,
        o_proj.bias.as_ref(),
        post_norm,
    )?)
}

/// Adds the launch that computes attention, right after the launches of `add_qkv`.
/// `q`, `[heads, head_dim]`, receives the rotated queries. `table` is the same as for [`add_attention`].
/// Returns the buffer for the output, which has the shape and dtype of `q`.
fn add_flash_attention(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    layer_buffers: &mut LayerBuffers,
    attention: &Attention,
    cache: CachedLayer,
    q: &Tensor,
    table: &Tensor,
) -> Result<Tensor> {
    let Attention { sinks, config, .. } = attention;
    let device = buffers.x.device();
    let Device::Cuda(cuda) = device else { bail!("the decode graph needs a GPU") };
    let mask = AttentionMask { window: config.spec.window, scale: config.scale, softcap: config.softcap };
    let queries = q.unsqueeze(0)?;
    let attended = layer_buffers.tensor(Contents::Attended, q.dims(), q.dtype(), device)?;
    let flash = FlashAttention::new(cuda, &queries, cache, 1, mask)?;
    let tensors = FlashTensors {
        q: &queries,
        layer: cache,
        sinks: sinks.as_ref(),
        // The kernel reads the position from `state` on the device, so the graph can be replayed at any position.
        positions: &buffers.state.narrow(0, 0, 1)?,
        tables: table,
        out: &attended.unsqueeze(0)?,
        partials: &layer_buffers.tensor(Contents::Partials, &[flash.partials.max(1)], DType::F32, device)?,
        arrivals: &layer_buffers.tensor(Contents::Arrivals, &[flash.arrivals.max(1)], DType::U32, device)?,
    };
    let launch = flash.launch(&tensors)?;
    // SAFETY: `FlashAttention::launch` checks the shapes and dtypes.
    // `DecodeGraph` runs a step only if the block table covers its position.
    // `set_tables` rejects blocks that the cache does not have.
    // Overlap: before the last kernel of `add_qkv` ends, the attention kernel reads only data that was written before
    // that kernel started: the sinks, the position, the block table, and the keys and values of earlier steps.
    unsafe { launches.add(launch)? };
    Ok(attended)
}

/// Adds the launches for a gated MLP, from the norm before the MLP to the residual connection.
pub(super) fn add_gated_mlp(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    layer_buffers: &mut LayerBuffers,
    layer: &DecoderLayer,
    mlp: &GatedMlp,
) -> Result<()> {
    let GatedMlp { down_proj, activation, .. } = mlp;
    let [gate_proj, up_proj] = mlp.gate_and_up()?;
    let (intermediate, _) = gate_proj.weight.dims();
    let h = layer_buffers.tensor(Contents::Intermediate, &[intermediate], mlp.dtype(), buffers.x.device())?;
    let unnormalized =
        layer_buffers.tensor(Contents::UnnormalizedOutput, buffers.x.dims(), DType::F32, buffers.x.device())?;
    let (gate, up) = (projection(&gate_proj), projection(&up_proj));
    decode::add_gate_up(launches, buffers, rms_norm(&layer.mlp_norm), gate, up, *activation, &h)?;
    let post_norm = post_norm(&layer.mlp_post_norm, &unnormalized);
    Ok(decode::add_residual(launches, buffers, &h, &down_proj.weight, down_proj.bias.as_ref(), post_norm)?)
}

/// Adds the launches for an MoE of Mixtral or Qwen3-MoE, from the norm before the MoE to the residual connection.
pub(super) fn add_gated_moe(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    layer_buffers: &mut LayerBuffers,
    layer: &DecoderLayer,
    moe: &GatedMoe,
) -> Result<()> {
    let GatedMoe { router, gate_up_proj, down_proj, dtype, config, .. } = moe;
    let (Matrix::Dense(router), Some(gate_up), Some(down)) =
        (&router.weight, gate_up_proj.as_matrix()?, down_proj.as_matrix()?)
    else {
        bail!("the decode graph has no kernel for a router or experts in this format");
    };
    let device = buffers.x.device();
    let logits = layer_buffers.tensor(Contents::RouterLogits, &[config.experts], DType::F32, device)?;
    // Take the intermediate size from `down`, because with several ranks, this rank may hold only some of its columns.
    let (_, columns) = down.dims();
    let h = layer_buffers.tensor(Contents::Intermediate, &[config.experts_per_token, columns], *dtype, device)?;
    let norm = rms_norm(&layer.mlp_norm);
    decode::add_router(launches, buffers, norm, router, None, &logits, None)?;
    decode::add_routed_gate_up(launches, buffers, norm, &gate_up, &logits, &h)?;
    Ok(decode::add_routed_down(launches, buffers, &down, &logits, config.softmax, &h)?)
}

/// Adds the launches for an MXFP4 MoE of gpt-oss, from the norm before the MoE to the residual connection.
pub(super) fn add_clamped_moe(
    launches: &mut LaunchList,
    buffers: &StepBuffers,
    layer_buffers: &mut LayerBuffers,
    layer: &DecoderLayer,
    moe: &ClampedMoe,
) -> Result<()> {
    let ClampedMoe { router, gate_up_proj, gate_up_bias, down_proj, down_bias, config, .. } = moe;
    let (ExpertWeights::Mxfp4Tiles(gate_up), ExpertWeights::Mxfp4Tiles(down)) = (gate_up_proj, down_proj) else {
        bail!("the decode graph supports the experts of gpt-oss only in MXFP4");
    };
    let Matrix::Dense(router_weight) = &router.weight else { bail!("the decode graph needs an unquantized router") };
    if layer_buffers.experts.is_none() {
        // As in `add_gated_moe`, take the intermediate size from `down`.
        let (_, _, columns) = down.dims();
        let (count, chosen) = (config.experts, config.experts_per_token);
        layer_buffers.experts = Some(ExpertBuffers::new(&buffers.x, count, chosen, columns)?);
    }
    let Some(expert_buffers) = &layer_buffers.experts else {
        bail!("internal error: the expert buffers were not allocated")
    };
    let norm = rms_norm(&layer.mlp_norm);
    decode::add_router(
        launches,
        buffers,
        norm,
        router_weight,
        router.bias.as_ref(),
        &expert_buffers.logits,
        Some(expert_buffers),
    )?;
    let up_bias = gate_up_bias.to_dtype(DType::F32)?;
    let down_bias = down_bias.to_dtype(DType::F32)?;
    decode::add_mxfp4_gate_up(launches, buffers, gate_up, &up_bias, config.swiglu_limit, expert_buffers)?;
    Ok(decode::add_mxfp4_down(launches, buffers, down, &down_bias, expert_buffers)?)
}
