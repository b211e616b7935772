//! Checks whether the decode graph supports a model.

use anyhow::Result;
use candle_core::DType;
use candle_core::cuda_backend::CudaDevice;

use crate::kernels::attention::FLASH_HEAD_DIMS;
use crate::kernels::decode;
use crate::kernels::matrix::Matrix;
use crate::kernels::moe::experts::ExpertWeights;
use crate::kernels::moe::routing::{MAX_EXPERTS, check_routing};
use crate::nn::decoder::Decoder;
use crate::nn::layer::DecoderLayer;
use crate::nn::mlp::Mlp;
use crate::nn::moe::ClampedMoe;
use crate::runner::decode_graph::NoDecodeGraphReason;

/// Returns why the decode graph cannot run this rank's part of the model, or `None` if it can.
/// [`DecodeGraph::plan`](super::DecodeGraph::plan) checks the size of the vocabulary.
pub(super) fn unsupported_reason(decoder: &Decoder, device: &CudaDevice) -> Result<Option<NoDecodeGraphReason>> {
    let dtype = decoder.dtype();
    if !matches!(dtype, DType::BF16 | DType::F16) {
        return Ok(Some(NoDecodeGraphReason::Dtype(dtype)));
    }
    if decoder.world().size() > 1 && decoder.world().exchange().is_none() {
        return Ok(Some(NoDecodeGraphReason::HostCopies));
    }
    if decoder.world().size() > 1 && has_empty_part(decoder) {
        return Ok(Some(NoDecodeGraphReason::EmptyPart));
    }
    if decoder.norm.bias.is_some() || decoder.own_layers().any(|(_, layer)| has_layer_norm(layer)) {
        return Ok(Some(NoDecodeGraphReason::Layer("LayerNorm")));
    }
    if decoder.embed_positions.is_some() {
        return Ok(Some(NoDecodeGraphReason::Layer("learned positions")));
    }
    for (_, layer) in decoder.own_layers() {
        if let Some(reason) = unsupported_layer(layer, device)? {
            return Ok(Some(reason));
        }
    }
    Ok(None)
}

/// Returns whether this rank's part of the output head is empty,
/// or its part of the attention or the MLP in a layer that it runs.
fn has_empty_part(decoder: &Decoder) -> bool {
    let is_empty = |mlp: &Mlp| match mlp {
        Mlp::Gated(mlp) => mlp.down_proj.weight.dims().1 == 0,
        Mlp::ClampedMoe(mlp) => mlp.down_proj.bytes() == 0,
        Mlp::GatedMoe(mlp) => mlp.down_proj.bytes() == 0,
        Mlp::Plain(_) => false,
    };
    decoder.lm_head.weight.dims().0 == 0
        || decoder.own_layers().any(|(_, layer)| layer.self_attn.config.heads == 0 || is_empty(&layer.mlp))
}

/// Returns whether any norm of a layer, including its q/k norms, is a LayerNorm.
fn has_layer_norm(layer: &DecoderLayer) -> bool {
    let qk_norms = layer.self_attn.qk_norms.iter().flat_map(|norms| [&norms.q_norm, &norms.k_norm]);
    layer.norms().chain(qk_norms).any(|norm| norm.bias.is_some())
}

/// Returns why the decode graph cannot run this layer, or `None` if it can.
fn unsupported_layer(layer: &DecoderLayer, device: &CudaDevice) -> Result<Option<NoDecodeGraphReason>> {
    let head_dim = layer.self_attn.config.spec.head_dim;
    if !FLASH_HEAD_DIMS.contains(&head_dim) {
        return Ok(Some(NoDecodeGraphReason::HeadDim(head_dim)));
    }
    if let Some(reason) = unsupported_mlp(&layer.mlp)? {
        return Ok(Some(reason));
    }
    if layer.mlp_post_norm.is_some() && !matches!(layer.mlp, Mlp::Gated(_)) {
        return Ok(Some(NoDecodeGraphReason::Layer("a norm after the experts")));
    }
    let attention = [&layer.self_attn.qkv_proj.weight, &layer.self_attn.o_proj.weight];
    let mut products: Vec<Product> = attention.map(|weight| (weight.clone(), 1)).into();
    products.extend(mlp_products(&layer.mlp)?);
    for (weight, inputs) in products {
        if !decode::has_decode_kernel(device, &weight, inputs)? {
            return Ok(Some(match weight {
                Matrix::Concatenated(_) => NoDecodeGraphReason::IncompatibleQkv,
                _ => NoDecodeGraphReason::RowLength(weight.dims().1),
            }));
        }
    }
    Ok(None)
}

/// A weight matrix, and the number of input vectors that the matrix multiplies in one decode step.
type Product = (Matrix, usize);

/// Returns why the decode graph cannot run this MLP, or `None` if it can.
/// The caller checks whether decode kernels support the matrices that `mlp_products` returns.
fn unsupported_mlp(mlp: &Mlp) -> Result<Option<NoDecodeGraphReason>> {
    Ok(match mlp {
        Mlp::Gated(mlp) => {
            let [gate, up] = mlp.gate_and_up()?.map(|layer| layer.weight);
            let is_mixed = gate.format() != up.format() || gate.input_quantization() != up.input_quantization();
            is_mixed.then_some(NoDecodeGraphReason::MixedGateUp)
        }
        Mlp::ClampedMoe(mlp) => {
            let ClampedMoe { gate_up_proj, down_proj, config, .. } = mlp;
            let (chosen, experts) = (config.experts_per_token, config.experts);
            let (_, _, columns) = down_proj.dims()?;
            if !matches!(mlp.router.weight, Matrix::Dense(_)) {
                Some(NoDecodeGraphReason::Layer("a quantized router"))
            } else if !matches!((gate_up_proj, down_proj), (ExpertWeights::Mxfp4Tiles(_), ExpertWeights::Mxfp4Tiles(_)))
            {
                Some(NoDecodeGraphReason::ExpertFormat)
            } else if chosen > decode::MAX_CHOSEN_MXFP4 || experts > MAX_EXPERTS {
                Some(NoDecodeGraphReason::ExpertCount { chosen, experts })
            } else if columns % 8 != 0 || columns > decode::MAX_MXFP4_INTERMEDIATE_SIZE {
                Some(NoDecodeGraphReason::RowLength(columns))
            } else {
                None
            }
        }
        Mlp::GatedMoe(mlp) => {
            let (chosen, experts) = (mlp.config.experts_per_token, mlp.config.experts);
            if !matches!(mlp.router.weight, Matrix::Dense(_)) {
                Some(NoDecodeGraphReason::Layer("a quantized router"))
            } else if check_routing(chosen, experts).is_err() {
                Some(NoDecodeGraphReason::ExpertCount { chosen, experts })
            } else if mlp.gate_up_proj.as_matrix()?.is_none() || mlp.down_proj.as_matrix()?.is_none() {
                Some(NoDecodeGraphReason::Layer("experts in this format"))
            } else {
                None
            }
        }
        Mlp::Plain(_) => Some(NoDecodeGraphReason::Layer("an MLP without a gate")),
    })
}

/// Returns the weight matrices of an MLP with their numbers of input vectors.
/// Leaves out routers and MXFP4 experts, which have kernels of their own.
/// Returns no matrices for an MLP without a gate, which `unsupported_mlp` rejects.
fn mlp_products(mlp: &Mlp) -> Result<Vec<Product>> {
    Ok(match mlp {
        Mlp::Gated(mlp) => {
            let [gate, up] = mlp.gate_and_up()?.map(|layer| layer.weight);
            [gate, up, mlp.down_proj.weight.clone()].map(|weight| (weight, 1)).into()
        }
        Mlp::GatedMoe(mlp) => {
            let gate_up = mlp.gate_up_proj.as_matrix()?.map(|weight| (weight, 1));
            let down = mlp.down_proj.as_matrix()?.map(|weight| (weight, mlp.config.experts_per_token));
            gate_up.into_iter().chain(down).collect()
        }
        Mlp::ClampedMoe(_) | Mlp::Plain(_) => Vec::new(),
    })
}
